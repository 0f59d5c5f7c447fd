"""The routed experts of a sparse layer: gate_up, SwiGLU, down, weighted sum over a token's experts.

Called by the sparse layers with the router's choice.
"""

import torch
from torch import Tensor

from headrace.kernels.fp8_block import Fp8Weight
from headrace.kernels.silu_mul import silu_mul, silu_mul_ref


class ExpertWeights:
    """Stacked weights of E experts: gate_up [E, 2F, D] with the gate first, down [E, D, F].

    Fp8 is for cards; for a CPU the loader widens it.
    """

    __slots__ = ("down", "down_views", "gate_up", "gate_up_views")

    def __init__(self, gate_up: Tensor | Fp8Weight, down: Tensor | Fp8Weight) -> None:
        self.gate_up = gate_up
        self.down = down
        # Indexing a stack costs as much as a small product: the CPU's per-expert calls use ready views.
        self.gate_up_views = _views(self.gate_up)
        self.down_views = _views(self.down)


def experts(x: Tensor, weights: ExpertWeights, ids: Tensor, scales: Tensor, base: Tensor | None) -> Tensor:
    """Sum over a token's experts of scale * down(SwiGLU(gate_up(x))).

    Args:
        x: [T, D].
        weights: of E experts.
        ids: [T, K] int64, distinct within a row.
        scales: [T, K] float32.
        base: [T, D] to add to, overwritten by the result; None = zeros.

    Returns:
        [T, D]; `base` where one was given.
    """
    if x.is_cuda:
        from headrace.kernels.experts_cuda import experts_cuda

        return experts_cuda(x, weights.gate_up, weights.down, ids, scales, base)
    out = torch.zeros_like(x) if base is None else base
    if x.shape[0] == 1:
        _one_token(x, weights, ids, scales, out)
    else:
        _by_expert(x, weights, ids, scales, out)
    return out


def _one_token(x: Tensor, weights: ExpertWeights, ids: Tensor, scales: Tensor, out: Tensor) -> None:
    """A matrix-vector product per weight, read once and never copied."""
    chosen: list[int] = ids.view(-1).tolist()
    vector, total = x.view(-1), out.view(-1)
    gate_up = torch.cat([torch.mv(weights.gate_up_views[expert], vector) for expert in chosen])
    hidden = silu_mul(gate_up.view(len(chosen), -1))
    factors: list[float] = scales.view(-1).tolist()
    for row, expert, factor in zip(hidden.unbind(0), chosen, factors, strict=True):
        total.addmv_(weights.down_views[expert], row, alpha=factor)


def _by_expert(x: Tensor, weights: ExpertWeights, ids: Tensor, scales: Tensor, out: Tensor) -> None:
    """Sort the (token, expert) pairs by expert; two products for each expert that was hit."""
    flat = ids.view(-1)
    order = flat.argsort(stable=True)
    counts: list[int] = flat.bincount(minlength=weights.gate_up.shape[0]).tolist()
    tokens = order.div(ids.shape[1], rounding_mode="floor")
    inputs = x.index_select(0, tokens)
    gate_up = x.new_empty(inputs.shape[0], weights.gate_up.shape[1])
    hit = [(expert, count) for expert, count in enumerate(counts) if count]
    sizes = [count for _, count in hit]
    for (expert, _), source, target in zip(hit, inputs.split(sizes), gate_up.split(sizes), strict=True):
        torch.mm(source, weights.gate_up_views[expert].t(), out=target)
    hidden = silu_mul(gate_up).mul_(scales.view(-1).index_select(0, order).unsqueeze(1))
    # The inputs are spent: their memory takes the outputs.
    for (expert, _), source, target in zip(hit, hidden.split(sizes), inputs.split(sizes), strict=True):
        torch.mm(source, weights.down_views[expert].t(), out=target)
    out.index_add_(0, tokens, inputs)


def experts_ref(
    x: Tensor, weights: ExpertWeights, ids: Tensor, scales: Tensor, base: Tensor | None
) -> Tensor:
    out = torch.zeros_like(x, dtype=torch.float32) if base is None else base.float()
    for token, (chosen, scale) in enumerate(zip(ids.tolist(), scales, strict=True)):
        for slot, expert in enumerate(chosen):
            gate_up, down = _float(weights.gate_up[expert]), _float(weights.down[expert])
            hidden = silu_mul_ref((gate_up @ x[token].float()).unsqueeze(0))[0]
            out[token] += scale[slot] * (down @ hidden)
    return out.to(x.dtype) if base is None else base.copy_(out)


def _views(stack: Tensor | Fp8Weight) -> tuple[Tensor, ...]:
    return stack.unbind(0) if isinstance(stack, Tensor) else ()


def _float(weight: Tensor | Fp8Weight) -> Tensor:
    return weight.float() if isinstance(weight, Tensor) else weight.dequantize(torch.float32)
