"""The static inputs of recorded steps, and their way from the host to where the graphs read them.

They cross on a stream of their own while the step before still runs, so that between two replays the card only moves
them within its own memory. Knows no request and no model. Used by core/graphs.py.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

STAGES = 2  # one is being filled while the copy out of the other may still be under way


class Staging:
    """Some arrays that lie one behind the other, three times: on the host (pinned), on their way, and in place.

    Args:
        fields: dtype and shape of each array. The last one may be sent in part.
        device: a card.
    """

    def __init__(self, fields: Sequence[tuple[torch.dtype, tuple[int, ...]]], device: torch.device) -> None:
        ends, end = [], 0
        for dtype, shape in fields:
            end += -(-math.prod(shape) * dtype.itemsize // 16) * 16
            ends.append(end)
        self._fields = list(zip(fields, (0, *ends[:-1]), strict=True))
        self._place = torch.zeros(end, dtype=torch.uint8, device=device)
        self._hosts = [torch.zeros(end, dtype=torch.uint8, pin_memory=True) for _ in range(STAGES)]
        self._passing = [torch.zeros(end, dtype=torch.uint8, device=device) for _ in range(STAGES)]
        self._arrays = [tuple(view.numpy() for view in self._views(host)) for host in self._hosts]
        self._stream = torch.cuda.Stream(device)
        self._crossed = [torch.cuda.Event() for _ in range(STAGES)]
        self._moved = [torch.cuda.Event() for _ in range(STAGES)]
        self._turn = 0
        # What was zeroed on this stream must not be zeroed after it was filled on that one.
        self._stream.wait_stream(torch.cuda.current_stream(device))

    @property
    def place(self) -> tuple[Tensor, ...]:
        """The arrays that graphs read; their addresses never change."""
        return self._views(self._place)

    def next(self) -> tuple[NDArray[Any], ...]:
        """The host arrays of the next step, free to be filled; they hold what they held two steps ago."""
        self._crossed[self._turn].synchronize()
        return self._arrays[self._turn]

    def send(self, rows: int) -> None:
        """Queue the copies of what `next` gave, of the last array the first `rows`."""
        turn, (last, start) = self._turn, self._fields[-1]
        size = start + rows * math.prod(last[1][1:]) * last[0].itemsize
        passing, current = self._passing[turn][:size], torch.cuda.current_stream(self._place.device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._moved[turn])
            passing.copy_(self._hosts[turn][:size], non_blocking=True)
            self._crossed[turn].record()
        current.wait_event(self._crossed[turn])
        self._place[:size].copy_(passing, non_blocking=True)
        self._moved[turn].record()
        self._turn = (turn + 1) % STAGES

    def _views(self, flat: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            flat[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for (dtype, shape), start in self._fields
        )
