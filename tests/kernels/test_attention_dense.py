"""Attention on the CPU: ragged short rows in groups, beside prompts, equal the token-by-token reference."""

import pytest
import torch

from headrace.kernels.attention_plan import AttentionPlan, plan_attention
from headrace.kernels.gqa_attention import gqa_attention, gqa_attention_ref
from headrace.kernels.mla_attention import mla_attention, mla_attention_ref
from headrace.kernels.paged_plan import ShortRows

BLOCK_SIZE = 8
# query tokens, context, and how many rows are short
STEPS = {
    "one row of four": ([4], [37], 1),
    "equal rows": ([4, 4, 4], [37, 37, 37], 3),
    "contexts of one group": ([3, 3], [33, 60], 2),
    "ragged": ([1, 1, 2, 4, 4, 9], [5, 70, 2, 33, 64, 40], 6),
    "beside a prompt": ([1, 4, 4, 20], [33, 4, 70, 50], 3),
    "decodes and prompts": ([1, 1, 5, 1], [9, 31, 5, 12], 2),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_mla(step: tuple[list[int], list[int], int]) -> None:
    plan, num_blocks = _plan(*step)
    q = torch.randn(sum(step[0]), 4, 24)
    cache = _poisoned(torch.randn(num_blocks, BLOCK_SIZE, 24), plan)
    found = mla_attention(q, cache, plan, 0.2, 16)
    torch.testing.assert_close(found, mla_attention_ref(q, cache, plan, 0.2, 16), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_gqa(step: tuple[list[int], list[int], int]) -> None:
    plan, num_blocks = _plan(*step)
    q = torch.randn(sum(step[0]), 6, 16)
    keys = _poisoned(torch.randn(num_blocks, BLOCK_SIZE, 2, 16), plan)
    values = _poisoned(torch.randn(num_blocks, BLOCK_SIZE, 2, 16), plan)
    cache = torch.stack((keys, values))
    found = gqa_attention(q, cache, plan, 0.2)
    torch.testing.assert_close(found, gqa_attention_ref(q, cache, plan, 0.2), rtol=1e-5, atol=1e-5)


def _plan(queries: list[int], contexts: list[int], num_short: int) -> tuple[AttentionPlan, int]:
    torch.manual_seed(len(queries))
    needed = [-(-length // BLOCK_SIZE) for length in contexts]
    order = (torch.randperm(sum(needed)) + 1).int()
    tables = torch.zeros(len(queries), max(needed), dtype=torch.int32)
    at = 0
    for row, count in enumerate(needed):
        tables[row, :count] = order[at : at + count]
        at += count
    few = queries[:num_short]
    plan = plan_attention(
        torch.tensor([0, *queries]).cumsum(0).int(),
        torch.tensor(contexts, dtype=torch.int32),
        tables,
        few.count(1),
        BLOCK_SIZE,
        max(queries),
        max(contexts),
        short=ShortRows(num_short, sum(few), max(few)),
    )
    return plan, sum(needed) + 1


def _poisoned(cells: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """NaN wherever no row wrote: behind each context, and in block 0."""
    cells[0] = float("nan")
    for table, length in zip(plan.block_tables.tolist(), plan.context_lens.tolist(), strict=True):
        if length % BLOCK_SIZE:
            cells[table[length // BLOCK_SIZE], length % BLOCK_SIZE :] = float("nan")
    return cells
