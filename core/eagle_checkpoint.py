"""Loads an EAGLE head from a folder of its own and joins it to a model: `--speculate-model PATH`.

Reads the layout of EAGLE-1 and -2 as published: config.json of a one-layer Llama, and safetensors. Refuses EAGLE-3
and other drafters by name. Called by core/build.py.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.core.hf_config import read_config
from headrace.core.hf_rope import parse_rope
from headrace.core.model_spec import GqaSpec, ModelSpec
from headrace.core.models.decoder import Decoder
from headrace.core.models.eagle import Eagle, EagleSpec, build_eagle
from headrace.core.models.rope_table import rope_table
from headrace.core.safetensors_index import Checkpoint, CheckpointError, open_checkpoint
from headrace.core.tensor_source import Recorder
from headrace.core.typed_keys import Keys, UnsupportedModel
from headrace.core.weights import FP8, check_tensors
from headrace.kernels.fp8_block import Fp8Weight

# Copies of the model's own, which the training left as they were.
SHARED = ("embed_tokens.weight", "lm_head.weight")


def attach_eagle(path: Path, model: Decoder) -> None:
    """Make the head of `path` the model's drafter, in place of any MTP modules of its own.

    Raises:
        ConfigError: among them UnsupportedModel and CheckpointError; the message names key or tensor.
    """
    spec = parse_eagle(read_config(path))
    check_fit(spec, model.spec)
    with open_checkpoint(path) as checkpoint, torch.no_grad():
        recorder = Recorder()
        build_eagle(recorder, spec)
        found = {name: info for name, info in checkpoint.tensors.items() if name not in SHARED}
        check_tensors(recorder.shapes, found, model.spec)
        weights = build_eagle(_Source(checkpoint, model.dtype, model.device), spec)
    model.spec = replace(model.spec, num_mtp=1)
    model.mtp = Eagle(
        model.spec,
        weights,
        embedding=model.embedding,
        norm=model.norm,
        head=model.head,
        rope_table=rope_table(spec.rope, model.spec.max_position, model.device),
    )


class _Source:
    """The folder's tensors in the model's dtype."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)

    def product(self, names: tuple[str, ...], *shape: int, in_blocks: bool) -> Tensor | Fp8Weight:
        return self.empty(*shape)

    def fill(self, name: str, target: Tensor | Fp8Weight) -> None:
        if self._checkpoint.tensors[name].dtype == FP8:
            raise CheckpointError(f"{name} is in fp8, which heads may not be")
        assert isinstance(target, Tensor)
        target.copy_(self._checkpoint.read(name))


def parse_eagle(data: dict[str, Any]) -> EagleSpec:
    """Turn the contents of a head's config.json into an EagleSpec. Raises UnsupportedModel."""
    keys = Keys(data)
    names = data.get("architectures") or []
    if keys.present("draft_vocab_size") or any("eagle3" in str(name).lower() for name in names):
        raise UnsupportedModel("the head is an EAGLE-3 one; only EAGLE-1 and EAGLE-2 heads are supported")
    if keys.present("dflash_config") or any("dflash" in str(name).lower() for name in names):
        raise UnsupportedModel("the head is a DFlash one; only EAGLE-1 and EAGLE-2 heads are supported")
    keys.require("model_type", "llama", default="llama")
    keys.require("num_hidden_layers", 1)
    keys.require("hidden_act", "silu", default="silu")
    keys.require("attention_bias", False, default=False)
    keys.require("mlp_bias", False, default=False)
    hidden, heads = keys.positive("hidden_size"), keys.positive("num_attention_heads")
    kv_heads = keys.positive("num_key_value_heads", default=heads)
    head_dim = keys.positive("head_dim", default=hidden // heads)
    if heads % kv_heads:
        raise UnsupportedModel(
            f"num_attention_heads = {heads} is no multiple of num_key_value_heads = {kv_heads}"
        )
    rope, _ = parse_rope(keys, head_dim, interleaved=False)
    return EagleSpec(
        hidden_size=hidden,
        intermediate_size=keys.positive("intermediate_size"),
        vocab_size=keys.positive("vocab_size"),
        norm_eps=keys.number("rms_norm_eps", default=1e-6),
        attention=GqaSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5),
        rope=rope,
        bias=keys.flag("bias", default=True),
        qkv_bias=keys.flag("qkv_bias", default=False),
    )


def check_fit(head: EagleSpec, model: ModelSpec) -> None:
    """Raise UnsupportedModel unless the head is for such a model: its KV lies in the model's pool."""
    cache = model.attention
    if not isinstance(cache, GqaSpec):
        raise UnsupportedModel(
            f"an EAGLE head stores keys and values, and a {model.model_type} model latents: no pool for it"
        )
    for name, found, expected in (
        ("hidden_size", head.hidden_size, model.hidden_size),
        ("vocab_size", head.vocab_size, model.vocab_size),
        ("num_key_value_heads", head.attention.num_kv_heads, cache.num_kv_heads),
        ("head_dim", head.attention.head_dim, cache.head_dim),
    ):
        if found != expected:
            raise UnsupportedModel(f"the head's {name} = {found} is not the model's {expected}")
