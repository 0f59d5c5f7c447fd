"""A decoder whose layers run as torch.compile makes them: one function for each kind of layer, for any step.

Regional: layers of a kind share what was compiled, so a start compiles two functions, not the model. Wraps
core/models/decoder.py's weights; built by core/build.py for `--compile` on a card.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.core.batch import Batch
from headrace.core.model_spec import MlaSpec, RouterSpec
from headrace.core.models.decoder import Decoder
from headrace.core.models.ffn import STACKED_TOKENS, DenseFfn, SparseFfn
from headrace.core.models.layer import Layer
from headrace.core.models.mla import MlaAttention
from headrace.core.models.step import begin_step
from headrace.core.models.wrapped import WrappedDecoder
from headrace.kernels.custom_ops import ops, plan_tensors, weight_tensors

Part = list[Any]  # tensors, lists of tensors, and None


@dataclass(frozen=True, slots=True)
class Constants:
    """What is no tensor in a layer. Layers that agree in it share their compiled function."""

    mla: MlaSpec | None
    scale: float  # of the scores
    interleaved: bool
    eps: tuple[float, ...]  # of the layer's two norms, then of the attention's
    router: RouterSpec | None
    stacked: int  # shared experts among the routed ones


class CompiledDecoder(WrappedDecoder):
    """Implements core/models/base.py's Model over a decoder's weights, on a card."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self._layers = [(_constants(layer), _attention(layer), _ffn(layer)) for layer in decoder.layers]
        self._functions: dict[tuple[Constants, bool], Callable[..., None]] = {}
        for constants, _, _ in self._layers:
            for many in (False, True):
                self._functions.setdefault((constants, many), _compile(constants, many=many))

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: Tensor) -> Tensor:
        """See Model.forward."""
        decoder = self._decoder
        step = begin_step(batch, kv, decoder.rope_table, decoder.spec)
        residual = decoder.embedding.index_select(0, batch.token_ids)
        shared = [residual, torch.view_as_real(step.rotation), step.slots, *plan_tensors(step.plan)]
        tables = shared[5]
        for tensor in (*shared[:5], tables, *shared[7:]):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)  # noqa: SLF001 - it has no other name
        torch._dynamo.maybe_mark_dynamic(tables, 1)  # noqa: SLF001
        many = residual.shape[0] > STACKED_TOKENS
        caches = kv[: len(self._layers)].unbind(0)
        for (constants, attention, ffn), cache in zip(self._layers, caches, strict=True):
            self._functions[constants, many](*shared[:3], shared[3:], cache, attention, ffn)
        return residual

    def logits(self, hidden: Tensor) -> Tensor:
        """See Model.logits."""
        return self._decoder.logits(hidden)


def _compile(constants: Constants, *, many: bool) -> Callable[..., None]:
    """The function of a kind of layer. `many`: for steps whose shared experts do not ride with the routed ones."""
    attend = _gqa if constants.mla is None else _mla
    feed = _dense if constants.router is None else _sparse

    def layer(
        residual: Tensor,
        rotation: Tensor,
        slots: Tensor,
        plan: list[Tensor],
        cache: Tensor,
        attention: Part,
        ffn: Part,
    ) -> None:
        attend(constants, residual, rotation, slots, plan, cache, attention)
        feed(constants, residual, ffn, many)

    return torch.compile(layer, fullgraph=True, dynamic=False)


def _gqa(
    c: Constants,
    residual: Tensor,
    rotation: Tensor,
    slots: Tensor,
    plan: list[Tensor],
    cache: Tensor,
    weights: Part,
) -> None:
    gain, qkv, q_gain, k_gain, out = weights
    projected = ops.norm_linear(residual, gain, c.eps[0], qkv)
    q = ops.qk_norm_rope_kv_write(projected, q_gain, k_gain, c.eps[2], rotation, slots, cache, c.interleaved)
    ops.linear_add(ops.gqa_attention(q, cache, plan, c.scale), out, residual)


def _mla(
    c: Constants,
    residual: Tensor,
    rotation: Tensor,
    slots: Tensor,
    plan: list[Tensor],
    cache: Tensor,
    weights: Part,
) -> None:
    gain, down, q_gain, q_up, kv_gain, up, out = weights
    mla = c.mla
    assert mla is not None, "this layer has no latents"
    projected = ops.norm_linear(residual, gain, c.eps[0], down)
    q, kv_a = projected.split_with_sizes((projected.shape[1] - mla.latent_dim, mla.latent_dim), 1)
    ops.mla_kv_write(kv_a, kv_gain, c.eps[2], rotation, slots, cache, c.interleaved)
    if q_up is not None:
        q = ops.norm_linear(q, q_gain, c.eps[3], q_up)
    q = q.view(-1, mla.num_heads, mla.nope_dim + mla.rope_dim)
    ops.linear_add(ops.mla_attend(q, cache, up, rotation, plan, c.scale, c.interleaved), out, residual)


def _dense(c: Constants, residual: Tensor, weights: Part, many: bool) -> None:
    gain, gate_up, down = weights
    ops.linear_add(ops.silu_mul(ops.norm_linear(residual, gain, c.eps[1], gate_up)), down, residual)


def _sparse(c: Constants, residual: Tensor, weights: Part, many: bool) -> None:
    gain, gate, bias, gate_up, down, *shared = weights
    r = c.router
    assert r is not None, "this layer has no router"
    stacked = 0 if many else c.stacked
    x, ids, scales = ops.norm_route(
        residual,
        gain,
        c.eps[1],
        gate,
        bias,
        r.top_k,
        r.num_groups,
        r.topk_groups,
        r.normalize,
        r.weight_scale,
        stacked,
    )
    if not stacked:
        for expert_gate_up, expert_down in shared:
            hidden = ops.silu_mul(ops.linear(x, expert_gate_up))
            ops.linear_add(hidden, expert_down, residual)
    ops.experts(x, gate_up, down, ids, scales, residual)


def _constants(layer: Layer) -> Constants:
    attention, ffn = layer.attention, layer.ffn
    eps = [layer.input_norm.eps, layer.post_norm.eps]
    if isinstance(attention, MlaAttention):
        eps += [norm.eps for norm in (attention.kv_norm, attention.q_norm) if norm is not None]
    else:
        eps.append(attention.q_norm.eps)
    return Constants(
        mla=attention.spec if isinstance(attention, MlaAttention) else None,
        scale=attention.spec.scale,
        interleaved=attention.interleaved,
        eps=tuple(eps),
        router=ffn.router if isinstance(ffn, SparseFfn) else None,
        stacked=ffn.routed.gate_up.shape[0] - ffn.gate.shape[0] if isinstance(ffn, SparseFfn) else 0,
    )


def _attention(layer: Layer) -> Part:
    a, gain = layer.attention, layer.input_norm.gain
    if not isinstance(a, MlaAttention):
        return [gain, weight_tensors(a.qkv), a.q_norm.gain, a.k_norm.gain, weight_tensors(a.out)]
    q_gain = None if a.q_norm is None else a.q_norm.gain
    q_up = None if a.q_up is None else weight_tensors(a.q_up)
    up = [a.up.key, a.up.value, a.up.both]
    return [gain, weight_tensors(a.down), q_gain, q_up, a.kv_norm.gain, up, weight_tensors(a.out)]


def _ffn(layer: Layer) -> Part:
    ffn, gain = layer.ffn, layer.post_norm.gain
    if isinstance(ffn, DenseFfn):
        return [gain, weight_tensors(ffn.gate_up), weight_tensors(ffn.down)]
    routed = (weight_tensors(ffn.routed.gate_up), weight_tensors(ffn.routed.down))
    shared = [[weight_tensors(one.gate_up), weight_tensors(one.down)] for one in ffn.shared]
    return [gain, ffn.gate, ffn.bias, *routed, *shared]
