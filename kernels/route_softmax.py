"""Router of Qwen3-MoE and DeepSeek-V2: softmax scores, the best experts, optionally of the best groups.

Called by the sparse layers. Sources: arXiv 2405.04434, 2.2.2 (groups); Qwen3-MoE's released code.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def route_softmax(
    x: Tensor,
    gate: Tensor,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    normalize: bool,
    weight_scale: float,
) -> tuple[Tensor, Tensor]:
    """Choose `top_k` of E experts for each token.

    Args:
        x: [T, D].
        gate: [E, D] float32.
        num_groups: equal groups of neighbouring experts; 1 = none.
        topk_groups: a token chooses from the groups with the best single expert.
        normalize: the weights of a token sum to `weight_scale`; else they are shares of all E.

    Returns:
        Expert ids [T, top_k] int64 in no particular order, their weights [T, top_k] float32.
    """
    if x.is_cuda:
        from headrace.kernels.route_triton import launch_choose, launch_logits

        logits = launch_logits(x, gate)
        return launch_choose(logits, None, top_k, num_groups, topk_groups, normalize, weight_scale)
    scores = F.linear(x.float(), gate).softmax(-1)
    if num_groups > 1:
        grouped = scores.view(scores.shape[0], num_groups, -1)
        best = grouped.amax(-1).topk(topk_groups, -1, sorted=False)[1]
        opened = torch.zeros(grouped.shape[:2], device=x.device).scatter_(1, best, 1.0)
        grouped.mul_(opened.unsqueeze(-1))
    weights, ids = scores.topk(top_k, -1, sorted=False)
    if normalize:
        weights.div_(weights.sum(-1, keepdim=True))
    return ids, weights if weight_scale == 1.0 else weights.mul_(weight_scale)


def route_softmax_ref(
    x: Tensor,
    gate: Tensor,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    normalize: bool,
    weight_scale: float,
) -> tuple[Tensor, Tensor]:
    logits = x.float() @ gate.T
    scores = (logits - logits.logsumexp(-1, keepdim=True)).exp()
    ids = torch.empty(x.shape[0], top_k, dtype=torch.int64, device=x.device)
    for token, row in enumerate(scores.tolist()):
        size = len(row) // num_groups
        order = sorted(range(num_groups), key=lambda g: max(row[g * size : (g + 1) * size]), reverse=True)
        open_groups = order[:topk_groups]
        experts = [e for e in range(len(row)) if e // size in open_groups]
        ids[token] = torch.tensor(sorted(experts, key=lambda e: row[e], reverse=True)[:top_k])
    weights = scores.gather(1, ids)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights * weight_scale
