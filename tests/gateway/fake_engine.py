"""An engine in the test's own loop, behind the link's socket interface: the real dispatcher talks to it.

It answers each Submit with scripted tokens, one step at a time, and honours credit, cancel, stop ids and limits.
"""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.ipc.messages import (
    Cancel,
    Credit,
    Finished,
    Logprobs,
    Rejected,
    Submit,
    ToEngine,
    ToGateway,
    Tokens,
    Usage,
    Welcome,
)

Answer = Callable[[Submit], Sequence[int]]

MS_PER_TOKEN = 1.5  # what it charges


@dataclass
class Running:
    """One stream on the engine."""

    submit: Submit
    script: Sequence[int]
    credit: int
    sent: int = 0
    cancelled: bool = False
    grants: list[int] = field(default_factory=list)


class FakeEngine:
    """Plays engine and socket at once; `connect` is what a Dispatcher wants.

    Args:
        answer: the tokens of a Submit; the engine stops by itself at the script's end (reason "stop").
        step_s: pause between steps.
        per_step: tokens of a row, as speculation makes them.
    """

    def __init__(
        self,
        answer: Answer,
        step_s: float = 0.0,
        per_step: int = 1,
        max_model_len: int = 256,
        vocab_size: int = 4096,
    ) -> None:
        self.answer = answer
        self.step_s = step_s
        self.per_step = per_step
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.reject: tuple[str, str] | None = None
        self.num_rejected = 0
        self.error_after: int | None = None  # a stream that has so many tokens ends with an error
        self.burst = 1  # steps in one turn of the loop, as a gateway that fell behind reads them
        self.ready = True
        self.heeds_credit = True
        self.running: dict[int, Running] = {}
        self.seen: list[Running] = []  # every stream ever submitted
        self.cancelled = asyncio.Event()
        self.parked = asyncio.Event()
        self._scheduled = False

    def connect(
        self, _address: str, on_message: Callable[[ToGateway], None], on_state: Callable[[str, str], None]
    ) -> "FakeEngine":
        self._on_message, self._on_state = on_message, on_state
        return self

    def start(self) -> None:
        if self.ready:
            self.welcome()

    def welcome(self) -> None:
        self._on_message(Welcome(1, "fake", "print", "fake", self.vocab_size, self.max_model_len, 8, 64, 16))
        self._on_state("ready", "")

    def die(self) -> None:
        self.running.clear()
        self._on_state("lost", "killed by the test")

    def close(self) -> None:
        self.running.clear()

    def send(self, message: ToEngine) -> bool:
        match message:
            case Submit() if self.reject is not None:
                self.num_rejected += 1
                rejected = Rejected(message.stream, *self.reject)
                asyncio.get_running_loop().call_soon(self._on_message, rejected)
            case Submit():
                stream = Running(message, self.answer(message), message.credit)
                self.running[message.stream] = stream
                self.seen.append(stream)
            case Credit() if message.stream in self.running:
                self.running[message.stream].credit = message.limit
                self.running[message.stream].grants.append(message.limit)
            case Cancel() if message.stream in self.running:
                self.running[message.stream].cancelled = True
            case _:
                pass
        self._schedule()
        return True

    def _schedule(self) -> None:
        if self.running and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(self.step_s, self._step)

    def _step(self) -> None:
        self._scheduled = False
        for _ in range(self.burst):
            self._one_step()
        if not self._scheduled and self.running:
            self.parked.set()

    def _one_step(self) -> None:
        streams: list[int] = []
        starts: list[int] = []
        counts: list[int] = []
        ids: list[int] = []
        logprobs: list[Logprobs] = []
        finished: list[Finished] = []
        for number, stream in list(self.running.items()):
            row = [] if stream.cancelled else self._row(stream)
            if row:
                if stream.submit.sampling.logprobs >= 0:
                    logprobs.append(fake_logprobs(len(streams), row, stream.submit.sampling.logprobs))
                streams.append(number)
                starts.append(stream.sent)
                counts.append(len(row))
                ids += row
                stream.sent += len(row)
            reason = self._end(stream, row)
            if reason:
                del self.running[number]
                finished.append(self._finished(number, stream, reason))
                if reason == "cancelled":
                    self.cancelled.set()
        if streams or finished:
            self._on_message(
                Tokens(
                    1,
                    array("I", streams).tobytes(),
                    array("I", starts).tobytes(),
                    bytes(counts),
                    array("i", ids).tobytes(),
                    tuple(logprobs),
                    tuple(finished),
                )
            )
            self._schedule()

    def _row(self, stream: Running) -> list[int]:
        sampling = stream.submit.sampling
        credit = stream.credit if self.heeds_credit else sampling.max_tokens
        stop = min(stream.sent + self.per_step, credit, sampling.max_tokens, len(stream.script))
        row = list(stream.script[stream.sent : stop])
        for at, token_id in enumerate(row):
            if token_id in sampling.stop_token_ids and stream.sent + at >= sampling.min_tokens:
                return row[: at + 1]
        return row

    def _end(self, stream: Running, row: list[int]) -> str:
        sampling = stream.submit.sampling
        if stream.cancelled:
            return "cancelled"
        if self.error_after is not None and stream.sent >= self.error_after:
            return "error"
        if row and row[-1] in sampling.stop_token_ids and stream.sent > sampling.min_tokens:
            return "stop"
        if stream.sent >= sampling.max_tokens:
            return "length"
        return "stop" if stream.sent >= len(stream.script) else ""

    def _finished(self, number: int, stream: Running, reason: str) -> Finished:
        num_prompt = len(stream.submit.prompt) // 4
        message = "NaN logits at layer 3" if reason == "error" else ""
        usage = Usage(num_prompt, 2, stream.sent, 0.0, 0.0, 0.0, 0, MS_PER_TOKEN * stream.sent, 3, 2)
        return Finished(number, reason, usage, message)


def fake_logprobs(row: int, token_ids: Sequence[int], top_k: int) -> Logprobs:
    """Log-probability -id/1000 for each token; its alternatives are the ids that follow it."""
    top_ids = [token_id + k for token_id in token_ids for k in range(top_k)]
    return Logprobs(
        row,
        array("f", [-token_id / 1000 for token_id in token_ids]).tobytes(),
        top_k,
        array("i", top_ids).tobytes(),
        array("f", [-token_id / 1000 for token_id in top_ids]).tobytes(),
    )


def prompt_ids(submit: Submit) -> list[int]:
    """The prompt as the engine got it."""
    return memoryview(submit.prompt).cast("i").tolist()
