"""Holds one load against a server for a while, and returns the run. Open loop or closed loop, warm-up and drain.

Owns the users' tasks. Knows no transport; the clock is time.perf_counter.
"""

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import tee
from math import inf
from time import perf_counter
from typing import Any

from headrace.loadtest.arrivals import ClosedLoop, Load, OpenLoop, describe, times
from headrace.loadtest.client import Client
from headrace.loadtest.conversation import Asking, play
from headrace.loadtest.exchange import Exchange
from headrace.loadtest.lag import LagMeter
from headrace.loadtest.record import Health, Latency, Run
from headrace.loadtest.recorder import Recorder, Window
from headrace.loadtest.slo import Slo
from headrace.loadtest.workload import Session

LATE_S = 0.010  # a client that is later than this at the 99th percentile is part of what it measures
BUSY_SHARE = 0.85  # of a core


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a run is: until `duration_s` is over, `requests` were sent, or the sessions have run out."""

    duration_s: float = inf
    requests: int = 0  # 0 = no limit
    warmup_s: float = 0.0  # of the duration, not counted
    drain_s: float = 30.0  # what still runs at the end may take so long
    max_open: int = 16384  # sessions; one more is counted as not sent


class Driver:
    """One run. `recorder` and `lag` may be read while it goes on."""

    def __init__(
        self,
        client: Client,
        sessions: Iterator[Session],
        load: Load,
        limits: Limits,
        asking: Asking,
        slo: Slo,
    ) -> None:
        self.client = client
        self.lag = LagMeter()
        self.load = load
        self.interrupted = False
        self.limits = limits
        self._sessions = sessions
        self._asking = asking
        self._slo = slo
        self._tasks: set[asyncio.Task[None]] = set()
        self._claimed = 0
        self._ended: float | None = None  # when the run was ended before its sessions
        self._bug: BaseException | None = None
        self._stopped = asyncio.Event()  # nothing new
        self.start = perf_counter()
        bucket_s = 0.5 if limits.duration_s == inf else min(5.0, max(0.25, limits.duration_s / 500))
        self.window = Window(
            self.start, self.start + limits.warmup_s, self.start + max(limits.duration_s, limits.warmup_s)
        )
        self.recorder = Recorder(self.window, slo, bucket_s)

    async def run(self) -> Run:
        """Hold the load to its end."""
        started = datetime.now(UTC).isoformat(timespec="seconds")
        self.lag.start()
        source = asyncio.get_running_loop().create_task(self._source())
        idle = asyncio.get_running_loop().create_task(self._until_idle(source))
        stopped = asyncio.get_running_loop().create_task(self._stopped.wait())
        timeout = None if self.limits.duration_s == inf else self.limits.duration_s
        try:
            await asyncio.wait({idle, stopped}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not idle.done():
                self._ended = perf_counter() if self.interrupted else self.window.end
        finally:
            self._stopped.set()
            for task in (source, idle, stopped):
                task.cancel()
            await asyncio.wait({source, idle, stopped})
            await self._drain()
            cpu_share = await self.lag.stop()
            self.recorder.fold()
        if not source.cancelled():
            source.result()
        if self._bug is not None:
            raise self._bug
        return self._result(started, cpu_share)

    def stop(self) -> None:
        """End the run now: what still runs is cut, the figures so far are the result."""
        self.interrupted = True
        self._stopped.set()

    async def _source(self) -> None:
        """Start users as the load says."""
        if isinstance(self.load, ClosedLoop):
            for index in range(self.load.users):
                due = self.start + self.load.ramp_s * index / self.load.users
                await _sleep_until(due)
                self._begin(self._user())
            return
        sessions = self._sessions
        trace: Iterator[float | None] = iter(())
        if not self.load.rate:
            sessions, copies = tee(self._sessions)
            trace = (session.at for session in copies)
        for at in times(self.load, trace):
            due = self.start + at
            await _sleep_until(due)
            session = next(sessions, None)
            if session is None or self._full():
                return
            if len(self._tasks) >= self.limits.max_open:
                self._not_sent(session, due)
            else:
                self._begin(self._play(session, due))

    async def _user(self) -> None:
        """One user of a closed loop: the next session begins when one has ended."""
        while not self._full():
            session = next(self._sessions, None)
            if session is None:
                return
            await self._play(session, perf_counter())

    async def _play(self, session: Session, intended: float) -> None:
        await play(session, intended, self.client, self._asking, self._claim, self.recorder.add)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._gone)

    def _gone(self, task: "asyncio.Task[None]") -> None:
        """A user has left; if by a bug of ours, nothing new is begun and `run` raises it."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._bug = self._bug or error
            self._stopped.set()

    async def _until_idle(self, source: "asyncio.Task[None]") -> None:
        """Until nothing more will come and all has ended."""
        await asyncio.wait({source})
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _drain(self) -> None:
        """Let what runs come to its end, then cut it."""
        tasks = set(self._tasks)
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=0 if self.interrupted else self.limits.drain_s)
        for task in late:
            task.cancel()
        await asyncio.wait(tasks)

    def _full(self) -> bool:
        limit = self.limits.requests
        return self._stopped.is_set() or (limit > 0 and self._claimed >= limit)

    def _claim(self) -> bool:
        if self._full():
            return False
        self._claimed += 1
        return True

    def _not_sent(self, session: Session, due: float) -> None:
        call = session.recorded or self._asking.call([], session.turns[0])
        exchange = Exchange(call, due, ended=perf_counter())
        exchange.fail("not_sent", f"{self.limits.max_open} sessions were open already")
        self.recorder.add(exchange)

    def _result(self, started: str, cpu_share: float) -> Run:
        recorder, load = self.recorder, self.load
        end = self._ended or max(recorder.last_end, self.window.begin)
        window_s = max(end - self.window.begin, 1e-9)
        tpot = recorder.latencies["tpot"].quantile(0.5)
        has_slo = bool(str(self._slo))
        return Run(
            load=describe(load),
            users=load.users if isinstance(load, ClosedLoop) else 0,
            rate=load.rate if isinstance(load, OpenLoop) else 0.0,
            started=started,
            window_s=window_s,
            requests=recorder.requests,
            failed=recorder.failed,
            cut=recorder.cut,
            errors=dict(recorder.errors),
            error_samples=recorder.error_samples,
            prompt_tokens=recorder.prompt_tokens,
            cached_tokens=recorder.cached_tokens,
            output_tokens=recorder.output_tokens,
            requests_per_s=recorder.ended_within / window_s,
            input_tokens_per_s=recorder.input_tokens / window_s,
            output_tokens_per_s=recorder.output_tokens / window_s,
            tokens_by_usage=recorder.tokens_by_usage,
            tokens_per_event=recorder.tokens_per_event,
            latencies={name: Latency.of(found) for name, found in recorder.latencies.items()},
            slo=str(self._slo),
            good=recorder.good if has_slo else 0,
            attainment=recorder.good / recorder.requests if has_slo and recorder.requests else None,
            goodput_per_s=recorder.good_within / window_s if has_slo else None,
            interactivity=1 / tpot if tpot > 0 else None,
            series=recorder.series(),
            health=self._health(cpu_share),
        )

    def _health(self, cpu_share: float) -> Health:
        lag, late = Latency.of(self.lag.lag), Latency.of(self.recorder.late)
        reasons = []
        if lag.p99_s is not None and lag.p99_s > LATE_S:
            reasons.append(f"its event loop ran {lag.p99_s * 1e3:.1f} ms late at the 99th percentile")
        if late.p99_s is not None and late.p99_s > LATE_S:
            reasons.append(f"requests were sent {late.p99_s * 1e3:.1f} ms late at the 99th percentile")
        if cpu_share > BUSY_SHARE:
            reasons.append(f"it took {cpu_share:.0%} of a core")
        return Health(
            lag_p50_s=lag.p50_s,
            lag_p99_s=lag.p99_s,
            late_p50_s=late.p50_s,
            late_p99_s=late.p99_s,
            cpu_share=cpu_share,
            connections=self.client.opened,
            reasons=tuple(reasons),
        )


async def _sleep_until(due: float) -> None:
    wait = due - perf_counter()
    while wait > 0:
        await asyncio.sleep(wait)
        wait = due - perf_counter()
