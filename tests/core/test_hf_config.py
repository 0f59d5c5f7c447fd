"""What is read from a config.json, and what is refused by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.config import ConfigError
from headrace.core.hf_config import parse_spec, read_spec
from headrace.core.model_spec import GqaSpec, MlaSpec
from headrace.core.typed_keys import UnsupportedModel

QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 128,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
    "eos_token_id": [7, 8],
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 12,
    "max_position_embeddings": 1280,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "float16",
    "eos_token_id": 2,
}


def test_embedded_model_is_read_whole(embedded_path: Path) -> None:
    spec = read_spec(embedded_path)
    assert isinstance(spec.attention, MlaSpec)
    assert (spec.num_layers, spec.num_mtp, spec.tied_embeddings) == (7, 1, True)
    assert spec.moe_layers == (False,) + (True,) * 6
    assert spec.fp8_block == (128, 128)
    assert spec.moe is not None and spec.moe.router.scoring == "sigmoid"
    assert (spec.moe.router.num_groups, spec.moe.router.topk_groups) == (4, 2)
    assert spec.moe.shared_size == 256


def test_sparse_layers_of_qwen_follow_step_and_list() -> None:
    spec = parse_spec({**QWEN, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert spec.moe_layers == (False, True, False, False, False, True)
    assert isinstance(spec.attention, GqaSpec)
    assert spec.eos_token_ids == (7, 8)
    assert spec.dtype is torch.bfloat16


def test_both_rope_spellings_mean_the_same() -> None:
    yarn = {"factor": 10.0, "original_max_position_embeddings": 128, "mscale": 1.0, "mscale_all_dim": 0.5}
    old = parse_spec({**DEEPSEEK, "rope_theta": 5000, "rope_scaling": {"type": "yarn", **yarn}})
    new = parse_spec({**DEEPSEEK, "rope_parameters": {"rope_type": "yarn", "rope_theta": 5000, **yarn}})
    assert old == new
    assert old.rope.theta == 5000
    assert old.rope.yarn is not None
    assert old.rope.yarn.cos_sin_scale == pytest.approx((0.1 * math.log(10) + 1) / (0.05 * math.log(10) + 1))
    assert isinstance(old.attention, MlaSpec)
    assert old.attention.scale == pytest.approx(20**-0.5 * (0.05 * math.log(10) + 1) ** 2)


def test_choosing_from_all_groups_is_choosing_freely() -> None:
    moe = parse_spec({**DEEPSEEK, "topk_group": 4}).moe
    assert moe is not None and moe.router.num_groups == 1


def test_kv_shape_counts_mtp_layers_only_when_asked() -> None:
    spec = parse_spec(DEEPSEEK)
    assert spec.kv_shape(10, 16) == (3, 10, 16, 24)
    assert spec.kv_shape(10, 16, mtp=True) == (4, 10, 16, 24)
    assert parse_spec(QWEN).kv_shape(10, 16) == (6, 2, 10, 16, 2, 16)
    assert spec.kv_bytes_per_block(16, torch.bfloat16) == 3 * 16 * 24 * 2


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (QWEN, {"model_type": "llama"}, ["model_type", "'llama'", "qwen3_moe"]),
        (QWEN, {"model_type": None}, ["model_type", "missing"]),
        (QWEN, {"use_sliding_window": True}, ["use_sliding_window", "True"]),
        (
            QWEN,
            {"layer_types": ["full_attention", "sliding_attention"]},
            ["layer_types", "sliding_attention"],
        ),
        (QWEN, {"attention_bias": True}, ["attention_bias", "True"]),
        (QWEN, {"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "silu"]),
        (QWEN, {"hidden_size": None}, ["hidden_size", "missing"]),
        (QWEN, {"hidden_size": "64"}, ["hidden_size", "'64'", "integer"]),
        (QWEN, {"hidden_size": True}, ["hidden_size", "True"]),
        (QWEN, {"hidden_size": 0}, ["hidden_size", "0"]),
        (QWEN, {"num_key_value_heads": 3}, ["num_key_value_heads", "3", "4"]),
        (QWEN, {"num_experts_per_tok": 9}, ["num_experts_per_tok", "9", "8"]),
        (QWEN, {"rope_scaling": {"rope_type": "longrope"}}, ["rope_scaling.rope_type", "'longrope'"]),
        (QWEN, {"rope_scaling": {"type": "dynamic"}}, ["rope_scaling.type", "'dynamic'"]),
        (QWEN, {"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor", "missing"]),
        (QWEN, {"rope_scaling": [1]}, ["rope_scaling", "[1]"]),
        (QWEN, {"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "0.5"]),
        (QWEN, {"torch_dtype": "int8"}, ["torch_dtype", "'int8'"]),
        (QWEN, {"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan"]),
        (
            QWEN,
            {"quantization_config": {"quant_method": "awq"}},
            ["quantization_config.quant_method", "'awq'"],
        ),
        (
            QWEN,
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            ["quantization_config.weight_block_size", "[64, 64]"],
        ),
        (DEEPSEEK, {"scoring_func": "softmax"}, ["scoring_func", "'softmax'"]),
        (DEEPSEEK, {"topk_method": "greedy"}, ["topk_method", "'greedy'"]),
        (DEEPSEEK, {"moe_layer_freq": 2}, ["moe_layer_freq", "2"]),
        (DEEPSEEK, {"n_group": 3}, ["n_group = 3", "n_routed_experts = 8"]),
        (DEEPSEEK, {"qk_rope_head_dim": 7}, ["7", "odd"]),
        (DEEPSEEK, {"model_type": "deepseek_v2", "norm_topk_prob": True}, ["norm_topk_prob", "True"]),
        (DEEPSEEK, {"model_type": "deepseek_v2", "topk_method": "noaux_tc"}, ["topk_method", "'noaux_tc'"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) and len(value) < 3 else "",
)
def test_refusal_names_key_and_value(base: dict[str, Any], change: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        parse_spec({**base, **change})
    for part in named:
        assert part in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"], ids=["cut", "list", "bytes"])
def test_unreadable_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_spec(tmp_path)


def test_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_spec(tmp_path)


def test_a_config_survives_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    assert read_spec(tmp_path) == parse_spec(DEEPSEEK)
