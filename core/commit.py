"""The fourth verb of a step: turn what it chose into outputs.

Owns nothing. Called by the engine with what it read back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.core.launched import Chosen
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


def commit(plan: StepPlan, chosen: Chosen, scheduler: Scheduler) -> list[Output]:
    """Tell the scheduler what a step chose, and say what is new."""
    sampling = [row for row in plan.rows if row.samples]
    outputs: list[Output] = []
    tokens: dict[str, Sequence[int]] = {}
    for row, found in zip(sampling, chosen.by_row(sampling), strict=True):
        request = row.request
        if found[-1] == INVALID_TOKEN and not request.finished:
            position = len(request.token_ids) + len(found) - 1
            scheduler.cancel(request.request_id, FinishReason.ERROR)
            message = f"the model's logits for position {position} are not numbers (NaN)"
            outputs.append(Output(request, request.num_output, (), (), FinishReason.ERROR, message))
        tokens[request.request_id] = found
    committed = scheduler.commit(plan, tokens)
    logprobs = {} if chosen.logprobs is None else _logprobs(plan, chosen, chosen.logprobs)
    outputs += [
        Output(
            request=emitted.request,
            start=emitted.start,
            token_ids=tuple(emitted.token_ids),
            logprobs=tuple(logprobs[emitted.row][: len(emitted.token_ids)])
            if emitted.row in logprobs
            else (),
            finish_reason=emitted.request.finish_reason,
        )
        for emitted in committed.emitted
    ]
    return outputs


def _logprobs(plan: StepPlan, chosen: Chosen, found: LogprobRows) -> Mapping[int, list[TokenLogprob]]:
    """By index in the plan's rows: those of each sampling position, rejected drafts' included."""
    owners = [
        (index, row) for index, row in enumerate(plan.rows) if row.samples for _ in range(row.num_samples)
    ]
    values, top_ids, top = found.chosen.tolist(), found.top_ids.tolist(), found.top.tolist()
    result: dict[int, list[TokenLogprob]] = {}
    for at, position in enumerate(found.rows):
        index, row = owners[position]
        count = row.request.sampling.logprobs
        entry = TokenLogprob(values[at], tuple(top_ids[at][:count]), tuple(top[at][:count]))
        result.setdefault(index, []).append(entry)
    return result
