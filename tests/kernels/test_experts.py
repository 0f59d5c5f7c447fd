"""Products with weights, and routed experts against a loop over tokens and experts."""

import pytest
import torch

from headrace.kernels.experts import ExpertWeights, experts, experts_ref
from headrace.kernels.linear import (
    linear,
    linear_add,
    linear_add_ref,
    linear_ref,
    norm_linear,
    norm_linear_ref,
)
from headrace.kernels.rms_norm import NormWeight
from tests.kernels.close import assert_close
from tests.kernels.shapes import DTYPES, SIZES, normal


def choose(
    tokens: int, num_experts: int, top_k: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    scales, ids = torch.rand(tokens, num_experts, device=device).topk(top_k, -1, sorted=False)
    return ids, scales


@pytest.mark.parametrize("with_base", [True, False], ids=["base", "zero"])
@pytest.mark.parametrize("shape", [(4, 2, 24, 33), (16, 4, 64, 32), (64, 6, 32, 40)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", SIZES)
def test_experts(
    tokens: int, dtype: torch.dtype, shape: tuple[int, int, int, int], with_base: bool, device: torch.device
) -> None:
    num_experts, top_k, hidden, size = shape
    gate_up = normal(num_experts, 2 * size, hidden, dtype=dtype, device=device, scale=hidden**-0.5)
    down = normal(num_experts, hidden, size, dtype=dtype, device=device, scale=size**-0.5)
    weights = ExpertWeights(gate_up, down)
    x = normal(tokens, hidden, dtype=dtype, device=device)
    ids, scales = choose(tokens, num_experts, top_k, device)
    base = normal(tokens, hidden, dtype=dtype, device=device) if with_base else None
    expected = experts_ref(x, weights, ids, scales, base if base is None else base.clone())
    found = experts(x, weights, ids, scales, base)
    assert_close("sum", found, expected)
    assert base is None or found.data_ptr() == base.data_ptr()


def test_experts_that_nobody_chose_are_not_read(device: torch.device) -> None:
    """Poison in an idle expert stays there."""
    gate_up = normal(8, 16, 8, dtype=torch.float32, device=device)
    down = normal(8, 8, 8, dtype=torch.float32, device=device)
    gate_up[5], down[5] = float("nan"), float("nan")
    weights = ExpertWeights(gate_up, down)
    for tokens in (1, 9):
        x = normal(tokens, 8, dtype=torch.float32, device=device)
        ids = torch.tensor([[0, 7]], device=device).expand(tokens, -1).contiguous()
        scales = torch.ones(tokens, 2, device=device)
        found = experts(x, weights, ids, scales, None)
        assert_close("sum", found, experts_ref(x, weights, ids, scales, None))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(129, 63), (63, 129), (256, 64)], ids=str)
@pytest.mark.parametrize("tokens", SIZES)
def test_linear(tokens: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    weight = normal(*shape, dtype=dtype, device=device, scale=0.3)
    x = normal(tokens, shape[1], dtype=dtype, device=device)
    norm = NormWeight(normal(shape[1], dtype=dtype, device=device), 1e-6)
    assert_close("product", linear(x, weight), linear_ref(x, weight))
    assert_close("normed product", norm_linear(x, norm, weight), norm_linear_ref(x, norm, weight))
    residual = normal(tokens, shape[0], dtype=dtype, device=device)
    expected = linear_add_ref(x, weight, residual.clone())
    found = linear_add(x, weight, residual)
    assert_close("sum", found, expected)
    assert found.data_ptr() == residual.data_ptr()
