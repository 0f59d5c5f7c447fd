"""The norm and the router of a sparse layer: its residual in, what the experts read and whom they serve out.

Called by the sparse layers.
"""

import torch
from torch import Tensor

from headrace.kernels.rms_norm import NormWeight, rms_norm, rms_norm_ref
from headrace.kernels.route_sigmoid import route_sigmoid, route_sigmoid_ref
from headrace.kernels.route_softmax import route_softmax, route_softmax_ref


def norm_route(
    residual: Tensor,
    norm: NormWeight,
    gate: Tensor,
    bias: Tensor | None,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    normalize: bool,
    weight_scale: float,
    num_shared: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm the residual and choose experts for it; on a card a few tokens take two launches.

    Args:
        residual: [T, D].
        norm: of D numbers.
        gate: [E, D] float32.
        bias: [E] float32 for `route_sigmoid`; None = `route_softmax`. The arguments behind it are theirs.
        num_shared: experts E, E + 1, ... of the stack, which every token takes, with weight 1.

    Returns:
        The norm [T, D], expert ids [T, top_k + num_shared] int64 and their weights, float32.
    """
    choice = (top_k, num_groups, topk_groups, normalize, weight_scale)
    if residual.is_cuda:
        from headrace.kernels.route_triton import (
            FEW_TOKENS,
            launch_choose,
            launch_logits,
            launch_norm_logits,
        )

        if residual.shape[0] <= FEW_TOKENS:
            x, logits = launch_norm_logits(residual, norm, gate)
        else:
            x = rms_norm(residual, norm)
            logits = launch_logits(x, gate)
        return x, *launch_choose(logits, bias, *choice, num_shared)
    x = rms_norm(residual, norm)
    if bias is None:
        return x, *_with_shared(*route_softmax(x, gate, *choice), gate.shape[0], num_shared)
    return x, *_with_shared(*route_sigmoid(x, gate, bias, *choice), gate.shape[0], num_shared)


def norm_route_ref(
    residual: Tensor,
    norm: NormWeight,
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
    x = rms_norm_ref(residual, norm)
    if bias is None:
        return x, *_with_shared(*route_softmax_ref(x, gate, *choice), gate.shape[0], num_shared)
    return x, *_with_shared(*route_sigmoid_ref(x, gate, bias, *choice), gate.shape[0], num_shared)


def _with_shared(ids: Tensor, weights: Tensor, num_experts: int, num_shared: int) -> tuple[Tensor, Tensor]:
    if not num_shared:
        return ids, weights
    shared = torch.arange(num_experts, num_experts + num_shared, device=ids.device)
    ids = torch.cat((ids, shared.expand(ids.shape[0], -1)), -1)
    return ids, torch.cat((weights, weights.new_ones(ids.shape[0], num_shared)), -1)
