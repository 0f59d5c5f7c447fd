"""The kernels of routed experts with fp8 weights: one token, few tokens, many tokens."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.experts import ExpertWeights, experts
from headrace.kernels.fp8_block import Fp8Weight
from tests.kernels.close import assert_close
from tests.kernels.test_experts_cuda import by_expert, make

# Rows as sums of two fp8 numbers carry 8 bits; Triton's interpreter cuts where a card rounds, which loses one.
TWO_TERMS = torch.bfloat16


def fp8_experts(
    T: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Fp8Weight, Fp8Weight, Tensor, Tensor, Tensor]:
    x, gate_up, down, ids, scales, base = make(T, shape, dtype, device, fp8=True)
    assert isinstance(gate_up, Fp8Weight) and isinstance(down, Fp8Weight)
    return x, gate_up, down, ids, scales, base


@pytest.mark.parametrize("shape", [(5, 3, 256, 128), (4, 2, 2176, 384)], ids=str)
def test_one_token_is_exact(shape: tuple[int, int, int, int], device: torch.device) -> None:
    from headrace.kernels.experts_one_fp8 import launch_experts_one_fp8

    args = fp8_experts(1, shape, torch.float32, device)
    expected = by_expert(*args)
    assert_close("sum", launch_experts_one_fp8(*args), expected)


def test_halves_that_cut_a_block_of_scales_are_refused(device: torch.device) -> None:
    from headrace.kernels.experts_one_fp8 import launch_experts_one_fp8

    with pytest.raises(ValueError, match="do not fit 128x128"):
        launch_experts_one_fp8(*fp8_experts(1, (5, 3, 72, 40), torch.float32, device))


@pytest.mark.parametrize("tokens", [2, 19])
def test_few_tokens_are_near_exact(tokens: int, device: torch.device) -> None:
    from headrace.kernels.experts_fp8 import FewExpertsTuning, experts_fp8
    from headrace.kernels.fp8_few import FewTuning

    args = fp8_experts(tokens, (5, 3, 256, 128), torch.float32, device)
    expected = by_expert(*args)
    few = FewTuning(block_n=64, num_warps=4, num_stages=2)
    assert_close("sum", experts_fp8(*args, tuning=FewExpertsTuning(16, few, few)), expected, TWO_TERMS)


@pytest.mark.parametrize("tokens", [2, 19])
def test_many_tokens(tokens: int, device: torch.device) -> None:
    from headrace.kernels.experts_fp8 import ManyExpertsTuning, experts_fp8
    from headrace.kernels.fp8_many import ManyTuning
    from headrace.kernels.fp8_tiles import Fp8Tuning

    args = fp8_experts(tokens, (5, 3, 256, 128), torch.float32, device)
    expected = by_expert(*args)
    tuning = ManyExpertsTuning(32, ManyTuning(num_warps=4, num_stages=2), Fp8Tuning(16, 128, 4, 2))
    found = experts_fp8(*args, tuning=tuning)
    # Activations of 4 bits; Triton's interpreter cuts where a card rounds: twice the error.
    error = float((found - expected).norm() / expected.norm())
    assert error < (0.05 if args[0].is_cuda else 0.1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(128, 8, 2048, 768), (64, 6, 2048, 1408), (16, 8, 7168, 2048)], ids=["qwen3", "v2-lite", "v3"]
)
def test_fp8_experts_on_the_card(shape: tuple[int, int, int, int], device: torch.device) -> None:
    from headrace.kernels.experts_fp8 import FewExpertsTuning, experts_fp8_tuning

    _, gate_up, down, *_ = fp8_experts(1, shape, torch.bfloat16, device)
    weights = ExpertWeights(gate_up, down)
    E, K, D, _ = shape
    for tokens in (1, 2, 7, 63, 129, 256, 1000, 4096):
        scales, ids = torch.rand(tokens, E, device=device).topk(K, -1)
        x = torch.randn(tokens, D, dtype=torch.bfloat16, device=device)
        base = torch.randn(tokens, D, dtype=torch.bfloat16, device=device) if tokens % 2 else None
        expected = by_expert(x, gate_up, down, ids, scales, base)
        # Activations of few tokens are as exact as bf16, of many have 4 bits.
        few = isinstance(experts_fp8_tuning(tokens * K // E), FewExpertsTuning)
        dtype = torch.bfloat16 if few or tokens == 1 else torch.float8_e4m3fn
        assert_close(f"{tokens}", experts(x, weights, ids, scales, base), expected, dtype)


@pytest.mark.gpu
def test_few_tokens_with_numbers_of_any_size(device: torch.device) -> None:
    """The scale of 128 numbers must carry tiny and huge rows."""
    x, gate_up, down, ids, scales, _ = fp8_experts(9, (16, 4, 2048, 768), torch.bfloat16, device)
    weights = ExpertWeights(gate_up, down)
    for factor in (1e-6, 1e4):
        x_scaled = x * factor
        expected = by_expert(x_scaled, gate_up, down, ids, scales, None)
        assert_close(f"{factor}", experts(x_scaled, weights, ids, scales, None), expected)
    zeros = experts(torch.zeros_like(x), weights, ids, scales, None)
    assert not zeros.any()
