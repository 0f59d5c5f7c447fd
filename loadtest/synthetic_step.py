"""The tokens of one synthetic step, for all running rows at once, and the messages that carry them.

Knows rows and tokens; not who is in the batch nor what becomes of those that end. loadtest/synthetic_batch.py
calls.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.ipc.messages import Logprobs, Tokens
from headrace.loadtest.synthetic_rows import Generation, Rows
from headrace.loadtest.synthetic_tokens import TokenSource


@dataclass(frozen=True, slots=True)
class SyntheticStep:
    """B running rows and K lanes; the arrays are the step's own."""

    rows: NDArray[np.int64]  # [B]
    starts: NDArray[np.int64]  # [B] output index of the first token
    counts: NDArray[np.int64]  # [B] of the K tokens, how many count
    token_ids: NDArray[np.int32]  # [B, K]
    stopped: NDArray[np.bool_]  # [B] the last one is a stop id
    logprobs: dict[int, tuple[bytes, int, bytes, bytes]]  # by index: chosen, top_k, top_ids, top

    def message(self, step: int, streams: NDArray[np.uint32], members: NDArray[np.int64]) -> Tokens:
        """The rows at the indices `members`; `streams` [B] are the stream numbers of all."""
        counts = self.counts[members]
        logprobs: tuple[Logprobs, ...] = ()
        if self.logprobs:
            found = ((row, self.logprobs.get(index)) for row, index in enumerate(members.tolist()))
            logprobs = tuple(Logprobs(row, *entry) for row, entry in found if entry is not None)
        lanes = np.arange(self.token_ids.shape[1])
        return Tokens(
            step=step,
            streams=streams[members].tobytes(),
            starts=self.starts[members].astype(np.uint32).tobytes(),
            counts=counts.astype(np.uint8).tobytes(),
            token_ids=self.token_ids[members][lanes < counts[:, None]].tobytes(),
            logprobs=logprobs,
            finished=(),
        )


def draw(
    running: NDArray[np.int64], columns: Rows, by_row: dict[int, Generation], source: TokenSource, lanes: int
) -> SyntheticStep:
    """The next tokens of every running row, at most `lanes` each, cut at its end, its credit and its stop ids."""
    starts = columns.produced[running]
    room = np.minimum(columns.end[running], columns.credit[running]) - starts
    token_ids = source.at(columns.seed[running][:, None], starts[:, None] + np.arange(lanes))
    counts = np.minimum(room, lanes)
    step = SyntheticStep(running, starts, counts, token_ids, np.zeros(len(running), np.bool_), {})
    for index in np.flatnonzero(columns.special[running]).tolist():
        _treat_special(step, index, by_row[int(running[index])], source)
    return step


def _treat_special(step: SyntheticStep, index: int, generation: Generation, source: TokenSource) -> None:
    """Stop ids and log-probabilities of one row."""
    sampling = generation.submit.sampling
    start, count = int(step.starts[index]), int(step.counts[index])
    token_ids = step.token_ids[index, :count]
    allowed = np.arange(start, start + count) >= sampling.min_tokens
    hits = np.flatnonzero(np.isin(token_ids, generation.stops) & allowed)
    if len(hits):
        token_ids = token_ids[: hits[0] + 1]
        step.counts[index] = len(token_ids)
        step.stopped[index] = True
    if sampling.logprobs >= 0:
        chosen, ids, top = source.likeliest(sampling.seed, start, token_ids, sampling.logprobs)
        step.logprobs[index] = (chosen.tobytes(), ids.shape[1], ids.tobytes(), top.tobytes())
