"""Whatever happens in whatever order: nothing leaks, nobody starves, and every token is the fake model's."""

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.core.plan import StepPlan
from headrace.core.policy import NOTHING
from headrace.core.rejection import QueueFull
from headrace.core.request import UNLIMITED, FinishReason, Request, RequestState
from tests.core.factories import Loop, expected_output, guesses, make_request, make_scheduler

MAX_MODEL_LEN = 40
# No request needs more rows than tokens for itself, so all that were ahead of it, recomputing included, are
# through by then. A request that is passed over for ever exceeds any bound.
PATIENCE = 2_000


class World:
    """A scheduler under fire: operations by number, and what must hold after each."""

    def __init__(self, *, num_blocks: int, max_num_seqs: int, budget: int, prefix_cache: bool) -> None:
        self.scheduler = make_scheduler(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(budget, max_num_seqs),
            max_waiting=12,
            max_model_len=MAX_MODEL_LEN,
            num_blocks=num_blocks,
            prefix_cache=prefix_cache,
        )
        self.loop = Loop(self.scheduler)
        self.requests: list[Request] = []
        self._unfinished: list[Request] = []
        self.seen: Counter[str] = Counter()
        self._waited: Counter[Request] = Counter()  # steps since submission in which it had credit

    @property
    def live(self) -> list[Request]:
        self._unfinished = [request for request in self._unfinished if not request.finished]
        return self._unfinished

    def submit(self, *, family: int, length: int, max_tokens: int, priority: int, credit: int) -> None:
        """Prompts of one family share blocks; those of two families are alike but for their beginning.

        Some stop ids come true.
        """
        number = len(self.requests)
        seed = number % 5
        own = [] if length % 4 == 0 else [9_000 + number]
        prompt = [*range(100 * family, 100 * family + 4), *range(1000, 1020)][:length] + own
        request = make_request(
            f"r{number}",
            prompt,
            max_tokens=max_tokens,
            seed=seed,
            priority=priority,
            salt="salted" if family == 3 else "",
            stop=[7, 33] if number % 2 else [],
            credit=credit,
        )
        try:
            self.scheduler.submit(request)
        except QueueFull:
            self.seen["refused"] += 1
        else:
            self.requests.append(request)
            self._unfinished.append(request)

    def launch(self, rng: random.Random | None = None) -> bool:
        """Schedule and run a step, unless two are open; False if there is none. Drafts come from `rng`."""
        if self.loop.in_flight > 1:
            return False
        wanted = NOTHING if rng is None else guesses(self.scheduler, rng, ahead=rng.randrange(5))
        plan = self.loop.launch(wanted)
        if plan is None:
            return False
        self._check_order(plan)
        self.seen["copies"] += len(plan.copies)
        self.seen["drafted"] += plan.num_drafted
        self.seen["overlapped"] += self.loop.in_flight > 1
        for request in self.live:
            if request.state is not RequestState.PARKED:
                self._waited[request] += 1
                assert self._waited[request] < PATIENCE, f"{request} starves"
        return True

    def settle(self) -> None:
        if self.loop.in_flight:
            for request in self.loop.settle().finished:
                self._check_output(request)

    def cancel(self, request: Request) -> None:
        assert self.scheduler.cancel(request.request_id) is request
        self.seen["cancelled"] += 1

    def preempt(self, request: Request) -> None:
        self.seen["preempted"] += self.scheduler.preempt(request.request_id)

    def grant(self, request: Request, more: int) -> None:
        self.seen["returned"] += request.state is RequestState.PARKED
        assert self.scheduler.grant_credit(request.request_id, request.num_output + more)

    def drain(self) -> None:
        """Give everyone credit and let all end."""
        for request in self.live:
            self.scheduler.grant_credit(request.request_id, UNLIMITED)
        for _ in range(PATIENCE):
            if not self.scheduler.has_work:
                break
            self.launch()
            self.settle()
        assert not self.live
        assert not self.scheduler.has_work
        assert self.scheduler.kv.num_used == 0, "blocks leaked"
        self.scheduler.check_integrity()
        for request in self.requests:
            self._check_output(request)

    def _check_output(self, request: Request) -> None:
        wanted, reason = expected_output(request, self.scheduler.max_model_len)
        if request.finish_reason is FinishReason.CANCELLED:
            assert request.output_ids == wanted[: request.num_output]
        else:
            assert (request.output_ids, request.finish_reason) == (wanted, reason)

    def _check_order(self, plan: StepPlan) -> None:
        """Who entered was the first of its class in the queue; the queue holds all that wait."""
        queued = [r for r in self.live if r.state in (RequestState.WAITING, RequestState.PREEMPTED)]
        for request in plan.entered:
            promoted, priority, sequence = request.rank
            older = [r for r in queued if r.priority == priority and r.rank[2] < sequence]
            assert not promoted or not older, f"{request} was admitted before {older}"


class Machine(RuleBasedStateMachine):
    """Hypothesis chooses the world and the operations, and shrinks what fails."""

    @initialize(
        num_blocks=st.integers(8, 30),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 24),
        prefix_cache=st.sampled_from([True, True, False]),
    )
    def build(self, num_blocks: int, max_num_seqs: int, budget: int, prefix_cache: bool) -> None:
        self.world = World(
            num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=budget, prefix_cache=prefix_cache
        )

    @rule(
        family=st.integers(0, 3),
        length=st.integers(1, 24),
        max_tokens=st.integers(1, 30),
        priority=st.integers(0, 2),
        credit=st.sampled_from([0, 1, 2, 5, UNLIMITED, UNLIMITED]),
    )
    def submit(self, family: int, length: int, max_tokens: int, priority: int, credit: int) -> None:
        self.world.submit(
            family=family, length=length, max_tokens=max_tokens, priority=priority, credit=credit
        )

    @rule(times=st.integers(1, 4), drafts=st.none() | st.integers(0, 999))
    def launch_and_settle(self, times: int, drafts: int | None) -> None:
        for _ in range(times):
            self.world.launch(None if drafts is None else random.Random(drafts))
            self.world.settle()

    @rule(drafts=st.none() | st.integers(0, 999))
    def launch(self, drafts: int | None) -> None:
        self.world.launch(None if drafts is None else random.Random(drafts))

    @rule()
    def settle(self) -> None:
        self.world.settle()

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.cancel(data.draw(st.sampled_from(self.world.live)))

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.world.preempt(data.draw(st.sampled_from(self.world.live)))

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), more=st.integers(0, 6))
    def grant(self, data: st.DataObject, more: int) -> None:
        self.world.grant(data.draw(st.sampled_from(self.world.live)), more)

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "world"):
            self.world.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


TestAnyHistory = Machine.TestCase
TestAnyHistory.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("mode", ["immediate", "overlapped", "any interleaving", "drafting"])
def test_ten_thousand_random_operations(mode: str) -> None:
    """One seeded history, long enough to reach rare corners; the corners reached are asserted."""
    rng = random.Random(20_261)
    world = World(num_blocks=18, max_num_seqs=6, budget=20, prefix_cache=True)
    depth = 1 if mode == "overlapped" else 0
    for _ in range(10_000):
        act = rng.random()
        if act < 0.22:
            world.submit(
                family=rng.randrange(4),
                length=rng.randrange(1, 25),
                max_tokens=rng.randrange(1, 30),
                priority=rng.randrange(3),
                credit=rng.choice([0, 1, 3, 8, UNLIMITED, UNLIMITED]),
            )
        elif act < 0.75:
            if mode == "any interleaving":
                if rng.random() < 0.5:
                    world.launch()
                else:
                    world.settle()
            elif mode == "drafting":
                world.launch(rng)
                if rng.random() < 0.7:
                    world.settle()
            else:
                launched = world.launch()
                while world.loop.in_flight > (depth if launched else 0):
                    world.settle()
        elif world.live:
            request = rng.choice(world.live)
            if act < 0.78:
                world.cancel(request)
            elif act < 0.81:
                world.preempt(request)
            else:
                world.grant(request, rng.randrange(7))
        world.scheduler.check_integrity()
    world.drain()
    assert len(world.requests) > 500
    counters = world.scheduler.counters
    assert counters.prefix_hits > 1_000
    world.seen["yielded"] = counters.preemptions - world.seen["preempted"]
    rare = {"refused", "copies", "cancelled", "returned", "preempted", "yielded"}
    rare |= {"overlapped"} if mode != "immediate" else set()
    rare |= {"drafted"} if mode == "drafting" else set()
    assert min(world.seen[name] for name in rare) > 10, world.seen
