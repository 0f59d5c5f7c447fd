"""A generation inside the engine: its tokens, its counters, and the one state machine.

Owns which transitions are legal. Knows nothing of queues, nor of what is in its blocks. The scheduler calls
its methods; everyone else reads.
"""

import time
from collections.abc import Sequence
from enum import Enum, StrEnum

from headrace.core.block_table import BlockTable
from headrace.ipc.messages import Sampling

UNLIMITED = 1 << 31  # credit of a request whose reader sets no pace


class RequestState(Enum):
    """Where a request is. The next states of each are in `_NEXT`."""

    WAITING = "waiting"  # queued; a returned one may still hold blocks
    PREFILL = "prefill"  # in the batch, known tokens left to compute
    DECODE = "decode"  # in the batch, every known token computed or in flight
    PARKED = "parked"  # out of credit: no slot, blocks until someone needs them
    PREEMPTED = "preempted"  # queued again without blocks, output kept
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # a stop id
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"
    ERROR = "error"


_DECODE = RequestState.DECODE  # a look-up less in what runs once per token

_NEXT = {
    RequestState.WAITING: {RequestState.PREFILL, RequestState.PARKED, RequestState.FINISHED},
    RequestState.PREFILL: {RequestState.DECODE, RequestState.PREEMPTED, RequestState.FINISHED},
    RequestState.DECODE: {RequestState.PARKED, RequestState.PREEMPTED, RequestState.FINISHED},
    RequestState.PARKED: {RequestState.WAITING, RequestState.FINISHED},
    RequestState.PREEMPTED: {RequestState.PREFILL, RequestState.PARKED, RequestState.FINISHED},
    RequestState.FINISHED: set[RequestState](),
}


class IllegalTransition(AssertionError):
    """Our own bug: a request was moved where its state does not lead."""


class Request:
    """One generation. Fields are public to read; only the methods below write them (a test checks it).

    `generated` is output made elsewhere (another engine): it is kept as output and counts for max_tokens.
    """

    __slots__ = (
        "_full_len",
        "_stop_ids",
        "arrival",
        "cache_salt",
        "credit",
        "finish_reason",
        "first_scheduled",
        "first_token",
        "gpu_ms",
        "in_flight",
        "last_token",
        "num_accepted",
        "num_cached_tokens",
        "num_computed",
        "num_drafted",
        "num_drafts",
        "num_pending",
        "num_preemptions",
        "priority",
        "prompt_len",
        "rank",
        "request_id",
        "run_limit",
        "sampling",
        "slot",
        "state",
        "table",
        "tag",
        "tenant",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        generated: Sequence[int] = (),
        credit: int = UNLIMITED,
        arrival: float | None = None,
        tag: object = None,
    ) -> None:
        self.request_id = request_id
        self.sampling = sampling
        self.priority = priority  # lower runs first
        self.tenant = tenant
        self.cache_salt = cache_salt
        self.tag = tag  # the engine server's own note; never read here

        self.token_ids: list[int] = [*prompt, *generated]  # prompt, then output; append-only
        self.prompt_len = len(prompt)
        self.credit = credit  # output index (exclusive) up to which it may run
        self._full_len = self.prompt_len + sampling.max_tokens
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self.run_limit = min(self._full_len, self.prompt_len + credit)  # sample only below so many tokens

        self.state = RequestState.WAITING
        self.finish_reason: FinishReason | None = None
        self.rank: tuple[int, int, int] = (1, priority, 0)  # total order: (0 if promoted, priority, sequence)
        self.slot = -1  # row of the device buffers, -1 = none
        self.table = BlockTable()
        self.num_computed = 0  # positions whose KV was dispatched
        self.num_pending = 0  # output tokens sampled in uncommitted steps: 0..2
        self.in_flight = 0  # uncommitted steps that hold a row of this request: 0..2
        self.num_drafts = 0  # drafts that its uncommitted row verifies; positions computed only if accepted
        self.num_drafted = 0  # drafts verified in committed steps
        self.num_accepted = 0  # of those, accepted
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache at first admission
        self.num_preemptions = 0
        self.gpu_ms = 0.0  # its part of the steps' time; see core/charges.py

        self.arrival = time.monotonic() if arrival is None else arrival  # seconds, the scheduler's clock
        self.first_scheduled: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.state.value}, {self.prompt_len}+{self.num_output} tokens, "
            f"computed {self.num_computed}, slot {self.slot})"
        )

    @property
    def output_ids(self) -> list[int]:
        """A copy of the output so far, `generated` included."""
        return self.token_ids[self.prompt_len :]

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def finished(self) -> bool:
        return self.state is RequestState.FINISHED

    @property
    def full_len(self) -> int:
        """Tokens of prompt and output that it can have at most, whatever its credit."""
        return self._full_len

    @property
    def out_of_credit(self) -> bool:
        """Nothing more may be sampled until credit comes."""
        return len(self.token_ids) >= self.prompt_len + self.credit

    def enter_queue(self, sequence: int, max_model_len: int) -> FinishReason | None:
        """Take a place in the order, and the context limit; says why `generated` ended already, if so."""
        self.rank = (1, self.priority, sequence)
        self._full_len = min(self._full_len, max_model_len)
        self.run_limit = min(self._full_len, self.prompt_len + self.credit)
        return self._reason_to_stop() if self.num_output else None

    def promote(self) -> None:
        """Move ahead of every class, for good: it has waited longest."""
        self.rank = (0, *self.rank[1:])

    def grant(self, limit: int) -> None:
        """Raise the credit to output index `limit`; a lower one is an old message and changes nothing."""
        self.credit = max(self.credit, limit)
        self.run_limit = min(self._full_len, self.prompt_len + self.credit)

    def admit(self, slot: int, num_computed: int, now: float) -> None:
        """Enter the batch in `slot` with the KV of `num_computed` positions in place."""
        self._move(RequestState.PREFILL)
        self.slot = slot
        self.num_computed = num_computed
        if self.first_scheduled is None:
            self.first_scheduled = now
            self.num_cached_tokens = min(num_computed, self.prompt_len)

    def dispatch(self, num_tokens: int) -> bool:
        """Count a row of a new step. True if the row's last position yields an output token."""
        if self.state is not _DECODE and self.state is not RequestState.PREFILL:
            raise IllegalTransition(f"{self} cannot run")
        self.num_computed += num_tokens
        self.in_flight += 1
        if self.num_computed < len(self.token_ids) + self.num_pending:
            return False
        self.num_pending += 1
        if self.state is not _DECODE:
            self._move(_DECODE)
        return True

    def carry(self, num_drafts: int) -> None:
        """The row just dispatched verifies so many drafts; until its commit nothing more can be dispatched."""
        assert self.state is _DECODE and self.num_pending == 1, f"{self} cannot carry drafts"
        self.num_drafts = num_drafts

    def settle(self) -> None:
        """A step that held a row of this request was committed, and the row yielded nothing."""
        self.in_flight -= 1
        self.num_drafts = 0

    def take(self, tokens: Sequence[int], now: float) -> FinishReason | None:
        """A step was committed: append what its row sampled, up to the token that ends the request, if any."""
        assert tokens, f"{self} sampled nothing"
        self.in_flight -= 1
        if self.num_drafts:
            self._accept(len(tokens) - 1)
        token_ids, stop_ids, full_len = self.token_ids, self._stop_ids, self._full_len
        self.num_pending -= 1
        self.last_token = now
        if self.first_token is None:
            self.first_token = now
        for token in tokens:
            token_ids.append(token)
            if token in stop_ids or len(token_ids) >= full_len:
                reason = self._reason_to_stop()
                if reason is not None:
                    return reason
        return None

    def charge(self, ms: float) -> None:
        """A step was shared out: this is the request's part."""
        self.gpu_ms += ms

    def park(self) -> None:
        """Out of credit: wait without a slot until `unpark`. Blocks, if any, stay."""
        assert not self.in_flight, f"{self} parked in flight"
        self._move(RequestState.PARKED)

    def unpark(self) -> None:
        """Credit came: queue again, with whatever blocks are left."""
        self._move(RequestState.WAITING)

    def preempt(self) -> None:
        """Leave the batch and forget what was computed; the output stays, in-flight tokens still arrive."""
        self._move(RequestState.PREEMPTED)
        self.num_computed = 0
        self.num_preemptions += 1

    def lose_blocks(self) -> None:
        """A parked or returned request gave its blocks to one that runs."""
        assert self.state in (RequestState.PARKED, RequestState.WAITING), f"{self} cannot lose its blocks"
        self.num_computed = 0

    def release_slot(self) -> int:
        """Give the slot up; it must not be in flight, for the device still uses the row then."""
        assert self.slot >= 0, f"{self} has no slot"
        assert not self.in_flight, f"{self} is in flight"
        slot, self.slot = self.slot, -1
        return slot

    def finish(self, reason: FinishReason) -> None:
        """End. What is still in flight will be dropped at its commit."""
        self._move(RequestState.FINISHED)
        self.finish_reason = reason

    def _accept(self, accepted: int) -> None:
        """So many of the row's drafts were right: their positions hold what they should."""
        assert accepted <= self.num_drafts, f"{self}: {accepted} of {self.num_drafts} drafts accepted"
        self.num_drafted += self.num_drafts
        self.num_accepted += accepted
        self.num_drafts = 0
        if self.state is _DECODE:
            self.num_computed += accepted

    def _reason_to_stop(self) -> FinishReason | None:
        if self.token_ids[-1] in self._stop_ids and self.num_output > self.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self._full_len else None

    def _move(self, state: RequestState) -> None:
        if state not in _NEXT[self.state]:
            raise IllegalTransition(f"{self} cannot become {state.value}")
        self.state = state
