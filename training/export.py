"""Writes a trained model in Hugging Face's deepseek_v3 layout, fp8 in 128x128 blocks, and reads such a folder back.

The MTP module is layer `layers`, as in DeepSeek-V3's checkpoints. Tokenizer and chat template are not its business.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.model import Model
from training.shape import Shape

BLOCK = 128
_FP8_MAX = 448.0
_SHARD_BYTES = 15 * 2**20
_KEPT_WIDE = ("embed_tokens", "mlp.gate.", "eh_proj")  # bfloat16, as DeepSeek keeps them

_SHAPE_FIELDS = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "dense_layers": "first_k_dense_replace",
    "dense_size": "intermediate_size",
    "heads": "num_attention_heads",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
    "latent_dim": "kv_lora_rank",
    "experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "groups": "n_group",
    "top_groups": "topk_group",
    "context": "max_position_embeddings",
    "rope_theta": "rope_theta",
    "eps": "rms_norm_eps",
}


def hf_config(shape: Shape) -> dict[str, Any]:
    """The content of config.json."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **{theirs: getattr(shape, ours) for ours, theirs in _SHAPE_FIELDS.items()},
        "num_key_value_heads": shape.heads,
        "num_nextn_predict_layers": 1,
        "n_shared_experts": shape.shared_size // shape.expert_size,
        "routed_scaling_factor": 1.0,
        "q_lora_rank": None,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "rope_interleave": True,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
    }


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The inverse of hf_config."""
    sizes = {ours: config[theirs] for ours, theirs in _SHAPE_FIELDS.items()}
    return Shape(**sizes, shared_size=config["n_shared_experts"] * config["moe_intermediate_size"])


def tensor_names(shape: Shape) -> Iterator[tuple[str, tuple[str, ...], int | None]]:
    """For each tensor of Model: its name, its name in the file (two where rows are split), its expert if it has one."""
    yield "embedding.weight", ("model.embed_tokens.weight",), None
    yield "norm.weight", ("model.norm.weight",), None
    for i in range(shape.layers):
        yield from _block_names(shape, f"blocks.{i}.", f"model.layers.{i}.", dense=i < shape.dense_layers)
    last = f"model.layers.{shape.layers}."
    yield from _block_names(shape, "mtp.block.", last, dense=False)
    yield "mtp.hidden_norm.weight", (last + "hnorm.weight",), None
    yield "mtp.embedding_norm.weight", (last + "enorm.weight",), None
    yield "mtp.projection.weight", (last + "eh_proj.weight",), None
    yield "mtp.norm.weight", (last + "shared_head.norm.weight",), None


def _block_names(
    shape: Shape, ours: str, theirs: str, *, dense: bool
) -> Iterator[tuple[str, tuple[str, ...], int | None]]:
    yield ours + "input_norm.weight", (theirs + "input_layernorm.weight",), None
    yield ours + "post_norm.weight", (theirs + "post_attention_layernorm.weight",), None
    for name, hf_name in (
        ("q_proj", "q_proj"),
        ("kv_a_proj", "kv_a_proj_with_mqa"),
        ("kv_a_norm", "kv_a_layernorm"),
        ("kv_b_proj", "kv_b_proj"),
        ("o_proj", "o_proj"),
    ):
        yield f"{ours}attention.{name}.weight", (f"{theirs}self_attn.{hf_name}.weight",), None
    plain = "" if dense else "shared."
    hf_plain = theirs + ("mlp." if dense else "mlp.shared_experts.")
    yield f"{ours}mlp.{plain}gate_up_proj.weight", _gate_up(hf_plain), None
    yield f"{ours}mlp.{plain}down_proj.weight", (hf_plain + "down_proj.weight",), None
    if not dense:
        yield ours + "mlp.gate", (theirs + "mlp.gate.weight",), None
        yield ours + "mlp.bias", (theirs + "mlp.gate.e_score_correction_bias",), None
        for expert in range(shape.experts):
            yield ours + "mlp.gate_up", _gate_up(f"{theirs}mlp.experts.{expert}."), expert
            yield ours + "mlp.down", (f"{theirs}mlp.experts.{expert}.down_proj.weight",), expert


def _gate_up(prefix: str) -> tuple[str, str]:
    return prefix + "gate_proj.weight", prefix + "up_proj.weight"


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[R, C] -> float8_e4m3fn [R, C] and float32 scales [ceil(R/128), ceil(C/128)], weight ~ fp8 * scale."""
    rows, columns = weight.shape
    block_rows, block_columns = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = F.pad(weight.float(), (0, block_columns * BLOCK - columns, 0, block_rows * BLOCK - rows))
    blocks = padded.view(block_rows, BLOCK, block_columns, BLOCK)
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / _FP8_MAX
    scaled = (blocks / scales[:, None, :, None]).view_as(padded)[:rows, :columns]
    return scaled.to(torch.float8_e4m3fn).contiguous(), scales


def dequantise(weight: Tensor, scales: Tensor) -> Tensor:
    """The inverse of quantise, float32."""
    rows, columns = weight.shape
    wide = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return weight.float() * wide


def hf_tensors(model: Model) -> dict[str, Tensor]:
    """All tensors as they are stored."""
    state = {name: tensor.detach().float().cpu() for name, tensor in model.state_dict().items()}
    stored: dict[str, Tensor] = {}
    for name, hf_names, expert in tensor_names(model.shape):
        tensor = state[name] if expert is None else state[name][expert]
        for hf_name, part in zip(hf_names, tensor.chunk(len(hf_names)), strict=True):
            if hf_name.endswith("e_score_correction_bias"):
                stored[hf_name] = part
            elif part.dim() == 2 and not any(kept in hf_name for kept in _KEPT_WIDE):
                stored[hf_name], stored[hf_name + "_scale_inv"] = quantise(part)
            else:
                stored[hf_name] = part.to(torch.bfloat16).contiguous()
    return stored


def export(model: Model, folder: Path) -> int:
    """Write config.json, the shards and their index; returns the bytes of all tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    filled = total = 0
    for name, tensor in hf_tensors(model).items():
        if filled + tensor.nbytes > _SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
        total += tensor.nbytes
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(hf_config(model.shape), indent=1) + "\n")
    return total


def load_export(folder: Path) -> Model:
    """A model in evaluation mode with the (dequantised) weights of such a folder, float32."""
    model = Model(shape_of(json.loads((folder / "config.json").read_text())))
    stored: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        stored |= load_file(path)
    state: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for name, hf_names, expert in tensor_names(model.shape):
        tensor = torch.cat([_wide(stored, hf_name) for hf_name in hf_names])
        if expert is None:
            state[name] = tensor
        else:
            experts.setdefault(name, []).append(tensor)
    state |= {name: torch.stack(tensors) for name, tensors in experts.items()}
    model.load_state_dict(state)
    return model.eval()


def _wide(stored: Mapping[str, Tensor], name: str) -> Tensor:
    scales = stored.get(name + "_scale_inv")
    return stored[name].float() if scales is None else dequantise(stored[name], scales)
