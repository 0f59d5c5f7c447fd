"""However a sequence is cut, placed and mixed with others, its logits are those of one pass over it alone."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.core.models.base import Model
from headrace.core.weights import load_model
from tests.core.hf_models import save_tiny
from tests.core.ragged import (
    BLOCK_SIZE,
    Row,
    error_of_scale,
    make_batch,
    make_pool,
    make_tables,
    random_tokens,
    whole,
)

LIMIT = 2e-5  # of the largest logit: float32, products of other shapes
LENGTH = 45
BLOCKS = -(-LENGTH // BLOCK_SIZE)


@pytest.fixture(scope="module", params=["deepseek_v3_q_lora_yarn", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, folder)
    return load_model(folder, dtype=torch.float32, device=torch.device("cpu"))


def run(model: Model, kv: Tensor, *rows: Row) -> Tensor:
    """[T, V] logits of every query token."""
    return model.logits(model.forward(make_batch(rows), kv))


@pytest.mark.parametrize("cuts", [[1, 45], [4, 8, 45], [7, 30, 31, 45], [44, 45]], ids=str)
def test_chunked_prefill_equals_whole(model: Model, cuts: list[int]) -> None:
    tokens, (table,) = random_tokens(0, LENGTH, model.spec.vocab_size), make_tables(0, 1, BLOCKS)
    kv = make_pool(model, BLOCKS + 1)
    starts = [0, *cuts[:-1]]
    parts = [run(model, kv, Row(tokens[a:b], a, table)) for a, b in zip(starts, cuts, strict=True)]
    assert error_of_scale(torch.cat(parts), whole(model, tokens)) < LIMIT


def test_token_by_token_over_shuffled_blocks_equals_whole(model: Model) -> None:
    tokens, (table,) = random_tokens(1, LENGTH, model.spec.vocab_size), make_tables(1, 1, BLOCKS)
    kv = make_pool(model, BLOCKS + 1)
    parts = [run(model, kv, Row([token], at, table)) for at, token in enumerate(tokens)]
    assert error_of_scale(torch.cat(parts), whole(model, tokens)) < LIMIT


def test_mixed_ragged_batch_equals_each_alone(model: Model) -> None:
    """Decodes of many lengths, a chunk over a cached prefix and a fresh prompt in one step."""
    lengths = [1, 2, 5, 17, 33, 40, 41, 44, 44, LENGTH]
    new = [1, 1, 1, 1, 1, 1, 1, 1, 19, LENGTH]
    tokens = [random_tokens(10 + i, n, model.spec.vocab_size) for i, n in enumerate(lengths)]
    tables = make_tables(2, len(lengths), BLOCKS)
    kv = make_pool(model, len(lengths) * BLOCKS + 1)
    for sequence, table, n in zip(tokens, tables, new, strict=True):
        if len(sequence) > n:
            run(model, kv, Row(sequence[:-n], 0, table))
    rows = [
        Row(sequence[-n:], len(sequence) - n, table)
        for sequence, table, n in zip(tokens, tables, new, strict=True)
    ]
    expected = torch.cat([whole(model, sequence)[-n:] for sequence, n in zip(tokens, new, strict=True)])
    assert error_of_scale(run(model, kv, *rows), expected) < LIMIT


def test_equal_decodes_in_one_step_equal_each_alone(model: Model) -> None:
    """All contexts equally long: the path without a mask."""
    tokens = [random_tokens(30 + i, 9, model.spec.vocab_size) for i in range(5)]
    tables = make_tables(3, 5, 3)
    kv = make_pool(model, 16)
    for sequence, table in zip(tokens, tables, strict=True):
        run(model, kv, Row(sequence[:-1], 0, table))
    found = run(model, kv, *(Row(s[-1:], 8, t) for s, t in zip(tokens, tables, strict=True)))
    assert error_of_scale(found, torch.cat([whole(model, s)[-1:] for s in tokens])) < LIMIT


def test_a_row_may_read_blocks_that_a_sibling_writes_in_the_same_step(model: Model) -> None:
    """Two requests with one prompt prefix: the second computes only its own end."""
    prefix = random_tokens(4, 3 * BLOCK_SIZE, model.spec.vocab_size)
    ends = [random_tokens(5, 6, model.spec.vocab_size), random_tokens(6, 5, model.spec.vocab_size)]
    first, second = make_tables(4, 2, 5)
    shared = [*first[:3], *second[3:]]
    kv = make_pool(model, 11)
    found = run(model, kv, Row(ends[1], len(prefix), shared), Row(prefix + ends[0], 0, first))
    expected = torch.cat([whole(model, prefix + ends[1])[len(prefix) :], whole(model, prefix + ends[0])])
    assert error_of_scale(found, expected) < LIMIT


def test_only_the_step_s_own_slots_are_written(model: Model) -> None:
    """Nobody else's KV is touched: the pool stays poisoned everywhere else."""
    table = make_tables(5, 1, 3)[0]
    kv = make_pool(model, 8)
    run(model, kv, Row(random_tokens(7, 10, model.spec.vocab_size), 0, table))
    axis = 1 if kv.dim() == 4 else 2
    written = ~kv.transpose(0, axis).flatten(1).isnan().all(1)
    assert written.nonzero().flatten().tolist() == sorted(table)
    assert int((~kv.isnan()).sum()) == kv.numel() // (8 * BLOCK_SIZE) * 10


def test_pool_bytes_match_its_shape(model: Model) -> None:
    pool = torch.empty(model.kv_shape(6, 16), dtype=torch.bfloat16)
    assert model.kv_bytes_per_block(16, torch.bfloat16) * 6 == pool.numel() * pool.element_size()
