"""One choice's generation: numbers and logs the pieces of its answer, meters the engine's credit, knows its end.

Knows no HTTP and no JSON. jobs.py makes streams, an engine link calls them, SSE, JSON answers and the WebSocket
are their sinks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.gateway.assembler import Assembler
from headrace.gateway.deadlines import Deadlines
from headrace.gateway.errors import ApiError, rejected, unavailable
from headrace.gateway.handle import Handle, Listener
from headrace.gateway.token_log import Event, TokenLog
from headrace.ipc.messages import Finished, Logprobs, Usage

MAX_LOG_BYTES = 4 << 20
NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a stream ended."""

    seq: int  # the next number after the last event: the end counts as an event too
    reason: str  # stop | length | timeout | error
    stop_reason: str | int | None  # the stop string or stop token id that ended it
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    error: ApiError | None  # set for reason "error"
    gpu_ms: float | None = None  # what the engine charged; None = it did not say, for the end is not its own
    drafted: int = 0  # draft tokens verified, as far as the engine said
    accepted: int = 0  # of those, accepted


class Sink(Protocol):
    """Where a stream's events go. Plain calls on the event loop that must not block."""

    def write(self, events: Sequence[Event]) -> None:
        """New events, in order; at most one call per engine step."""

    def finish(self, outcome: Outcome) -> None:
        """The end; nothing comes after it. Not called after `Stream.cancel`."""


class Stream:
    """The listener of one generation.

    Args:
        assembler: a fresh one.
        num_prompt: tokens of the prompt.
        max_tokens: output tokens at most; no credit is granted beyond.
        window: tokens the engine may run ahead of the reader; also the credit to submit with.
    """

    __slots__ = (
        "_acknowledged",
        "_assembler",
        "_deadlines",
        "_finish",
        "_finished",
        "_grant_at",
        "_handle",
        "_max_tokens",
        "_num_prompt",
        "_window",
        "_write",
        "log",
    )

    def __init__(self, assembler: Assembler, num_prompt: int, max_tokens: int, window: int) -> None:
        self.log = TokenLog(MAX_LOG_BYTES)  # for reading
        self._assembler = assembler
        self._num_prompt = num_prompt
        self._max_tokens = max_tokens
        self._window = window
        self._grant_at = max(1, window // 4) if window < max_tokens else NEVER  # taken tokens
        self._acknowledged = 0  # newest event that the reader took
        self._finished = False
        self._handle: Handle | None = None
        self._deadlines: Deadlines | None = None
        self._write: Callable[[Sequence[Event]], None] = _drop
        self._finish: Callable[[Outcome], None] = _drop

    def start(self, sink: Sink, submit: Callable[[Listener], Handle], deadlines: Deadlines) -> None:
        """Submit the generation; events go to `sink` from now on, until the end or the deadline.

        Raises:
            NoEngine, TooManyStreams: from `submit`; the stream is then over and the sink hears nothing.
        """
        self._write, self._finish = sink.write, sink.finish
        self._handle = submit(self)
        self._deadlines = deadlines
        deadlines.add(self)

    def cancel(self) -> None:
        """Nobody wants the rest; the sink hears nothing more. May be called at any time."""
        if not self._finished:
            handle = self._handle
            self._close()
            if handle is not None:
                handle.cancel()

    def acknowledge(self, seq: int) -> None:
        """The reader took every event up to number `seq`."""
        self._acknowledged = seq
        if self._assembler.num_received >= self._grant_at:
            self._grant()

    def on_tokens(self, start: int, token_ids: list[int], logprobs: Logprobs | None) -> None:
        assembler = self._assembler
        if start != assembler.num_received:
            raise ValueError(f"the engine sent output token {start} where {assembler.num_received} was due")
        piece = assembler.push(token_ids, logprobs)
        if piece is not None:
            self._write((self.log.append(*piece),))
        elif assembler.num_received >= self._grant_at:
            self._grant()
        if assembler.stop_reason is not None and assembler.matched and self._handle is not None:
            self._handle.stop()

    def on_finished(self, finished: Finished) -> None:
        cached = finished.usage.cached_tokens
        if finished.reason in ("stop", "length"):
            self._end(finished.reason, cached, bill=finished.usage)
        elif finished.reason == "error":
            message = f"the engine gave up: {finished.message}"
            self._end("error", cached, ApiError(500, message, code="generation_failed"))
        else:
            message = "the engine cancelled the generation"
            self._end("error", cached, unavailable(message, "engine_cancelled"))

    def on_rejected(self, code: str, message: str) -> None:
        self._end("error", 0, rejected(code, message))

    def on_lost(self, message: str) -> None:
        if self._assembler.matched:
            self._end("stop", 0)  # complete before the engine went; only its usage is missing
        else:
            self._end("error", 0, unavailable(message, "engine_lost"))

    def overdue(self) -> None:
        """The time limit of a request is over."""
        assert self._deadlines is not None
        if self._handle is not None:
            self._handle.cancel()
        if self._assembler.num_received:
            self._end("timeout", 0)
        else:
            message = f"no token within {self._deadlines.after_s:g} s, the limit of a request"
            self._end("error", 0, ApiError(504, message, code="timeout"))

    def _grant(self) -> None:
        """Raise the engine's limit once the reader took another quarter of the window.

        A reader that took every event also took the tokens that made no event yet: else a long held-back
        stretch would park the sequence for good.
        """
        up_to_date = self._acknowledged >= self.log.last
        taken = self._assembler.num_received if up_to_date else self.log.end_of(self._acknowledged)
        if taken >= self._grant_at:
            limit = taken + self._window
            self._grant_at = taken + max(1, self._window // 4) if limit < self._max_tokens else NEVER
            if self._handle is not None:
                self._handle.grant(limit)

    def _end(
        self, reason: str, cached_tokens: int, error: ApiError | None = None, bill: Usage | None = None
    ) -> None:
        """Send what was held back, then the outcome."""
        if self._finished:
            return
        assembler = self._assembler
        piece = assembler.flush()
        if piece is not None:
            self._write((self.log.append(*piece),))
        if assembler.stop_reason is not None and error is None:
            reason = "stop"
        finish = self._finish
        self._close()
        finish(
            Outcome(
                self.log.last + 1,
                reason,
                assembler.stop_reason,
                self._num_prompt,
                cached_tokens,
                assembler.num_received,
                error,
                *((bill.gpu_ms, bill.drafted, bill.accepted) if bill is not None else ()),
            )
        )

    def _close(self) -> None:
        """Let go of sink and handle: both know the stream, and a cycle would wait for the garbage collector."""
        self._finished = True
        self._handle = None
        self._write = self._finish = _drop
        if self._deadlines is not None:
            self._deadlines.discard(self)
            self._deadlines = None


def _drop(_: object) -> None:
    """Nobody listens."""
