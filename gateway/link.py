"""One engine as a gateway worker sees it: its state, its newest load, and the table of our streams on it.

Knows no routing and no HTTP. The dispatcher owns one per engine address; the socket's callbacks end here.
"""

import asyncio
import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Protocol

from headrace.gateway.handle import Handle
from headrace.gateway.stats import EngineStats
from headrace.ipc.messages import (
    Cancel,
    Credit,
    Finished,
    Goodbye,
    Load,
    Refused,
    Rejected,
    Submit,
    ToEngine,
    ToGateway,
    Tokens,
    Welcome,
)

log = logging.getLogger(__name__)

MAX_STREAM = 2**32 - 1  # stream numbers are uint32 on the wire
MUTED = ("abort", "error")  # outcomes after which the listener hears nothing
# Rows of a step between two turns of the loop, so that the first tokens are on the wire before the last are looked at.
SLICE = 64


class Socket(Protocol):
    """What a link needs of `ipc.sockets.GatewaySocket`."""

    def start(self) -> None: ...
    def send(self, message: ToEngine) -> bool: ...
    def close(self) -> None: ...


Connect = Callable[[str, Callable[[ToGateway], None], Callable[[str, str], None]], Socket]
"""(address, on_message, on_state) -> Socket, not yet started."""


class EngineLink:
    """Streams of one engine, and what it last said about itself.

    Args:
        index: position of the engine in the configuration; its `engine` label.
        address: ZeroMQ address.
        connect: makes the socket.
        on_rejected: called for a generation the engine turned away, with code and message.
    """

    def __init__(
        self,
        index: int,
        address: str,
        connect: Connect,
        on_rejected: Callable[["EngineLink", Handle, str, str], None],
    ) -> None:
        self.index = index
        self.address = address
        self.state = "connecting"  # connecting | ready | draining | lost | refused
        self.reason = "not connected yet"
        self.welcome: Welcome | None = None
        self.load: Load | None = None
        self.stats = EngineStats()
        self._on_rejected = on_rejected
        self._handles: dict[int, Handle] = {}
        self._ending: dict[int, Handle] = {}  # cancelled, the engine has not confirmed yet
        self._unsent: dict[int, Cancel | Credit] = {}  # found the socket full; the newest of each stream
        self._next_stream = 0
        self._last_step_at = -1.0  # never equal to a handle's 0.0
        self._own_at_load = 0
        self._walk: Iterator[None] | None = None  # of a step whose last rows still wait for their turn
        self._socket = connect(address, self.on_message, self.on_state)

    def start(self) -> None:
        self._socket.start()

    def close(self) -> None:
        self._socket.close()
        self._catch_up()
        self._drop_all("the gateway is closing")

    @property
    def num_streams(self) -> int:
        """Our streams on this engine, those that are ending included."""
        return len(self._handles) + len(self._ending)

    @property
    def pressure(self) -> float:
        """Requests per batch slot: our own, exactly, and the other gateways' as of the newest Load."""
        own = self.num_streams
        if self.load is None or self.welcome is None:
            return float(own)
        reported = self.load.running + self.load.waiting + self.load.parked
        others = max(0, reported - self._own_at_load)
        return (others + own) / max(1, self.welcome.max_num_seqs)

    def submit(self, handle: Handle) -> bool:
        """Send a generation; False = the socket is full and nothing was sent."""
        generation = handle.generation
        stream = self._free_stream()
        message = Submit(
            stream,
            generation.request_id,
            generation.tenant,
            generation.cache_salt,
            generation.priority,
            pack(generation.prompt),
            handle.generated,
            generation.sampling,
            handle.credit,
        )
        if not self._socket.send(message):
            return False
        self._handles[stream] = handle
        handle.engine, handle.stream = self.index, stream
        return True

    def cancel(self, handle: Handle, *, report: bool) -> None:
        """Move the stream out of the walked table: its late tokens find nobody."""
        if self._handles.pop(handle.stream, None) is None:
            if not report and handle.stream in self._ending:
                handle.outcome = "abort"
            return
        handle.outcome = "stop" if report else "abort"
        self._ending[handle.stream] = handle
        self._send_control(Cancel(handle.stream))

    def grant(self, handle: Handle, limit: int) -> None:
        if limit > handle.credit:
            handle.credit = limit
            if handle.stream in self._handles:
                self._send_control(Credit(handle.stream, limit))

    def on_state(self, state: str, reason: str) -> None:
        """The socket's view changed; anything but ready and draining ends our streams here."""
        if (state, reason) != (self.state, self.reason):
            log.info("engine %d (%s): %s%s", self.index, self.address, state, f", {reason}" if reason else "")
        self.state, self.reason = state, reason
        self._catch_up()
        if state not in ("ready", "draining"):
            self.load = None
            self._own_at_load = 0
            self._drop_all(f"engine {self.index} is {state}: {reason}")

    def on_message(self, message: ToGateway) -> None:
        """Whatever the engine sends, in order."""
        self._catch_up()
        match message:
            case Tokens():
                self._walk = self._rows(message)
                self._go_on(self._walk)
            case Load():
                self.load = message
                self._own_at_load = self.num_streams
            case Rejected():
                self._reject(message)
            case Welcome():
                self.welcome = message
            case Refused() | Goodbye():
                pass  # the socket turns both into a state
        if self._unsent:
            self._flush()

    def _go_on(self, walk: Iterator[None]) -> None:
        """Walk the next rows of a step, unless they were walked because something newer came."""
        if walk is not self._walk:
            return
        for _ in walk:
            asyncio.get_running_loop().call_soon(self._go_on, walk)
            return
        self._walk = None

    def _catch_up(self) -> None:
        """Walk what is left of a step at once: a gateway that is behind must not fall further behind."""
        walk, self._walk = self._walk, None
        if walk is not None:
            for _ in walk:
                pass

    def _rows(self, message: Tokens) -> Iterator[None]:
        """Walk the rows of one step, in slices. The gateway's hot path: nothing per token but the slice of ids."""
        now = monotonic()
        previous, self._last_step_at = self._last_step_at, now
        streams = memoryview(message.streams).cast("I").tolist()
        starts = memoryview(message.starts).cast("I").tolist()
        ids = memoryview(message.token_ids).cast("i").tolist()
        logprobs = {entry.row: entry for entry in message.logprobs}
        handles, stats = self._handles, self.stats
        at = steady = late = 0
        for row, (stream, start, count) in enumerate(zip(streams, starts, message.counts, strict=True)):
            first, at = at, at + count
            if row % SLICE == 0 and row:
                yield
            handle = handles.get(stream)
            if handle is None:
                late += count
                continue
            # Most rows had their last token in the step before: one shared interval, counted once below.
            if handle.last_token_at == previous and count == 1:
                steady += 1
            elif handle.last_token_at:
                stats.inter_token.observe((now - handle.last_token_at) / count, count)
            else:
                stats.time_to_first.observe(now - handle.submitted_at)
            handle.last_token_at = now
            try:
                handle.on_tokens(start, ids[first:at], logprobs.get(row) if logprobs else None)
            except Exception as error:  # noqa: BLE001 - a listener's bug ends its own stream only
                self._fail(handle, error)
        if steady:
            stats.inter_token.observe(now - previous, steady)
        stats.generation_tokens += at - late
        stats.late_tokens += late
        for finished in message.finished:
            self._finish(finished, now)

    def _finish(self, finished: Finished, now: float) -> None:
        handle = self._handles.pop(finished.stream, None) or self._ending.pop(finished.stream, None)
        if handle is None:
            return
        self._unsent.pop(finished.stream, None)
        handle.engine = -1
        reason = handle.outcome or ("abort" if finished.reason == "cancelled" else finished.reason)
        self.stats.on_finished(reason, handle.generation.tenant, finished.usage, now - handle.submitted_at)
        if handle.outcome in MUTED:
            return
        if handle.outcome == "stop":
            finished = replace(finished, reason="stop")
        self._call(handle, lambda: handle.listener.on_finished(finished))

    def _reject(self, rejected: Rejected) -> None:
        handle = self._handles.pop(rejected.stream, None) or self._ending.pop(rejected.stream, None)
        if handle is None:
            return
        self._unsent.pop(rejected.stream, None)
        handle.engine = -1
        if handle.outcome not in MUTED:
            self._call(handle, lambda: self._on_rejected(self, handle, rejected.code, rejected.message))

    def _drop_all(self, message: str) -> None:
        lost = [*self._handles.values(), *(h for h in self._ending.values() if h.outcome not in MUTED)]
        self._handles.clear()
        self._ending.clear()
        self._unsent.clear()
        self.stats.lost += len(lost)
        for handle in lost:
            handle.engine = -1
        for handle in lost:
            self._call(handle, partial(handle.listener.on_lost, message))

    def _fail(self, handle: Handle, error: Exception) -> None:
        """A listener raised in the walk: its generation ends, the others never notice."""
        self.stats.listener_errors += 1
        log.error("request %s: its listener failed", handle.generation.request_id, exc_info=error)
        self.cancel(handle, report=False)
        handle.outcome = "error"
        self._call(handle, lambda: handle.listener.on_lost("internal error in the gateway"))

    def _call(self, handle: Handle, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            self.stats.listener_errors += 1
            log.exception("request %s: its listener failed", handle.generation.request_id)

    def _free_stream(self) -> int:
        while True:
            self._next_stream = self._next_stream % MAX_STREAM + 1
            if self._next_stream not in self._handles and self._next_stream not in self._ending:
                return self._next_stream

    def _send_control(self, message: Cancel | Credit) -> None:
        """Send now or, the socket being full, with the next message that comes in. One per stream is kept."""
        if message.stream in self._unsent or not self._socket.send(message):
            self._unsent[message.stream] = message

    def _flush(self) -> None:
        for stream, message in list(self._unsent.items()):
            if not self._socket.send(message):
                return
            del self._unsent[stream]


def pack(token_ids: Sequence[int] | bytes) -> bytes:
    """Token ids as the wire has them: int32, little-endian (every host that torch runs on)."""
    return token_ids if isinstance(token_ids, bytes) else array("i", token_ids).tobytes()
