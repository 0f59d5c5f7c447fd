"""What is stored for a token, where, and what comes back as its query."""

import pytest
import torch

from headrace.kernels.mla_kv_write import mla_kv_write, mla_kv_write_ref
from headrace.kernels.mla_query import mla_query, mla_query_ref
from headrace.kernels.mla_value import mla_value, mla_value_ref
from headrace.kernels.qk_norm_rope_kv_write import qk_norm_rope_kv_write, qk_norm_rope_kv_write_ref
from headrace.kernels.rms_norm import NormWeight
from tests.kernels.close import assert_close
from tests.kernels.shapes import DTYPES, SIZES, normal, rotations

BLOCKS, BLOCK_SIZE = 20, 8


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def assert_same_cells(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The same cells written, with the same numbers; all others still poisoned."""
    assert torch.equal(found.isnan(), expected.isnan())
    assert_close("cache", found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", SIZES)
def test_mla_kv_write(tokens: int, dtype: torch.dtype, interleaved: bool, device: torch.device) -> None:
    kv_a = normal(tokens, 100, dtype=dtype, device=device)[:, 60:]
    norm = NormWeight(normal(24, dtype=dtype, device=device), 1e-6)
    rotation = rotations(tokens, 8, device)
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, device=device)[:tokens]
    found, expected = (poisoned(BLOCKS, BLOCK_SIZE, 40, dtype=dtype, device=device) for _ in range(2))
    mla_kv_write(kv_a.clone(), norm, rotation, slots, found, interleaved)
    mla_kv_write_ref(kv_a, norm, rotation, slots, expected, interleaved)
    assert_same_cells(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", SIZES)
def test_mla_query_and_value(tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    q = normal(tokens, 3, 28, dtype=dtype, device=device)
    key_up = normal(3, 12, 24, dtype=dtype, device=device, scale=0.3)
    value_up = normal(3, 24, 20, dtype=dtype, device=device, scale=0.2)
    rotation = rotations(tokens, 8, device)
    expected = mla_query_ref(q, key_up, rotation, True)
    assert_close("query", mla_query(q.clone(), key_up, rotation, True), expected)
    latent = normal(tokens, 3, 24, dtype=dtype, device=device)
    assert_close("value", mla_value(latent, value_up), mla_value_ref(latent, value_up))


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)], ids=str)
@pytest.mark.parametrize("tokens", SIZES)
def test_qk_norm_rope_kv_write(
    tokens: int, heads: tuple[int, int], dtype: torch.dtype, interleaved: bool, device: torch.device
) -> None:
    q_heads, kv_heads = heads
    qkv = normal(tokens, (q_heads + 2 * kv_heads) * 16, dtype=dtype, device=device)
    q_norm, k_norm = (NormWeight(normal(16, dtype=dtype, device=device), 1e-6) for _ in range(2))
    rotation = rotations(tokens, 8, device)
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, device=device)[:tokens]
    shape = (2, BLOCKS, BLOCK_SIZE, kv_heads, 16)
    found, expected = (poisoned(*shape, dtype=dtype, device=device) for _ in range(2))
    q = qk_norm_rope_kv_write(qkv, q_norm, k_norm, rotation, slots, found, interleaved)
    q_ref = qk_norm_rope_kv_write_ref(qkv, q_norm, k_norm, rotation, slots, expected, interleaved)
    assert_close("query", q, q_ref)
    assert_same_cells(found, expected)
