"""A step on its way to the host: what it chose, read back without waiting for the step behind it.

Made by `execute`, waited for by the engine. Knows no request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.core.mtp_drafter import Drafted
from headrace.core.plan import PlanRow
from headrace.core.sampler import LogprobRows, Sampled


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a step chose, on the host."""

    tokens: list[int]  # of each sampling position, row after row
    accepted: (
        list[int] | None
    )  # drafts of each sampling row that stand; None = nobody had any, one token a row
    logprobs: LogprobRows | None
    drafts: list[list[int]]  # by sampling row, tokens that may come next; empty where none were asked for
    confidences: list[list[float]]

    def by_row(self, rows: Sequence[PlanRow]) -> list[Sequence[int]]:
        """The tokens that each sampling row emits: its accepted drafts, and the one behind them."""
        if self.accepted is None:
            return [(token,) for token in self.tokens]
        emitted: list[Sequence[int]] = []
        at = 0
        for row, accepted in zip(rows, self.accepted, strict=True):
            emitted.append(self.tokens[at : at + accepted + 1])
            at += row.num_samples
        return emitted


class Launched:
    """What a queued step will have chosen.

    On a card the copies to pinned memory are queued at once, so `read` waits for this step only, however many
    come behind it.

    Args:
        sampled: on the device; None where no row of the step sampled.
        drafted: on the device; None where nothing was.
    """

    def __init__(self, sampled: Sampled | None, drafted: Drafted | None = None) -> None:
        self._tokens: Tensor | None = None
        self._accepted: Tensor | None = None
        self._logprobs: LogprobRows | None = None
        self._drafted: Drafted | None = None
        self._ready: torch.cuda.Event | None = None
        if sampled is None:
            return
        self._tokens = _to_host(sampled.tokens)
        if sampled.logprobs is not None:
            found = sampled.logprobs
            self._logprobs = LogprobRows(
                found.rows, _to_host(found.chosen), _to_host(found.top_ids), _to_host(found.top)
            )
        if sampled.accepted is not None:
            self._accepted = _to_host(sampled.accepted)
        if drafted is not None:
            self._drafted = Drafted(_to_host(drafted.tokens), _to_host(drafted.confidences))
        if sampled.tokens.is_cuda:
            self._ready = torch.cuda.Event()
            self._ready.record()

    def read(self) -> Chosen:
        """Wait for the step."""
        if self._tokens is None:
            return Chosen([], None, None, [], [])
        if self._ready is not None:
            self._ready.synchronize()
        drafted = self._drafted
        return Chosen(
            tokens=self._tokens.tolist(),
            accepted=None if self._accepted is None else self._accepted.tolist(),
            logprobs=self._logprobs,
            drafts=[] if drafted is None else drafted.tokens.tolist(),
            confidences=[] if drafted is None else drafted.confidences.tolist(),
        )


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
