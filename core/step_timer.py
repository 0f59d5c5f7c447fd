"""Times an engine's steps at start, so that the first drafts are weighed by this machine's costs and no other's.

Runs made-up rows over block 0, which nobody owns, in the spare slot. Called by core/build.py.
"""

import time
from collections.abc import Sequence

import numpy as np

from headrace.core.execute import Executor
from headrace.core.prepare import DraftInputs, StepInputs
from headrace.core.speculation.step_cost import StepCost
from headrace.core.speculation.step_costs import StepCosts
from headrace.kernels.paged_plan import ShortRows

CONTEXT = 256  # positions of each row
DRAFTS = 3  # of each row of a step that verifies
ROUNDS = 3  # timed runs of each step; the quickest counts: whatever else ran only slowed it


def time_steps(
    executor: Executor,
    *,
    rows: Sequence[int],
    drafting_rows: Sequence[int],
    tokens: Sequence[int],
    ahead: int,
    spare_slot: int,
    block_size: int,
    max_model_len: int,
    padded: bool,
) -> StepCosts:
    """Measure.

    Args:
        executor: idle.
        rows: sizes of plain steps, rising.
        drafting_rows: sizes of steps behind which the model drafts, rising.
        tokens: query tokens of steps that verify, rising.
        ahead: tokens that the model drafts; 0 = it does not.
        spare_slot: of the sampler, and nobody's.
        block_size: tokens of a block.
        max_model_len: positions of the longest request.
        padded: steps that verify take as long as the next of the sizes `tokens`.
    """
    context = min(CONTEXT, max_model_len - DRAFTS)

    def step(counts: Sequence[int], ahead: int = 0) -> StepInputs:
        return made_up(counts, ahead, spare_slot, block_size, context)

    plain = [(count, _time(executor, step([1] * count), waited=False)) for count in rows]
    verify = [(count, _time(executor, step(_split(count)), waited=True)) for count in tokens]
    draft = None
    if ahead:
        draft = [
            (
                count,
                _time(executor, step([1] * count, ahead), waited=True)
                - _time(executor, step([1] * count), waited=True),
            )
            for count in drafting_rows
        ]
    return StepCosts(
        StepCost(plain),
        StepCost(verify, padded=padded),
        None if draft is None else StepCost([(count, max(ms, 0.0)) for count, ms in draft]),
        most_tokens=tokens[-1],
        most_rows=drafting_rows[-1],
        whole_depth=padded,
    )


def made_up(counts: Sequence[int], ahead: int, slot: int, block_size: int, context: int) -> StepInputs:
    """Inputs of a step whose rows have so many query tokens each, all but the first of a row being drafts."""
    num_rows, num_tokens = len(counts), sum(counts)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    depths = np.concatenate([np.arange(count) for count in counts])
    positions = context - 1 + depths
    tokens = np.where(depths > 0, 1, 0)
    drafts = np.append(tokens[1:], 0)
    drafts[starts[1:] - 1] = -1
    longest = max(counts)
    return StepInputs(
        token_ids=tokens,
        positions=positions,
        slot_mapping=positions % block_size,
        query_starts=starts,
        context_lens=(context - 1 + np.asarray(counts)).astype(np.int32),
        block_tables=np.zeros((num_rows, -(-(context + longest + ahead) // block_size)), np.int32),
        num_decodes=list(counts).count(1),
        max_query_len=longest,
        max_context_len=context - 1 + longest,
        copies=(),
        sample_at=np.arange(num_tokens),
        sample_rows=np.arange(num_rows),
        sample_slots=np.full(num_tokens, slot),
        sample_positions=positions + 1,
        unknown_at=np.empty(0, np.int64),
        unknown_slots=np.empty(0, np.int64),
        short=ShortRows(num_rows, num_tokens, longest) if longest > 1 else None,
        drafts=DraftInputs(starts, drafts, np.zeros(num_tokens, np.bool_), depths) if longest > 1 else None,
        ahead=ahead,
        next_ids=np.zeros(num_tokens, np.int64) if ahead else None,
    )


def _split(num_tokens: int) -> list[int]:
    """Rows of up to 1 + DRAFTS tokens, the shorter one first."""
    whole, rest = divmod(num_tokens, 1 + DRAFTS)
    return ([rest] if rest else []) + [1 + DRAFTS] * whole


def _time(executor: Executor, inputs: StepInputs, *, waited: bool) -> float:
    """Milliseconds of a step: by itself, or one of several that follow each other without waiting."""
    executor.execute(inputs).read()
    best = float("inf")
    for _ in range(ROUNDS):
        # On a card the first of them pays for what the others hide.
        repeats = 1 if waited else 8 if executor.last_token.is_cuda else 2
        begin = time.perf_counter()
        for _ in range(repeats):
            launched = executor.execute(inputs)
        launched.read()
        best = min(best, (time.perf_counter() - begin) / repeats)
    return best * 1e3
