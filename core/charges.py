"""What each request owes of the engine's time: every step's milliseconds, shared by query tokens and context.

Owns the running sums; all of the busy time is either charged to a request or counted as overhead. Knows no device and
no wire. core/engine.py calls it at the begin, the commits and the end of its steps.
"""

import time
from collections.abc import Callable, Sequence

from headrace.core.plan import PlanRow, StepPlan
from headrace.core.request import Request


class Charges:
    """The engine's busy time and who pays for it.

    A step's time is what passed since the commit before it, or since its own begin where nothing was in flight: under
    overlap the steps of a busy engine so follow each other without gap. A request whose end comes to light while the
    next step already holds a row of it pays for that row at the price of the newest step, since its bill is about to
    leave; whom that step then holds pays the rest.

    Args:
        context_cost: of one query token attending to one token of context, in query tokens.
        clock: seconds, monotonic.
    """

    def __init__(self, context_cost: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.busy_s = 0.0
        self.charged_s = 0.0  # to requests, in all
        self.overhead_s = (
            0.0  # to nobody: steps that held only ended requests, and time behind the last commit
        )
        self._context_cost = context_cost
        self._clock = clock
        self._mark = 0.0  # up to here the clock was read
        self._unpaid_s = 0.0  # measured, not charged yet; below 0: charged in advance
        self._step_s = 0.0  # the newest step
        self._paid: set[Request] = set()  # ended, and paid for the step in flight

    def begin(self, *, in_flight: bool) -> None:
        """A step is about to be made; unless one is in flight, what passed until now was idle."""
        if not in_flight:
            self._mark = self._clock()

    def settle(self, plan: StepPlan, in_flight: Sequence[StepPlan]) -> None:
        """A step was committed: share its time out."""
        self._step_s = self._measure()
        owed = [(row.request, self._weight(row)) for row in plan.rows if row.request not in self._paid]
        if not owed:
            self._write_off()
        elif self._unpaid_s > 0:
            price = self._unpaid_s / sum([weight for _, weight in owed])
            for request, weight in owed:
                request.charge(price * weight * 1e3)
            self.charged_s += self._unpaid_s
            self._unpaid_s = 0.0
        if self._paid:
            self._paid = {request for request in self._paid if request.in_flight}
        if in_flight:
            for request, _ in owed:
                if request.finish_reason is not None:
                    self.close_bill(request, in_flight)

    def close_bill(self, request: Request, in_flight: Sequence[StepPlan]) -> None:
        """Let a request that has ended pay now for the steps that still hold it."""
        if not (request.finished and request.in_flight) or request in self._paid:
            return
        self._paid.add(request)
        for plan in in_flight:
            weights = [(row.request, self._weight(row)) for row in plan.rows]
            own = sum([weight for other, weight in weights if other is request])
            seconds = self._step_s * own / sum([weight for _, weight in weights])
            request.charge(seconds * 1e3)
            self.charged_s += seconds
            self._unpaid_s -= seconds

    def end(self, *, in_flight: bool) -> None:
        """A step was made; unless one is in flight, nobody pays for what passed since the last commit."""
        if not in_flight:
            self._measure()
            self._write_off()

    def waive(self, request: Request) -> None:
        """Count what a request was charged as overhead: it was the engine's own."""
        seconds = request.gpu_ms / 1e3
        self.charged_s -= seconds
        self.overhead_s += seconds

    def _measure(self) -> float:
        now = self._clock()
        seconds, self._mark = now - self._mark, now
        self.busy_s += seconds
        self._unpaid_s += seconds
        return seconds

    def _write_off(self) -> None:
        if self._unpaid_s > 0:
            self.overhead_s += self._unpaid_s
            self._unpaid_s = 0.0

    def _weight(self, row: PlanRow) -> float:
        """Query tokens, each with the context up to itself."""
        count = row.num_tokens
        return count + self._context_cost * count * (row.start + (count + 1) / 2)
