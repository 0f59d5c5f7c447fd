"""Router of DeepSeek-V3: sigmoid scores, a learned bias on the choice, experts in groups.

Called by the sparse layers. Source: arXiv 2412.19437, 2.1.2.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ONE_TOKEN_EXPERTS = (
    64  # on a CPU, up to which plain Python chooses for one token faster than a dozen operations
)
WEIGHT_EPS = 1e-20  # keeps the normalisation finite when every chosen score is 0


def route_sigmoid(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
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
        bias: [E] float32, added to the score for the choice only.
        num_groups: equal groups of neighbouring experts; 1 = none.
        topk_groups: a token chooses from the groups with the largest sum of their two best.
        normalize: the weights of a token sum to `weight_scale`.

    Returns:
        Expert ids [T, top_k] int64 in no particular order, their weights [T, top_k] float32.
    """
    if x.is_cuda:
        from headrace.kernels.route_triton import launch_choose, launch_logits

        logits = launch_logits(x, gate)
        return launch_choose(logits, bias, top_k, num_groups, topk_groups, normalize, weight_scale)
    scores = F.linear(x.float(), gate).sigmoid_()
    if x.shape[0] == 1 and gate.shape[0] <= ONE_TOKEN_EXPERTS:
        row: list[float] = scores.view(-1).tolist()
        chosen = _choose(row, bias.tolist(), top_k, num_groups, topk_groups)
        parts = [row[expert] for expert in chosen]
        factor = weight_scale / max(sum(parts), WEIGHT_EPS) if normalize else weight_scale
        return torch.tensor([chosen]), torch.tensor([[part * factor for part in parts]])
    choice = scores + bias
    if num_groups > 1:
        grouped = choice.view(choice.shape[0], num_groups, -1)
        best = grouped.topk(2, -1)[0].sum(-1).topk(topk_groups, -1, sorted=False)[1]
        closed = torch.full(grouped.shape[:2], float("-inf"), device=x.device).scatter_(1, best, 0.0)
        grouped.add_(closed.unsqueeze(-1))
    ids = choice.topk(top_k, -1, sorted=False)[1]
    weights = scores.gather(1, ids)
    if normalize:
        weights.div_(weights.sum(-1, keepdim=True).clamp_min_(WEIGHT_EPS))
    return ids, weights if weight_scale == 1.0 else weights.mul_(weight_scale)


def _choose(
    scores: list[float], bias: list[float], top_k: int, num_groups: int, topk_groups: int
) -> list[int]:
    """The experts of one token."""
    choice = [score + extra for score, extra in zip(scores, bias, strict=True)]
    experts = list(range(len(choice)))
    if num_groups > 1:
        size = len(choice) // num_groups
        groups = [experts[at : at + size] for at in range(0, len(choice), size)]
        groups.sort(key=lambda group: sum(sorted([choice[e] for e in group])[-2:]))
        experts = [expert for group in groups[-topk_groups:] for expert in group]
    return sorted(experts, key=choice.__getitem__)[-top_k:]


def route_sigmoid_ref(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    normalize: bool,
    weight_scale: float,
) -> tuple[Tensor, Tensor]:
    scores = 1 / (1 + (-(x.float() @ gate.T)).exp())
    ids = torch.empty(x.shape[0], top_k, dtype=torch.int64, device=x.device)
    for token, row in enumerate((scores + bias).tolist()):
        size = len(row) // num_groups
        groups = [row[g * size : (g + 1) * size] for g in range(num_groups)]
        order = sorted(range(num_groups), key=lambda g: sum(sorted(groups[g])[-2:]), reverse=True)
        open_groups = order[:topk_groups]
        experts = [e for e in range(len(row)) if e // size in open_groups]
        ids[token] = torch.tensor(sorted(experts, key=lambda e: row[e], reverse=True)[:top_k])
    weights = scores.gather(1, ids)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=WEIGHT_EPS)
    return ids, weights * weight_scale
