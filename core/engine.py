"""One engine: the step loop over scheduler, preparer and executor.

Owns which launched step is not committed yet, and the step clock. What may not be added here: anything about
one model, one device, sockets or text. Called by core/server.py; tests drive it directly.
"""

import time
from collections import deque
from dataclasses import dataclass

from headrace.core.charges import Charges
from headrace.core.commit import Output, commit
from headrace.core.execute import Executor
from headrace.core.kv_cache import KVCache
from headrace.core.launched import Launched
from headrace.core.plan import StepPlan
from headrace.core.policy import NOTHING
from headrace.core.prepare import Preparer
from headrace.core.request import FinishReason, Request
from headrace.core.scheduler import Scheduler
from headrace.core.speculator import Speculator
from headrace.ipc.messages import Sampling


@dataclass(slots=True)
class StepClock:
    """How long steps take."""

    steps: int = 0
    last_ms: float = 0.0


class Engine:
    """Continuous batching of one model.

    Args:
        scheduler: who runs.
        kv: the scheduler's blocks; read here only to report their use.
        preparer: plan to tensors.
        executor: model, KV tensor and sampler.
        charges: who pays for the steps.
        speculator: what the steps verify; None = nothing is drafted.
        overlap: schedule and launch step N + 1 before step N is read back. Pays where the device works
            beside the host; on a CPU it only delays each token by a step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KVCache,
        preparer: Preparer,
        executor: Executor,
        charges: Charges,
        *,
        speculator: Speculator | None = None,
        overlap: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.kv = kv
        self.clock = StepClock()
        self.charges = charges
        self.speculator = speculator
        self._preparer = preparer
        self._executor = executor
        self._depth = 1 if overlap else 0
        self._begun: tuple[StepPlan, float] | None = None  # the newest step, if another follows at once
        self._launched: deque[tuple[StepPlan, Launched]] = deque()

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            Rejection: it is not taken; see Scheduler.submit.
        """
        self.scheduler.submit(request)

    def cancel(self, request_id: str) -> Request | None:
        """End a request before the next step; None if it already ended."""
        request = self.scheduler.cancel(request_id)
        if request is not None:
            self.charges.close_bill(request, [plan for plan, _ in self._launched])
            if self.speculator is not None:
                self.speculator.forget(request)
        return request

    @property
    def has_work(self) -> bool:
        """`step` has something to do."""
        return self.scheduler.has_work

    def step(self) -> list[Output]:
        """Schedule, prepare and execute one step, and commit the newest that may be committed."""
        begin = time.perf_counter()
        self._observe(begin)
        self.charges.begin(in_flight=bool(self._launched))
        outputs: list[Output] = []
        wanted = NOTHING
        if self.speculator is not None and self.speculator.awake(self.scheduler.decoding()):
            # Drafts follow known tokens: nothing may be in flight.
            outputs += self._settle(0)
            wanted = self.speculator.propose(self.scheduler.decoding())
        plan = self.scheduler.schedule(wanted)
        if plan is not None:
            for request in plan.entered:
                self._executor.enter(request)
            self._launched.append((plan, self._executor.execute(self._preparer.prepare(plan))))
        alone = plan is None or plan.ahead or plan.num_drafted
        outputs += self._settle(0 if alone else self._depth)
        self.charges.end(in_flight=bool(self._launched))
        if plan is not None:
            self.clock.steps += 1
            self.clock.last_ms = (time.perf_counter() - begin) * 1e3
        self._begun = (plan, begin) if plan is not None and self.scheduler.has_work else None
        return outputs

    def _observe(self, now: float) -> None:
        """Tell the speculator how long it took from step to step, if there was work all the time."""
        if self.speculator is not None and self._begun is not None:
            plan, begin = self._begun
            self.speculator.observe(plan, (now - begin) * 1e3, waited=not self._launched)

    def _settle(self, left: int) -> list[Output]:
        """Commit the oldest steps until `left` are in flight."""
        outputs: list[Output] = []
        while len(self._launched) > left:
            plan, launched = self._launched.popleft()
            chosen = launched.read()
            done = commit(plan, chosen, self.scheduler)
            outputs += done
            if self.speculator is not None:
                self.speculator.learn(plan, chosen)
                for output in done:
                    if output.finish_reason is not None:
                        self.speculator.forget(output.request)
            self.charges.settle(plan, [plan for plan, _ in self._launched])
        return outputs

    def warm_up(self, num_tokens: int) -> None:
        """Run a prompt of `num_tokens` and one decode step through the real path, so that the first user does
        not pay for what is set up on first use."""
        request = Request("warm-up", [0] * num_tokens, Sampling(max_tokens=2), cache_salt="warm-up")
        self.submit(request)
        while self.has_work:
            self.step()
        assert request.finish_reason is FinishReason.LENGTH
        self.charges.waive(request)
