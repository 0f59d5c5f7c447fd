"""Decides what each step shall verify: asks the drafters, remembers what the model drafted, learns what held.

Owns the drafts in waiting and the counters of speculation. Knows no tensor and no block: the scheduler may grant
less. Called by core/engine.py around each step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.core.launched import Chosen
from headrace.core.plan import StepPlan
from headrace.core.policy import Wanted
from headrace.core.request import Request, RequestState
from headrace.core.sampler import draws
from headrace.core.speculation.proposal import HostDrafter, Proposal
from headrace.ipc.limits import MAX_DRAFTS

MTP = "mtp"


@dataclass(slots=True)
class SpeculationCounters:
    """Totals since the engine started; they only grow."""

    steps: int = 0  # that verified drafts
    rows: int = 0  # of requests whose drafts were verified
    drafted: int = 0
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)  # by place in the row


class Speculator:
    """The drafts of one engine.

    Args:
        drafters: on the host.
        ahead: tokens that the model's own drafter looks ahead; 0 = there is none.
        limit: most drafts of a row.
        exact: drafts are never drawn; see Sampler.
    """

    def __init__(self, drafters: Sequence[HostDrafter], *, ahead: int, limit: int, exact: bool) -> None:
        self.counters = SpeculationCounters()
        self._drafters = tuple(drafters)
        self._ahead = ahead
        self._limit = limit
        self._exact = exact
        self._waiting: dict[Request, tuple[int, Proposal]] = {}  # and the tokens known when it was made

    def propose(self, decoding: Sequence[Request]) -> Wanted:
        """What the next step shall verify and draft. Every token of these requests is known."""
        proposals: dict[Request, Proposal] = {}
        for request in decoding:
            offers = self._offers(request)
            if offers:
                proposals[request] = offers[0]
        return Wanted(proposals, self._ahead)

    def learn(self, plan: StepPlan, chosen: Chosen) -> None:
        """A step was committed: keep what it drafted, and count what it accepted."""
        sampling = [row for row in plan.rows if row.samples]
        if chosen.accepted is not None:
            self.counters.steps += 1
            for row, accepted in zip(sampling, chosen.accepted, strict=True):
                if row.drafts is not None:
                    self._count(row.drafts, accepted)
        if not plan.ahead:
            return
        self._waiting = {}
        for row, tokens, confidences in zip(sampling, chosen.drafts, chosen.confidences, strict=True):
            request = row.request
            if request.state is RequestState.DECODE:
                sampled = draws(request.sampling, exact=self._exact)
                self._waiting[request] = (
                    len(request.token_ids),
                    Proposal(MTP, tokens, confidences, sampled),
                )

    def forget(self, request: Request) -> None:
        """It ended."""
        for drafter in self._drafters:
            drafter.forget(request)

    def _offers(self, request: Request) -> list[Proposal]:
        wish = request.sampling.speculation
        offers: list[Proposal] = []
        known, waiting = self._waiting.get(request, (0, None))
        if waiting is not None and known == len(request.token_ids) and wish in ("auto", MTP):
            offers.append(waiting)
        for drafter in self._drafters:
            if wish in ("auto", drafter.name):
                proposal = drafter.propose(request, self._limit)
                if proposal is not None:
                    offers.append(proposal)
        return offers

    def _count(self, drafts: Proposal, accepted: int) -> None:
        counters = self.counters
        counters.rows += 1
        counters.drafted += len(drafts.tokens)
        for place in range(accepted):
            counters.accepted[place] += 1
