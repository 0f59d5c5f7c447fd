"""Prefill and decode of every family on the card against transformers' own model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.core.batch import Batch
from headrace.core.models.base import Model
from tests.gpu.models import CARD, FAMILIES, error, load, prompts

pytestmark = pytest.mark.gpu
PROMPT, DECODED, BLOCK_SIZE = 100, 12, 16


@pytest.fixture(scope="module")
def text() -> list[int]:
    return prompts(1, PROMPT + DECODED, PROMPT + DECODED, seed=3)[0]


def ours(model: Model, text: list[int]) -> Tensor:
    """[T, V]: the prompt in two pieces, then token by token, over shuffled blocks."""
    blocks = -(-len(text) // BLOCK_SIZE)
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)) + 1
    kv = torch.full(model.kv_shape(blocks + 1, BLOCK_SIZE), float("nan"), dtype=model.dtype, device=CARD)
    logits, start = [], 0
    for end in (60, PROMPT, *range(PROMPT + 1, len(text) + 1)):
        positions = torch.arange(start, end)
        cells = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        batch = Batch(
            token_ids=torch.tensor(text[start:end]).to(CARD),
            positions=positions.to(CARD),
            slot_mapping=cells.to(CARD),
            query_starts=torch.tensor([0, end - start], dtype=torch.int32, device=CARD),
            context_lens=torch.tensor([end], dtype=torch.int32, device=CARD),
            block_tables=table.int().unsqueeze(0).to(CARD),
            num_decodes=int(end - start == 1),
            max_query_len=end - start,
            max_context_len=end,
        )
        logits.append(model.logits(model.forward(batch, kv)))
        start = end
    return torch.cat(logits)


def theirs(path: Path, text: list[int], dtype: torch.dtype) -> Tensor:
    """[T, V] float32 of transformers' model on the card, its experts one by one."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, experts_implementation="eager"
    )
    with torch.no_grad():
        logits: Tensor = model.to(CARD)(torch.tensor([text], device=CARD)).logits[0].float()
    return logits


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_logits_are_those_of_transformers(
    name: str, folders: dict[str, Path], text: list[int]
) -> None:
    expected = theirs(folders[name], text, torch.float32)
    assert error(ours(load(folders[name], torch.float32), text), expected) < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_errs_no_more_than_transformers_does(
    name: str, folders: dict[str, Path], models: dict[str, Model], text: list[int]
) -> None:
    """Both against float32: ours may be at most half as far off again."""
    exact = theirs(folders[name], text, torch.float32)
    allowed = 1.5 * error(theirs(folders[name], text, torch.bfloat16), exact)
    assert error(ours(models[name], text), exact) < allowed
