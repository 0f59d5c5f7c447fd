"""Decides what each step shall verify: asks the drafters, remembers what the model drafted, learns what held.

Owns the drafts in waiting, what is known of their worth, and the counters of speculation. Knows no tensor and no
block: the scheduler may grant less. Called by core/engine.py around each step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.core.launched import Chosen
from headrace.core.plan import StepPlan
from headrace.core.policy import NOTHING, Wanted
from headrace.core.request import Request, RequestState
from headrace.core.sampler import draws
from headrace.core.speculation.calibration import Calibration
from headrace.core.speculation.outlook import Outlook
from headrace.core.speculation.pace import Pace
from headrace.core.speculation.planner import choose
from headrace.core.speculation.proposal import HostDrafter, Proposal
from headrace.core.speculation.step_costs import StepCosts
from headrace.ipc.limits import MAX_DRAFTS

MTP = "mtp"
# While speculation rests the host's drafters go on reading: every so many steps, for so many requests in turn.
LOOK_EVERY, LOOK_AT = 8, 8
LIKELY = 0.6
OBSERVE_EVERY = 8  # plain steps of which one is timed
# What a step with drafts must be quicker by, for a prediction is no better than that.
MARGIN = 1.03


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
        self._calibration = Calibration()
        self._pace = Pace()
        self._outlook = Outlook(ahead)
        self._costs: StepCosts | None = None
        self._naps = 0
        self._trying = False  # the newest step was made with drafts in mind
        self._emitted = 0  # tokens of the newest committed step

    def use_drafters(self, drafters: Sequence[HostDrafter]) -> None:
        """Ask these from now on, instead of those on the host."""
        self._drafters = tuple(drafters)

    def use_costs(self, costs: StepCosts) -> None:
        """From now on verify what pays; until then everything that is offered."""
        self._costs = costs

    def awake(self, running: Sequence[Request]) -> bool:
        """Whether the next step may speculate, so that nothing must be in flight before it."""
        self._trying = self._costs is None or self._may_pay(running, self._costs)
        return self._trying

    def _may_pay(self, running: Sequence[Request], costs: StepCosts) -> bool:
        if len(running) > costs.most_rows:
            return False
        if self._pace.awake(len(running)) or not running:
            return True
        self._naps += 1
        if self._naps % LOOK_EVERY or not self._sees_something(running):
            return False
        self._pace.wake()
        return True

    def propose(self, decoding: Sequence[Request]) -> Wanted:
        """What the next step shall verify and draft. Every token of these requests is known."""
        self._calibration.step()
        best = [self._best(request) for request in decoding]
        rows = len(decoding)
        ahead = self._ahead
        if self._costs is not None and ahead and rows:
            ahead = self._outlook.depth(rows, self._costs)
        counts = self._choose([offer for _, offer in best], drafting=ahead > 0)
        proposals = {
            request: proposal.cut(count)
            for request, (proposal, _), count in zip(decoding, best, counts, strict=True)
            if proposal is not None and count
        }
        if rows and not ahead and not proposals and self._ahead:
            # Neither now nor, as far as one can say, in the next steps.
            self._pace.rest(rows)
            self._outlook.forget()
            self._trying = False
            return NOTHING
        return Wanted(proposals, ahead)

    def learn(self, plan: StepPlan, chosen: Chosen) -> None:
        """A step was committed: keep what it drafted, and count what it accepted."""
        sampling = [row for row in plan.rows if row.samples]
        self._emitted = len(sampling) + sum(chosen.accepted or ())
        if plan.num_drafted and chosen.accepted is not None:
            self.counters.steps += 1
            for row, accepted in zip(sampling, chosen.accepted, strict=True):
                if row.drafts is not None:
                    self._count(row.drafts, accepted)
        self._waiting = {}
        if not plan.ahead:
            return
        for row, tokens, confidences in zip(sampling, chosen.drafts, chosen.confidences, strict=True):
            request = row.request
            if request.state is RequestState.DECODE:
                sampled = draws(request.sampling, exact=self._exact)
                count = tokens.index(-1) if -1 in tokens else len(tokens)
                proposal = Proposal(MTP, tokens, confidences, sampled).cut(count)
                self._waiting[request] = (len(request.token_ids), proposal)

    def observe(self, plan: StepPlan, ms: float, *, waited: bool) -> None:
        """A step took so long; `waited`: it was committed before the next one was made."""
        costs, rows = self._costs, len(plan.rows)
        if costs is None or plan.num_decodes + plan.num_drafted < rows:
            return
        drafting = plan.ahead > 0
        if self._trying:
            self._pace.record(self._emitted * costs.plain_ms(rows) / (rows * ms), rows)
        elif plan.step % OBSERVE_EVERY:
            return
        costs.observe(rows, plan.num_tokens, ms, drafting=drafting, waited=waited)

    def forget(self, request: Request) -> None:
        """It ended."""
        self._waiting.pop(request, None)
        for drafter in self._drafters:
            drafter.forget(request)

    def _sees_something(self, running: Sequence[Request]) -> bool:
        """The host's drafters have a likely proposal for half of the requests that are looked at."""
        start = self._naps // LOOK_EVERY * LOOK_AT % len(running)
        looked = [running[(start + i) % len(running)] for i in range(min(LOOK_AT, len(running)))]
        found = 0
        for request in looked:
            for drafter in self._drafters:
                if request.sampling.speculation in ("auto", drafter.name):
                    proposal = drafter.propose(request, 1)
                    if proposal is not None:
                        sure = proposal.confidences[0]
                        found += self._calibration.probability(drafter.name, 1, sure) > LIKELY
        return 2 * found >= len(looked)

    def _best(self, request: Request) -> tuple[Proposal | None, list[float]]:
        """The proposal that is expected to yield most, and the probability that each of its drafts is accepted."""
        best: tuple[Proposal | None, list[float]] = (None, [])
        most = 0.0
        for proposal in self._offers(request):
            offer = self._odds(proposal)
            worth = expected(offer)
            if worth > most:
                best, most = (proposal, offer), worth
        return best

    def _odds(self, proposal: Proposal) -> list[float]:
        """The probability that each draft is accepted, given that those before it are.

        Of drawn drafts nothing may be looked at that a drawn token has a say in, not even how far drafting went on
        behind it: whether a draft is verified would depend on which token it is, and the output's distribution
        with it. So only the first one's confidence counts, which was known before it was drawn.
        """
        key, calibration = _key(proposal), self._calibration
        if proposal.sampled:
            first = calibration.probability(key, 1, proposal.confidences[0])
            return [first, *(calibration.average(key, depth) for depth in range(2, self._ahead + 1))]
        return [
            calibration.probability(key, depth, confidence)
            for depth, confidence in enumerate(proposal.confidences, 1)
        ]

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

    def _choose(self, offers: Sequence[Sequence[float]], *, drafting: bool) -> list[int]:
        costs = self._costs
        if costs is None:
            return [len(offer) for offer in offers]
        rows = len(offers)
        return choose(
            offers,
            rows,
            lambda tokens: MARGIN * costs.verify_ms(tokens) if tokens > rows else costs.plain_ms(rows),
            costs.most_tokens - rows,
            overhead_ms=costs.draft_ms(rows) if drafting else 0.0,
        )

    def _count(self, drafts: Proposal, accepted: int) -> None:
        counters = self.counters
        counters.rows += 1
        counters.drafted += len(drafts.tokens)
        for place in range(accepted):
            counters.accepted[place] += 1
        # What stood behind a wrong draft was never judged.
        for depth, confidence in enumerate(drafts.confidences[: accepted + 1], 1):
            self._calibration.record(_key(drafts), depth, confidence, depth <= accepted)
            if drafts.drafter == MTP:
                self._outlook.record(depth - 1, depth <= accepted)


def _key(proposal: Proposal) -> str:
    """Under which a proposal's drafts are calibrated: drawn ones are accepted by another rule."""
    return f"{proposal.drafter} drawn" if proposal.sampled else proposal.drafter


def expected(offer: Sequence[float]) -> float:
    """Drafts that will be accepted, given the probability of each after those before it."""
    total, reached = 0.0, 1.0
    for probability in offer:
        reached *= probability
        total += reached
    return total
