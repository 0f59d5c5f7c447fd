"""The routed experts of a sparse layer: gate_up, SwiGLU, down, weighted sum over a token's experts.

Called by the sparse layers with the router's choice.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels.fp8_block import Fp8Weight
from headrace.kernels.silu_mul import silu_mul, silu_mul_ref

FEW_TOKENS = 8  # on a CPU, up to which reading a weight once per token is cheaper than sorting


class ExpertWeights:
    """Stacked weights of E experts: gate_up [E, 2F, D] with the gate first, down [E, D, F].

    Fp8 is for cards; for a CPU the loader widens it, for there it would be widened at every use.
    """

    __slots__ = ("down", "down_rows", "down_views", "gate_up", "gate_up_rows", "gate_up_views")

    def __init__(self, gate_up: Tensor | Fp8Weight, down: Tensor | Fp8Weight) -> None:
        self.gate_up = gate_up
        self.down = down
        self.gate_up_rows: _Rows | None = None
        self.down_rows: _Rows | None = None
        if isinstance(gate_up, Tensor) and isinstance(down, Tensor) and gate_up.device.type == "cpu":
            # Input by input, as sums of rows want them; products over many tokens are as fast this way.
            self.gate_up_rows, self.gate_up = _by_input(gate_up)
            self.down_rows, self.down = _by_input(down)
        # Indexing a stack costs as much as a small product: the CPU's per-expert calls use ready views.
        self.gate_up_views = _views(self.gate_up)
        self.down_views = _views(self.down)


class _Rows(NamedTuple):
    """A stack of E weights with K inputs and N outputs, as one table of rows."""

    table: Tensor  # [E * K, N]
    of_expert: Tensor  # [E, K] int64: indices of an expert's rows


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
    if isinstance(weights.gate_up, Fp8Weight):
        return experts_ref(x, weights, ids, scales, base)
    out = torch.zeros_like(x) if base is None else base
    if x.shape[0] == 1:
        _one_token(x, weights, ids, scales, out)
    elif x.shape[0] <= FEW_TOKENS and x.dtype is torch.float32:
        _few_tokens(x, weights, ids, scales, out)
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


def _few_tokens(x: Tensor, weights: ExpertWeights, ids: Tensor, scales: Tensor, out: Tensor) -> None:
    """Each (token, expert) pair is a bag of the expert's rows, weighted by its inputs: no sort, two operations."""
    gate_up, down = weights.gate_up_rows, weights.down_rows
    assert gate_up is not None and down is not None, "weights made for another device"
    flat, (tokens, per_token) = ids.view(-1), ids.shape
    inputs = x.unsqueeze(1).expand(-1, per_token, -1)
    hidden = silu_mul(_bags(gate_up, flat, inputs, 1)).mul_(scales.view(-1, 1))
    out.add_(_bags(down, flat, hidden.view(tokens, -1), per_token))


def _bags(rows: _Rows, chosen: Tensor, factors: Tensor, per_bag: int) -> Tensor:
    """Sum the rows of `per_bag` neighbouring experts times their factors: [P / per_bag, N]."""
    index = rows.of_expert.index_select(0, chosen).view(-1)
    starts = torch.arange(0, index.shape[0], per_bag * rows.of_expert.shape[1])
    return torch.embedding_bag(rows.table, index, starts, mode=0, per_sample_weights=factors.reshape(-1))[0]


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


def _by_input(weight: Tensor) -> tuple[_Rows, Tensor]:
    """[E, N, K] -> the table of its transposes, and the stack as a view of it."""
    E, N, K = weight.shape
    turned = weight.transpose(1, 2).contiguous()
    return _Rows(turned.view(E * K, N), torch.arange(E * K).view(E, K)), turned.transpose(1, 2)


def _views(stack: Tensor | Fp8Weight) -> tuple[Tensor, ...]:
    return stack.unbind(0) if isinstance(stack, Tensor) else ()


def _float(weight: Tensor | Fp8Weight) -> Tensor:
    return weight.float() if isinstance(weight, Tensor) else weight.dequantize(torch.float32)
