"""The device kernels of latent attention against their reference."""

from collections.abc import Sequence

import pytest
import torch

from headrace.kernels.attention_plan import AttentionPlan
from headrace.kernels.mla_attention import mla_attention_paged, mla_attention_ref
from tests.kernels.close import assert_close
from tests.kernels.paged import ragged_plan
from tests.kernels.shapes import poison_unused

CASES = {
    "one": ([1], [1], 1),
    "decodes": ([1, 1, 1], [5, 16, 150], 3),
    "verify": ([1, 4, 2], [33, 4, 150], 0),
    "mixed": ([1, 17], [70, 30], 1),
}


def check(dtype: torch.dtype, device: torch.device, plan: AttentionPlan, blocks: int, *shape: int) -> None:
    """`shape`: heads, rank of the latent, rotary dimensions."""
    heads, rank, turning = shape
    tokens = int(plan.query_starts[-1])
    scale = (rank + turning) ** -0.5
    q = torch.randn(tokens, heads, rank + turning, dtype=dtype, device=device)
    cache = torch.randn(blocks, 16, rank + turning, dtype=dtype, device=device)
    poison_unused(cache, plan, block_axis=0)
    out = mla_attention_paged(q, cache, plan, scale, rank)
    assert_close("attention", out, mla_attention_ref(q, cache, plan, scale, rank))


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
    check(dtype, device, plan, blocks, 8, 64, 16)


def test_short_rows_beside_a_prompt(device: torch.device) -> None:
    """Ragged ones, one of them padding without query tokens, and a prompt behind them."""
    plan, blocks = ragged_plan([1, 4, 0, 2, 20], [33, 4, 1, 70, 50], device, num_short=4)
    check(torch.float32, device, plan, blocks, 8, 64, 16)


def test_fixed_splits_make_a_row_independent_of_its_batch(device: torch.device) -> None:
    """The same bits alone, among others, and with room for longer contexts."""
    dtype = torch.float16
    plan, blocks = ragged_plan([1, 2, 1], [70, 150, 20], device, split_size=64)
    q = torch.randn(4, 8, 80, dtype=dtype, device=device)
    cache = torch.randn(blocks, 16, 80, dtype=dtype, device=device)
    together = mla_attention_paged(q, cache, plan, 0.1, 64)
    alone, _ = ragged_plan([2], [150], device, split_size=64, capacity=400)
    alone.block_tables[0, :10] = plan.block_tables[1, :10]
    assert torch.equal(mla_attention_paged(q[1:3], cache, alone, 0.1, 64), together[1:3])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1, 7, 63, 129, 1000])
def test_decodes_on_the_card(size: int, dtype: torch.dtype) -> None:
    """Contexts around `size`, and `size` rows of short contexts."""
    device = torch.device("cuda")
    for lengths in ([size, size + 5, max(1, size // 2)], [1 + 7 * row % 40 for row in range(size)]):
        plan, blocks = ragged_plan([1] * len(lengths), lengths, device, num_decodes=len(lengths))
        check(dtype, device, plan, blocks, 16, 512, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("split_size", [None, 128], ids=["free", "fixed"])
@pytest.mark.parametrize("shape", [(16, 512, 64), (8, 64, 16), (128, 512, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_ragged_steps_on_the_card(
    dtype: torch.dtype, shape: tuple[int, int, int], split_size: int | None
) -> None:
    device = torch.device("cuda")
    for query_lens, context_lens, num_decodes in (
        ([1, 8, 3, 1, 5], [1000, 63, 700, 1, 129], 0),
        ([1, 1, 129, 63, 7], [300, 63, 129, 400, 1000], 2),
    ):
        plan, blocks = ragged_plan(
            query_lens, context_lens, device, num_decodes=num_decodes, split_size=split_size
        )
        check(dtype, device, plan, blocks, *shape)
