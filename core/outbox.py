"""Packs the outputs of a step into one Tokens message per gateway.

Knows the wire's columns and nothing of sockets. Called by core/server.py after each step.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.core.commit import Output, TokenLogprob
from headrace.core.request import FinishReason, Request
from headrace.ipc.messages import Finished, Logprobs, Tokens, Usage
from headrace.ipc.packed import pack_float32, pack_int32, pack_uint32


class Tag(NamedTuple):
    """What the server notes on each request: where its tokens go."""

    gateway: bytes
    stream: int


def pack(step: int, outputs: Iterable[Output]) -> dict[bytes, Tokens]:
    """One message for each gateway that has a row or an end in `outputs`."""
    columns: dict[bytes, _Columns] = {}
    for output in outputs:
        tag = output.request.tag
        assert isinstance(tag, Tag), f"{output.request} came from no gateway"
        columns.setdefault(tag.gateway, _Columns()).add(tag.stream, output)
    return {gateway: columns.message(step) for gateway, columns in columns.items()}


def finished(stream: int, request: Request, reason: FinishReason, message: str = "") -> Finished:
    """The end of a stream, with what it took."""
    return Finished(stream, reason.value, usage(request), message)


def usage(request: Request) -> Usage:
    """What a request took so far; an interval that it never entered is 0."""
    scheduled, first, last = request.first_scheduled, request.first_token, request.last_token
    return Usage(
        prompt_tokens=request.prompt_len,
        cached_tokens=request.num_cached_tokens,
        output_tokens=request.num_output,
        queue_s=max(scheduled - request.arrival, 0.0) if scheduled is not None else 0.0,
        prefill_s=first - scheduled if scheduled is not None and first is not None else 0.0,
        decode_s=last - first if last is not None and first is not None else 0.0,
        preemptions=request.num_preemptions,
        gpu_ms=request.gpu_ms,
        drafted=request.num_drafted,
        accepted=request.num_accepted,
    )


@dataclass(slots=True)
class _Columns:
    streams: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)

    def add(self, stream: int, output: Output) -> None:
        if output.token_ids:
            if output.logprobs:
                self.logprobs.append(_pack_logprobs(len(self.streams), output.logprobs))
            self.streams.append(stream)
            self.starts.append(output.start)
            self.counts.append(len(output.token_ids))
            self.token_ids += output.token_ids
        if output.finish_reason is not None:
            self.finished.append(finished(stream, output.request, output.finish_reason, output.message))

    def message(self, step: int) -> Tokens:
        return Tokens(
            step=step,
            streams=pack_uint32(self.streams),
            starts=pack_uint32(self.starts),
            counts=bytes(self.counts),
            token_ids=pack_int32(self.token_ids),
            logprobs=tuple(self.logprobs),
            finished=tuple(self.finished),
        )


def _pack_logprobs(row: int, logprobs: tuple[TokenLogprob, ...]) -> Logprobs:
    return Logprobs(
        row=row,
        chosen=pack_float32([token.chosen for token in logprobs]),
        top_k=len(logprobs[0].top_ids),
        top_ids=pack_int32([token_id for token in logprobs for token_id in token.top_ids]),
        top=pack_float32([value for token in logprobs for value in token.top]),
    )
