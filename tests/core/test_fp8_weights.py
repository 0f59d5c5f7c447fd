"""Weights of products in fp8: kept as found, rounded while loading, widened where told, the same model either way."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.config import Quantization
from headrace.core.dummy import DummySource
from headrace.core.models.decoder import Decoder
from headrace.core.models.ffn import SparseFfn
from headrace.core.models.gqa import GqaAttention
from headrace.core.models.mla import MlaAttention
from headrace.core.safetensors_index import open_checkpoint
from headrace.core.tensor_source import Fp8Storage, take_rows
from headrace.core.weights import fingerprint, load_model
from headrace.kernels.fp8_block import Fp8Weight, fp8_block_quantize
from tests.core.hf_models import COMMON, TINY, save_tiny
from tests.core.ragged import error_of_scale, random_tokens, whole

CPU = torch.device("cpu")
KEPT = Fp8Storage(keep=True, copies=False)
SUMS = 1e-5  # float32 sums in another order
# The rounded weights' effect on logits: 3 bits behind the leading one through a few layers of random weights.
ROUNDING = 0.1
BLOCKS: dict[str, Any] = {
    **COMMON,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "initializer_range": 0.05,
}


def load(
    path: Path,
    *,
    keep: bool,
    quantization: Quantization = "",
    dummy: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    model = load_model(
        path,
        dtype=dtype,
        device=CPU,
        load_format="dummy" if dummy else "safetensors",
        quantization=quantization,
        keep_fp8=keep,
    )
    assert isinstance(model, Decoder)
    return model


def logits(model: Decoder) -> Tensor:
    return whole(model, random_tokens(0, 12, model.spec.vocab_size))


def products(model: Decoder) -> dict[str, Tensor | Fp8Weight]:
    """The weights of products by layer and name, kv_b_proj apart, which is used in pieces."""
    found: dict[str, Tensor | Fp8Weight] = {}
    for i, layer in enumerate(model.layers):
        owners: list[Any] = [layer.attention, layer.ffn]
        if isinstance(layer.ffn, SparseFfn):
            owners = [layer.attention, layer.ffn.routed, *layer.ffn.shared]
        for owner in owners:
            for name in ("qkv", "down", "q_up", "out", "gate_up"):
                weight = getattr(owner, name, None)
                if weight is not None:
                    found[f"{i}.{type(owner).__name__}.{name}"] = weight
    return found


@pytest.fixture(scope="module")
def qwen_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wide Qwen3-MoE checkpoint whose weights lie in blocks."""
    folder = tmp_path_factory.mktemp("qwen")
    TINY["qwen3_moe_blocks"] = ("Qwen3Moe", BLOCKS)
    try:
        save_tiny("qwen3_moe_blocks", folder)
    finally:
        del TINY["qwen3_moe_blocks"]
    return folder


@pytest.fixture(scope="module")
def qwen_fp8_path(qwen_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as published in fp8: products in blocks, scales in bf16, the rest as it was."""
    folder = tmp_path_factory.mktemp("qwen_fp8")
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(qwen_path / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            values, scales = fp8_block_quantize(tensor)
            tensors[name], tensors[f"{name}_scale_inv"] = values, scales.bfloat16()
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((qwen_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("layout", ["deepseek_v3", "qwen3_moe"])
def test_an_fp8_checkpoint_stays_fp8_where_told_and_is_the_same_model(
    layout: str, embedded_path: Path, qwen_fp8_path: Path
) -> None:
    path = embedded_path if layout == "deepseek_v3" else qwen_fp8_path
    kept, wide = load(path, keep=True), load(path, keep=False)
    assert all(isinstance(weight, Fp8Weight) for weight in products(kept).values())
    assert all(isinstance(weight, Tensor) for weight in products(wide).values())
    assert error_of_scale(logits(kept), logits(wide)) < SUMS


def test_the_file_s_bits_are_the_weight_s(qwen_fp8_path: Path) -> None:
    model = load(qwen_fp8_path, keep=True)
    with open_checkpoint(qwen_fp8_path) as checkpoint:
        layer = "model.layers.1."
        ffn, attention = model.layers[1].ffn, model.layers[1].attention
        assert isinstance(ffn, SparseFfn) and isinstance(attention, GqaAttention)
        gate_up, qkv = ffn.routed.gate_up, attention.qkv
        assert isinstance(gate_up, Fp8Weight) and isinstance(qkv, Fp8Weight)
        for name, weight in (
            ("mlp.experts.3.gate_proj", gate_up[3].rows(0, 128)),
            ("mlp.experts.3.up_proj", gate_up[3].rows(128, 256)),
            ("self_attn.k_proj", qkv.rows(256, 384)),
        ):
            values = checkpoint.read(f"{layer}{name}.weight").view(torch.uint8)
            scales = checkpoint.read(f"{layer}{name}.weight_scale_inv")
            assert torch.equal(weight.values.view(torch.uint8), values), name
            assert torch.equal(weight.scale_inv, scales.float()), name


def test_wide_weights_are_rounded_to_the_same_numbers_kept_or_widened(qwen_path: Path) -> None:
    """So a CPU, which widens, answers as a card does."""
    kept, rounded = (load(qwen_path, keep=keep, quantization="fp8") for keep in (True, False))
    exact = products(load(qwen_path, keep=False))
    for name, weight in products(kept).items():
        widened, original = products(rounded)[name], exact[name]
        assert isinstance(weight, Fp8Weight) and isinstance(widened, Tensor) and isinstance(original, Tensor)
        parts = [weight] if len(weight.shape) == 2 else [weight[i] for i in range(weight.shape[0])]
        values = torch.stack([part.dequantize(torch.float32) for part in parts]).view_as(widened)
        assert torch.equal(values, widened), name
        # Half a step of e4m3: a sixteenth of the number, or, near zero, of the block's largest over 2**18.
        allowed = (original.abs() / 16).clamp(min=float(original.abs().max()) * 2.0**-18) * 1.001
        assert bool(((values - original).abs() <= allowed).all()), name
    assert error_of_scale(logits(kept), logits(rounded)) < SUMS
    assert 0 < error_of_scale(logits(rounded), logits(load(qwen_path, keep=False))) < ROUNDING


def test_rounding_leaves_what_is_no_product_alone(qwen_path: Path) -> None:
    plain, rounded = (load(qwen_path, keep=True, quantization=q) for q in ("", "fp8"))
    for before, after in zip(plain.layers, rounded.layers, strict=True):
        assert isinstance(before.ffn, SparseFfn) and isinstance(after.ffn, SparseFfn)
        assert torch.equal(before.ffn.gate, after.ffn.gate)
        assert torch.equal(before.input_norm.gain, after.input_norm.gain)
    hidden = torch.randn(3, plain.spec.hidden_size)
    assert torch.equal(plain.logits(hidden), rounded.logits(hidden))


def test_weights_that_do_not_lie_in_blocks_stay_wide(tmp_path: Path) -> None:
    save_tiny("qwen3_moe", tmp_path)
    plain, told = (load(tmp_path, keep=True, quantization=q) for q in ("", "fp8"))
    assert all(isinstance(weight, Tensor) for weight in products(told).values())
    assert torch.equal(logits(plain), logits(told))


def test_parts_that_share_memory_must_begin_at_a_block() -> None:
    source = DummySource(0, torch.float32, CPU, quantization="fp8", storage=KEPT)
    assert isinstance(take_rows(source, (("a", 256), ("b", 72)), 128), Fp8Weight)
    assert isinstance(take_rows(source, (("c", 72), ("d", 256)), 128), Tensor)


def test_a_wide_copy_holds_the_rounded_numbers() -> None:
    source = DummySource(
        0, torch.bfloat16, CPU, quantization="fp8", storage=Fp8Storage(keep=True, copies=True)
    )
    weight = take_rows(source, (("a", 256), ("b", 72)), 128)
    assert isinstance(weight, Fp8Weight) and weight.wide is not None
    assert torch.equal(weight.wide, weight.dequantize(torch.bfloat16))
    stack = source.product(("c",), 3, 128, 128, in_blocks=True)
    assert isinstance(stack, Fp8Weight) and stack.wide is None


def test_dummy_weights_are_rounded_like_others(qwen_path: Path) -> None:
    kept, rounded = (load(qwen_path, keep=keep, quantization="fp8", dummy=True) for keep in (True, False))
    assert all(isinstance(weight, Fp8Weight) for weight in products(kept).values())
    assert error_of_scale(logits(kept), logits(rounded)) < SUMS
    assert not torch.equal(logits(rounded), logits(load(qwen_path, keep=False, dummy=True)))


def test_mla_of_an_fp8_checkpoint_keeps_its_up_projection_wide(small_path: Path) -> None:
    """It is used in two pieces that cut its blocks."""
    attention = load(small_path, keep=True).layers[0].attention
    assert isinstance(attention, MlaAttention)
    assert all(isinstance(getattr(attention.up, f.name), Tensor) for f in dataclasses.fields(attention.up))


def test_fingerprint_tells_rounded_models_apart(small_path: Path) -> None:
    plain, rounded = (
        fingerprint(small_path, dtype=torch.float32, load_format="safetensors", quantization=q)
        for q in ("", "fp8")
    )
    assert plain != rounded
