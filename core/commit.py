"""The fourth verb of a step: read back what it chose and turn that into outputs.

Owns nothing. It waits for the device, so the engine calls it when the next step is already queued there.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.core.launched import Launched
from headrace.core.plan import StepPlan
from headrace.core.request import FinishReason, Request
from headrace.core.sampler import LogprobRows
from headrace.core.scheduler import Scheduler
from headrace.kernels.sample import INVALID_TOKEN


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a chosen token, and the likeliest ones with theirs, best first."""

    chosen: float
    top_ids: tuple[int, ...]
    top: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Output:
    """What a step made for one request."""

    request: Request
    start: int  # output index of the first of `token_ids`
    token_ids: tuple[int, ...]  # may be empty where the request ended with an error
    logprobs: tuple[TokenLogprob, ...]  # one per token, or none at all
    finish_reason: FinishReason | None
    message: str = ""  # for FinishReason.ERROR: what went wrong


def commit(plan: StepPlan, launched: Launched, scheduler: Scheduler) -> list[Output]:
    """Wait for `launched`, tell the scheduler what it chose, and say what is new."""
    sampling = [row for row in plan.rows if row.samples]
    chosen, found = launched.read()
    outputs: list[Output] = []
    tokens: dict[str, tuple[int, ...]] = {}
    for row, token in zip(sampling, chosen, strict=True):
        request = row.request
        if token == INVALID_TOKEN and not request.finished:
            position = row.start + row.num_tokens
            scheduler.cancel(request.request_id, FinishReason.ERROR)
            message = f"the model's logits for position {position} are not numbers (NaN)"
            outputs.append(Output(request, request.num_output, (), (), FinishReason.ERROR, message))
        tokens[request.request_id] = (token,)
    committed = scheduler.commit(plan, tokens)
    logprobs = {} if found is None else _logprobs(plan, found)
    outputs += [
        Output(
            request=emitted.request,
            start=emitted.start,
            token_ids=tuple(emitted.token_ids),
            logprobs=(logprobs[emitted.row],) if emitted.row in logprobs else (),
            finish_reason=emitted.request.finish_reason,
        )
        for emitted in committed.emitted
    ]
    return outputs


def _logprobs(plan: StepPlan, found: LogprobRows) -> Mapping[int, TokenLogprob]:
    """By index in the plan's rows."""
    sampling = [(index, row) for index, row in enumerate(plan.rows) if row.samples]
    chosen, top_ids, top = found.chosen.tolist(), found.top_ids.tolist(), found.top.tolist()
    result: dict[int, TokenLogprob] = {}
    for at, sampled_row in enumerate(found.rows):
        index, row = sampling[sampled_row]
        count = row.request.sampling.logprobs
        result[index] = TokenLogprob(chosen[at], tuple(top_ids[at][:count]), tuple(top[at][:count]))
    return result
