"""The device kernels of grouped-query attention against their reference."""

from collections.abc import Sequence

import pytest
import torch

from headrace.kernels.attention_plan import AttentionPlan
from headrace.kernels.gqa_attention import gqa_attention_paged, gqa_attention_ref
from tests.kernels.close import assert_close
from tests.kernels.paged import ragged_plan
from tests.kernels.shapes import poison_unused

CASES = {
    "one": ([1], [1], 1),
    "decodes": ([1, 1, 1, 1], [5, 16, 70, 131], 4),
    "verify": ([1, 4, 2], [33, 4, 70], 0),
    "mixed": ([1, 1, 37, 17], [9, 70, 37, 50], 2),
    "padded": ([1, 1, 1], [20, 1, 0], 3),
}


def check(
    dtype: torch.dtype,
    device: torch.device,
    plan: AttentionPlan,
    blocks: int,
    *shape: int,
    block_size: int = 16,
) -> None:
    """`shape`: query heads, key-value heads, their dimension."""
    heads, kv_heads, dim = shape
    tokens = int(plan.query_starts[-1])
    q = torch.randn(tokens, heads, dim, dtype=dtype, device=device)
    cache = torch.randn(2, blocks, block_size, kv_heads, dim, dtype=dtype, device=device)
    poison_unused(cache, plan, block_axis=1)
    # Rows without any context hold zeros; the reference knows none.
    out = gqa_attention_paged(q, cache, plan, dim**-0.5)
    empty = (plan.context_lens == 0).nonzero().flatten()
    rows = plan.query_starts.long()[empty]
    assert not out[rows].any()
    expected = gqa_attention_ref(q, cache, plan, dim**-0.5)
    expected[rows] = 0
    assert_close("attention", out, expected)


@pytest.mark.parametrize(
    ("dtype", "split_size"), [(torch.float32, None), (torch.float16, 64)], ids=["free", "fixed"]
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_interpreted(
    case: tuple[Sequence[int], Sequence[int], int],
    dtype: torch.dtype,
    split_size: int | None,
    device: torch.device,
) -> None:
    query_lens, context_lens, num_decodes = case
    plan, blocks = ragged_plan(
        query_lens, context_lens, device, num_decodes=num_decodes, split_size=split_size
    )
    check(dtype, device, plan, blocks, 4, 2, 16)


def test_blocks_of_64_and_a_group_of_one(device: torch.device) -> None:
    plan, blocks = ragged_plan([1, 2], [70, 130], device, block_size=64)
    check(torch.float32, device, plan, blocks, 2, 2, 32, block_size=64)


def test_short_rows_beside_a_prompt(device: torch.device) -> None:
    """Ragged ones, one of them padding without query tokens, and a prompt behind them."""
    plan, blocks = ragged_plan([1, 4, 0, 2, 20], [33, 4, 1, 70, 50], device, num_short=4)
    check(torch.float32, device, plan, blocks, 4, 2, 16)


def test_fixed_splits_make_a_row_independent_of_its_batch(device: torch.device) -> None:
    """The same bits alone, among others, and with room for longer contexts."""
    dtype = torch.float16
    plan, blocks = ragged_plan([1, 2, 1], [70, 150, 20], device, split_size=64)
    q = torch.randn(4, 4, 16, dtype=dtype, device=device)
    cache = torch.randn(2, blocks, 16, 2, 16, dtype=dtype, device=device)
    together = gqa_attention_paged(q, cache, plan, 0.25)
    alone, _ = ragged_plan([2], [150], device, split_size=64, capacity=400)
    alone.block_tables[0, :10] = plan.block_tables[1, :10]
    assert torch.equal(gqa_attention_paged(q[1:3], cache, alone, 0.25), together[1:3])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1, 7, 63, 129, 1000])
def test_decodes_on_the_card(size: int, dtype: torch.dtype) -> None:
    """Contexts around `size`, and `size` rows of short contexts."""
    device = torch.device("cuda")
    for lengths in ([size, size + 5, max(1, size // 2)], [1 + 7 * row % 40 for row in range(size)]):
        plan, blocks = ragged_plan([1] * len(lengths), lengths, device, num_decodes=len(lengths))
        check(dtype, device, plan, blocks, 32, 4, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("split_size", [None, 128], ids=["free", "fixed"])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_ragged_steps_on_the_card(dtype: torch.dtype, block_size: int, split_size: int | None) -> None:
    device = torch.device("cuda")
    for query_lens, context_lens in (
        ([1, 8, 3, 1, 5], [1000, 63, 700, 1, 129]),
        ([1, 1, 129, 63, 7], [300, 63, 129, 400, 1000]),
        ([1000, 1], [1000, 1]),
    ):
        plan, blocks = ragged_plan(
            query_lens,
            context_lens,
            device,
            block_size=block_size,
            num_decodes=2 if query_lens[1] == 1 and query_lens[0] == 1 else 0,
            split_size=split_size,
        )
        check(dtype, device, plan, blocks, 32, 4, 128, block_size=block_size)


@pytest.mark.gpu
def test_a_recorded_step_follows_its_inputs() -> None:
    """A graph captured over one set of lengths is right for others."""
    device = torch.device("cuda")
    plan, blocks = ragged_plan([1, 1, 1], [5, 1, 1], device, num_decodes=3, capacity=1024)
    other, more = ragged_plan([1, 1, 1], [900, 333, 64], device, num_decodes=3)
    tables = torch.zeros(3, 64, dtype=torch.int32, device=device)
    plan = AttentionPlan(plan.query_starts, plan.context_lens, tables, paged=plan.paged)
    q = torch.randn(3, 32, 128, dtype=torch.bfloat16, device=device)
    cache = torch.randn(2, max(blocks, more), 16, 4, 128, dtype=torch.bfloat16, device=device)
    gqa_attention_paged(q, cache, plan, 0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gqa_attention_paged(q, cache, plan, 0.1)
    plan.context_lens.copy_(other.context_lens)
    tables[:, : other.block_tables.shape[1]] = other.block_tables
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert_close("replay", out, gqa_attention_ref(q, cache, other, 0.1))
