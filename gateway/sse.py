"""Server-sent events for one answer (HTML standard, section 9.2): each step's piece from its stream to the transport.

Head, events and end are written by the callbacks that bring them; the request's task sleeps but for slow sockets. Above
the transport's high-water mark pieces wait in their logs and go out merged once it has drained, and then count as
taken. Knows no API; openai/respond.py runs it with a Shape.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter

from headrace.gateway.cork import Cork
from headrace.gateway.deadlines import Deadlines
from headrace.gateway.errors import ApiError
from headrace.gateway.jobs import Job
from headrace.gateway.openai.shape import ChunkFrame, Shape, usage
from headrace.gateway.sse_head import SseHead, keeps_alive
from headrace.gateway.stream import Outcome, Stream
from headrace.gateway.token_log import Event, merge

log = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
LAST_CHUNK = b"0\r\n\r\n"  # RFC 9112, section 7.1
WAITING = "waiting"  # for the first token; nothing is written
LIVE = "live"
SLOW = "slow"  # the transport is above its high-water mark
CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SseRules:
    """What all answers of a worker have in common."""

    cork: Cork
    head: SseHead
    silence: Deadlines  # half the silence that proxies must not hear: looked at twice, it is never exceeded
    stall_s: float  # a socket that takes nothing for so long is given up


class Sent(web.StreamResponse):
    """What aiohttp gets for an answer that is on the transport already."""

    def __init__(self, *, reusable: bool) -> None:
        super().__init__()
        self._reusable = reusable

    @property
    def keep_alive(self) -> bool:
        return self._reusable

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing is left to write."""


class SseAnswer:
    """The streaming answer to one request.

    Args:
        request: of which the answer is.
        job: with the order of choices.
        streams: one per choice, not yet started.
        shape: of the chunks.
        rules: head, keep-alive and limits.
    """

    def __init__(
        self, request: web.Request, job: Job, streams: Sequence[Stream], shape: Shape, rules: SseRules
    ) -> None:
        assert request.transport is not None
        self._request = request
        self._transport: asyncio.Transport = request.transport
        self._job = job
        self._streams = streams
        self._shape = shape
        self._rules = rules
        self._chunked = request.version >= HttpVersion11
        self.state = WAITING
        self.num_slow = 0  # times the socket fell behind
        self.sinks = [_Choice(self, i, stream, shape) for i, stream in enumerate(streams)]
        self._seqs = [0] * len(streams)  # newest event written, per choice
        self._head = b""  # to be written with the first events
        self._pending: list[bytes] = []  # events of this turn of the loop
        self._error: ApiError | None = None
        self._missing = len(streams)
        self._complete = False  # the end is pending or written
        self._waiter: asyncio.Future[None] | None = None
        self._last_write = monotonic()

    async def run(self) -> web.StreamResponse:
        """Sleep until the answer is written; the streams have been started.

        The head waits for the first token, so that a failure before it is a proper status, but no longer than half a
        keep-alive interval: a proxy would take the silence for death.

        Raises:
            ApiError: the first failure, if nothing was sent yet.
        """
        self._rules.silence.add(self)
        try:
            while not self._complete or self._pending:
                if self._error is not None and self.state == WAITING:
                    raise self._error
                if self.state == SLOW:
                    await self._drained()
                    self.state = LIVE
                    self._catch_up()
                else:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
                if self.state == CLOSED:
                    raise ConnectionResetError("the client is gone")
            if self._request.protocol.writing_paused:
                await self._drained()
        finally:
            self.state = CLOSED
            self._rules.silence.discard(self)
            self.sinks = []  # they know the answer; without the cycle they are freed at once
        return Sent(reusable=keeps_alive(self._request))

    def begin(self) -> None:
        """Write head and opening chunks, ahead of whatever is written next."""
        self.state = LIVE
        self._head = self._rules.head.make(self._request)
        for sink in self.sinks:
            opening = self._shape.opening(sink.index)
            if opening:
                self.write(b"data: %b\n\n" % opening)

    def write(self, event: bytes) -> None:
        """Have an event written at the end of this turn; called only while live."""
        if not self._pending:
            self._rules.cork.add(self)
        self._pending.append(event)

    def flush(self) -> None:
        """Hand this turn's events to the transport, framed as one HTTP chunk."""
        if self.state == CLOSED:
            return
        payload = b"".join(self._pending)
        self._pending.clear()
        if self._chunked:
            last = LAST_CHUNK if self._complete else b""
            payload = b"%b%x\r\n%b\r\n%b" % (self._head, len(payload), payload, last)
        elif self._head:
            payload = self._head + payload
        self._head = b""
        try:
            if not self._transport.is_closing():
                self._transport.write(payload)
        except (RuntimeError, OSError):  # uvloop raises on a transport that closed within this turn
            self.state = CLOSED
            self.wake()
            return
        self._last_write = monotonic()
        if self._complete:
            self.wake()
        elif self._request.protocol.writing_paused:
            self.state = SLOW
            self.num_slow += 1
            self.wake()

    def event(self, index: int, seq: int, chunk: bytes) -> bytes:
        """One numbered event of a choice.

        Its id is what a client sends back as Last-Event-ID: the newest number of each choice, comma-separated.
        """
        seqs = self._seqs
        if len(seqs) == 1:
            return b"id: %d\ndata: %b\n\n" % (seq, chunk)
        seqs[index] = seq
        return b"id: %b\ndata: %b\n\n" % (b",".join([b"%d" % seq for seq in seqs]), chunk)

    def wake(self) -> None:
        """Have `run` look at the state."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def overdue(self) -> None:
        """Half an interval has passed: say something, unless something was said."""
        if self.state == WAITING and self._error is None:
            self.begin()
            if not self._pending:
                self.write(KEEP_ALIVE)
        elif self.state == LIVE and monotonic() - self._last_write >= self._rules.silence.after_s:
            self.write(KEEP_ALIVE)
        self._rules.silence.add(self)

    def ended(self, sink: "_Choice", error: ApiError | None) -> None:
        """A choice has ended; a failure ends the others too."""
        if self._error is not None:
            return
        self._missing -= 1
        if error is not None:
            self._error = error
            self._missing = 0
            for stream in self._streams:
                stream.cancel()
            if self.state == WAITING:
                self.wake()
                return
        elif self.state == WAITING:
            self.begin()
        if self.state == LIVE:
            if self._missing:
                sink.close()
            else:
                self._end()

    def _end(self) -> None:
        """After the last token: reasons, usage, or the error; then the mark that OpenAI's clients wait for."""
        self._complete = True
        if self._error is not None:
            self.write(b"data: %b\n\n" % self._error.to_json() + DONE)
            return
        parts = [sink.closing() for sink in self.sinks if not sink.closed]
        if self._job.request.include_usage:
            outcomes = [sink.outcome for sink in self.sinks if sink.outcome is not None]
            parts.append(b"data: %b\n\n" % self._shape.usage_chunk(usage(self._job, outcomes)))
        self.write(b"".join([*parts, DONE]))

    async def _drained(self) -> None:
        """Until the transport is below its low-water mark."""
        try:
            async with asyncio.timeout(self._rules.stall_s):
                await self._request.writer.drain()
        except TimeoutError:
            self._transport.abort()
            message = f"the reader took nothing for {self._rules.stall_s:g} s"
            raise ConnectionResetError(message) from None

    def _catch_up(self) -> None:
        """Write what waits in the logs, one merged event per choice, and the end if it has come."""
        for sink in self.sinks:
            sink.catch_up()
        if not self._missing:
            self._end()


class _Choice:
    """The sink of one choice."""

    __slots__ = ("_answer", "_frame", "_shape", "_stream", "_written", "closed", "index", "outcome")

    def __init__(self, answer: SseAnswer, index: int, stream: Stream, shape: Shape) -> None:
        self.index = index
        self.outcome: Outcome | None = None
        self.closed = False  # its finish_reason is out
        self._answer = answer
        self._stream = stream
        self._shape = shape
        self._frame: ChunkFrame = shape.frame(index)
        self._written = 0  # newest event handed over

    def write(self, events: Sequence[Event]) -> None:
        answer = self._answer
        if answer.state == WAITING:
            answer.begin()
        if answer.state == LIVE:
            answer.write(self._event(events[0] if len(events) == 1 else merge(list(events))))
        elif self._stream.log.cut > self._written:
            answer.ended(self, ApiError(500, "the reader fell too far behind", code="reader_too_slow"))

    def finish(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._answer.ended(self, outcome.error)

    def catch_up(self) -> None:
        """The answer is live again: write what waits, the end included."""
        if self._stream.log.cut > self._written:
            return  # the answer ends with an error
        events = self._stream.log.since(self._written)
        if events:
            self._answer.write(self._event(merge(events)))
        if self.outcome is not None and self.outcome.error is None:
            self.close()

    def close(self) -> None:
        """Write the finish_reason now, while other choices go on."""
        if not self.closed:
            self._answer.write(self.closing())

    def closing(self) -> bytes:
        """The event with the finish_reason."""
        assert self.outcome is not None
        self.closed = True
        return self._answer.event(self.index, self.outcome.seq, self._shape.closing(self.index, self.outcome))

    def _event(self, event: Event) -> bytes:
        """Serialise an event that will certainly be written; it counts as taken."""
        seq, text, _, _, logprobs = event
        if logprobs is None:
            chunk = self._frame.fill(text)
        else:
            chunk = self._frame.fill_both(text, self._shape.logprobs(logprobs))
        self._written = seq
        self._stream.acknowledge(seq)
        return self._answer.event(self.index, seq, chunk)
