"""Server-sent events for one answer: each engine step's piece goes from its stream to the transport, no task between.

A transport above its high-water mark makes the answer slow: its streams' pieces wait in their logs and go out merged
once the socket has drained, which is also when they count as taken. The format is that of the HTML standard,
section 9.2. Knows no API; openai/respond.py runs it with a Shape.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from time import monotonic

from aiohttp import HttpVersion11, web

from headrace.gateway.cork import Cork
from headrace.gateway.errors import ApiError
from headrace.gateway.jobs import Job
from headrace.gateway.openai.shape import ChunkFrame, Shape, usage
from headrace.gateway.stream import Outcome, Stream
from headrace.gateway.token_log import Event, merge

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the events otherwise
}
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
WAITING = "waiting"  # for the first token, or for headers to be sent
LIVE = "live"
SLOW = "slow"  # the transport is above its high-water mark
CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SseRules:
    """What all answers of a worker have in common."""

    cork: Cork
    keepalive_s: float  # silence after which a comment is sent
    stall_s: float  # a socket that takes nothing for so long is given up


class SseResponse(web.StreamResponse):
    """Its headers leave together with the first events, as those of aiohttp's own Response do."""

    _send_headers_immediately = False


class SseAnswer:
    """The streaming answer to one request.

    Args:
        request: of which the answer is.
        job: with the order of choices.
        streams: one per choice, not yet started.
        shape: of the chunks.
        rules: keep-alive and limits.
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
        self._pending: list[bytes] = []  # events of this turn of the loop
        self._error: ApiError | None = None
        self._missing = len(streams)
        self._wake = asyncio.Event()
        self._last_write = monotonic()

    async def run(self) -> web.StreamResponse:
        """Write the answer to its end; the streams have been started.

        Headers wait for the first token, so that a failure before it is a proper status, but no longer than one
        keep-alive interval: a proxy would take the silence for death.

        Raises:
            ApiError: the first failure, if no header was sent yet.
        """
        await self._woken(self._rules.keepalive_s)
        if self._error is not None:
            raise self._error
        response = SseResponse(headers=HEADERS)
        await response.prepare(self._request)
        try:
            await self._within_stall(response.write(self._opening()))
            self.state = LIVE
            self._catch_up()  # with what came meanwhile
            await self._pump()
            await self._within_stall(response.write_eof(b"".join([*self._pending, self._ending()])))
        finally:
            self.state = CLOSED
            self.sinks = []  # they know the answer; without the cycle they are freed at once
        return response

    def write(self, event: bytes) -> None:
        """Have an event written at the end of this turn; called only while live."""
        if not self._pending:
            self._rules.cork.add(self)
        self._pending.append(event)

    def flush(self) -> None:
        """Hand this turn's events to the transport, framed as one HTTP chunk."""
        if self.state != LIVE or not self._missing or not self._pending:
            return  # the end takes them along
        payload = b"".join(self._pending)
        self._pending.clear()
        try:
            if not self._transport.is_closing():
                self._transport.write(b"%x\r\n%b\r\n" % (len(payload), payload) if self._chunked else payload)
        except (RuntimeError, OSError):  # uvloop raises on a transport that closed within this turn
            self.state = CLOSED
            self._wake.set()
            return
        self._last_write = monotonic()
        if self._request.protocol.writing_paused:
            self.state = SLOW
            self.num_slow += 1
            self._wake.set()

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
        self._wake.set()

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
        elif self._missing and self.state == LIVE:
            sink.close()
        self._wake.set()

    def _opening(self) -> bytes:
        """Every choice's opening chunk, then the tokens that have come; a comment where there are neither."""
        openings = [self._shape.opening(sink.index) for sink in self.sinks]
        parts = [b"data: %b\n\n" % chunk for chunk in openings if chunk]
        parts += [event for sink in self.sinks if (event := sink.waiting())]
        return b"".join(parts) or KEEP_ALIVE

    async def _pump(self) -> None:
        """Sleep until the end, but for slow sockets and silence."""
        while self._missing or self.state == SLOW:
            silent = monotonic() - self._last_write
            if self.state == CLOSED:
                raise ConnectionResetError("the client is gone")
            if self.state == SLOW:
                await self._within_stall(self._request.writer.drain())
                self.state = LIVE
                self._catch_up()
            elif silent >= self._rules.keepalive_s:
                self.write(KEEP_ALIVE)
                self.flush()
            else:
                await self._woken(self._rules.keepalive_s - silent)

    async def _within_stall(self, writing: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._rules.stall_s):
                await writing
        except TimeoutError:
            self._transport.abort()
            message = f"the reader took nothing for {self._rules.stall_s:g} s"
            raise ConnectionResetError(message) from None

    def _catch_up(self) -> None:
        """Write what waits in the logs, one merged event per choice."""
        for sink in self.sinks:
            sink.catch_up()

    def _ending(self) -> bytes:
        """After the last token: reasons, usage, or the error; then the mark that OpenAI's clients wait for."""
        if self._error is not None:
            return b"data: %b\n\n" % self._error.to_json() + DONE
        parts = [sink.closing() for sink in self.sinks if not sink.closed]
        if self._job.request.include_usage:
            outcomes = [sink.outcome for sink in self.sinks if sink.outcome is not None]
            parts.append(b"data: %b\n\n" % self._shape.usage_chunk(usage(self._job, outcomes)))
        return b"".join([*parts, DONE])

    async def _woken(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()


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
        if answer.state == LIVE:
            answer.write(self._event(events[0] if len(events) == 1 else merge(list(events))))
        elif answer.state == WAITING:
            answer.wake()
        elif self._stream.log.cut > self._written:
            answer.ended(self, ApiError(500, "the reader fell too far behind", code="reader_too_slow"))

    def finish(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._answer.ended(self, outcome.error)

    def waiting(self) -> bytes | None:
        """What is in the log and not yet written, as one event."""
        events = self._stream.log.since(self._written)
        return self._event(merge(events)) if events else None

    def catch_up(self) -> None:
        """The answer is live (again): write what waits, the end included."""
        if self._stream.log.cut > self._written:
            return  # the answer ends with an error
        event = self.waiting()
        if event is not None:
            self._answer.write(event)
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
