"""The second verb of a step: turn a StepPlan into the numbers of one forward pass, still on the host.

Owns the block tables by slot. Knows no device, no model and no queues. The engine calls it right after `schedule`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.core.plan import PlanRow, StepPlan

Ints = NDArray[np.int64]
Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Everything `execute` needs. T query tokens, R rows, B blocks of the longest table, S rows that sample."""

    token_ids: Ints  # [T]; 0 where `unknown_at` points
    positions: Ints  # [T]
    slot_mapping: Ints  # [T]: block * block_size + offset
    query_starts: Int32s  # [R + 1]
    context_lens: Int32s  # [R]
    block_tables: Int32s  # [R, B]
    num_decodes: int
    max_query_len: int
    max_context_len: int
    copies: tuple[tuple[int, int], ...]  # (source, target) blocks
    sample_at: Ints  # [S]: index into the query tokens
    sample_slots: Ints  # [S]
    sample_positions: Ints  # [S]: position of the token to choose
    unknown_at: Ints  # [U]: query tokens that only the device knows
    unknown_slots: Ints  # [U]: whose last token they are

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class Preparer:
    """Fills a step's inputs.

    Args:
        max_num_seqs: number of slots.
        max_model_len: positions of the longest request.
        block_size: tokens of a KV block.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self._block_size = block_size
        width = -(-max_model_len // block_size)
        self._tables = np.zeros((max_num_seqs, width), dtype=np.int32)
        self._known = [0] * max_num_seqs  # leading entries of the row that are right

    def prepare(self, plan: StepPlan) -> StepInputs:
        """Gather the plan's rows. Reads requests, changes none."""
        for request in plan.entered:
            self._known[request.slot] = 0
        rows = plan.rows
        for row in rows:
            self._extend_table(row)
        counts = np.fromiter((row.num_tokens for row in rows), np.int64, len(rows))
        starts = np.fromiter((row.start for row in rows), np.int64, len(rows))
        slots = np.fromiter((row.slot for row in rows), np.int64, len(rows))
        ends = starts + counts
        query_starts = np.zeros(len(rows) + 1, dtype=np.int64)
        counts.cumsum(out=query_starts[1:])
        row_of = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(query_starts[-1]) - query_starts[row_of] + starts[row_of]
        blocks = self._tables[slots[row_of], positions // self._block_size]
        width = -(-int(ends.max()) // self._block_size)
        token_ids, unknown = _token_ids(rows, int(query_starts[-1]))
        sampling = np.fromiter((row.samples for row in rows), np.bool_, len(rows))
        return StepInputs(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=blocks.astype(np.int64) * self._block_size + positions % self._block_size,
            query_starts=query_starts.astype(np.int32),
            context_lens=ends.astype(np.int32),
            block_tables=self._tables[slots, :width],
            num_decodes=plan.num_decodes,
            max_query_len=int(counts.max()),
            max_context_len=int(ends.max()),
            copies=plan.copies,
            sample_at=query_starts[1:][sampling] - 1,
            sample_slots=slots[sampling],
            sample_positions=ends[sampling],
            unknown_at=np.array([at for at, _ in unknown], np.int64),
            unknown_slots=np.array([slot for _, slot in unknown], np.int64),
        )

    def _extend_table(self, row: PlanRow) -> None:
        known, needed = self._known[row.slot], -(-(row.start + row.num_tokens) // self._block_size)
        if needed > known:
            self._tables[row.slot, known:needed] = row.block_table[known:needed]
            self._known[row.slot] = needed


def _token_ids(rows: Sequence[PlanRow], num_tokens: int) -> tuple[Ints, list[tuple[int, int]]]:
    """[T] int64 known tokens, and (index, slot) of those that are still in flight."""
    token_ids = np.zeros(num_tokens, dtype=np.int64)
    unknown: list[tuple[int, int]] = []
    at = 0
    for row in rows:
        known = row.request.token_ids
        end = row.start + row.num_tokens
        if end > len(known):
            # One step at most is in flight, so only the row's last token can be unknown.
            unknown.append((at + row.num_tokens - 1, row.slot))
            end = len(known)
        if end - row.start == 1:
            token_ids[at] = known[row.start]
        elif end > row.start:
            token_ids[at : at + end - row.start] = known[row.start : end]
        at += row.num_tokens
    return token_ids, unknown
