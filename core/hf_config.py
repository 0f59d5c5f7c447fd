"""Reads a Hugging Face config.json into a ModelSpec, and refuses what the models cannot do.

Knows the spellings of transformers 4 and 5; knows no tensor. Called by core/weights.py and the CLI.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headrace.config import ConfigError
from headrace.core.hf_rope import parse_rope, yarn_mscale
from headrace.core.model_spec import GqaSpec, MlaSpec, ModelSpec, MoeSpec, RopeSpec, RouterSpec
from headrace.core.typed_keys import Keys, UnsupportedModel

FP8_BLOCK = (128, 128)
# The latent norms of DeepSeek's own code (and of transformers) ignore rms_norm_eps.
LORA_NORM_EPS = 1e-6
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_spec(path: Path) -> ModelSpec:
    """Parse `path`/config.json.

    Raises:
        ConfigError: the file is absent or is not a JSON object.
        UnsupportedModel: a value the models cannot honour; the message names key and value.
    """
    return parse_spec(read_config(path))


def read_config(path: Path) -> dict[str, Any]:
    """The contents of `path`/config.json. Raises ConfigError."""
    file = path / "config.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: cannot read {file}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"model: {file} holds no JSON object")
    return data


def parse_spec(data: Mapping[str, Any]) -> ModelSpec:
    """Turn the contents of a config.json into a ModelSpec. Raises UnsupportedModel."""
    keys = Keys(data)
    parsers = {
        "deepseek_v2": _deepseek,
        "deepseek_v3": _deepseek,
        "qwen3": _qwen3,
        "qwen3_moe": _qwen3,
    }
    model_type = keys.choice("model_type", tuple(parsers))
    keys.require("hidden_act", "silu", default="silu")
    keys.require("attention_bias", False, default=False)
    keys.require("mlp_bias", False, default=False)
    attention, rope, moe, moe_layers = parsers[model_type](keys)
    return ModelSpec(
        model_type=model_type,
        vocab_size=keys.positive("vocab_size"),
        hidden_size=keys.positive("hidden_size"),
        intermediate_size=keys.positive("intermediate_size"),
        num_layers=len(moe_layers),
        norm_eps=keys.number("rms_norm_eps", default=1e-6),
        max_position=keys.positive("max_position_embeddings"),
        tied_embeddings=keys.flag("tie_word_embeddings", default=False),
        attention=attention,
        rope=rope,
        moe=moe,
        moe_layers=moe_layers,
        num_mtp=keys.count("num_nextn_predict_layers", default=keys.count("num_mtp_layers", default=0)),
        dtype=DTYPES[keys.choice("dtype" if "dtype" in data else "torch_dtype", tuple(DTYPES), "float32")],
        fp8_block=_fp8_block(keys),
        bos_token_id=data.get("bos_token_id"),
        eos_token_ids=_eos(data.get("eos_token_id")),
    )


_Parts = tuple[MlaSpec | GqaSpec, RopeSpec, MoeSpec | None, tuple[bool, ...]]


def _deepseek(keys: Keys) -> _Parts:
    rope_dim, nope_dim = keys.positive("qk_rope_head_dim"), keys.positive("qk_nope_head_dim")
    rope, raw = parse_rope(keys, rope_dim, interleaved=keys.flag("rope_interleave", default=True))
    scale = (nope_dim + rope_dim) ** -0.5
    if rope.yarn is not None and raw.number("mscale_all_dim", default=0.0):
        # The logits' temperature of DeepSeek's YaRN, on top of what cos and sin carry.
        scale *= yarn_mscale(rope.yarn.factor, raw.number("mscale_all_dim")) ** 2
    attention = MlaSpec(
        num_heads=keys.positive("num_attention_heads"),
        q_lora_rank=keys.positive("q_lora_rank") if keys.present("q_lora_rank") else None,
        kv_lora_rank=keys.positive("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=keys.positive("v_head_dim"),
        scale=scale,
        lora_norm_eps=LORA_NORM_EPS,
    )
    keys.require("moe_layer_freq", 1, default=1)
    layers = keys.positive("num_hidden_layers")
    if not keys.present("n_routed_experts"):
        return attention, rope, None, (False,) * layers
    dense = keys.count("first_k_dense_replace", default=0)
    size = keys.positive("moe_intermediate_size")
    moe = MoeSpec(
        num_experts=keys.positive("n_routed_experts"),
        intermediate_size=size,
        shared_size=size * keys.count("n_shared_experts", default=0),
        router=_deepseek_router(keys),
    )
    return attention, rope, moe, tuple(i >= dense for i in range(layers))


def _deepseek_router(keys: Keys) -> RouterSpec:
    experts, top_k = keys.positive("n_routed_experts"), keys.positive("num_experts_per_tok")
    if keys.data["model_type"] == "deepseek_v3":
        keys.require("scoring_func", "sigmoid", default="sigmoid")
        keys.require("topk_method", "noaux_tc", default="noaux_tc")
        grouped, normalize = True, keys.flag("norm_topk_prob", default=True)
    else:
        keys.require("scoring_func", "softmax", default="softmax")
        grouped = keys.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy") != "greedy"
        # DeepSeek's code and transformers disagree on what it would mean here; no checkpoint uses it.
        keys.require("norm_topk_prob", False, default=False)
        normalize = False
    groups = keys.positive("n_group", default=1) if grouped else 1
    chosen = keys.positive("topk_group", default=1) if grouped else 1
    if experts % groups or chosen > groups or top_k > chosen * (experts // groups):
        raise UnsupportedModel(
            f"n_group = {groups}, topk_group = {chosen}, num_experts_per_tok = {top_k} do not fit "
            f"n_routed_experts = {experts}"
        )
    if chosen == groups:  # choosing from every group is choosing freely
        groups = chosen = 1
    return RouterSpec(
        scoring="sigmoid" if keys.data["model_type"] == "deepseek_v3" else "softmax",
        top_k=top_k,
        num_groups=groups,
        topk_groups=chosen,
        normalize=normalize,
        weight_scale=keys.number("routed_scaling_factor", default=1.0),
    )


def _qwen3(keys: Keys) -> _Parts:
    sparse = keys.data["model_type"] == "qwen3_moe"
    keys.require("use_sliding_window", False, default=False)
    for kind in keys.data.get("layer_types") or ():
        if kind != "full_attention":
            raise UnsupportedModel(f"layer_types has {kind!r}; only 'full_attention' is supported")
    heads, layers = keys.positive("num_attention_heads"), keys.positive("num_hidden_layers")
    kv_heads = keys.positive("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise UnsupportedModel(
            f"num_attention_heads = {heads} is no multiple of num_key_value_heads = {kv_heads}"
        )
    head_dim = keys.positive("head_dim", default=keys.positive("hidden_size") // heads if sparse else 128)
    attention = GqaSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5)
    rope, _ = parse_rope(keys, head_dim, interleaved=False)
    if not sparse:
        return attention, rope, None, (False,) * layers
    router = RouterSpec(
        scoring="softmax",
        top_k=keys.positive("num_experts_per_tok"),
        num_groups=1,
        topk_groups=1,
        normalize=keys.flag("norm_topk_prob", default=False),
        weight_scale=1.0,
    )
    experts = keys.positive("num_experts" if "num_experts" in keys.data else "num_local_experts")
    if router.top_k > experts:
        raise UnsupportedModel(f"num_experts_per_tok = {router.top_k} is more than num_experts = {experts}")
    moe = MoeSpec(
        num_experts=experts,
        intermediate_size=keys.positive("moe_intermediate_size"),
        shared_size=0,
        router=router,
    )
    step, dense = keys.positive("decoder_sparse_step", default=1), keys.data.get("mlp_only_layers") or ()
    return attention, rope, moe, tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))


def _fp8_block(keys: Keys) -> tuple[int, int] | None:
    if not keys.present("quantization_config"):
        return None
    quant = keys.child("quantization_config")
    quant.require("quant_method", "fp8")
    quant.require("fmt", "e4m3", default="e4m3")
    quant.require("activation_scheme", "dynamic", default="dynamic")
    block = quant.data.get("weight_block_size")
    if not isinstance(block, list) or tuple(block) != FP8_BLOCK:
        raise UnsupportedModel(
            f"quantization_config.weight_block_size = {block!r} is not supported (only {list(FP8_BLOCK)})"
        )
    return FP8_BLOCK


def _eos(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)
