"""What the answers of chat and completions have in common: the envelope, prebuilt chunks, usage.

Knows no socket. chat_shape.py and completion_shape.py build on it; respond.py and sse.py use a Shape.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from headrace.gateway.jobs import Job
from headrace.gateway.stream import Outcome
from headrace.gateway.token_log import Event, TokenLogprob

MS_PER_HOUR = 3.6e6
MIN_LOGPROB = -9999.0  # JSON has no -infinity; OpenAI writes this instead


class ChunkFrame:
    """One choice's streaming chunk, cut open where text and logprobs go: no JSON is built per token.

    Args:
        chunk: the whole chunk, with "" for the text and null for logprobs.
        text_field: the text's field, empty, as it stands there.
    """

    __slots__ = ("_head", "_plain_tail")

    def __init__(self, chunk: bytes, text_field: bytes) -> None:
        # Quotes within JSON strings are escaped, so the pattern can only match the field itself.
        head, found, self._plain_tail = chunk.partition(text_field)
        assert found
        self._head = head + found[: -len(b'""')]

    def fill(self, text: str) -> bytes:
        """The chunk's JSON without logprobs."""
        return b"".join((self._head, orjson.dumps(text), self._plain_tail))

    def fill_both(self, text: str, logprobs: dict[str, Any]) -> bytes:
        """The chunk's JSON."""
        middle, found, tail = self._plain_tail.partition(b'"logprobs":null')
        assert found
        return b'%b%b%b"logprobs":%b%b' % (
            self._head,
            orjson.dumps(text),
            middle,
            orjson.dumps(logprobs),
            tail,
        )


class Shape(Protocol):
    """How one job's answer looks."""

    def opening(self, index: int) -> bytes | None:
        """The chunk before a choice's first token."""

    def frame(self, index: int) -> ChunkFrame:
        """The chunk of a choice's tokens."""

    def logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Log-probabilities of some tokens."""

    def closing(self, index: int, outcome: Outcome) -> bytes:
        """The chunk with a choice's finish_reason."""

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The chunk after the last choice."""

    def whole(self, events: Sequence[Sequence[Event]], outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """The answer in one piece; events and outcome per choice."""


class ChunkEnvelope:
    """What surrounds the choice in every chunk of a job, serialised once: a chunk is two joins, not a dictionary."""

    __slots__ = ("_head", "_tail", "_usage_head")

    def __init__(self, job: Job, object_: str) -> None:
        empty = orjson.dumps(envelope(job, object_, []))
        self._head = empty[: -len(b"]}")]
        self._tail = b'],"usage":null}' if job.request.include_usage else b"]}"
        self._usage_head = empty[:-1] + b',"usage":'

    def chunk(self, choice: bytes) -> bytes:
        """A chunk with this choice."""
        return b"%b%b%b" % (self._head, choice, self._tail)

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The chunk without choices that carries the usage."""
        return b"%b%b}" % (self._usage_head, orjson.dumps(usage))


def envelope(job: Job, object_: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields around `choices`."""
    return {
        "id": job.id,
        "object": object_,
        "created": job.created,
        "model": job.model,
        "system_fingerprint": job.fingerprint,
        "choices": choices,
    }


def usage(job: Job, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Tokens of the whole job. A prompt counts once, however many choices it has; so do its cached tokens.

    `gpu_ms` is null if a choice ended without the engine's bill, as at a time limit.
    """
    firsts = [outcome for i, outcome in enumerate(outcomes) if i % job.request.n == 0]
    prompt = sum(outcome.prompt_tokens for outcome in firsts)
    completion = sum(outcome.output_tokens for outcome in outcomes)
    accepted = sum(outcome.accepted for outcome in outcomes)
    bills = [outcome.gpu_ms for outcome in outcomes]
    gpu_ms = None if None in bills else sum(bill for bill in bills if bill is not None)
    found: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(outcome.cached_tokens for outcome in firsts)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(outcome.drafted for outcome in outcomes) - accepted,
        },
        "gpu_ms": None if gpu_ms is None else round(gpu_ms, 3),
    }
    if job.price_per_gpu_hour:
        found["cost_usd"] = (
            None if gpu_ms is None else round(gpu_ms / MS_PER_HOUR * job.price_per_gpu_hour, 9)
        )
    return found


def reasons(outcome: Outcome, eos_ids: Sequence[int]) -> dict[str, Any]:
    """Why a choice ended.

    `stop_reason` is vLLM's: the client's own stop string or token id that was found, null for the model's end.
    """
    found = None if outcome.stop_reason in eos_ids else outcome.stop_reason
    return {"finish_reason": outcome.reason, "stop_reason": found}


def ending(outcome: Outcome, eos_ids: Sequence[int]) -> bytes:
    """`reasons` as the members of a JSON object."""
    return orjson.dumps(reasons(outcome, eos_ids))[1:-1]


def joined(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events)


def all_logprobs(events: Sequence[Event]) -> list[TokenLogprob]:
    return [entry for event in events for entry in event.logprobs or ()]


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
