"""The synthetic engine's generations that are not in the running batch: waiting, in prefill, parked, resuming.

Owns their order and the reservation of blocks. Knows no tokens; loadtest/synthetic_batch.py drives it.
"""

import heapq
from collections import deque

from headrace.loadtest.synthetic_rows import Generation, Rows


class SyntheticQueue:
    """Priority, then first come first served. Out of credit a generation is parked and keeps its blocks."""

    def __init__(self, rows: Rows, num_blocks: int) -> None:
        self.num_parked = 0
        self._rows = rows
        self._num_blocks = num_blocks
        self._reserved = 0
        self._arrivals = 0
        self._waiting: list[tuple[int, int, Generation]] = []  # a heap
        self._resuming: deque[Generation] = deque()  # credit came back: before the waiting
        self._prefilling: deque[Generation] = deque()

    @property
    def num_waiting(self) -> int:
        """Generations without a slot that could use one."""
        return len(self._waiting) + len(self._resuming)

    @property
    def num_prefilling(self) -> int:
        """Generations that hold a slot and compute their prompt."""
        return len(self._prefilling)

    def add(self, generation: Generation) -> None:
        """A new generation waits."""
        self._arrivals += 1
        heapq.heappush(self._waiting, (generation.submit.priority, self._arrivals, generation))

    def park(self, generation: Generation) -> None:
        """It is out of credit."""
        generation.state = "parked"
        self.num_parked += 1

    def unpark(self, generation: Generation) -> None:
        """Credit came back: it gets the next free slot."""
        self.num_parked -= 1
        generation.state = "resuming"
        self._resuming.append(generation)

    def admit(self, slots: int, now: float) -> list[Generation]:
        """Fill free slots; those returned go on at once, the others begin their prefill while blocks last."""
        resumed = []
        while self._resuming and slots > 0:
            resumed.append(self._resuming.popleft())
            slots -= 1
        while self._waiting and slots > 0:
            generation = self._waiting[0][2]
            if self._reserved + generation.blocks > self._num_blocks:
                break
            heapq.heappop(self._waiting)
            self._reserved += generation.blocks
            generation.state, generation.scheduled = "prefill", now
            self._prefilling.append(generation)
            slots -= 1
        return resumed

    def prefill(self, budget: int) -> tuple[list[Generation], int]:
        """Compute prompts in order, up to `budget` tokens: who is done with it, and how many tokens it took."""
        ready, left = [], budget
        while self._prefilling and left > 0:
            generation = self._prefilling[0]
            chunk = min(generation.prefill, left)
            generation.prefill -= chunk
            left -= chunk
            if generation.prefill:
                break
            self._prefilling.popleft()
            if self._rows.has_credit(generation.row):
                ready.append(generation)
            else:
                self.park(generation)
        return ready, budget - left

    def remove(self, generation: Generation) -> None:
        """Forget it wherever it is held here."""
        match generation.state:
            case "waiting":
                self._waiting = [entry for entry in self._waiting if entry[2] is not generation]
                heapq.heapify(self._waiting)
            case "prefill":
                self._prefilling.remove(generation)
            case "resuming":
                self._resuming.remove(generation)
            case "parked":
                self.num_parked -= 1
            case _:
                pass

    def release(self, generation: Generation) -> None:
        """It has ended; its blocks are free if it ever had any."""
        if generation.state != "waiting":
            self._reserved -= generation.blocks
