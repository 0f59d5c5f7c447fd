"""Products on a card: of one token, of many; the norm folded in, the sum added in place, fp8 weights."""

import pytest
import torch

from headrace.kernels.fp8_block import Fp8Weight, fp8_weight
from headrace.kernels.linear import linear_add, linear_ref, norm_linear, norm_linear_ref
from headrace.kernels.rms_norm import NormWeight
from tests.kernels.close import assert_close
from tests.kernels.shapes import normal


def make(
    T: int, N: int, K: int, dtype: torch.dtype, device: torch.device, *, fp8: bool
) -> tuple[torch.Tensor, torch.Tensor | Fp8Weight, NormWeight]:
    weight = normal(N, K, dtype=dtype, device=device, scale=K**-0.5)
    norm = NormWeight(normal(K, dtype=dtype, device=device), 1e-6)
    return normal(T, K, dtype=dtype, device=device), fp8_weight(weight) if fp8 else weight, norm


def widen(weight: torch.Tensor | Fp8Weight) -> torch.Tensor:
    return weight.dequantize(torch.float32) if isinstance(weight, Fp8Weight) else weight.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_streaming_product(dtype: torch.dtype, device: torch.device) -> None:
    from headrace.kernels.linear_one import OneTuning, launch_linear_one

    x, weight, norm = make(1, 70, 300, dtype, device, fp8=False)
    assert isinstance(weight, torch.Tensor)
    tuning = OneTuning(block_n=32, block_k=256, num_warps=4, num_stages=2)
    found = launch_linear_one(x, weight, None, tuning, norm)
    assert_close("normed", found, norm_linear_ref(x.float(), norm, widen(weight)))
    found = launch_linear_one(x, weight, None, tuning)
    assert_close("plain", found, linear_ref(x.float(), widen(weight)))
    residual = normal(1, 70, dtype=dtype, device=device)
    expected = residual.float() + linear_ref(x.float(), widen(weight))
    found = launch_linear_one(x, weight, residual, tuning)
    assert found is residual
    assert_close("added", found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("shape", [(5120, 2048), (2048, 4096), (3648, 2048), (999, 1001)], ids=str)
def test_products_on_the_card(shape: tuple[int, int], fp8: bool, device: torch.device) -> None:
    for tokens in (1, 7, 16, 63, 129, 1000):
        x, weight, norm = make(tokens, *shape, torch.bfloat16, device, fp8=fp8)
        # Many tokens, or inputs that are no whole blocks: an fp8 weight meets fp8 activations.
        exact = not fp8 or tokens == 1 or (tokens <= 64 and shape[1] % 128 == 0)
        dtype = torch.bfloat16 if exact else torch.float8_e4m3fn
        found = norm_linear(x, norm, weight)
        assert_close(f"normed, {tokens}", found, norm_linear_ref(x.float(), norm, widen(weight)), dtype)
        residual = normal(tokens, shape[0], dtype=torch.bfloat16, device=device)
        expected = residual.float() + linear_ref(x.float(), widen(weight))
        assert_close(f"added, {tokens}", linear_add(x, weight, residual), expected, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes_on_the_card(dtype: torch.dtype, device: torch.device) -> None:
    for tokens in (1, 7):
        x, weight, norm = make(tokens, 1000, 2048, dtype, device, fp8=False)
        expected = norm_linear_ref(
            x.double(), NormWeight(norm.gain.double(), norm.eps), widen(weight).double()
        )
        assert_close(f"{tokens}", norm_linear(x, norm, weight), expected)
