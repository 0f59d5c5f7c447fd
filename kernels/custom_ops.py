"""The kernels as operators that torch.compile can put into a graph: tensors and numbers in, shapes known ahead.

Importing this module registers them as `torch.ops.headrace.*`; the table below says of each what it runs, what it
writes and what comes out. Plain calls go past it: an operator's dispatch costs about ten microseconds. A weight is
one tensor, or those of an Fp8Weight; a plan is made by `plan_tensors`. Used by the compiled decoder on a card.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from headrace.kernels.attention_plan import AttentionPlan
from headrace.kernels.experts_cuda import experts_cuda
from headrace.kernels.fp8_block import Fp8Weight
from headrace.kernels.gqa_attention import gqa_attention
from headrace.kernels.linear import linear, linear_add, norm_linear
from headrace.kernels.mla_attend import MlaUp, mla_attend
from headrace.kernels.mla_kv_write import mla_kv_write
from headrace.kernels.paged_plan import PagedPlan
from headrace.kernels.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from headrace.kernels.rms_norm import NormWeight
from headrace.kernels.route import norm_route
from headrace.kernels.silu_mul import silu_mul

NAMESPACE = "headrace"


def weight_tensors(weight: Tensor | Fp8Weight) -> list[Tensor]:
    """What an operator takes for a weight."""
    if isinstance(weight, Tensor):
        return [weight]
    return [weight.values, weight.scale_inv, *([] if weight.wide is None else [weight.wide])]


def plan_tensors(plan: AttentionPlan) -> list[Tensor]:
    """What an operator takes for a plan.

    A compiled function is made anew for a size of 0 or 1 that was none before, and for any other number. So each
    tensor is a little longer than the plan says, and the plan's numbers lie in one int64 tensor on the host.
    """
    paged = plan.paged
    assert paged is not None, "the plan was made for the CPU"
    values = [getattr(paged, field.name) for field in fields(PagedPlan)]
    numbers = torch.tensor([value for value in values if isinstance(value, int)])
    tensors = [value for value in values if isinstance(value, Tensor)]
    tables = F.pad(plan.block_tables, (0, 1, 0, 1))
    return [
        plan.query_starts,
        F.pad(plan.context_lens, (0, 1)),
        tables,
        numbers,
        *(F.pad(one, (0, 2)) for one in tensors),
    ]


def _plan(parts: Sequence[Tensor]) -> AttentionPlan:
    starts, lengths, tables, numbers, *tensors = parts
    found: dict[str, Any] = {}
    left = iter(numbers.tolist())
    rest = iter(tensors)
    for field in fields(PagedPlan):
        if field.type is int:
            found[field.name] = next(left)
        elif field.type is Tensor:
            found[field.name] = next(rest)
        else:
            found[field.name] = starts.device if field.type is torch.device else None
    return AttentionPlan(starts, lengths, tables, paged=PagedPlan(**found))


def _weight(parts: Sequence[Tensor]) -> Tensor | Fp8Weight:
    return parts[0] if len(parts) == 1 else Fp8Weight(*parts)


def _norm(gain: Tensor, eps: float) -> NormWeight:
    """On a card without what only a CPU reads: making it would launch kernels."""
    if not gain.is_cuda:
        return NormWeight(gain, eps)
    norm = object.__new__(NormWeight)
    for name, value in (("gain", gain), ("eps", eps)):
        object.__setattr__(norm, name, value)
    return norm


def _norm_linear(x: Tensor, gain: Tensor, eps: float, weight: Sequence[Tensor]) -> Tensor:
    return norm_linear(x, _norm(gain, eps), _weight(weight))


def _norm_linear_shape(x: Tensor, gain: Tensor, eps: float, weight: Sequence[Tensor]) -> Tensor:
    return x.new_empty(x.shape[0], weight[0].shape[0])


def _linear(x: Tensor, weight: Sequence[Tensor]) -> Tensor:
    return linear(x, _weight(weight))


def _linear_shape(x: Tensor, weight: Sequence[Tensor]) -> Tensor:
    return x.new_empty(x.shape[0], weight[0].shape[0])


def _linear_add(x: Tensor, weight: Sequence[Tensor], residual: Tensor) -> None:
    linear_add(x, _weight(weight), residual)


def _silu_mul(gate_up: Tensor) -> Tensor:
    return silu_mul(gate_up)


def _silu_mul_shape(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def _qk_norm_rope_kv_write(
    qkv: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    eps: float,
    rotation: Tensor,
    slots: Tensor,
    cache: Tensor,
    interleaved: bool,
) -> Tensor:
    norms = (_norm(q_gain, eps), _norm(k_gain, eps))
    turning = torch.view_as_complex(rotation)
    return qk_norm_rope_kv_write(qkv, *norms, turning, slots, cache, interleaved).contiguous()


def _queries_shape(
    qkv: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    eps: float,
    rotation: Tensor,
    slots: Tensor,
    cache: Tensor,
    interleaved: bool,
) -> Tensor:
    heads, dim = cache.shape[3:]
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] // dim - 2 * heads, dim)


def _gqa_attention(q: Tensor, cache: Tensor, plan: Sequence[Tensor], scale: float) -> Tensor:
    return gqa_attention(q, cache, _plan(plan), scale)


def _gqa_attention_shape(q: Tensor, cache: Tensor, plan: Sequence[Tensor], scale: float) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])


def _mla_kv_write(
    kv_a: Tensor,
    gain: Tensor,
    eps: float,
    rotation: Tensor,
    slots: Tensor,
    cache: Tensor,
    interleaved: bool,
) -> None:
    turning = torch.view_as_complex(rotation)
    mla_kv_write(kv_a, _norm(gain, eps), turning, slots, cache, interleaved)


def _mla_attend(
    q: Tensor,
    cache: Tensor,
    up: Sequence[Tensor],
    rotation: Tensor,
    plan: Sequence[Tensor],
    scale: float,
    interleaved: bool,
) -> Tensor:
    turning = torch.view_as_complex(rotation)
    return mla_attend(q, cache, MlaUp(*up), turning, _plan(plan), scale, interleaved)


def _mla_attend_shape(
    q: Tensor,
    cache: Tensor,
    up: Sequence[Tensor],
    rotation: Tensor,
    plan: Sequence[Tensor],
    scale: float,
    interleaved: bool,
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1] * up[1].shape[2])


def _norm_route(
    residual: Tensor,
    gain: Tensor,
    eps: float,
    gate: Tensor,
    bias: Tensor | None,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    normalize: bool,
    weight_scale: float,
    num_shared: int,
) -> tuple[Tensor, Tensor, Tensor]:
    choice = (top_k, num_groups, topk_groups, normalize, weight_scale)
    return norm_route(residual, _norm(gain, eps), gate, bias, *choice, num_shared)


def _norm_route_shape(
    residual: Tensor,
    gain: Tensor,
    eps: float,
    gate: Tensor,
    bias: Tensor | None,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    normalize: bool,
    weight_scale: float,
    num_shared: int,
) -> tuple[Tensor, Tensor, Tensor]:
    chosen = (residual.shape[0], top_k + num_shared)
    ids = residual.new_empty(chosen, dtype=torch.int64)
    return torch.empty_like(residual), ids, residual.new_empty(chosen, dtype=torch.float32)


def _experts(
    x: Tensor,
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    ids: Tensor,
    scales: Tensor,
    base: Tensor,
) -> None:
    experts_cuda(x, _weight(gate_up), _weight(down), ids, scales, base)


def _nothing(*args: object) -> None:
    """The shape of an operator that only writes."""


_OPERATORS: tuple[tuple[Callable[..., Any], tuple[str, ...], Callable[..., Any]], ...] = (
    # what it runs, which arguments it writes, what comes out
    (_norm_linear, (), _norm_linear_shape),
    (_linear, (), _linear_shape),
    (_linear_add, ("residual",), _nothing),
    (_silu_mul, (), _silu_mul_shape),
    (_qk_norm_rope_kv_write, ("cache",), _queries_shape),
    (_gqa_attention, (), _gqa_attention_shape),
    (_mla_kv_write, ("cache",), _nothing),
    (_mla_attend, (), _mla_attend_shape),
    (_norm_route, (), _norm_route_shape),
    (_experts, ("base",), _nothing),
)
for _run, _written, _shape in _OPERATORS:
    _name = f"{NAMESPACE}::{_run.__name__.removeprefix('_')}"
    custom_op(_name, _run, mutates_args=_written).register_fake(_shape)
ops: Any = getattr(torch.ops, NAMESPACE)
