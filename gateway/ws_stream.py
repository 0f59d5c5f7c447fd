"""One `start` frame's generation: its choices, their token frames, its end.

Knows the protocol's server frames, not the socket's reading side. ws_session.py makes them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.gateway.errors import ApiError
from headrace.gateway.jobs import Choice, Job, Jobs
from headrace.gateway.openai.shape import Shape, reasons, usage
from headrace.gateway.stats import WorkerStats
from headrace.gateway.stream import Outcome, Stream
from headrace.gateway.token_log import Event, LogCut, merge
from headrace.gateway.ws_format import Format
from headrace.gateway.ws_outbox import Outbox

_NEVER_BEGUN = {"finish_reason": "cancelled", "stop_reason": None, "usage": None}


@dataclass(frozen=True, slots=True)
class StartOptions:
    """What a `start` frame asks of the socket, beside the request itself."""

    stream_id: str
    acks: bool  # the client returns credit itself; else what is written counts as taken
    token_ids: bool  # token frames carry them


class SocketStream:
    """The generation of one id, from `begin` to its last `done` or its `error`.

    Args:
        options: from the start frame.
        format: of the socket.
        outbox: takes the frames.
        stats: where slow streams are counted.
        on_end: called once, when no more frames come.
    """

    def __init__(
        self,
        options: StartOptions,
        format: Format,  # noqa: A002 - the word of the protocol
        outbox: Outbox,
        stats: WorkerStats,
        on_end: Callable[[str], None],
    ) -> None:
        self.options = options
        self.format = format
        self.outbox = outbox
        self.stats = stats
        self._on_end = on_end
        self._job: Job | None = None
        self._eos_ids: Sequence[int] = ()
        self._choices: list[_Choice] = []
        self._ended = False

    def begin(self, jobs: Jobs, job: Job, shape: Shape) -> None:
        """Submit every choice and say so.

        Raises:
            NoEngine, TooManyStreams: nothing runs.
        """
        self._job = job
        self._eos_ids = jobs.text.defaults.eos_ids
        streams = jobs.streams(job)
        self._choices = [
            _Choice(self, choice, stream, shape) for choice, stream in zip(job.choices, streams, strict=True)
        ]
        jobs.start(job, streams, self._choices)
        self.send({"type": "started", "request_id": job.id, "model": job.model, "choices": len(streams)})

    def cancel(self) -> None:
        """The client wants no more: every open choice ends with reason "cancelled"."""
        for choice in self._choices:
            choice.cancel()
        if not self._choices and not self._ended:
            self._ended = True
            self.send({"type": "done", "index": 0, "seq": 1, **_NEVER_BEGUN})
            self._on_end(self.options.stream_id)

    def abandon(self) -> None:
        """The socket is gone: end the generation without a word."""
        self._ended = True
        for choice in self._choices:
            choice.stream.cancel()

    def acknowledge(self, index: int, seq: int) -> None:
        """The client took everything up to event `seq` of choice `index`.

        Raises:
            ValueError: there is no such choice or event.
        """
        if not 0 <= index < len(self._choices):
            raise ValueError(f"ack of choice {index}; the stream has {len(self._choices)}")
        choice = self._choices[index]
        if not 0 <= seq <= choice.written:
            raise ValueError(f"ack of event {seq}; the newest is {choice.written}")
        if self.options.acks:
            choice.stream.acknowledge(seq)

    def catch_up(self) -> None:
        """The socket has drained: send what waits in the logs."""
        for choice in self._choices:
            if self._ended:
                return
            choice.catch_up()

    def fail(self, error: ApiError) -> None:
        """End it with an error frame."""
        if self._ended:
            return
        self.abandon()
        self.send({"type": "error", **error.to_dict()})
        self._on_end(self.options.stream_id)

    def send(self, frame: dict[str, Any]) -> None:
        """A frame of this id."""
        self.outbox.send(self.format.encode({**frame, "id": self.options.stream_id}))

    def done(self, choice: "_Choice", outcome: Outcome) -> None:
        """A choice has ended and all its events are out; the last one carries the usage of all."""
        assert self._job is not None
        outcomes = [other.outcome for other in self._choices if other.done and other.outcome is not None]
        last = len(outcomes) == len(self._choices)
        self.send(
            {
                "type": "done",
                "index": choice.index,
                "seq": outcome.seq,
                **reasons(outcome, self._eos_ids),
                "usage": usage(self._job, outcomes) if last else None,
            }
        )
        if last:
            self._ended = True
            self._on_end(self.options.stream_id)


class _Choice:
    """The sink of one choice."""

    __slots__ = (
        "_behind",
        "_frame",
        "_num_prompt",
        "_owner",
        "_shape",
        "done",
        "index",
        "outcome",
        "stream",
        "written",
    )

    def __init__(self, owner: SocketStream, choice: Choice, stream: Stream, shape: Shape) -> None:
        self.index = choice.index
        self.stream = stream
        self.written = 0  # newest event handed to the outbox
        self.outcome: Outcome | None = None
        self.done = False
        self._owner = owner
        self._shape = shape
        self._num_prompt = choice.num_prompt
        self._frame = owner.format.token_frame(owner.options.stream_id, choice.index)
        self._behind = False

    def write(self, events: Sequence[Event]) -> None:
        if self._owner.outbox.slow or self._behind:
            if not self._behind:
                self._behind = True
                self._owner.stats.slow_streams += 1
            return
        for event in events:
            self._send(event)

    def finish(self, outcome: Outcome) -> None:
        self.outcome = outcome
        if outcome.error is not None:
            self._owner.fail(outcome.error)
        elif not self._behind:
            self._end(outcome)

    def catch_up(self) -> None:
        self._behind = False
        if self.done:
            return
        try:
            if self.stream.log.last > self.written:
                self._send(merge(self.stream.log.since(self.written)))
        except LogCut as error:
            self._owner.fail(ApiError(500, f"the reader fell too far behind: {error}", code="log_cut"))
            return
        if self.outcome is not None:
            self._end(self.outcome)

    def cancel(self) -> None:
        if self.done:
            return
        self.stream.cancel()
        if self.outcome is None:
            log = self.stream.log
            made = log.end_of(log.last)
            self.outcome = Outcome(log.last + 1, "cancelled", None, self._num_prompt, 0, made, None)
        self._end(self.outcome)

    def _send(self, event: Event) -> None:
        owner = self._owner
        self.written = event.seq
        logprobs = None if event.logprobs is None else self._shape.logprobs(event.logprobs)
        token_ids = event.token_ids if owner.options.token_ids else None
        owner.outbox.send(self._frame.fill(event.seq, event.text, token_ids, logprobs))
        if not owner.options.acks:
            self.stream.acknowledge(event.seq)

    def _end(self, outcome: Outcome) -> None:
        self.done = True
        self._owner.done(self, outcome)
