"""The engine's requests from submission to their end: `schedule` gives a step, `commit` takes its tokens.

Owns which steps are in flight. Knows no tensor and no socket; who gets into a step is core/policy.py's. Called
by core/engine.py and core/server.py. Nothing here may be O(tokens) per step and decode row.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from headrace.config import ConfigError
from headrace.core.kv_cache import KVCache
from headrace.core.outcome import Counters, Emitted, Outcome
from headrace.core.plan import StepPlan
from headrace.core.policy import NOTHING, Policy, Wanted
from headrace.core.rejection import BadRequest, QueueFull, TooLong
from headrace.core.request import FinishReason, Request, RequestState
from headrace.core.roster import Roster

_PREFILL, _DECODE, _FINISHED = RequestState.PREFILL, RequestState.DECODE, RequestState.FINISHED
_OUT_OF_BATCH = (RequestState.FINISHED, RequestState.PREEMPTED)


class Scheduler:
    """Requests, their queues and the steps that hold them.

    One step may be in flight while the next one is scheduled. Its tokens are counted (`Request.num_pending`)
    but not known, so only stop ids can surprise: a request that ends while a step holds it keeps its slot and
    blocks until that step's commit, which drops its token.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_waiting: int,
        max_model_len: int,
        kv: KVCache,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ConfigError(
                f"scheduler.max_num_batched_tokens = {max_num_batched_tokens} must be at least "
                f"scheduler.max_num_seqs = {max_num_seqs}: every running request needs one token per step"
            )
        self.max_model_len = min(max_model_len, kv.capacity)  # what one request can have when it is alone
        self.counters = Counters()
        self._max_waiting = max_waiting
        self.kv = kv
        self._clock = clock
        self._roster = Roster(max_num_seqs, kv)
        self._policy = Policy(
            max_num_batched_tokens=max_num_batched_tokens,
            roster=self._roster,
            kv=kv,
            counters=self.counters,
            clock=clock,
        )
        self._in_flight: deque[StepPlan] = deque()
        self._submissions = 0
        self._steps = 0

    @property
    def num_running(self) -> int:
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        return len(self._roster.waiting)

    @property
    def num_parked(self) -> int:
        return len(self._roster.parked)

    @property
    def has_work(self) -> bool:
        """Something can be scheduled, or awaits its commit. Parked requests await their readers."""
        return bool(self.num_running or self.num_waiting or self._in_flight)

    def submit(self, request: Request) -> None:
        """Queue a new request. One whose `generated` output is complete comes out finished and is not kept.

        Raises:
            BadRequest: it has no prompt, asks for no token, or its id is in use.
            TooLong: its tokens leave no room for one more in `max_model_len`.
            QueueFull: `max_waiting` requests wait already, or as many are parked.
        """
        self._check(request)
        self._submissions += 1
        reason = request.enter_queue(self._submissions, self.max_model_len)
        if reason is None:
            self._roster.enter(request)
        else:
            request.finish(reason)

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> Request | None:
        """End a request now; None if it has ended. Its blocks are free before the next step is scheduled.

        If an uncommitted step holds it, they are free at that step's commit. `FinishReason.ERROR` also takes
        its blocks out of the prefix index.
        """
        request = self._roster.live(request_id)
        if request is not None:
            self._roster.finish(request, reason)
        return request

    def grant_credit(self, request_id: str, limit: int) -> bool:
        """Let a request run up to output index `limit`; a parked one queues again. False if it has ended."""
        request = self._roster.live(request_id)
        if request is None:
            return False
        request.grant(limit)
        if request.state is RequestState.PARKED and not request.out_of_credit:
            self._roster.unpark(request)
        return True

    def preempt(self, request_id: str) -> bool:
        """Take a request out of the batch, and its blocks from it; False if it does not run."""
        request = self._roster.live(request_id)
        if request is None or request.state not in (_PREFILL, _DECODE):
            return False
        self._policy.preempt(request)
        return True

    def decoding(self) -> list[Request]:
        """The requests of which every step yields tokens. Drafts may follow those that are not in flight."""
        return [request for request in self._roster.running.snapshot() if request.state is _DECODE]

    def schedule(self, wanted: Wanted = NOTHING) -> StepPlan | None:
        """The next step, or None if nothing can run now. At most one earlier step may be uncommitted.

        A request whose drafts are in an uncommitted step is in no step until that one is committed.
        """
        assert len(self._in_flight) <= 1, "two steps are in flight"
        self.kv.begin_step()
        step = self._policy.compose(wanted)
        copies = self.kv.end_step()
        if not step.singles and not step.drafted and not step.longer:
            assert self._in_flight or not self.has_work, "requests wait, but nothing runs that they wait for"
            return None
        self._steps += 1
        plan = StepPlan(
            step=self._steps,
            rows=(*step.singles, *step.drafted, *step.longer),
            num_decodes=len(step.singles),
            copies=copies,
            entered=tuple(step.entered),
            num_drafted=len(step.drafted),
            ahead=wanted.ahead,
        )
        self._in_flight.append(plan)
        return plan

    def commit(self, plan: StepPlan, tokens: Mapping[str, Sequence[int]]) -> Outcome:
        """Append what the oldest uncommitted step sampled, and end or park who is done.

        `tokens` holds, by request id, at least one token for every sampling row whose request has not ended; as
        many more as drafts of the row were accepted.
        """
        assert self._in_flight, "no step is in flight"
        assert self._in_flight[0] is plan, f"step {plan.step} is not the oldest one in flight"
        self._in_flight.popleft()
        kv, roster, now = self.kv, self._roster, self._clock()
        kv.copied(plan.copies)
        emitted: list[Emitted] = []
        finished: list[Request] = []
        for index, row in enumerate(plan.rows):
            request = row.request
            if row.samples and request.state is not _FINISHED:
                start = len(request.token_ids)
                sampled = tokens[request.request_id]
                reason = request.take(sampled, now)
                known = len(request.token_ids)
                if known - start < len(sampled):
                    sampled = sampled[: known - start]
                emitted.append(Emitted(index, request, start - request.prompt_len, sampled))
                if known >= request.table.publish_at and request.state is _DECODE:
                    kv.publish(request.table, request.cache_salt, request.token_ids, request.num_computed)
                if reason is not None:
                    finished.append(request)
                    roster.finish(request, reason)
                    continue
                if known >= request.run_limit:
                    roster.park(request)
            else:
                request.settle()
            if not request.in_flight and request.state in _OUT_OF_BATCH:
                roster.settled(request)
        self.counters.output_tokens += sum([len(row.token_ids) for row in emitted])
        return Outcome(tuple(emitted), tuple(finished))

    def check_integrity(self) -> None:
        """Assert that places, states, slots, counters and blocks agree with each other."""
        self._roster.check_integrity(self._in_flight)

    def _check(self, request: Request) -> None:
        roster, known, limit = self._roster, len(request.token_ids), self.max_model_len
        if request.request_id in roster:
            raise BadRequest(f"request id {request.request_id!r} is in use")
        if request.prompt_len < 1:
            raise BadRequest("the prompt has 0 tokens; it needs at least 1")
        if request.sampling.max_tokens < 1:
            raise BadRequest(f"max_tokens = {request.sampling.max_tokens}; it must be at least 1")
        if known >= limit:
            output = f" and {request.num_output} output tokens" if request.num_output else ""
            raise TooLong(
                f"{request.prompt_len} prompt tokens{output} leave no room for another: "
                f"the context holds {limit} tokens of prompt and output"
            )
        for count, doing in ((self.num_waiting, "waiting"), (self.num_parked, "parked")):
            if count >= self._max_waiting:
                raise QueueFull(f"{count} requests are {doing}; the limit is {self._max_waiting}")
