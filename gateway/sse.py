"""Server-sent events for one answer: each engine step's piece goes from its stream straight to the transport.

No task wakes per token. A transport above its high-water mark makes the answer slow: its streams' pieces wait in
their logs and go out merged once the socket has drained, which is also when they count as taken. The format is
that of the HTML standard, section 9.2. Knows no API; openai/respond.py runs it with a Shape.
"""

import asyncio
from collections.abc import Sequence
from time import monotonic

import orjson
from aiohttp import HttpVersion11, web

from headrace.gateway.errors import ApiError
from headrace.gateway.jobs import Job
from headrace.gateway.openai.shape import ChunkFrame, Shape, usage
from headrace.gateway.stream import Outcome, Stream
from headrace.gateway.token_log import Event, LogCut, merge

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the events otherwise
}
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
LIVE, WAITING, SLOW, CLOSED = "live", "waiting", "slow", "closed"


class SseAnswer:
    """The streaming answer to one request.

    Args:
        request: of which the answer is.
        job: with the order of choices.
        streams: one per choice, not yet started.
        shape: of the chunks.
        keepalive_s: silence after which a comment is sent.
        stall_s: a socket that takes nothing for so long is given up.
    """

    def __init__(
        self,
        request: web.Request,
        job: Job,
        streams: Sequence[Stream],
        shape: Shape,
        keepalive_s: float,
        stall_s: float,
    ) -> None:
        assert request.transport is not None
        self._request = request
        self._transport: asyncio.Transport = request.transport
        self._job = job
        self._shape = shape
        self._keepalive_s = keepalive_s
        self._stall_s = stall_s
        self._chunked = request.version >= HttpVersion11
        self.state = WAITING  # for the first token; then live or slow
        self.num_slow = 0  # times the socket fell behind
        self.sinks = [_Choice(self, i, stream, shape) for i, stream in enumerate(streams)]
        self._seqs = [0] * len(streams)  # newest event written, per choice
        self._error: ApiError | None = None
        self._missing = len(streams)
        self._wake = asyncio.Event()
        self._last_write = monotonic()

    async def run(self) -> web.StreamResponse:
        """Write the answer to its end; the streams have been started.

        Raises:
            ApiError: the first failure, if no header was sent yet.
        """
        await self._woken(self._keepalive_s)
        if self._error is not None:
            raise self._error
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(self._request)
        self.state = LIVE
        self._open()
        await self._pump()
        await response.write_eof(self._ending())
        return response

    def event(self, index: int, seq: int, chunk: bytes) -> bytes:
        """One numbered event of a choice.

        Its id is what a client sends back as Last-Event-ID: the newest number of each choice, comma-separated.
        """
        self._seqs[index] = seq
        return b"id: %b\ndata: %b\n\n" % (b",".join(b"%d" % seq for seq in self._seqs), chunk)

    def write(self, payload: bytes) -> None:
        """Hand bytes to the transport, framed as one HTTP chunk."""
        transport = self._transport
        if transport.is_closing():
            self.state = CLOSED  # aiohttp cancels the handler in a moment
            return
        try:
            transport.write(b"%x\r\n%b\r\n" % (len(payload), payload) if self._chunked else payload)
        except (RuntimeError, OSError):  # uvloop raises on a transport that closed within this step
            self.state = CLOSED
            return
        self._last_write = monotonic()
        if self._request.protocol.writing_paused:
            self.state = SLOW
            self.num_slow += 1
            self._wake.set()

    def wake(self) -> None:
        self._wake.set()

    def ended(self, sink: "_Choice", error: ApiError | None) -> None:
        """A choice has ended; a failure ends the others too."""
        if self._error is not None:
            return
        self._error = error
        self._missing = 0 if error is not None else self._missing - 1
        if self._missing and self.state == LIVE:
            sink.close()
        self._wake.set()

    def _open(self) -> None:
        """Every choice's opening chunk, then what came before the headers."""
        openings = [self._shape.opening(sink.index) for sink in self.sinks]
        if any(openings):
            self.write(b"".join(b"data: %b\n\n" % chunk for chunk in openings if chunk))
        self._catch_up()

    async def _pump(self) -> None:
        """Sleep until the end, but for slow sockets and silence."""
        while self._missing or self.state == SLOW:
            silent = monotonic() - self._last_write
            if self.state == CLOSED:
                raise ConnectionResetError("the client is gone")
            if self.state == SLOW:
                await self._drain()
                self._catch_up()
            elif silent >= self._keepalive_s:
                self.write(KEEP_ALIVE)
            else:
                await self._woken(self._keepalive_s - silent)

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self._request.writer.drain()
        except TimeoutError:
            self._transport.abort()
            raise ConnectionResetError(f"the reader took nothing for {self._stall_s:g} s") from None
        self.state = LIVE

    def _catch_up(self) -> None:
        """Write what waits in the logs, one merged event per choice."""
        for sink in self.sinks:
            if self.state != LIVE:
                return
            try:
                sink.catch_up()
            except LogCut as error:
                message = f"the reader fell too far behind: {error}"
                self.ended(sink, ApiError(500, message, code="log_cut"))
                return

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
        self._written = 0  # newest event handed to the transport

    def write(self, events: Sequence[Event]) -> None:
        answer = self._answer
        if answer.state == LIVE:
            self._send(events[0] if len(events) == 1 else merge(list(events)))
        elif answer.state == WAITING:
            answer.wake()

    def finish(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._answer.ended(self, outcome.error)

    def catch_up(self) -> None:
        """The socket has drained: what was written is taken, what waits goes out as one event."""
        self._stream.acknowledge(self._written)
        waiting = self._stream.log.since(self._written)
        if waiting:
            self._send(merge(waiting))
        if self.outcome is not None and self._answer.state == LIVE:
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

    def _send(self, event: Event) -> None:
        answer = self._answer
        logprobs = event.logprobs
        if logprobs is None:
            chunk = self._frame.fill(event.text)
        else:
            chunk = self._frame.fill(event.text, orjson.dumps(self._shape.logprobs(logprobs)))
        self._written = event.seq
        answer.write(answer.event(self.index, event.seq, chunk))
        if answer.state == LIVE:
            self._stream.acknowledge(event.seq)
