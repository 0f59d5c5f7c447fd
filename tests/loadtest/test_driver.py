"""Loads against a client that answers as the test says: who is sent when, what is counted, what is cut."""

import asyncio
from collections.abc import Iterator
from itertools import count
from math import inf
from time import perf_counter

import pytest

from headrace.loadtest.arrivals import ClosedLoop, Load, OpenLoop
from headrace.loadtest.conversation import Asking
from headrace.loadtest.driver import Driver, Limits
from headrace.loadtest.exchange import Call, Exchange
from headrace.loadtest.record import Run
from headrace.loadtest.slo import Slo
from headrace.loadtest.workload import Session, Turn


class FakeClient:
    """Answers "abc" after `delay_s`; the first `stalled` requests only when `release` is set."""

    def __init__(self, delay_s: float = 0.0, stalled: int = 0) -> None:
        self.opened = 1
        self.exchanges: set[Exchange] = set()
        self.calls: list[Call] = []
        self.most_open = 0
        self.release = asyncio.Event()
        self._delay_s = delay_s
        self._stalled = stalled

    async def send(self, exchange: Exchange) -> None:
        exchange.sent = perf_counter()
        self.exchanges.add(exchange)
        self.calls.append(exchange.call)
        self.most_open = max(self.most_open, len(self.exchanges))
        try:
            if len(self.calls) <= self._stalled:
                await self.release.wait()
            await asyncio.sleep(self._delay_s)
            exchange.arrivals.append(perf_counter())
            exchange.pieces.append(b"abc")
        finally:
            exchange.ended = perf_counter()
            self.exchanges.discard(exchange)

    async def close(self) -> None:
        pass


def sessions(num_turns: int = 1) -> Iterator[Session]:
    for index in count():
        yield Session(tuple(Turn(f"say {index} {turn}", 3) for turn in range(num_turns)))


async def drive(
    client: FakeClient, load: Load, limits: Limits, source: Iterator[Session] | None = None
) -> Run:
    driver = Driver(client, source or sessions(), load, limits, Asking(), Slo(ttft=10.0))
    return await driver.run()


async def test_a_closed_loop_keeps_its_users_busy_and_never_more() -> None:
    client = FakeClient()
    run = await drive(client, ClosedLoop(users=3), Limits(requests=20))
    assert len(client.calls) == run.requests == 20
    assert client.most_open == 3
    assert (run.failed, run.good, run.attainment) == (0, 20, 1.0)


async def test_an_open_loop_sends_whatever_is_still_open() -> None:
    client = FakeClient(stalled=1000)
    limits = Limits(requests=30)
    task = asyncio.ensure_future(drive(client, OpenLoop(rate=2000), limits))
    while len(client.calls) < 30:  # noqa: ASYNC110 - the client is the test's own
        await asyncio.sleep(0.001)
    assert client.most_open == 30
    client.release.set()
    assert (await task).requests == 30


async def test_waiting_for_a_stalled_server_is_in_the_figures() -> None:
    """Coordinated omission: an event loop that is blocked sends late, and the intended time does not forgive it."""
    client = FakeClient()
    driver = Driver(client, sessions(), OpenLoop(rate=200, seed=1), Limits(requests=20), Asking(), Slo())
    asyncio.get_running_loop().call_later(0.01, _block, 0.3)
    run = await driver.run()
    ttft, as_sent = run.latencies["ttft"], run.latencies["ttft_sent"]
    assert ttft.max_s is not None
    assert as_sent.p50_s is not None
    assert ttft.max_s > 0.15 > as_sent.p50_s
    assert any("event loop" in reason for reason in run.health.reasons)
    assert any("were sent" in reason for reason in run.health.reasons)


def _block(seconds: float) -> None:
    until = perf_counter() + seconds
    while perf_counter() < until:
        pass


async def test_what_still_runs_after_the_drain_is_cut_and_no_failure() -> None:
    client = FakeClient(stalled=2)
    run = await drive(client, ClosedLoop(users=2), Limits(duration_s=0.05, drain_s=0.0))
    assert (run.requests, run.failed, run.cut) == (0, 0, 2)
    assert run.attainment is None
    assert not client.exchanges


async def test_the_drain_waits_for_what_runs_and_begins_nothing() -> None:
    client = FakeClient(stalled=2)
    asyncio.get_running_loop().call_later(0.15, client.release.set)
    run = await drive(client, ClosedLoop(users=2), Limits(duration_s=0.05, drain_s=30.0))
    assert (run.requests, run.cut, len(client.calls)) == (2, 0, 2)
    assert run.window_s == pytest.approx(0.05)


async def test_a_run_that_is_stopped_keeps_its_figures() -> None:
    client = FakeClient()
    driver = Driver(client, sessions(), ClosedLoop(users=2), Limits(duration_s=60), Asking(), Slo())
    asyncio.get_running_loop().call_later(0.1, driver.stop)
    run = await driver.run()
    assert driver.interrupted
    assert run.requests > 0
    assert run.window_s < 10


async def test_sessions_beyond_the_limit_are_counted_as_not_sent() -> None:
    client = FakeClient(stalled=1000)
    asyncio.get_running_loop().call_later(0.2, client.release.set)
    run = await drive(client, OpenLoop(rate=1000), Limits(duration_s=0.1, max_open=5))
    assert len(client.calls) == 5
    assert run.errors["not_sent"] == run.failed == run.requests - 5


async def test_a_run_ends_with_its_sessions() -> None:
    client = FakeClient()
    run = await drive(client, ClosedLoop(users=4), Limits(duration_s=inf), iter(list(_some(7))))
    assert run.requests == 7
    assert run.window_s < 5


def _some(number: int) -> Iterator[Session]:
    for session, _ in zip(sessions(), range(number), strict=False):
        yield session


async def test_a_trace_is_sent_at_its_times() -> None:
    client = FakeClient()
    trace = [Session((Turn("x", 1),), at=at) for at in (0.0, 0.02, 0.1)]
    driver = Driver(client, iter(trace), OpenLoop(rate=0, speed=2), Limits(), Asking(), Slo())
    run = await driver.run()
    assert run.requests == 3
    assert 0.05 <= run.window_s < 2


async def test_a_turn_carries_the_real_answers_before_it() -> None:
    client = FakeClient()
    source = iter([Session((Turn("one", 3), Turn("two", 4)), system="be brief")])
    await drive(client, ClosedLoop(users=1), Limits(), source)
    assert [call.body["max_tokens"] for call in client.calls] == [3, 4]
    assert client.calls[1].body["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "abc"},
        {"role": "user", "content": "two"},
    ]


async def test_a_bug_in_the_client_ends_the_run_with_its_error() -> None:
    class Broken(FakeClient):
        async def send(self, exchange: Exchange) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await drive(Broken(), ClosedLoop(users=2), Limits(requests=4))
