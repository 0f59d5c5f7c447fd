"""Routing under a mask is sparse routing, and stays balanced."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.training.tiny import TINY, make_model
from training.experts import Experts, largest


def sparse(layer: Experts, x: Tensor) -> Tensor:
    """The mixture token by token and expert by expert, with topk as in DeepSeek's code."""
    shape = layer.shape
    rows = []
    for token in x.flatten(0, 1):
        scores = (layer.gate @ token).sigmoid()
        biased = (scores + layer.bias).view(shape.groups, -1)
        groups = biased.topk(2).values.sum(-1).topk(shape.top_groups).indices
        masked = torch.full_like(biased, float("-inf"))
        masked[groups] = biased[groups]
        chosen = masked.flatten().topk(shape.top_k).indices
        weights = scores[chosen] / scores[chosen].sum()
        out = layer.shared(token)
        for weight, expert in zip(weights, chosen, strict=True):
            gate, up = (layer.gate_up[expert] @ token).chunk(2)
            out = out + weight * (layer.down[expert] @ (F.silu(gate) * up))
        rows.append(out)
    return torch.stack(rows).view_as(x)


def test_experts_under_a_mask_equal_sparse_routing() -> None:
    layer = make_model().experts()[0]
    x = torch.randn(2, 17, TINY.hidden)
    torch.testing.assert_close(layer(x), sparse(layer, x), rtol=1e-5, atol=1e-5)


def test_gates_choose_top_k_within_top_groups_and_sum_to_one() -> None:
    layer = make_model().experts()[0]
    gates = layer.route(torch.randn(500, TINY.hidden))
    assert ((gates > 0).sum(-1) == TINY.top_k).all()
    groups_used = (gates.view(500, TINY.groups, -1) > 0).any(-1).sum(-1)
    assert (groups_used <= TINY.top_groups).all()
    torch.testing.assert_close(gates.sum(-1), torch.ones(500))


def test_largest_takes_the_earlier_of_equals() -> None:
    assert largest(torch.tensor([1.0, 3.0, 3.0, 3.0]), 2).tolist() == [False, True, True, False]


def test_balance_moves_the_bias_towards_idle_experts() -> None:
    layer = make_model().experts()[0].train()
    layer.bias.zero_()
    layer(torch.randn(4, 64, TINY.hidden))
    load = layer.load.clone()
    layer.balance(0.01)
    assert (layer.bias[load < load.mean()] > 0).all()
    assert (layer.bias[load > load.mean()] < 0).all()
    assert not layer.load.any()
