"""The device kernels around attention: those that write the KV, and MLA's way into and out of the latent space."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.mla_kv_write import mla_kv_write_ref
from headrace.kernels.mla_kv_write_triton import launch_mla_kv_write
from headrace.kernels.mla_query import mla_query_ref
from headrace.kernels.mla_query_triton import launch_mla_query
from headrace.kernels.mla_value import mla_value_ref
from headrace.kernels.mla_value_triton import launch_mla_value
from headrace.kernels.qk_norm_rope_kv_write import qk_norm_rope_kv_write_ref
from headrace.kernels.qk_norm_rope_kv_write_triton import launch_qk_norm_rope_kv_write
from headrace.kernels.rms_norm import NormWeight
from tests.kernels.close import assert_close
from tests.kernels.shapes import rotations

SMALL = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
PAIRS = pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
SIZES = pytest.mark.parametrize("tokens", [1, 7, 63, 129, 1000])


def gain(dim: int, dtype: torch.dtype, device: torch.device) -> NormWeight:
    return NormWeight((1 + torch.randn(dim) / 4).to(device, dtype), 1e-6)


def some_slots(tokens: int, device: torch.device) -> tuple[Tensor, int]:
    blocks = -(-tokens // 16) + 2
    return torch.randperm(blocks * 16)[:tokens].to(device), blocks


def check_gqa(tokens: int, dtype: torch.dtype, interleaved: bool, *shape: int, device: torch.device) -> None:
    heads, kv_heads, dim = shape
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim + 32, dtype=dtype, device=device)[:, :-32]
    slots, blocks = some_slots(tokens, device)
    cache = torch.full((2, blocks, 16, kv_heads, dim), 7.0, dtype=dtype, device=device)
    expected_cache = cache.clone()
    rest = (gain(dim, dtype, device), gain(dim, dtype, device), rotations(tokens, dim // 2, device), slots)
    q = launch_qk_norm_rope_kv_write(qkv, *rest, cache, interleaved)
    expected = qk_norm_rope_kv_write_ref(qkv, *rest, expected_cache, interleaved)
    assert_close("queries", q, expected)
    assert_close("cache", cache, expected_cache)
    assert torch.equal(cache == 7.0, expected_cache == 7.0), "a slot of somebody else was written"


def check_mla(tokens: int, dtype: torch.dtype, interleaved: bool, *shape: int, device: torch.device) -> None:
    heads, nope, turning, rank, width = shape
    q = torch.randn(tokens, heads * (nope + turning) + rank + turning, dtype=dtype, device=device)
    q, kv_a = q.split((heads * (nope + turning), rank + turning), 1)
    q = q.unflatten(1, (heads, -1))
    rotation = rotations(tokens, turning // 2, device)
    slots, blocks = some_slots(tokens, device)
    cache = torch.full((blocks, 16, rank + turning), 7.0, dtype=dtype, device=device)
    expected_cache = cache.clone()
    norm = gain(rank, dtype, device)
    launch_mla_kv_write(kv_a, norm, rotation, slots, cache, interleaved)
    mla_kv_write_ref(kv_a, norm, rotation, slots, expected_cache, interleaved)
    assert_close("cache", cache, expected_cache)
    key_up = torch.randn(heads, nope, rank, dtype=dtype, device=device) * nope**-0.5
    queries = launch_mla_query(q, key_up, rotation, interleaved)
    assert_close("queries", queries, mla_query_ref(q, key_up, rotation, interleaved))
    latent = torch.randn(tokens, heads, rank, dtype=dtype, device=device)
    value_up = torch.randn(heads, rank, width, dtype=dtype, device=device) * rank**-0.5
    assert_close("values", launch_mla_value(latent, value_up), mla_value_ref(latent, value_up))


@SMALL
@PAIRS
def test_gqa_interpreted(dtype: torch.dtype, interleaved: bool, device: torch.device) -> None:
    check_gqa(5, dtype, interleaved, 6, 2, 32, device=device)


@SMALL
@PAIRS
def test_mla_interpreted(dtype: torch.dtype, interleaved: bool, device: torch.device) -> None:
    check_mla(19, dtype, interleaved, 2, 48, 16, 64, 48, device=device)


@pytest.mark.gpu
@DTYPES
@PAIRS
@SIZES
def test_gqa_on_the_card(tokens: int, dtype: torch.dtype, interleaved: bool) -> None:
    check_gqa(tokens, dtype, interleaved, 32, 4, 128, device=torch.device("cuda"))


@pytest.mark.gpu
@DTYPES
@PAIRS
@SIZES
def test_mla_on_the_card(tokens: int, dtype: torch.dtype, interleaved: bool) -> None:
    device = torch.device("cuda")
    check_mla(tokens, dtype, interleaved, 16, 128, 64, 512, 128, device=device)
    check_mla(tokens, dtype, interleaved, 8, 48, 16, 64, 48, device=device)
