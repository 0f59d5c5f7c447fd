"""Choice and weights of experts against sorting in plain Python."""

import pytest
import torch

from headrace.kernels.rms_norm import NormWeight
from headrace.kernels.route import norm_route, norm_route_ref
from headrace.kernels.route_sigmoid import route_sigmoid, route_sigmoid_ref
from headrace.kernels.route_softmax import route_softmax, route_softmax_ref
from tests.kernels.close import assert_close
from tests.kernels.shapes import DTYPES, SIZES, normal

# experts, top_k, groups, groups to choose from
CHOICES = [(16, 4, 1, 1), (16, 4, 4, 2), (64, 6, 8, 3), (9, 9, 1, 1), (10, 1, 5, 1)]


def dense(ids: torch.Tensor, weights: torch.Tensor, experts: int) -> torch.Tensor:
    """[T, E]: the order of a token's experts does not matter."""
    assert ids.dtype is torch.int64 and weights.dtype is torch.float32
    return torch.zeros(ids.shape[0], experts, device=ids.device).scatter_(1, ids, weights)


@pytest.mark.parametrize("normalize", [True, False], ids=["normalised", "raw"])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", SIZES)
def test_route_sigmoid(
    tokens: int, dtype: torch.dtype, choice: tuple[int, int, int, int], normalize: bool, device: torch.device
) -> None:
    experts, top_k, groups, chosen = choice
    x = normal(tokens, 32, dtype=dtype, device=device)
    gate = normal(experts, 32, dtype=torch.float32, device=device, scale=0.2)
    bias = normal(experts, dtype=torch.float32, device=device, scale=0.2)
    found = dense(*route_sigmoid(x, gate, bias, top_k, groups, chosen, normalize, 2.5), experts)
    expected = dense(*route_sigmoid_ref(x, gate, bias, top_k, groups, chosen, normalize, 2.5), experts)
    assert_close("gates", found, expected)


@pytest.mark.parametrize("normalize", [True, False], ids=["normalised", "raw"])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", SIZES)
def test_route_softmax(
    tokens: int, dtype: torch.dtype, choice: tuple[int, int, int, int], normalize: bool, device: torch.device
) -> None:
    experts, top_k, groups, chosen = choice
    x = normal(tokens, 32, dtype=dtype, device=device)
    gate = normal(experts, 32, dtype=torch.float32, device=device, scale=0.2)
    found = dense(*route_softmax(x, gate, top_k, groups, chosen, normalize, 1.0), experts)
    expected = dense(*route_softmax_ref(x, gate, top_k, groups, chosen, normalize, 1.0), experts)
    assert_close("gates", found, expected)


def test_bias_moves_the_choice_and_not_the_weight(device: torch.device) -> None:
    x, gate = torch.zeros(1, 4, device=device), torch.ones(6, 4, device=device)
    bias = torch.tensor([0.0, 0, 9, 0, 9, 0], device=device)
    ids, weights = route_sigmoid(x, gate, bias, 2, 1, 1, False, 1.0)
    assert sorted(ids[0].tolist()) == [2, 4]
    assert weights.tolist() == [[0.5, 0.5]]


def test_weights_stay_finite_when_every_score_vanishes(device: torch.device) -> None:
    x, gate = torch.ones(1, 4, device=device), torch.full((6, 4), -1e3, device=device)
    _, weights = route_sigmoid(x, gate, torch.zeros(6, device=device), 2, 1, 1, True, 1.0)
    assert bool(weights.isfinite().all())


@pytest.mark.parametrize("sigmoid", [True, False], ids=["sigmoid", "softmax"])
@pytest.mark.parametrize("tokens", SIZES)
def test_shared_experts_follow_the_chosen_ones_of_the_norm(
    tokens: int, sigmoid: bool, device: torch.device
) -> None:
    residual = normal(tokens, 32, dtype=torch.float32, device=device)
    norm = NormWeight(normal(32, dtype=torch.float32, device=device), 1e-6)
    gate = normal(16, 32, dtype=torch.float32, device=device, scale=0.2)
    bias = normal(16, dtype=torch.float32, device=device) if sigmoid else None
    choice = (4, 4, 2, True, 2.5, 2)
    x, *found = norm_route(residual, norm, gate, bias, *choice)
    expected_x, *expected = norm_route_ref(residual, norm, gate, bias, *choice)
    assert_close("norm", x, expected_x)
    assert_close("gates", dense(found[0], found[1], 18), dense(expected[0], expected[1], 18))
