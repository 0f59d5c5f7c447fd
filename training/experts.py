"""Feed-forward layers: the plain one, and the mixture of experts with DeepSeek-V3's routing.

Every expert is computed for every token and multiplied by its gate: equal to sparse routing, with static shapes and
no dispatch. At this size that costs little and compiles well.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.shape import Shape


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, size: int) -> None:
        """gate_up_proj holds the gate's rows before the up projection's."""
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden, 2 * size, bias=False)
        self.down_proj = nn.Linear(size, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> the same shape."""
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


def largest(scores: Tensor, count: int) -> Tensor:
    """Mask of the `count` largest along the last axis, the earlier of equals first.

    By counting how many are larger, which fuses with its neighbours where a sort would not.
    """
    this, other = scores.unsqueeze(-1), scores.unsqueeze(-2)
    index = torch.arange(scores.shape[-1], device=scores.device)
    before = (other > this) | ((other == this) & (index < index[:, None]))
    mask: Tensor = before.sum(-1) < count
    return mask


class Experts(nn.Module):
    """A shared expert and `experts` routed ones, of which `top_k` within `top_groups` groups count for a token."""

    bias: Tensor  # [experts], added to the scores for the choice alone: balances without an auxiliary loss
    load: Tensor  # [experts], tokens routed since the last call of balance

    def __init__(self, shape: Shape) -> None:
        """Allocate; values are set by Model."""
        super().__init__()
        self.shape = shape
        self.gate = nn.Parameter(torch.empty(shape.experts, shape.hidden))
        self.gate_up = nn.Parameter(torch.empty(shape.experts, 2 * shape.expert_size, shape.hidden))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.expert_size))
        self.shared = FeedForward(shape.hidden, shape.shared_size)
        self.register_buffer("bias", torch.zeros(shape.experts))
        self.register_buffer("load", torch.zeros(shape.experts), persistent=False)

    def route(self, x: Tensor) -> Tensor:
        """Gates of x [N, hidden]: float32 [N, experts], zero where an expert is not chosen, rows sum to one."""
        shape = self.shape
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.gate.float()).sigmoid()
        biased = (scores + self.bias).detach()
        if shape.groups > 1:
            members = biased.view(-1, shape.groups, shape.experts // shape.groups)
            best_two = (members * largest(members, 2)).sum(-1)
            allowed = largest(best_two, shape.top_groups).unsqueeze(-1)
            biased = members.masked_fill(~allowed, float("-inf")).flatten(1)
        gates = scores * largest(biased, shape.top_k)
        shares: Tensor = gates / gates.sum(-1, keepdim=True)
        return shares

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, hidden] -> the same shape."""
        shape = self.shape
        flat = x.reshape(-1, shape.hidden)
        gates = self.route(flat)
        if self.training:
            self.load += (gates > 0).float().sum(0)
        gate, up = (
            F.linear(flat, self.gate_up.flatten(0, 1)).view(-1, shape.experts, 2, shape.expert_size).unbind(2)
        )
        inner = F.silu(gate) * up * gates.unsqueeze(-1).to(gate.dtype)
        down = self.down.transpose(0, 1).reshape(shape.hidden, -1)
        out: Tensor = self.shared(flat) + F.linear(inner.flatten(1), down)
        return out.view(x.shape)

    @torch.no_grad()
    def balance(self, rate: float) -> Tensor:
        """Raise the bias of idle experts and lower that of busy ones; the busiest one's load over the mean's."""
        mean = self.load.mean()
        self.bias += rate * torch.sign(mean - self.load)
        busiest = self.load.max() / mean
        self.load.zero_()
        return busiest
