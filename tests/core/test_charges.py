"""Who pays for the engine's time: everything that was measured is charged or counted, and shared fairly."""

import random
import time
from collections import deque
from pathlib import Path

import pytest

from headrace.core.charges import Charges
from headrace.core.context_cost import context_cost
from headrace.core.engine import Engine
from headrace.core.outbox import usage
from headrace.core.plan import StepPlan
from headrace.core.request import Request
from headrace.ipc.messages import Sampling
from tests.core.engines import load, make_engine
from tests.core.factories import FakeDevice, make_request, make_scheduler


class Clock:
    """Stands still until told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Metered:
    """The engine's loop over the fake device, with a clock of its own; keeps each bill as it left."""

    def __init__(self, *, overlap: bool, context_cost: float = 0.01, num_blocks: int = 64) -> None:
        self.clock = Clock()
        self.charges = Charges(context_cost, self.clock)
        self.scheduler = make_scheduler(num_blocks=num_blocks)
        self.bills: dict[str, float] = {}  # milliseconds, when the request's end was told
        self.busy_s = 0.0  # measured from outside
        self._device = FakeDevice()
        self._depth = 1 if overlap else 0
        self._launched: deque[tuple[StepPlan, dict[str, tuple[int, ...]]]] = deque()

    def work(self, seconds: float) -> None:
        self.clock.now += seconds
        self.busy_s += seconds

    def idle(self, seconds: float) -> None:
        """Time between steps; with a step in flight the device is at work meanwhile."""
        if self._launched:
            self.work(seconds)
        else:
            self.clock.now += seconds

    def step(self, schedule_s: float = 0.001, wait_s: float = 0.01, tail_s: float = 0.0) -> None:
        self.charges.begin(in_flight=bool(self._launched))
        self.work(schedule_s)
        plan = self.scheduler.schedule()
        if plan is not None:
            self._launched.append((plan, self._device.run(plan)))
        while len(self._launched) > (self._depth if plan is not None else 0):
            oldest, tokens = self._launched.popleft()
            self.work(wait_s)
            outcome = self.scheduler.commit(oldest, tokens)
            self.charges.settle(oldest, [plan for plan, _ in self._launched])
            for request in outcome.finished:
                self.bills[request.request_id] = request.gpu_ms
        self.work(tail_s)
        self.charges.end(in_flight=bool(self._launched))

    def cancel(self, request: Request) -> None:
        if self.scheduler.cancel(request.request_id) is not None:
            self.charges.close_bill(request, [plan for plan, _ in self._launched])
            self.bills[request.request_id] = request.gpu_ms

    @property
    def billed_s(self) -> float:
        return sum(self.bills.values()) / 1e3


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("seed", range(5))
def test_the_bills_of_a_run_and_the_overhead_are_the_busy_time(seed: int, *, overlap: bool) -> None:
    """With prefill in chunks, decode, stop ids, cancels in flight, preemption, a spell of idleness."""
    random_ = random.Random(seed)
    metered = Metered(overlap=overlap, num_blocks=24)
    requests = [
        make_request(
            f"r{i}", random_.randint(1, 40), max_tokens=random_.randint(1, 20), seed=i, stop=(i, i + 7)
        )
        for i in range(30)
    ]
    waiting = list(requests)
    while metered.scheduler.has_work or waiting:
        if waiting and random_.random() < 0.5:
            metered.scheduler.submit(waiting.pop())
        if metered.scheduler.has_work:
            metered.step(
                random_.uniform(0.001, 0.002), random_.uniform(0.005, 0.02), random_.uniform(0, 0.001)
            )
        metered.idle(random_.uniform(0, 0.002))
        if random_.random() < 0.1:
            metered.cancel(random_.choice(requests))
    assert metered.scheduler.counters.preemptions
    assert metered.bills.keys() == {request.request_id for request in requests if request.finished}
    charges = metered.charges
    assert charges.busy_s == pytest.approx(metered.busy_s)
    assert charges.charged_s == pytest.approx(metered.billed_s)
    assert metered.billed_s + charges.overhead_s == pytest.approx(metered.busy_s, rel=0.01)


def test_steps_in_flight_leave_no_gap() -> None:
    """What passes between two calls of an overlapped engine belongs to the step on the device."""
    metered = Metered(overlap=True)
    request = make_request(prompt=3, max_tokens=3)
    metered.scheduler.submit(request)
    for _ in range(4):
        metered.step(0.001, 0.010)
        metered.idle(0.005)
    # Four calls and three commits; the last call ends with nothing in flight, so its 5 ms were idle.
    assert request.finished
    assert request.gpu_ms == pytest.approx(4 * 1 + 3 * 10 + 3 * 5)
    assert metered.charges.overhead_s == pytest.approx(0)


def test_a_long_context_pays_more_than_a_short_one() -> None:
    metered = Metered(overlap=False, context_cost=0.1)
    long, short = make_request("long", 21, max_tokens=2), make_request("short", 1, max_tokens=2)
    for request in (long, short):
        metered.scheduler.submit(request)
    metered.step()
    before = long.gpu_ms, short.gpu_ms
    assert before[0] > 21 * before[1]
    metered.step(0.001, 0.010)
    paid = long.gpu_ms - before[0], short.gpu_ms - before[1]
    assert sum(paid) == pytest.approx(11)
    assert paid[0] / paid[1] == pytest.approx((1 + 0.1 * 22) / (1 + 0.1 * 2))


def test_who_ends_in_flight_pays_for_the_step_that_still_holds_it() -> None:
    metered = Metered(overlap=True)
    gone, stays = make_request("gone", 1, max_tokens=9), make_request("stays", 1, max_tokens=9)
    for request in (gone, stays):
        metered.scheduler.submit(request)
    metered.step(wait_s=0.010)
    metered.step(wait_s=0.010)
    before = gone.gpu_ms
    metered.cancel(gone)
    assert metered.bills["gone"] == gone.gpu_ms > 1.5 * before
    bill = gone.gpu_ms
    metered.step(wait_s=0.030)
    assert gone.gpu_ms == bill, "a bill that left does not change"
    assert metered.charges.charged_s * 1e3 == pytest.approx(gone.gpu_ms + stays.gpu_ms)
    assert metered.charges.charged_s == pytest.approx(metered.busy_s)


def test_a_step_of_ended_requests_is_overhead() -> None:
    """The only request is cancelled in flight, and the step takes longer than it paid for."""
    metered = Metered(overlap=True)
    request = make_request(prompt=1, max_tokens=9)
    metered.scheduler.submit(request)
    metered.step(wait_s=0.010)
    metered.step(wait_s=0.010)
    metered.cancel(request)
    metered.step(wait_s=0.050)
    assert not metered.scheduler.has_work
    assert metered.charges.overhead_s > 0
    assert metered.billed_s + metered.charges.overhead_s == pytest.approx(metered.busy_s)


def test_what_was_paid_too_much_in_advance_comes_off_the_next_step() -> None:
    metered = Metered(overlap=True)
    request, other = make_request("a", 1, max_tokens=9), make_request("b", 1, max_tokens=2)
    metered.scheduler.submit(request)
    metered.step(wait_s=0.010)
    metered.step(wait_s=0.010)
    metered.cancel(request)
    metered.scheduler.submit(other)
    metered.step(0.0, 0.001)
    metered.step(wait_s=0.010)
    metered.step(wait_s=0.010)
    assert metered.charges.overhead_s == 0
    assert metered.billed_s == pytest.approx(metered.busy_s)


def test_waived_time_is_overhead() -> None:
    metered = Metered(overlap=False)
    request = make_request(prompt=1, max_tokens=1)
    metered.scheduler.submit(request)
    metered.step()
    metered.charges.waive(request)
    assert metered.charges.charged_s == pytest.approx(0)
    assert metered.charges.overhead_s == pytest.approx(metered.busy_s)


class Watch:
    """Runs a real engine; measures from outside how long it was busy, and keeps the bills that the wire would get."""

    def __init__(self, engine: Engine, *, overlap: bool) -> None:
        self.busy_s = 0.0
        self.bills: dict[str, float] = {}
        self._engine = engine
        self._overlap = overlap
        self._since = 0.0
        self._in_flight = False

    def step(self) -> None:
        if not self._in_flight:
            self._since = time.perf_counter()
        for output in self._engine.step():
            if output.finish_reason is not None:
                self.bills[output.request.request_id] = usage(output.request).gpu_ms
        self._in_flight = self._overlap and self._engine.has_work
        now = time.perf_counter()
        self.busy_s += now - self._since
        self._since = now

    def cancel(self, request_id: str) -> None:
        request = self._engine.cancel(request_id)
        if request is not None:
            self.bills[request_id] = usage(request).gpu_ms


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_a_real_run_is_charged_to_within_a_hundredth(small_path: Path, *, overlap: bool) -> None:
    engine = make_engine(load(small_path), small_path, num_blocks=24, overlap=overlap)
    engine.warm_up(8)
    overhead_s = engine.charges.overhead_s
    assert overhead_s == pytest.approx(engine.charges.busy_s), "the warm-up is nobody's"
    watch = Watch(engine, overlap=overlap)
    requests = [
        Request(
            f"r{i}",
            range(5 + 200 * i, 10 + 209 * i),
            Sampling(max_tokens=24, temperature=0.0, stop_token_ids=(i,)),
        )
        for i in range(12)
    ]
    for request in requests[:9]:
        engine.submit(request)
    for number in range(10_000):
        if not engine.has_work:
            break
        watch.step()
        if number == 5:
            for request in requests[9:]:
                engine.submit(request)
            watch.cancel("r0")
            watch.cancel("r11")
        if number == 12:
            watch.cancel("r3")
    assert engine.scheduler.counters.preemptions
    assert watch.bills.keys() == {request.request_id for request in requests}
    assert watch.bills["r11"] == 0, "it never ran"
    overhead_s = engine.charges.overhead_s - overhead_s
    assert sum(watch.bills.values()) / 1e3 + overhead_s == pytest.approx(watch.busy_s, rel=0.01)
    assert overhead_s < 0.05 * watch.busy_s


def test_context_is_cheap_beside_weights_but_not_free(small_path: Path) -> None:
    """The small model: 5 layers of 4 heads (32 + 16 for keys, 32 for values), latent 48; 1 dense, 4 sparse."""
    attention = 128 * 4 * 48 + 128 * (48 + 16) + 48 * 4 * (32 + 32) + 4 * 32 * 128
    feed_forward = 3 * 128 * (512 + 4 * (2 * 64 + 2 * 64))
    expected = 5 * 4 * (32 + 16 + 32) / (5 * attention + feed_forward)
    assert context_cost(load(small_path).spec) == pytest.approx(expected)
