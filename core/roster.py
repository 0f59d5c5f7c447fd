"""Where every request is: waiting, running, parked, leaving; and the slots.

Owns these sets and moves a request between them together with its state, slot and blocks. Decides nothing:
core/policy.py and core/scheduler.py do, its only callers.
"""

from collections import Counter
from collections.abc import Iterable

from headrace.core.kv_cache import KVCache
from headrace.core.plan import StepPlan
from headrace.core.rank_queue import RankQueue
from headrace.core.request import FinishReason, Request, RequestState

_RUNNING = (RequestState.PREFILL, RequestState.DECODE)
_QUEUED = (RequestState.WAITING, RequestState.PREEMPTED)
_OUTSIDE = (RequestState.PREEMPTED, RequestState.FINISHED)  # their drafts, if in flight, will be dropped


class Roster:
    """All requests that hold anything of this engine, each in exactly one of four places."""

    def __init__(self, num_slots: int, kv: KVCache) -> None:
        self.num_slots = num_slots
        self.waiting = RankQueue()
        self.running = RankQueue()
        self.parked: set[Request] = set()
        self.leaving: set[Request] = set()  # finished, but an uncommitted step still holds them
        self._kv = kv
        self._requests: dict[str, Request] = {}
        self._keepers: dict[Request, None] = {}  # parked or returned ones with blocks, longest parked first
        self._free_slots = list(range(num_slots - 1, -1, -1))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def live(self, request_id: str) -> Request | None:
        """The request of that id, unless it finished."""
        request = self._requests.get(request_id)
        return None if request is None or request.finished else request

    @property
    def has_slot(self) -> bool:
        return bool(self._free_slots)

    def kept_blocks(self, spared: Request) -> int:
        """Upper bound of the blocks that `reclaim` can free: shared ones count once per holder."""
        return sum(len(request.table.blocks) for request in self._keepers if request is not spared)

    def enter(self, request: Request) -> None:
        """Take a new request in; without credit it starts parked."""
        self._requests[request.request_id] = request
        if request.out_of_credit:
            request.park()
            self.parked.add(request)
        else:
            self.waiting.add(request)

    def admit(self, request: Request, num_computed: int, now: float) -> None:
        """Move from waiting to running."""
        self.waiting.remove(request)
        self._keepers.pop(request, None)
        request.admit(self._free_slots.pop(), num_computed, now)
        self.running.add(request)

    def preempt(self, request: Request) -> None:
        """Move from running to waiting, without blocks. A slot in flight is given up by `settled`."""
        self.running.remove(request)
        request.preempt()
        self._kv.free(request.table)
        self._free_slot(request)
        self.waiting.add(request)

    def park(self, request: Request) -> None:
        """Move out of credit: from running, or from waiting if it was preempted. Blocks stay."""
        self._withdraw(request)
        request.park()
        self._free_slot(request)
        self.parked.add(request)
        if request.table.blocks:
            self._keepers[request] = None

    def unpark(self, request: Request) -> None:
        """Move from parked to waiting, with the blocks that are left."""
        self.parked.remove(request)
        request.unpark()
        self.waiting.add(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End it, and let go of what it holds; at `settled` if it is in flight."""
        self._withdraw(request)
        request.finish(reason)
        if reason is FinishReason.ERROR:
            self._kv.retract(request.table)
        if request.in_flight:
            self.leaving.add(request)
        else:
            self._release(request)

    def settled(self, request: Request) -> None:
        """A request that was finished or preempted in flight is not in flight any more."""
        if request.finished:
            self._release(request)
        else:
            self._free_slot(request)

    def reclaim(self, spared: Request | None = None) -> bool:
        """Take the blocks of the longest parked request that has some; False if none but `spared` has."""
        for request in self._keepers:
            if request is not spared:
                del self._keepers[request]
                request.lose_blocks()
                self._kv.free(request.table)
                return True
        return False

    def check_integrity(self, plans: Iterable[StepPlan]) -> None:
        """Assert that sets, states, slots, counters and blocks agree; `plans` are the uncommitted steps."""
        self.waiting.check_integrity()
        self.running.check_integrity()
        placed = [*self.waiting, *self.running, *self.parked, *self.leaving]
        assert len(set(placed)) == len(placed), "a request is in two places"
        assert set(placed) == set(self._requests.values()), "a request is in no place"
        assert all(request.state in _QUEUED for request in self.waiting), "a waiting request is not queued"
        assert all(request.state in _RUNNING for request in self.running), (
            "a running request is not in the batch"
        )
        assert all(request.state is RequestState.PARKED for request in self.parked), (
            "a parked one is not parked"
        )
        assert all(r.finished and r.in_flight for r in self.leaving), "a leaving request holds on for nothing"
        keepers = {r for r in (*self.waiting, *self.parked) if r.table.blocks}
        assert set(self._keepers) == keepers, "who keeps blocks while not running is not known"

        slots = [*self._free_slots, *(request.slot for request in placed if request.slot >= 0)]
        assert sorted(slots) == list(range(self.num_slots)), "slots are lost or given twice"
        assert all(request.slot >= 0 for request in self.running), "a running request has no slot"

        plans = tuple(plans)
        in_flight = Counter(row.request for plan in plans for row in plan.rows)
        pending = Counter(row.request for plan in plans for row in plan.rows if row.samples)
        for request in placed:
            assert request.in_flight == in_flight[request], f"{request}: steps in flight miscounted"
            assert request.finished or request.num_pending == pending[request], (
                f"{request}: tokens miscounted"
            )
            ahead = len(request.token_ids) + request.num_pending - request.num_computed
            assert ahead >= 1 or request.finished, f"{request}: computed beyond its tokens"
            assert ahead == 1 or request.state is not RequestState.DECODE, (
                f"{request}: decodes, but is behind"
            )
            blocks = len(request.table.blocks)
            held = request.num_computed + (0 if request.state in _OUTSIDE else request.num_drafts)
            assert held <= blocks * self._kv.block_size, f"{request}: {blocks} blocks are too few"
        self._kv.check_integrity(
            (request.table for request in placed), [copy for plan in plans for copy in plan.copies]
        )

    def _withdraw(self, request: Request) -> None:
        self._keepers.pop(request, None)
        if request.state in _RUNNING:
            self.running.remove(request)
        elif request.state in _QUEUED:
            self.waiting.remove(request)
        else:
            self.parked.remove(request)

    def _free_slot(self, request: Request) -> None:
        if request.slot >= 0 and not request.in_flight:
            self._free_slots.append(request.release_slot())

    def _release(self, request: Request) -> None:
        self._kv.free(request.table)
        self._free_slot(request)
        self.leaving.discard(request)
        del self._requests[request.request_id]
