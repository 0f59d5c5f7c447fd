"""The second verb of a step: turn a StepPlan into the numbers of one forward pass, still on the host.

Owns the block tables by slot. Knows no device, no model and no queues. The engine calls it right after `schedule`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.core.plan import PlanRow, StepPlan
from headrace.kernels.paged_plan import ShortRows

Ints = NDArray[np.int64]
Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """What is verified at the S positions that sample of a step with drafts."""

    starts: Int32s  # [Q + 1]: row q samples at positions starts[q]..starts[q + 1] - 1 of the S
    tokens: Ints  # [S]: the draft that the next query token of the row holds; -1 at its last one
    sampled: NDArray[np.bool_]  # [S]: that draft was drawn from a distribution, which the device keeps
    depths: Ints  # [S]: drafts of the row before it


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Everything `execute` needs. T query tokens, R rows, B blocks of the longest table, Q rows that sample.

    A row samples at its last query token, or at each of them if all but the first are drafts: S positions in all.
    """

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
    sample_rows: Ints  # [Q]: index into the rows
    sample_slots: Ints  # [S]
    sample_positions: Ints  # [S]: position of the token to choose
    unknown_at: Ints  # [U]: query tokens that only the device knows
    unknown_slots: Ints  # [U]: whose last token they are
    short: ShortRows | None = (
        None  # the rows with drafts and those of one query token; None = the latter alone
    )
    drafts: DraftInputs | None = None
    ahead: int = 0  # tokens to draft behind each sampling row
    next_ids: Ints | None = (
        None  # [T]: the token behind each query token, 0 where the step samples it; if `ahead`
    )

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
            # What lies beyond a request's blocks must name block 0: drafters may look there.
            self._tables[request.slot] = 0
            self._known[request.slot] = 0
        rows = plan.rows
        for row in rows:
            self._extend_table(row, len(row.block_table) if plan.ahead else 0)
        counts = np.fromiter((row.num_tokens for row in rows), np.int64, len(rows))
        starts = np.fromiter((row.start for row in rows), np.int64, len(rows))
        slots = np.fromiter((row.slot for row in rows), np.int64, len(rows))
        ends = starts + counts
        query_starts = np.zeros(len(rows) + 1, dtype=np.int64)
        counts.cumsum(out=query_starts[1:])
        row_of = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(query_starts[-1]) - query_starts[row_of] + starts[row_of]
        blocks = self._tables[slots[row_of], positions // self._block_size]
        # Drafts of drafts lie behind the step's own positions.
        width = -(-(int(ends.max()) + max(plan.ahead - 1, 0)) // self._block_size)
        token_ids, unknown = _token_ids(rows, int(query_starts[-1]))
        sampling = np.fromiter((row.samples for row in rows), np.bool_, len(rows))
        last = query_starts[1:] - 1
        sample_at, owner, drafts = last[sampling], np.flatnonzero(sampling), None
        if plan.num_drafted:
            sample_at, owner, drafts = _drafts(rows, sampling, last, token_ids)
        num_short = plan.num_decodes + plan.num_drafted
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
            sample_at=sample_at,
            sample_rows=np.flatnonzero(sampling),
            sample_slots=slots[owner],
            sample_positions=positions[sample_at] + 1,
            unknown_at=np.array([at for at, _ in unknown], np.int64),
            unknown_slots=np.array([slot for _, slot in unknown], np.int64),
            short=(
                ShortRows(num_short, int(query_starts[num_short]), int(counts[:num_short].max()))
                if plan.num_drafted
                else None
            ),
            drafts=drafts,
            ahead=plan.ahead,
            next_ids=_next_ids(rows, token_ids, last) if plan.ahead else None,
        )

    def _extend_table(self, row: PlanRow, least: int) -> None:
        known, needed = self._known[row.slot], -(-(row.start + row.num_tokens) // self._block_size)
        needed = max(needed, least)
        if needed > known:
            self._tables[row.slot, known:needed] = row.block_table[known:needed]
            self._known[row.slot] = needed


def _drafts(
    rows: Sequence[PlanRow], sampling: NDArray[np.bool_], last: Ints, token_ids: Ints
) -> tuple[Ints, Ints, DraftInputs]:
    """[S] where among the query tokens is sampled, [S] for which row, and which drafts are verified there."""
    counts = np.fromiter((1 if r.drafts is None else r.num_tokens for r in rows), np.int64, len(rows))
    counts = np.where(sampling, counts, 0)
    owner = np.repeat(np.arange(len(rows)), counts)
    starts = np.zeros(int(sampling.sum()) + 1, np.int32)
    counts[sampling].cumsum(out=starts[1:])
    depths = np.arange(len(owner)) - np.repeat(starts[:-1], counts[sampling])
    sample_at = last[owner] - counts[owner] + 1 + depths
    tokens = np.full(len(owner), -1, np.int64)
    followed = np.ones(len(owner), np.bool_)
    followed[starts[1:] - 1] = False
    tokens[followed] = token_ids[sample_at[followed] + 1]
    drawn = np.fromiter((r.drafts is not None and r.drafts.sampled for r in rows), np.bool_, len(rows))
    return sample_at, owner, DraftInputs(starts, tokens, drawn[owner] & followed, depths)


def _next_ids(rows: Sequence[PlanRow], token_ids: Ints, last: Ints) -> Ints:
    """[T] the token behind each query token, as far as it is known."""
    following = np.zeros_like(token_ids)
    following[:-1] = token_ids[1:]
    for row, at in zip(rows, last.tolist(), strict=True):
        following[at] = 0 if row.samples else row.request.token_ids[row.start + row.num_tokens]
    return following


def _token_ids(rows: Sequence[PlanRow], num_tokens: int) -> tuple[Ints, list[tuple[int, int]]]:
    """[T] int64 known tokens, and (index, slot) of those that are still in flight."""
    token_ids = np.zeros(num_tokens, dtype=np.int64)
    unknown: list[tuple[int, int]] = []
    at = 0
    for row in rows:
        known = row.request.token_ids
        end = row.start + row.num_tokens
        if row.drafts is not None:
            token_ids[at] = known[row.start]
            token_ids[at + 1 : at + row.num_tokens] = row.drafts.tokens
            at += row.num_tokens
            continue
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
