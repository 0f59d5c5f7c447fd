"""The operations of a step on a card whose result for a token depends on nothing else in the batch, bit by bit.

Each has one order of sums for any number of rows. Called by the batch-invariant decoder; Triton is imported by the
first call.
"""

from torch import Tensor

from headrace.kernels.attention_plan import AttentionPlan
from headrace.kernels.experts import ExpertWeights
from headrace.kernels.fp8_block import Fp8Weight


def linear_fixed(x: Tensor, weight: Tensor | Fp8Weight, add_to: Tensor | None = None) -> Tensor:
    """[T, K] x [N, K] -> [T, N]; `add_to` [T, N] += it, where given."""
    from headrace.kernels.linear_fixed import launch_linear_fixed

    return launch_linear_fixed(x, weight, add_to)


def heads_fixed(x: Tensor, weight: Tensor) -> Tensor:
    """A product for each head: [T, H, K] x [H, K, N] -> [T, H, N]."""
    from headrace.kernels.linear_fixed import launch_heads_fixed

    return launch_heads_fixed(x, weight)


def attention_fixed(q: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """Causal attention, the same for decodes and every chunk of a prompt.

    Args:
        q: [T, Hq, D + R].
        keys: [blocks, block_size, Hkv, D + R] of one layer; R is not 0 only where values are keys: MLA's latents.
        values: [blocks, block_size, Hkv, D].
        plan: with its paged part.
        scale: factor of the scores.

    Returns:
        [T, Hq, D].
    """
    from headrace.kernels.attend_fixed import attend_fixed

    return attend_fixed(q, keys, values, plan, scale)


def route_fixed(
    x: Tensor,
    gate: Tensor,
    bias: Tensor | None,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    normalize: bool,
    weight_scale: float,
) -> tuple[Tensor, Tensor]:
    """As route_sigmoid, or as route_softmax where `bias` is None."""
    from headrace.kernels.route_triton import launch_choose, launch_logits

    logits = launch_logits(x, gate, fixed=True)
    return launch_choose(logits, bias, top_k, num_groups, topk_groups, normalize, weight_scale)


def experts_fixed(x: Tensor, weights: ExpertWeights, ids: Tensor, scales: Tensor, base: Tensor) -> None:
    """As experts: `base` [T, D] += the weighted sum over each token's experts."""
    from headrace.kernels.experts_fixed import launch_experts_fixed

    launch_experts_fixed(x, weights.gate_up, weights.down, ids, scales, base)
