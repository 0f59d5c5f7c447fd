"""Measures one front end at one number of streams: tokens per second, CPU per token, added delay, memory.

The client runs in this process, on its own core. bench_gateway.py repeats and compares.
"""

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from secrets import token_hex
from time import perf_counter, process_time

import numpy as np
from numpy.typing import NDArray

from headrace.loadtest.client import Client, SseClient, Target
from headrace.loadtest.client_ws import WsClient
from headrace.loadtest.exchange import Call, Exchange
from headrace.loadtest.fleet import MODEL, Fleet, Front, cpu_seconds, resident_bytes

WARMUP_S = 1.0  # after every stream has begun
BEGIN_S = 10.0  # that streams may take to begin
PROMPT = "the mill by the river turns when the water comes down the hill"


class NothingCame(RuntimeError):
    """No stream brought a token; the message has the first error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`streams` at a time, each followed by the next as it ends."""

    transport: str  # sse | ws
    streams: int
    output_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measurement. Shares are of one core."""

    tokens_per_s: float
    tokens_per_event: float
    server_us: float  # CPU of the front end's workers together, per token
    server_share: float  # of them together
    busiest: float  # the busiest worker's part of that
    client_share: float
    engine_share: float
    failed: int
    delay_p50_ms: float | None = None  # from the engine's step to the client; when the engine is paced
    delay_p99_ms: float | None = None


async def measure(fleet: Fleet, front: Front, load: Load, *, paced: bool) -> Point:
    """Hold the load, count what arrives within the window.

    Raises:
        NothingCame: no token arrived.
    """
    client = _client(front, load)
    ended: list[Exchange] = []
    users = [asyncio.ensure_future(_user(client, load.output_tokens, ended)) for _ in range(load.streams)]
    gc.collect()
    gc.freeze()
    await _all_speak(client, load.streams)
    await asyncio.sleep(WARMUP_S)
    begin = perf_counter()
    before = (process_time(), cpu_seconds(fleet.engine_pid), *map(cpu_seconds, front.pids))
    await asyncio.sleep(load.seconds)
    after = (process_time(), cpu_seconds(fleet.engine_pid), *map(cpu_seconds, front.pids))
    end = perf_counter()
    for user in users:
        user.cancel()
    await asyncio.wait(users)
    await client.close()
    own, engine, *workers = (b - a for a, b in zip(before, after, strict=True))
    server = sum(workers)
    tokens, per_event = _tokens(ended, begin, end)
    if not tokens:
        detail = next((f"{e.error}: {e.detail}" for e in ended if e.error), "nothing was sent")
        raise NothingCame(f"{front.kind.label} over {load.transport}: {detail}")
    delays = _delays(ended, fleet.steps(), begin, end) if paced else None
    return Point(
        tokens_per_s=tokens / (end - begin),
        tokens_per_event=per_event,
        server_us=server / tokens * 1e6,
        server_share=server / (end - begin),
        busiest=max(workers) / server,
        client_share=own / (end - begin),
        engine_share=engine / (end - begin),
        failed=sum(1 for exchange in ended if exchange.error and exchange.ended <= end),
        delay_p50_ms=None if delays is None else float(np.quantile(delays, 0.5)) * 1e3,
        delay_p99_ms=None if delays is None else float(np.quantile(delays, 0.99)) * 1e3,
    )


async def idle_bytes(front: Front, transport: str, streams: int) -> float:
    """Memory that one open stream takes, once its first token has come; the engine should be slow.

    Raises:
        NothingCame: the streams could not all be opened.
    """
    client = _client(front, Load(transport=transport, streams=streams, output_tokens=100_000, seconds=0))
    ended: list[Exchange] = []
    before = sum(map(resident_bytes, front.pids))
    users = []
    for _ in range(streams):
        users.append(asyncio.ensure_future(_user(client, 100_000, ended)))
        if len(users) % 100 == 0:
            await asyncio.sleep(0.02)  # or the listen queue overflows
    # One look a tenth of a second at all of them costs less than an event in each.
    while not ended and sum(1 for exchange in client.exchanges if exchange.arrivals) < streams:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    grown = sum(map(resident_bytes, front.pids)) - before
    failed = next((f"{exchange.error}: {exchange.detail}" for exchange in ended), "")
    for user in users:
        user.cancel()
    await asyncio.wait(users)
    await client.close()
    if failed:
        raise NothingCame(f"{front.kind.label}: {failed}")
    return grown / streams


async def _all_speak(client: Client, streams: int) -> None:
    """Until as many streams have had a token, or until it is clear that not all will."""
    deadline = perf_counter() + BEGIN_S
    while perf_counter() < deadline:
        # A request of a short answer may just be between two.
        if sum(1 for exchange in client.exchanges if exchange.arrivals) >= 0.9 * streams:
            return
        await asyncio.sleep(0.05)


def _client(front: Front, load: Load) -> Client:
    target = Target(url=front.url, model=MODEL)
    if load.transport == "ws":
        return WsClient(target, streams=64)
    return SseClient(target)


async def _user(client: Client, output_tokens: int, ended: list[Exchange]) -> None:
    name = token_hex(6)
    for number in count():
        body = {
            # No two alike: a front end that remembers prompts shall not profit.
            "messages": [{"role": "user", "content": f"{name} {number} {PROMPT}"}],
            "max_tokens": output_tokens,
            "ignore_eos": True,
        }
        exchange = Exchange(Call("chat", body), perf_counter())
        try:
            await client.send(exchange)
        finally:
            ended.append(exchange)
        if exchange.error:
            await asyncio.sleep(0.1)


def _tokens(ended: Sequence[Exchange], begin: float, end: float) -> tuple[float, float]:
    """Tokens that arrived within the window, and tokens per event; where a stream was cut, an event is a token."""
    tokens, events, all_tokens = 0.0, 0, 0
    for exchange in ended:
        times = np.array(exchange.arrivals)
        if not len(times):
            continue
        within = int(((times >= begin) & (times < end)).sum())
        tokens += within * exchange.tokens / len(times)
        events += len(times)
        all_tokens += exchange.tokens
    return tokens, all_tokens / events if events else 1.0


def _delays(
    ended: Sequence[Exchange], steps: NDArray[np.float64], begin: float, end: float
) -> NDArray[np.float64] | None:
    """From the end of the step that made a token to its arrival, seconds; None if no stream tells.

    A stream gets one token a step, so its events belong to consecutive steps; which ones, its earliest event says:
    the latest run of steps that no event precedes.
    """
    found = []
    for exchange in ended:
        times = np.array(exchange.arrivals)
        if len(times) < 2:
            continue
        first = int(np.searchsorted(steps, times[0])) - 1
        while first >= 0:
            made = steps[first : first + len(times)]
            delays = times[: len(made)] - made
            if delays.min(initial=0.0) >= 0:
                found.append(delays[(times[: len(made)] >= begin) & (times[: len(made)] < end)])
                break
            first -= 1
    return np.concatenate(found) if found and sum(map(len, found)) else None
