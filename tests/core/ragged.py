"""Batches over a paged pool, built by hand: which row computes which tokens, over which blocks."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.core.batch import Batch
from headrace.core.models.base import Model

BLOCK_SIZE = 4


class Row(NamedTuple):
    """`tokens` at positions start.. of a sequence whose blocks are `table`."""

    tokens: Sequence[int]
    start: int
    table: Sequence[int]


def make_batch(rows: Sequence[Row], block_size: int = BLOCK_SIZE) -> Batch:
    """Rows of one token must come first, as the scheduler orders them."""
    counts = [len(row.tokens) for row in rows]
    assert sorted(counts, key=lambda count: count > 1) == counts, "decode rows first"
    positions = [row.start + i for row in rows for i in range(len(row.tokens))]
    owners = [row for row in rows for _ in row.tokens]
    width = max(len(row.table) for row in rows)
    return Batch(
        token_ids=torch.tensor([token for row in rows for token in row.tokens]),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(
            [
                row.table[p // block_size] * block_size + p % block_size
                for row, p in zip(owners, positions, strict=True)
            ]
        ),
        query_starts=torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        context_lens=torch.tensor([row.start + len(row.tokens) for row in rows], dtype=torch.int32),
        block_tables=torch.tensor(
            [[*row.table, *[0] * (width - len(row.table))] for row in rows], dtype=torch.int32
        ),
        num_decodes=counts.count(1),
        max_query_len=max(counts),
        max_context_len=max(row.start + len(row.tokens) for row in rows),
    )


def make_pool(model: Model, num_blocks: int, *, block_size: int = BLOCK_SIZE, mtp: bool = False) -> Tensor:
    """A pool whose unwritten cells would poison whoever reads them."""
    return torch.full(model.kv_shape(num_blocks, block_size, mtp=mtp), float("nan"), dtype=model.dtype)


def make_tables(seed: int, num_tables: int, blocks_each: int) -> list[list[int]]:
    """Disjoint block tables in random order; block 0 is the padding block and belongs to nobody."""
    blocks = list(range(1, num_tables * blocks_each + 1))
    random.Random(seed).shuffle(blocks)
    return [blocks[i * blocks_each : (i + 1) * blocks_each] for i in range(num_tables)]


def whole(model: Model, tokens: Sequence[int]) -> Tensor:
    """[T, V] logits of a sequence computed in one pass, alone."""
    blocks = -(-len(tokens) // BLOCK_SIZE)
    kv = make_pool(model, blocks + 1)
    return model.logits(model.forward(make_batch([Row(tokens, 0, range(1, blocks + 1))]), kv))


def random_tokens(seed: int, count: int, vocab_size: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(vocab_size) for _ in range(count)]


def error_of_scale(found: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest expected value."""
    return float((found - expected).abs().max() / expected.abs().max())
