"""A recorded step has places for rows that this one lacks, and room for more context than it has."""

from dataclasses import replace

import torch

from headrace.kernels.attention_plan import AttentionPlan
from headrace.kernels.gqa_attention import gqa_attention_paged, gqa_attention_ref
from headrace.kernels.mla_attend import MlaUp, mla_attend_expanded, mla_attend_ref
from tests.kernels.close import assert_close
from tests.kernels.paged import ragged_plan
from tests.kernels.shapes import poison_unused, rotations

# Three places for single tokens, one of them empty; 34 for prompts, more than a program looks at together.
SINGLES = 3
QUERIES = [1, 1, 0, 40, 5, *[0] * 31, 20]
CONTEXTS = [9, 30, 1, 70, 5, *[0] * 31, 20]


def roomy_plan(device: torch.device) -> tuple[AttentionPlan, int]:
    plan, blocks = ragged_plan(QUERIES, CONTEXTS, device, num_decodes=SINGLES)
    assert plan.paged is not None
    return replace(plan, paged=replace(plan.paged, long_context=300, capacity=1000, long_len=67)), blocks


def test_gqa_attends_past_empty_rows(device: torch.device) -> None:
    plan, blocks = roomy_plan(device)
    q = torch.randn(sum(QUERIES), 2, 16, dtype=torch.float16, device=device)
    cache = torch.randn(2, blocks, 16, 1, 16, dtype=torch.float16, device=device)
    poison_unused(cache, plan, block_axis=1)
    out = gqa_attention_paged(q, cache, plan, 0.25)
    assert_close("attention", out, gqa_attention_ref(q, cache, plan, 0.25))


def test_mla_attends_past_empty_rows(device: torch.device) -> None:
    plan, blocks = roomy_plan(device)
    heads, nope, turning, rank, value = 1, 32, 16, 64, 32
    tokens, dtype = sum(QUERIES), torch.float32
    q = torch.randn(tokens, heads, nope + turning, dtype=dtype, device=device)
    cache = torch.randn(blocks, 16, rank + turning, dtype=dtype, device=device)
    poison_unused(cache, plan, block_axis=0)
    both = torch.randn(heads, nope + value, rank, dtype=dtype, device=device) * rank**-0.5
    up = MlaUp(
        key=both[:, :nope].contiguous(),
        value=both[:, nope:].transpose(1, 2).contiguous(),
        both=both.flatten(0, 1),
    )
    rotation = rotations(tokens, turning // 2, device)
    out = mla_attend_expanded(q, cache, up, rotation, plan, 0.2, True)
    assert_close("values", out, mla_attend_ref(q, cache, up, rotation, plan, 0.2, True))
