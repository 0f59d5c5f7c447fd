"""What a committed step came to: tokens that joined their requests' outputs, and who ended.

Built by core/scheduler.py; the engine server turns it into Tokens messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.core.request import Request


class Emitted(NamedTuple):
    """Tokens that one row added to its request's output."""

    row: int  # index in the plan's rows
    request: Request
    start: int  # output index of the first one
    token_ids: Sequence[int]  # at least one; ends with the token that ended the request, if one did


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one step. Rows whose request had ended before the commit are not in it."""

    emitted: tuple[Emitted, ...]
    finished: tuple[Request, ...]  # their last tokens are among the emitted ones


@dataclass(slots=True)
class Counters:
    """Totals since the engine started; they only grow."""

    prompt_tokens: int = 0  # computed before a request's first token; cached ones are not
    cached_tokens: int = 0  # prompt tokens found at first admission
    output_tokens: int = 0
    prefix_queries: int = 0  # tokens looked up, at every admission
    prefix_hits: int = 0  # of those, found
    preemptions: int = 0
