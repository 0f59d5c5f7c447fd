"""Norms, rotations and SwiGLU's product against their references."""

import pytest
import torch

from headrace.kernels.rms_norm import NormWeight, add_rms_norm, add_rms_norm_ref, rms_norm, rms_norm_ref
from headrace.kernels.rope import rope, rope_ref
from headrace.kernels.silu_mul import silu_mul, silu_mul_ref
from tests.kernels.close import assert_close
from tests.kernels.shapes import DTYPES, SIZES, normal, rotations


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 63, 256])
@pytest.mark.parametrize("tokens", SIZES)
def test_rms_norm(tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    norm = NormWeight(normal(width, dtype=dtype, device=device), 1e-5)
    x = normal(tokens, width, dtype=dtype, device=device, scale=3)
    kept = x.clone()
    assert_close("normed", rms_norm(x, norm), rms_norm_ref(x, norm))
    assert torch.equal(x, kept)


@pytest.mark.parametrize("scale", [1e-6, 1e4], ids=str)
def test_rms_norm_of_tiny_and_huge_rows(scale: float, device: torch.device) -> None:
    """Below the epsilon the row is not blown up; far above it nothing overflows."""
    norm = NormWeight(torch.ones(64, device=device), 1e-6)
    x = normal(5, 64, dtype=torch.float32, device=device, scale=scale)
    assert_close("normed", rms_norm(x, norm), rms_norm_ref(x, norm))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", SIZES)
def test_add_rms_norm_updates_the_residual(tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    norm = NormWeight(normal(96, dtype=dtype, device=device), 1e-6)
    x, residual = (normal(tokens, 96, dtype=dtype, device=device) for _ in range(2))
    expected_residual = residual.clone()
    expected = add_rms_norm_ref(x, expected_residual, norm)
    assert_close("normed", add_rms_norm(x, residual, norm), expected)
    assert_close("residual", residual, expected_residual)


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", SIZES)
def test_rope(tokens: int, dtype: torch.dtype, interleaved: bool, device: torch.device) -> None:
    x = normal(tokens, 3, 48, dtype=dtype, device=device)[..., 32:]
    rotation = rotations(tokens, 8, device)
    assert_close("rotated", rope(x, rotation, interleaved), rope_ref(x, rotation, interleaved))


def test_rope_keeps_products_of_equal_distance(device: torch.device) -> None:
    """What rotary embedding is for: the score depends on the distance alone."""
    q, k = (normal(1, 1, 16, dtype=torch.float32, device=device) for _ in range(2))
    angles = torch.arange(40, device=device)[:, None, None] * torch.logspace(0, -2, 8, device=device)
    table = torch.complex(angles.cos(), angles.sin())
    for interleaved in (True, False):
        scores = [
            (rope(q, table[at : at + 1], interleaved) * rope(k, table[at - 3 : at - 2], interleaved)).sum()
            for at in (3, 17, 39)
        ]
        assert torch.stack(scores).std() < 1e-4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 33, 128])
@pytest.mark.parametrize("tokens", SIZES)
def test_silu_mul(tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = normal(tokens, 2 * width, dtype=dtype, device=device, scale=4)
    assert_close("product", silu_mul(gate_up), silu_mul_ref(gate_up))
