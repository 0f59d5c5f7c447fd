"""Answers of `/v1/completions`. Knows no socket. respond.py asks it."""

from collections.abc import Sequence
from typing import Any

import orjson

from headrace.gateway.jobs import Job
from headrace.gateway.openai.shape import (
    ChunkEnvelope,
    ChunkFrame,
    all_logprobs,
    ending,
    envelope,
    finite,
    joined,
    reasons,
    usage,
)
from headrace.gateway.stream import Outcome
from headrace.gateway.token_log import Event, TokenLogprob
from headrace.gateway.vocabulary import Vocabulary

OBJECT = "text_completion"  # whole or in chunks
PIECE = b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}'
CLOSING = b'{"index":%d,"text":"","logprobs":null,%b}'


class CompletionShape:
    """One completion job's answer."""

    def __init__(self, job: Job, vocabulary: Vocabulary, eos_ids: Sequence[int]) -> None:
        self._job = job
        self._vocabulary = vocabulary
        self._eos_ids = eos_ids
        self._envelope = ChunkEnvelope(job, OBJECT)

    def opening(self, index: int) -> bytes | None:
        echo = self._job.echoes[index]
        return self._envelope.chunk(PIECE % (index, orjson.dumps(echo))) if echo else None

    def frame(self, index: int) -> ChunkFrame:
        return ChunkFrame(self._envelope.chunk(PIECE % (index, b'""')), b'"text":""')

    def logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        text = self._vocabulary.token_text
        return {
            "tokens": [text(entry.token_id) for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [
                {text(token_id): finite(logprob) for token_id, logprob in entry.top} for entry in entries
            ],
            "text_offset": [entry.offset for entry in entries],
        }

    def closing(self, index: int, outcome: Outcome) -> bytes:
        return self._envelope.chunk(CLOSING % (index, ending(outcome, self._eos_ids)))

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return self._envelope.usage(usage)

    def whole(self, events: Sequence[Sequence[Event]], outcomes: Sequence[Outcome]) -> dict[str, Any]:
        choices = []
        for index, (pieces, outcome) in enumerate(zip(events, outcomes, strict=True)):
            text = self._job.echoes[index] + joined(pieces)
            choice = {"index": index, "text": text, "logprobs": None, **reasons(outcome, self._eos_ids)}
            if self._job.request.sampling.logprobs >= 0:
                choice["logprobs"] = self.logprobs(all_logprobs(pieces))
            choices.append(choice)
        return {**envelope(self._job, OBJECT, choices), "usage": usage(self._job, outcomes)}
