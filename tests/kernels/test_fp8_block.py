"""The fp8 block format, both ways."""

import pytest
import torch

from headrace.kernels.fp8_block import (
    E4M3_MAX,
    fp8_block_dequantize,
    fp8_block_dequantize_ref,
    fp8_block_quantize,
    fp8_block_quantize_ref,
)
from tests.kernels.shapes import DTYPES, normal

SHAPES = [(1, 1), (7, 129), (128, 128), (129, 63), (300, 257)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dequantize_equals_the_reference_bit_for_bit(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    values = normal(*shape, dtype=torch.float32, device=device, scale=100).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), device=device)
    found = fp8_block_dequantize(values, scales, dtype)
    assert torch.equal(found, fp8_block_dequantize_ref(values, scales, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize_equals_the_reference_bit_for_bit(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    weight = normal(*shape, dtype=dtype, device=device, scale=0.05)
    values, scales = fp8_block_quantize(weight)
    expected_values, expected_scales = fp8_block_quantize_ref(weight)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(values.float(), expected_values.float())


def test_round_trip_is_within_half_a_step_of_each_block(device: torch.device) -> None:
    """e4m3 keeps 3 bits behind the leading one: a sixteenth of the number; near zero, a fixed step."""
    weight = normal(200, 300, dtype=torch.float32, device=device)
    weight[:128, :128] *= 1000
    values, scales = fp8_block_quantize(weight)
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    allowed = torch.maximum(weight.abs() / 16, wide * 2.0**-10) * 1.001
    assert bool(((fp8_block_dequantize(values, scales, torch.float32) - weight).abs() <= allowed).all())
    assert values.float().abs().max() == E4M3_MAX


def test_a_block_of_zeros_has_a_harmless_scale(device: torch.device) -> None:
    values, scales = fp8_block_quantize(torch.zeros(128, 256, device=device))
    assert torch.equal(scales, torch.ones(1, 2, device=device))
    assert not fp8_block_dequantize(values, scales, torch.float32).any()
