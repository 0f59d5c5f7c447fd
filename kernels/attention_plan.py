"""What a step's attention calls share over all layers: which rows, which blocks, which masks.

Made once per step from the batch's tensors. Called by the model; read by the attention operations. On a card
the rows stay on the device (`paged`); on the CPU they are divided into calls of dense operations.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.paged_plan import PagedPlan, ShortRows, plan_paged


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """G rows of Q query tokens each with contexts of similar length, padded to the longest."""

    rows: Tensor | None  # [G * Q] int64, which query tokens; None = all of the step's, in order
    num_rows: int
    num_queries: int  # Q
    block_ids: Tensor  # [G * n]: n blocks for each row
    length: int  # of the longest context
    # Of one row whose blocks follow each other in the pool: its first cell. There is nothing to gather then.
    first_cell: int | None
    # [P] int64: cells of the G * n blocks, counted in tokens, that are not the row's own; None = there are none.
    padding: Tensor | None
    mask: Tensor  # float32, 0 or -inf: [G, Q, length]; [1, 1, 1] of 0 where everything is visible to all


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A row of several query tokens over its own context."""

    start: int  # first query token in the step
    end: int
    block_ids: Tensor  # [n]
    length: int  # of the context, the row's own tokens included
    mask: Tensor | None  # [end - start, length] float32; None = the whole context is its own: plain causal


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The ragged batch, and its division into calls of dense operations."""

    query_starts: Tensor  # [R + 1] int32
    context_lens: Tensor  # [R] int32
    block_tables: Tensor  # [R, B] int32
    decodes: tuple[DecodeGroup, ...] = ()
    prefills: tuple[PrefillRow, ...] = ()
    paged: PagedPlan | None = None  # for the device kernels


def plan_attention(
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    num_decodes: int,
    block_size: int,
    max_query_len: int,
    max_context_len: int,
    prefill_context: int | None = None,
    split_size: int | None = None,
    short: ShortRows | None = None,
) -> AttentionPlan:
    """Divide a step's rows. The arguments are fields of core.batch.Batch.

    Args:
        num_decodes: the first rows, with one query token each.
        max_query_len, max_context_len: on a card bounds will do: a step that is captured once gives those of
            every replay.
        prefill_context: positions of the contexts of the rows behind the short ones; None = not counted.
        split_size: on a card, positions of a part of a split context; a multiple of 64. Results then do not
            depend on which other rows there are.
        short: the first rows, which are computed as decodes are though they may be ragged; None = the decodes.
            On a card it need not be told where no row is long.
    """
    if query_starts.device.type == "cpu":
        num_short = num_decodes if short is None else short.count
        return _plan_dense(query_starts, context_lens, block_tables, num_short, block_size)
    return plan_device(
        query_starts,
        context_lens,
        block_tables,
        num_decodes,
        max_query_len,
        max_context_len,
        prefill_context,
        split_size,
        short,
    )


def plan_device(
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    num_decodes: int,
    max_query_len: int,
    max_context_len: int,
    prefill_context: int | None = None,
    split_size: int | None = None,
    short: ShortRows | None = None,
) -> AttentionPlan:
    """The plan of the device kernels; reads no tensor, so that it never waits and can be captured."""
    paged = plan_paged(
        context_lens, num_decodes, max_query_len, max_context_len, prefill_context, split_size, short
    )
    return AttentionPlan(query_starts, context_lens, block_tables, paged=paged)


def _plan_dense(
    query_starts: Tensor, context_lens: Tensor, block_tables: Tensor, num_short: int, block_size: int
) -> AttentionPlan:
    lengths: list[int] = context_lens.tolist()
    starts: list[int] = query_starts.tolist()
    groups = _decode_groups(starts, lengths, num_short, block_size)
    alone = len(groups) == 1 and num_short == len(lengths)
    return AttentionPlan(
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=block_tables,
        decodes=tuple(
            _decode_group(rows, starts, lengths, context_lens, block_tables, block_size, alone)
            for rows in groups
        ),
        prefills=_prefill_rows(starts, lengths, block_tables, num_short, block_size),
    )


def _decode_groups(starts: list[int], lengths: list[int], num_short: int, block_size: int) -> list[list[int]]:
    """Rows by their query tokens and the power of two that holds their blocks: padding at most doubles the work."""
    groups: dict[tuple[int, int], list[int]] = {}
    for row in range(num_short):
        size = (_blocks(lengths[row], block_size) - 1).bit_length()
        groups.setdefault((starts[row + 1] - starts[row], size), []).append(row)
    return list(groups.values())


def _decode_group(
    rows: list[int],
    starts: list[int],
    lengths: list[int],
    context_lens: Tensor,
    tables: Tensor,
    block_size: int,
    alone: bool,
) -> DecodeGroup:
    longest = max(lengths[row] for row in rows)
    needed = _blocks(longest, block_size)
    queries = starts[rows[0] + 1] - starts[rows[0]]
    index = None if alone else torch.tensor(rows, device=tables.device)
    padding, mask = None, torch.zeros(1, 1, 1, device=tables.device)
    ragged = any(lengths[row] != longest for row in rows)
    if ragged or queries > 1:
        own = context_lens if index is None else context_lens.index_select(0, index)
        cells = torch.arange(needed * block_size, device=tables.device)
        if ragged:
            padding = (cells >= own.view(-1, 1)).flatten().nonzero().flatten()
        visible = own.view(-1, 1) - torch.arange(queries - 1, -1, -1, device=tables.device)
        outside = cells[:longest] >= visible.unsqueeze(-1)
        mask = mask.expand(outside.shape).masked_fill(outside, float("-inf"))
    block_ids = (tables if index is None else tables.index_select(0, index))[:, :needed].flatten()
    first_cell = None
    if len(rows) == 1:
        blocks: list[int] = block_ids.tolist()
        if blocks[-1] - blocks[0] == needed - 1 and blocks == list(range(blocks[0], blocks[-1] + 1)):
            first_cell = blocks[0] * block_size
    tokens = index
    if index is not None and (queries > 1 or starts[rows[-1]] != rows[-1]):
        tokens = torch.tensor([at for row in rows for at in range(starts[row], starts[row + 1])])
    return DecodeGroup(tokens, len(rows), queries, block_ids, longest, first_cell, padding, mask)


def _prefill_rows(
    starts: list[int], lengths: list[int], tables: Tensor, num_short: int, block_size: int
) -> tuple[PrefillRow, ...]:
    rows = []
    for row in range(num_short, len(lengths)):
        start, end, length = starts[row], starts[row + 1], lengths[row]
        mask = None
        if end - start < length:
            full = torch.full((end - start, length), float("-inf"), device=tables.device)
            mask = full.triu_(length - (end - start) + 1)
        rows.append(PrefillRow(start, end, tables[row, : _blocks(length, block_size)], length, mask))
    return tuple(rows)


def _blocks(length: int, block_size: int) -> int:
    return -(-length // block_size)
