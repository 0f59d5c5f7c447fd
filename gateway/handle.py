"""One generation as the gateway sees it: what is asked (Generation), who listens, and the Handle to steer it.

Knows no socket and no HTTP. The dispatcher makes handles, the engine link calls listeners.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.ipc.messages import Finished, Logprobs, Sampling


class NoEngine(Exception):
    """No engine takes work now; the message says why, engine by engine. HTTP 503."""


class TooManyStreams(Exception):
    """The worker's handle table is full; the message names the limit. HTTP 429."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A request for one sequence of tokens."""

    request_id: str
    prompt: Sequence[int] | bytes  # token ids; bytes = int32[P], little-endian
    sampling: Sampling
    credit: int  # output index (exclusive) up to which the engine may run before `Handle.grant`
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0


class Listener(Protocol):
    """Hears of one generation, on the event loop, at most once per engine step.

    Calls are plain and must not block. After zero or more `on_tokens` exactly one of the other three comes,
    and nothing after it; after `Handle.cancel` nothing comes at all. An exception ends this generation only.
    """

    def on_tokens(self, start: int, token_ids: list[int], logprobs: Logprobs | None) -> None:
        """`token_ids[i]` is output token `start + i`. The list is the listener's to keep."""

    def on_finished(self, finished: Finished) -> None:
        """The engine is done with it; `finished.usage` says what it took."""

    def on_rejected(self, code: str, message: str) -> None:
        """No engine took it: queue_full | too_long | draining | bad_request."""

    def on_lost(self, message: str) -> None:
        """Its engine is gone. `Handle.resubmit` may carry it on elsewhere; else it is over."""


class Steering(Protocol):
    """What a handle needs of whoever routes it."""

    def cancel(self, handle: "Handle", *, report: bool) -> None: ...
    def grant(self, handle: "Handle", limit: int) -> None: ...
    def resubmit(self, handle: "Handle", generated: bytes) -> None: ...


class Handle:
    """Steers one generation; every method may be called at any time, also after the end."""

    __slots__ = (
        "credit",
        "engine",
        "generated",
        "generation",
        "last_token_at",
        "listener",
        "on_tokens",
        "outcome",
        "refused_by",
        "steering",
        "stream",
        "submitted_at",
    )

    def __init__(
        self, generation: Generation, listener: Listener, steering: Steering, submitted_at: float
    ) -> None:
        self.generation = generation
        self.listener = listener
        self.on_tokens: Callable[[int, list[int], Logprobs | None], None] = listener.on_tokens
        self.steering = steering
        self.engine = -1  # index of the engine that has it; -1 = none
        self.stream = 0  # its number there
        self.generated = b""  # int32[G]: output made before, on an engine that was lost
        self.credit = generation.credit
        self.submitted_at = submitted_at  # seconds, monotonic
        self.last_token_at = 0.0  # 0 = no token yet
        self.outcome = ""  # the reason the gateway gave it an end: abort | stop
        self.refused_by: tuple[int, ...] = ()  # engines that turned it away

    @property
    def open(self) -> bool:
        """True while an engine has it."""
        return self.engine >= 0

    def cancel(self) -> None:
        """Nobody wants the rest: the listener hears nothing more, the engine frees the blocks."""
        self.steering.cancel(self, report=False)

    def stop(self) -> None:
        """The gateway found the end itself (a stop string): no more tokens, but `on_finished` still comes,
        with reason "stop" and the usage, as soon as the engine confirms."""
        self.steering.cancel(self, report=True)

    def grant(self, limit: int) -> None:
        """The reader took more: the engine may run up to output index `limit` (exclusive)."""
        self.steering.grant(self, limit)

    def resubmit(self, generated: bytes) -> None:
        """After `on_lost`: go on at another engine behind `generated`, int32[G], the output so far.

        Raises:
            NoEngine: none takes it.
        """
        self.steering.resubmit(self, generated)
