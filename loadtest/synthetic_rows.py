"""The open streams of the synthetic engine: columns for what a step computes, an object for the rest.

Owns which row is free. Knows neither steps nor queues; loadtest/synthetic_batch.py drives it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.ipc.messages import Submit

_COLUMNS = ("stream", "gateway", "seed", "prompt", "produced", "end", "credit", "special", "charged_ms")
_FIRST_SIZE = 64


class Rows:
    """Parallel arrays, grown by doubling. A row's values are set after `add` and hold until `free`."""

    def __init__(self) -> None:
        self.stream = np.zeros(_FIRST_SIZE, np.uint32)
        self.gateway = np.zeros(_FIRST_SIZE, np.int32)
        self.seed = np.zeros(_FIRST_SIZE, np.uint64)
        self.prompt = np.zeros(_FIRST_SIZE, np.int64)  # prompt tokens
        self.produced = np.zeros(_FIRST_SIZE, np.int64)  # output tokens so far, those made elsewhere included
        self.end = np.zeros(_FIRST_SIZE, np.int64)  # output tokens at which the stream ends
        self.credit = np.zeros(_FIRST_SIZE, np.int64)  # output tokens it may have for now
        self.special = np.zeros(_FIRST_SIZE, np.bool_)  # has stop ids that can occur, or wants logprobs
        self.charged_ms = np.zeros(_FIRST_SIZE, np.float64)  # of the steps' time so far
        self._free = list(range(_FIRST_SIZE - 1, -1, -1))

    def add(self) -> int:
        """A free row; its columns hold leftovers."""
        if not self._free:
            size = len(self.stream)
            for name in _COLUMNS:
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
            self._free = list(range(2 * size - 1, size - 1, -1))
        return self._free.pop()

    def free(self, row: int) -> None:
        """Give the row back."""
        self._free.append(row)

    def has_credit(self, row: int) -> bool:
        """Whether the stream may have another token."""
        return bool(self.credit[row] > self.produced[row])


@dataclass(slots=True, eq=False)
class Generation:
    """What a stream needs beyond its columns. `state` is where it is held; its holder sets it."""

    row: int
    submit: Submit
    gateway: bytes
    blocks: int  # reserved from admission to the end: enough for the longest it can get
    stops: NDArray[np.int32]  # those of its stop ids that can occur
    prefill: int  # tokens still to compute before the first new one
    arrival: float
    scheduled: float | None = None
    first_token: float | None = None
    state: str = "waiting"  # waiting | prefill | running | parked | resuming
