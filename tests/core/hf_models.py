"""Hugging Face's own models as the measure of ours: tiny random ones, and the embedded one dequantised."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.core.safetensors_index import open_checkpoint
from headrace.kernels.fp8_block import fp8_block_dequantize_ref

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    # Large enough that the attention is not flat and the experts differ.
    "initializer_range": 0.2,
}
DEEPSEEK: dict[str, Any] = {
    **COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **COMMON,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
    ),
    "qwen3_moe_unnormalised_tied": (
        "Qwen3Moe",
        {
            **COMMON,
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "head_dim": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_yarn": (
        "Qwen3",
        {
            **COMMON,
            "num_hidden_layers": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rope_parameters": {k: v for k, v in YARN.items() if not k.startswith("mscale")},
        },
    ),
    "deepseek_v2_greedy_yarn": ("DeepseekV2", {**DEEPSEEK, "topk_method": "greedy", "rope_parameters": YARN}),
    "deepseek_v2_groups_q_lora": (
        "DeepseekV2",
        {
            **DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 20,
            "routed_scaling_factor": 3.0,
        },
    ),
    "deepseek_v3_q_lora_yarn": (
        "DeepseekV3",
        {
            **DEEPSEEK,
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 20,
            "rope_parameters": YARN,
            "routed_scaling_factor": 2.5,
        },
    ),
    "deepseek_v3_halves": (
        "DeepseekV3",
        {**DEEPSEEK, "n_group": 1, "topk_group": 1, "rope_interleave": False, "norm_topk_prob": False},
    ),
}


def save_tiny(name: str, folder: Path) -> Any:
    """A random model of transformers, saved by transformers; returned in float32."""
    family, settings = TINY[name]
    return save_random(family, settings, folder)


def save_random(family: str, settings: dict[str, Any], folder: Path) -> Any:
    """As `save_tiny`, of any family and size."""
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**settings)
    )
    generator = torch.Generator().manual_seed(1)
    for key, value in model.state_dict().items():
        # Norms of 1 and biases of 0 would hide a gain or a bias that is forgotten.
        if key.endswith("norm.weight"):
            value.uniform_(0.5, 1.5, generator=generator)
        elif key.endswith("e_score_correction_bias"):
            value.uniform_(-0.3, 0.3, generator=generator)
    model.eval().save_pretrained(folder)
    return model


def embedded_reference(path: Path) -> Any:
    """transformers' DeepseekV3ForCausalLM with the folder's weights dequantised to float32."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    settings = json.loads((path / "config.json").read_text())
    del settings["quantization_config"]
    settings["num_nextn_predict_layers"] = 0
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**settings)).eval()
    missing, unexpected = model.load_state_dict(_fused(_dequantised(path, settings)), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], []), "only the tied head may be absent"
    model.tie_weights()
    return model


def reference_logits(model: Any, tokens: list[int]) -> Tensor:
    """[T, V] of transformers' model."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def _dequantised(path: Path, settings: dict[str, Any]) -> dict[str, Tensor]:
    mtp = f"model.layers.{settings['num_hidden_layers']}."
    weights = {}
    with open_checkpoint(path) as checkpoint:
        for name, info in checkpoint.tensors.items():
            if name.startswith(mtp) or name.endswith("_scale_inv"):
                continue
            weight = checkpoint.read(name)
            if info.dtype == "F8_E4M3":
                weight = fp8_block_dequantize_ref(weight, checkpoint.read(name + "_scale_inv"), torch.float32)
            weights[name] = weight.float().clone()
    return weights


def _fused(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the experts as transformers 5 holds them."""
    out: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, weight in weights.items():
        before, dot, after = name.partition(".experts.")
        if not dot:
            out[name] = weight
            continue
        number, kind, _ = after.split(".")
        experts.setdefault(before, {})[int(number), kind] = weight
    for before, found in experts.items():
        numbers = sorted({number for number, _ in found})
        pairs = [torch.cat((found[n, "gate_proj"], found[n, "up_proj"])) for n in numbers]
        out[f"{before}.experts.gate_up_proj"] = torch.stack(pairs)
        out[f"{before}.experts.down_proj"] = torch.stack([found[n, "down_proj"] for n in numbers])
    return out
