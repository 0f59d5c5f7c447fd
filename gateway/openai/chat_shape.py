"""Answers of `/v1/chat/completions`. Knows no socket. respond.py asks it."""

from collections.abc import Sequence
from typing import Any

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

CHUNK = "chat.completion.chunk"
OPENING = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
PIECE = b'{"index":%d,"delta":{"content":""},"logprobs":null,"finish_reason":null}'
CLOSING = b'{"index":%d,"delta":{},"logprobs":null,%b}'


class ChatShape:
    """One chat job's answer."""

    def __init__(self, job: Job, vocabulary: Vocabulary, eos_ids: Sequence[int]) -> None:
        self._job = job
        self._vocabulary = vocabulary
        self._eos_ids = eos_ids
        self._envelope = ChunkEnvelope(job, CHUNK)

    def opening(self, index: int) -> bytes | None:
        return self._envelope.chunk(OPENING % index)

    def frame(self, index: int) -> ChunkFrame:
        return ChunkFrame(self._envelope.chunk(PIECE % index), b'"content":""')

    def logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def closing(self, index: int, outcome: Outcome) -> bytes:
        return self._envelope.chunk(CLOSING % (index, ending(outcome, self._eos_ids)))

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return self._envelope.usage(usage)

    def whole(self, events: Sequence[Sequence[Event]], outcomes: Sequence[Outcome]) -> dict[str, Any]:
        choices = []
        for index, (pieces, outcome) in enumerate(zip(events, outcomes, strict=True)):
            message = {"role": "assistant", "content": joined(pieces), "refusal": None}
            choice = {"index": index, "message": message, "logprobs": None, **reasons(outcome, self._eos_ids)}
            if self._job.request.sampling.logprobs >= 0:
                choice["logprobs"] = self.logprobs(all_logprobs(pieces))
            choices.append(choice)
        return {**envelope(self._job, "chat.completion", choices), "usage": usage(self._job, outcomes)}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._vocabulary.token_bytes(token_id)
        return {
            "token": self._vocabulary.token_text(token_id),
            "logprob": finite(logprob),
            "bytes": list(raw),
        }
