"""Products with a dense fp8 weight on a card: one token, a few, many."""

import pytest
import torch

from headrace.kernels.fp8_block import Fp8Weight, fp8_weight
from headrace.kernels.linear import linear_ref, norm_linear_ref
from headrace.kernels.rms_norm import NormWeight
from tests.kernels.close import assert_close
from tests.kernels.shapes import normal


def fp8(N: int, K: int, device: torch.device) -> Fp8Weight:
    return fp8_weight(normal(N, K, dtype=torch.float32, device=device, scale=K**-0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(70, 300), (300, 2176)], ids=str)
def test_one_token(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    from headrace.kernels.linear_one_fp8 import launch_linear_one_fp8

    (N, K), weight = shape, fp8(*shape, device)
    x, wide = normal(1, K, dtype=dtype, device=device), weight.dequantize(torch.float32)
    norm = NormWeight(normal(K, dtype=dtype, device=device), 1e-6)
    assert_close("plain", launch_linear_one_fp8(x, weight, None), linear_ref(x.float(), wide))
    expected = norm_linear_ref(x.float(), norm, wide)
    assert_close("normed", launch_linear_one_fp8(x, weight, None, norm=norm), expected)
    residual = normal(1, N, dtype=dtype, device=device)
    expected = residual.float() + linear_ref(x.float(), wide)
    found = launch_linear_one_fp8(x, weight, residual)
    assert found is residual
    assert_close("added", found, expected)


def test_a_scale_block_that_a_program_would_cross_is_refused(device: torch.device) -> None:
    from headrace.kernels.linear_one_fp8 import OneFp8LinearTuning, launch_linear_one_fp8

    x = normal(1, 128, dtype=torch.float32, device=device)
    with pytest.raises(ValueError, match="crosses the 128x128 blocks"):
        launch_linear_one_fp8(x, fp8(128, 128, device), None, OneFp8LinearTuning(block_n=256))


@pytest.mark.parametrize("tokens", [2, 19])
@pytest.mark.parametrize("splits", [1, 2])
def test_few_tokens_are_near_exact(tokens: int, splits: int, device: torch.device) -> None:
    from headrace.kernels.fp8_few import FewTuning, launch_few_linear
    from headrace.kernels.fp8_split import launch_split_rows

    weight = fp8(140, 256, device)
    x = normal(tokens, 256, dtype=torch.float32, device=device)
    residual = normal(tokens, 140, dtype=torch.float32, device=device)
    expected = residual + linear_ref(x, weight)
    tuning = FewTuning(block_n=64, num_warps=4, num_stages=2)
    found = launch_few_linear(launch_split_rows(x), weight, x.dtype, residual, 16, splits, tuning)
    assert found is residual
    # Sums of two fp8 numbers carry 8 bits.
    assert_close("added", found, expected, torch.bfloat16)


def test_a_split_row_is_the_row_to_eight_bits(device: torch.device) -> None:
    from headrace.kernels.fp8_split import launch_split_rows

    x = normal(5, 300, dtype=torch.float32, device=device)
    x[1] *= 1e-6
    x[2] *= 1e6
    x[3] = 0
    x[4, 0] = 1e3  # the others of its row are a thousandth of the largest
    rows = launch_split_rows(x)
    found = rows.values.float().sum(1) * rows.scales[:, None]
    # Two roundings to 4 bits; Triton's interpreter loses the carry into the exponent, so half of a rest may be gone.
    share = 2.0**-8 if x.is_cuda else 2.0**-5
    allowed = torch.maximum(x.abs() * share, x.abs().amax(1, keepdim=True) * 2.0**-17) * 1.001
    assert bool(((found - x).abs() <= allowed).all())


@pytest.mark.gpu
@pytest.mark.parametrize("wide", [False, True], ids=["fp8 alone", "with a wide copy"])
def test_a_wide_copy_serves_several_tokens(wide: bool, device: torch.device) -> None:
    from headrace.kernels.linear import linear, linear_add

    weight = fp8(5120, 2048, device)
    if wide:
        weight = Fp8Weight(weight.values, weight.scale_inv, weight.dequantize(torch.bfloat16))
    for tokens in (1, 5, 64):
        x = normal(tokens, 2048, dtype=torch.bfloat16, device=device)
        expected = linear_ref(x.float(), weight.dequantize(torch.float32))
        assert_close(f"{tokens}", linear(x, weight), expected)
        residual = normal(tokens, 5120, dtype=torch.bfloat16, device=device)
        assert_close(f"{tokens} added", linear_add(x, weight, residual.clone()), residual.float() + expected)
