"""What the answers of chat and completions have in common: the envelope, prebuilt chunks, usage.

Knows no socket. chat_shape.py and completion_shape.py build on it; respond.py and sse.py use a Shape.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from headrace.gateway.jobs import Job
from headrace.gateway.stream import Outcome
from headrace.gateway.token_log import Event, TokenLogprob

MIN_LOGPROB = -9999.0  # JSON has no -infinity; OpenAI writes this instead


class ChunkFrame:
    """One choice's streaming chunk, cut open where text and logprobs go: no JSON is built per token.

    Args:
        chunk: the whole chunk, with "" for the text and null for logprobs.
        text_key: the name of the text's field.
    """

    __slots__ = ("_head", "_middle", "_plain_tail", "_tail")

    def __init__(self, chunk: dict[str, Any], text_key: str) -> None:
        # Quotes within JSON strings are escaped, so the two patterns can only match the fields themselves.
        head, text_field, rest = orjson.dumps(chunk).partition(f'"{text_key}":""'.encode())
        middle, logprobs_field, tail = rest.partition(b'"logprobs":null')
        assert text_field
        assert logprobs_field
        self._head = head + text_field[: -len(b'""')]
        self._middle = middle + logprobs_field[: -len(b"null")]
        self._tail = tail
        self._plain_tail = rest

    def fill(self, text: str) -> bytes:
        """The chunk's JSON without logprobs."""
        return b"".join((self._head, orjson.dumps(text), self._plain_tail))

    def fill_both(self, text: str, logprobs: dict[str, Any]) -> bytes:
        """The chunk's JSON."""
        return b"".join((self._head, orjson.dumps(text), self._middle, orjson.dumps(logprobs), self._tail))


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
    """Tokens of the whole job. A prompt counts once, however many choices it has; so do its cached tokens."""
    firsts = [outcome for i, outcome in enumerate(outcomes) if i % job.request.n == 0]
    prompt = sum(outcome.prompt_tokens for outcome in firsts)
    completion = sum(outcome.output_tokens for outcome in outcomes)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(outcome.cached_tokens for outcome in firsts)},
    }


def reasons(outcome: Outcome | None, eos_ids: Sequence[int]) -> dict[str, Any]:
    """Why a choice ended; None = it has not.

    `stop_reason` is vLLM's: the client's own stop string or token id that was found, null for the model's end.
    """
    if outcome is None:
        return {"finish_reason": None}
    found = None if outcome.stop_reason in eos_ids else outcome.stop_reason
    return {"finish_reason": outcome.reason, "stop_reason": found}


def joined(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events)


def all_logprobs(events: Sequence[Event]) -> list[TokenLogprob]:
    return [entry for event in events for entry in event.logprobs or ()]


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
