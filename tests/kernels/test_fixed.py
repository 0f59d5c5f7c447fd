"""The batch-invariant kernels: right, and a token's bits depend on nothing but the token and its context."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from headrace.kernels.attention_plan import AttentionPlan
from headrace.kernels.gqa_attention import gqa_attention_ref
from headrace.kernels.mla_attention import mla_attention_ref
from tests.kernels.close import assert_close
from tests.kernels.paged import ragged_plan
from tests.kernels.shapes import normal, poison_unused

CASES = {
    "one": ([1], [1], 1),
    "decodes": ([1, 1, 1], [5, 300, 131], 3),
    "verify": ([1, 4, 2], [33, 4, 270], 0),
    "mixed": ([1, 1, 37, 17], [9, 270, 37, 50], 2),
    "padded": ([1, 1, 1], [20, 1, 0], 3),
}
CARD = [torch.bfloat16, torch.float32]
CARD_IDS = ["bf16", "fp32"]


def attend(q: Tensor, cache: Tensor, plan: AttentionPlan, split: bool | None = None, rank: int = 0) -> Tensor:
    """GQA, or MLA where `rank` is given; [T, Hq, D]."""
    from headrace.kernels.attend_fixed import attend_fixed

    if rank:
        keys = cache.unsqueeze(2)
        return attend_fixed(q, keys, keys[..., :rank], plan, 0.3, split)
    return attend_fixed(q, cache[0], cache[1], plan, 0.3, split)


def check_attention(
    case: tuple[Sequence[int], Sequence[int], int], dtype: torch.dtype, device: torch.device, *, mla: bool
) -> None:
    query_lens, context_lens, num_decodes = case
    plan, blocks = ragged_plan(query_lens, context_lens, device, num_decodes=num_decodes)
    empty = plan.query_starts.long()[(plan.context_lens == 0).nonzero().flatten()]
    if mla:
        q = normal(sum(query_lens), 4, 48, dtype=dtype, device=device)
        cache = normal(blocks, 16, 48, dtype=dtype, device=device)
        poison_unused(cache, plan, block_axis=0)
        expected = mla_attention_ref(q, cache, plan, 0.3, 32)
    else:
        q = normal(sum(query_lens), 4, 16, dtype=dtype, device=device)
        cache = normal(2, blocks, 16, 2, 16, dtype=dtype, device=device)
        poison_unused(cache, plan, block_axis=1)
        expected = gqa_attention_ref(q, cache, plan, 0.3).view_as(q)
    expected[empty] = 0
    whole = attend(q, cache, plan, False, 32 if mla else 0)
    assert_close("attention", whole, expected)
    assert torch.equal(attend(q, cache, plan, True, 32 if mla else 0), whole), "a split moves bits"


@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_interpreted(
    case: tuple[Sequence[int], Sequence[int], int], mla: bool, device: torch.device
) -> None:
    check_attention(case, torch.float32, device, mla=mla)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", CARD, ids=CARD_IDS)
@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_on_the_card(
    case: tuple[Sequence[int], Sequence[int], int], mla: bool, dtype: torch.dtype, device: torch.device
) -> None:
    check_attention(case, dtype, device, mla=mla)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", CARD, ids=CARD_IDS)
@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
def test_a_prompt_its_chunks_and_its_decodes_attend_alike(
    mla: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Row 1 of the plan, 700 tokens over a context of 1100, beside others; then cut, then one by one."""
    plan, blocks = ragged_plan([90, 700, 33], [90, 1100, 600], device)
    if mla:
        q = normal(823, 16, 576, dtype=dtype, device=device)
        cache = normal(blocks, 16, 576, dtype=dtype, device=device)
    else:
        q = normal(823, 32, 128, dtype=dtype, device=device)
        cache = normal(2, blocks, 16, 4, 128, dtype=dtype, device=device)
    rank = 512 if mla else 0
    expected = attend(q, cache, plan, rank=rank)[90:790]
    table = plan.block_tables[1:2]

    def piece(first: int, count: int, split: bool | None) -> Tensor:
        own = _alone(table, count, 400 + first + count)
        return attend(q[90 + first : 90 + first + count], cache, own, split, rank)

    for first, count in ((0, 700), (0, 129), (129, 571), (5, 1), (333, 4), (699, 1)):
        for split in (None, True, False):
            assert torch.equal(piece(first, count, split), expected[first : first + count]), (first, count)


def _alone(table: Tensor, tokens: int, context: int) -> AttentionPlan:
    from headrace.kernels.attention_plan import plan_device

    starts = torch.tensor([0, tokens], dtype=torch.int32, device=table.device)
    lengths = torch.tensor([context], dtype=torch.int32, device=table.device)
    return plan_device(starts, lengths, table, int(tokens == 1), tokens, 1200, context)


@pytest.mark.parametrize("shape", [(7, 40, 24), (70, 33, 136)], ids=str)
def test_product_interpreted(shape: tuple[int, int, int], device: torch.device) -> None:
    from headrace.kernels.linear_fixed import FixedTuning, launch_linear_fixed

    tokens, outputs, inputs = shape
    x = normal(tokens, inputs, dtype=torch.float32, device=device)
    weight = normal(outputs, inputs, dtype=torch.float32, device=device)
    residual = normal(tokens, outputs, dtype=torch.float32, device=device)
    tuning = FixedTuning(16, 16, 32, 4, 2)
    assert_close("product", launch_linear_fixed(x, weight, None, tuning), x @ weight.T)
    expected = residual + x @ weight.T
    assert_close("sum", launch_linear_fixed(x, weight, residual, tuning), expected)


def test_product_of_heads(device: torch.device) -> None:
    from headrace.kernels.linear_fixed import launch_heads_fixed

    x = normal(5, 3, 40, dtype=torch.float32, device=device)[..., :24]
    weight = normal(3, 24, 18, dtype=torch.float32, device=device)
    expected = torch.einsum("thk,hkn->thn", x, weight)
    assert_close("heads", launch_heads_fixed(x, weight), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", CARD, ids=CARD_IDS)
def test_a_row_of_a_product_has_the_same_bits_among_any_others(
    dtype: torch.dtype, device: torch.device
) -> None:
    from headrace.kernels.linear_fixed import launch_linear_fixed

    for outputs, inputs in ((5120, 2048), (2048, 4096), (10000, 512)):
        x = normal(1000, inputs, dtype=dtype, device=device)
        weight = normal(outputs, inputs, dtype=dtype, device=device, scale=inputs**-0.5)
        expected = launch_linear_fixed(x, weight, None)
        assert_close("product", expected, (x.double() @ weight.double().T).to(dtype))
        for first, count in ((0, 1), (77, 1), (10, 7), (100, 64), (3, 129), (500, 300)):
            found = launch_linear_fixed(x[first : first + count], weight, None)
            assert torch.equal(found, expected[first : first + count]), (outputs, first, count)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_token_has_the_same_experts_bits_among_any_others(fp8: bool, device: torch.device) -> None:
    from headrace.kernels.experts import ExpertWeights
    from headrace.kernels.fixed import experts_fixed, route_fixed
    from headrace.kernels.fp8_block import fp8_weight

    D, F, E, K = 1024, 512, 64, 6
    gate = torch.randn(E, D, device=device)
    up = normal(E, 2 * F, D, dtype=torch.bfloat16, device=device, scale=D**-0.5)
    down = normal(E, D, F, dtype=torch.bfloat16, device=device, scale=F**-0.5)
    weights = ExpertWeights(fp8_weight(up), fp8_weight(down)) if fp8 else ExpertWeights(up, down)
    x = normal(1000, D, dtype=torch.bfloat16, device=device)
    base = normal(1000, D, dtype=torch.bfloat16, device=device)

    def run(first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        some, out = x[first : first + count], base[first : first + count].clone()
        ids, scales = route_fixed(some, gate, None, K, 1, 1, True, 1.0)
        experts_fixed(some, weights, ids, scales, out)
        return ids, scales, out

    expected = run(0, 1000)
    for first, count in ((0, 1), (77, 1), (10, 7), (100, 64), (3, 129), (400, 600)):
        for found, want in zip(run(first, count), expected, strict=True):
            assert torch.equal(found, want[first : first + count]), (first, count)
