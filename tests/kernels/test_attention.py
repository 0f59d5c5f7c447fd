"""Paged attention of ragged batches against a loop over tokens."""

import pytest
import torch

from headrace.kernels.attention_plan import plan_attention
from headrace.kernels.gqa_attention import gqa_attention, gqa_attention_ref
from headrace.kernels.mla_attention import mla_attention, mla_attention_ref
from tests.kernels.close import assert_close
from tests.kernels.shapes import DTYPES, normal, poison_unused, ragged_plan

BLOCKS, BLOCK_SIZE = 90, 16

BATCHES = {
    "one": [(1, 1)],
    "one-long": [(1, 129)],
    "equal": [(1, 63)] * 3,
    "decodes": [(1, 1), (1, 7), (1, 63), (1, 129), (1, 16), (1, 17)],
    "prompt": [(31, 31)],
    "chunk": [(7, 129)],
    "mixed": [(1, 129), (1, 2), (1, 64), (2, 7), (33, 33), (7, 129)],
    "drafts": [(2, 30), (3, 31), (4, 32)],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_mla_attention(batch: str, dtype: torch.dtype, device: torch.device) -> None:
    plan, tokens = ragged_plan(BATCHES[batch], BLOCK_SIZE, BLOCKS, device)
    q = normal(tokens, 5, 48, dtype=dtype, device=device)
    cache = normal(BLOCKS, BLOCK_SIZE, 48, dtype=dtype, device=device)
    poison_unused(cache, plan, 0)
    found = mla_attention(q, cache, plan, 0.2, 32)
    assert_close("latent", found, mla_attention_ref(q, cache, plan, 0.2, 32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_gqa_attention(batch: str, heads: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    plan, tokens = ragged_plan(BATCHES[batch], BLOCK_SIZE, BLOCKS, device)
    q = normal(tokens, heads[0], 16, dtype=dtype, device=device)
    cache = normal(2, BLOCKS, BLOCK_SIZE, heads[1], 16, dtype=dtype, device=device)
    poison_unused(cache, plan, 1)
    found = gqa_attention(q, cache, plan, 0.3)
    assert_close("heads", found, gqa_attention_ref(q, cache, plan, 0.3))


def test_padding_at_most_doubles_the_work_of_decodes() -> None:
    """Rows are grouped by the power of two that holds their blocks."""
    lengths = [1, 16, 17, 40, 100, 129, 500, 511, 1000]
    plan = plan_attention(
        torch.arange(len(lengths) + 1, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        torch.arange(1, len(lengths) * 63 + 1, dtype=torch.int32).view(len(lengths), 63),
        len(lengths),
        16,
        1,
        1000,
    )
    rows = torch.cat([group.rows for group in plan.decodes if group.rows is not None])
    assert sorted(rows.tolist()) == list(range(len(lengths)))
    read = sum(len(group.block_ids) for group in plan.decodes)
    assert read <= 2 * sum(-(-length // 16) for length in lengths)
