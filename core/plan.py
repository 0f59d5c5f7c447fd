"""What crosses from `schedule` to `prepare`: the one object that says what a step computes.

Plain numbers and read-only views; no tensors. The scheduler builds it, prepare turns it into a Batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from headrace.core.request import Request
    from headrace.core.speculation.proposal import Proposal


class PlanRow(NamedTuple):
    """`num_tokens` query tokens of one request, at positions start..start + num_tokens - 1.

    A named tuple, for a frozen dataclass takes three times as long to make and a step makes one per request.
    """

    request: "Request"
    slot: int  # row of the device buffers, stable while the request holds it
    start: int
    num_tokens: int
    samples: bool  # the row's last position yields an output token
    block_table: Sequence[int]  # the request's live table, covering at least those positions; grows in place
    drafts: "Proposal | None" = (
        None  # what the query tokens behind the first one are; each position samples then
    )

    @property
    def num_samples(self) -> int:
        """Positions at which the row samples, if it does."""
        return 1 if self.drafts is None else self.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Rows with one query token come first, then those with drafts, then the longer ones."""

    step: int
    rows: tuple[PlanRow, ...]
    num_decodes: int  # rows with exactly one query token
    copies: tuple[tuple[int, int], ...]  # (source, target) blocks to copy before the step: copy-on-write
    entered: tuple["Request", ...]  # requests that got their slot in this step: their device state is stale
    num_drafted: int = 0  # rows with drafts
    ahead: int = 0  # tokens that the model's own drafter shall draft for each sampling row behind the step

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)
