"""Who gets into the next step, and who yields when blocks are short.

Owns the rules, and counts what they cause; core/roster.py holds the requests, core/kv_cache.py the blocks. Knows
no tensor and no commit. Called by core/scheduler.py. Nothing here may be O(tokens) per step and decode row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headrace.core.kv_cache import NO_HIT, KVCache, PrefixHit
from headrace.core.outcome import Counters
from headrace.core.plan import PlanRow
from headrace.core.request import Request, RequestState
from headrace.core.roster import Roster
from headrace.core.speculation.proposal import Proposal

# Of so many admissions one promotes the request that has waited longest, whatever its class.
PROMOTE_EVERY = 8

_PREFILL, _DECODE = RequestState.PREFILL, RequestState.DECODE


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the speculator wishes of a step; blocks, budget and limits may leave less of it."""

    proposals: Mapping[Request, Proposal] = field(default_factory=dict)
    ahead: int = 0  # see StepPlan

    @property
    def num_drafts(self) -> int:
        return sum(len(proposal.tokens) for proposal in self.proposals.values())


NOTHING = Wanted()


@dataclass(slots=True)
class Composition:
    """The rows of a step in the making."""

    budget: int  # query tokens left
    draft_budget: int = 0  # and kept for drafts
    singles: list[PlanRow] = field(default_factory=list)  # rows with one query token
    drafted: list[PlanRow] = field(default_factory=list)  # rows with drafts
    longer: list[PlanRow] = field(default_factory=list)
    entered: list[Request] = field(default_factory=list)


class Policy:
    """Continuous batching over one KV pool.

    Out of the token budget every running decode gets one token, then running prefills their next chunks, then
    waiting requests are admitted while there are slots and blocks. Within each, and for blocks throughout, who
    comes first is a matter of rank, the total order of (promoted, priority, arrival): first come, first served
    within a class.

    Blocks short: parked requests lose theirs first, the longest parked one before others; then the running
    request of the worst rank is preempted. It keeps its output and computes its KV again later; its rank puts
    it in front of its class.

    Nobody starves. Of the running requests the one of the best rank may take blocks from any other and yields
    to none, so it has a row in every step until it ends or parks, and then the next one has. Of the waiting
    ones the best is admitted first, and every `PROMOTE_EVERY`-th admission promotes the one that has waited
    longest, for good: it is behind nobody but those promoted before it.
    """

    def __init__(
        self,
        *,
        max_num_batched_tokens: int,
        roster: Roster,
        kv: KVCache,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._max_num_batched_tokens = max_num_batched_tokens
        self._roster = roster
        self._kv = kv
        self._counters = counters
        self._clock = clock
        self._admissions = 0

    def compose(self, wanted: Wanted) -> Composition:
        """Decide the next step: its requests are moved, their blocks reserved, their rows dispatched."""
        step = Composition(self._max_num_batched_tokens)
        preemptions = self._counters.preemptions
        self._add_running(step, wanted.num_drafts)
        # Who was just preempted would come straight back, or others would take what it gave up.
        if preemptions == self._counters.preemptions:
            self._add_admissions(step)
            if wanted.proposals or wanted.ahead:
                self._add_drafts(step, wanted)
        return step

    def preempt(self, request: Request) -> None:
        """Take a running request's slot and blocks; it queues again."""
        self._counters.preemptions += 1
        self._roster.preempt(request)

    def _add_running(self, step: Composition, num_drafts: int) -> None:
        rows, running = step.singles, self._roster.running.snapshot()
        step.budget -= sum(request.state is _DECODE for request in running)
        # Prompts keep half of what decodes leave: drafts only ever speed up those who run already.
        step.draft_budget = min(num_drafts, step.budget // 2)
        step.budget -= step.draft_budget
        for request in running:
            start = request.num_computed
            if request.state is _DECODE:
                # The last token it may sample now is in flight: its commit ends it, parks it, or finds credit.
                # Where its drafts are in flight, nobody knows its next position yet.
                if request.num_drafts or len(request.token_ids) + request.num_pending >= request.run_limit:
                    continue
                if start >= request.table.room and self._make_room(request, start + 1) == start:
                    continue
                rows.append(PlanRow(request, request.slot, start, 1, True, request.table.blocks))
                request.dispatch(1)
            elif request.state is _PREFILL and step.budget:
                end = self._make_room(request, min(start + step.budget, len(request.token_ids)))
                if end > start:
                    self._add_row(step, request, end - start)

    def _add_admissions(self, step: Composition) -> None:
        roster, kv = self._roster, self._kv
        if not roster.waiting or not roster.has_slot or not step.budget:
            return
        now = self._clock()
        while roster.waiting and roster.has_slot and step.budget:
            request = roster.waiting.first
            hit = self._find_place(request)
            if hit is None:
                break
            self._admit(request, hit, now)
            start = request.num_computed
            end = min(start + step.budget, len(request.token_ids))
            kv.reserve(request.table, start, end)
            self._add_row(step, request, end - start)
            step.entered.append(request)

    def _admit(self, request: Request, hit: PrefixHit, now: float) -> None:
        num_computed, first = request.num_computed, request.first_scheduled is None
        if not request.table.blocks:
            self._kv.take(request.table, hit)
            num_computed = hit.num_tokens
            self._counters.prefix_queries += len(request.token_ids)
            self._counters.prefix_hits += hit.num_tokens
        self._roster.admit(request, num_computed, now)
        if first:
            self._counters.cached_tokens += request.num_cached_tokens
        self._admissions += 1
        if self._admissions % PROMOTE_EVERY == 0:
            self._roster.waiting.promote_oldest()

    def _find_place(self, request: Request) -> PrefixHit | None:
        """What the cache has of a waiting request, if the whole of it can be admitted now.

        It must leave one block for every running request: to let it in and preempt somebody a few steps later
        would help nobody. Running prefills need no more: while there is one, it uses up budget or blocks.
        """
        if request.in_flight:
            return None
        kv, roster, table = self._kv, self._roster, request.table
        while True:
            hit = NO_HIT if table.blocks else kv.match(table, request.cache_salt, request.token_ids)
            needed = kv.blocks_for(len(request.token_ids)) - len(table.blocks) - len(hit.blocks) + hit.cost
            missing = needed + len(roster.running) - kv.num_available
            if missing <= 0:
                return hit
            if missing > roster.kept_blocks(spared=request) or not roster.reclaim(spared=request):
                return None

    def _make_room(self, request: Request, end: int) -> int:
        """Reserve a running request's next positions up to `end`; if others must yield for it, they do.

        Returns how far it came: a prefill may get a part, or nothing and has to wait. A decode gets its one
        position, or is preempted itself, or waits for blocks that come free at the next commit. Nobody yields
        who has a row in this step already: rows are made in order of rank.
        """
        kv, roster, start = self._kv, self._roster, request.num_computed
        while (fit := kv.fit(request.table, start, end)) < end:
            if roster.reclaim():
                continue
            if fit > start or roster.leaving:
                break
            victim = roster.running.last
            if victim is request and request.state is _PREFILL:
                break
            self.preempt(victim)
            if victim is request:
                return start
        if fit > start:
            kv.reserve(request.table, start, fit)
        return fit

    def _add_drafts(self, step: Composition, wanted: Wanted) -> None:
        """Let rows verify drafts, and give the model's drafter room, out of blocks that nobody else needs now."""
        plain: list[PlanRow] = []
        for row in step.singles:
            proposal = wanted.proposals.get(row.request) if row.samples else None
            count = self._fit_drafts(step, row, proposal, wanted.ahead)
            if not count or proposal is None:
                plain.append(row)
                continue
            row.request.carry(count)
            step.draft_budget -= count
            step.drafted.append(row._replace(num_tokens=1 + count, drafts=proposal.cut(count)))
        step.singles = plain
        for row in step.longer:
            if row.samples and wanted.ahead:
                self._spare_room(row.request, row.start + row.num_tokens, wanted.ahead - 1)

    def _fit_drafts(self, step: Composition, row: PlanRow, proposal: Proposal | None, ahead: int) -> int:
        """How many drafts the row can verify; positions for them are reserved."""
        request, end = row.request, row.start + row.num_tokens
        count = 0
        # A token that is still in flight cannot be followed by a guess.
        if proposal is not None and end == len(request.token_ids):
            count = max(min(len(proposal.tokens), request.run_limit - end - 1, step.draft_budget), 0)
        return min(count, self._spare_room(request, end + count, max(ahead - 1, 0)) - end)

    def _spare_room(self, request: Request, end: int, ahead: int) -> int:
        """Reserve positions up to `end`, and `ahead` more if the request can have them, without taking from anyone.

        Each running request keeps a block for its next token. Returns the position up to which there is room, at
        most `end`.
        """
        kv, table = self._kv, request.table
        wanted = min(end + ahead, max(end, request.full_len))
        if wanted > table.room:
            spare = kv.num_available - len(self._roster.running)
            if kv.blocks_for(wanted) - len(table.blocks) <= spare:
                kv.reserve(table, table.room, wanted)
        return min(end, table.room)

    def _add_row(self, step: Composition, request: Request, num_tokens: int) -> None:
        """A row of a prefill; its full blocks become findable for those who are scheduled after it."""
        start, table = request.num_computed, request.table
        samples = request.dispatch(num_tokens)
        row = PlanRow(request, request.slot, start, num_tokens, samples, table.blocks)
        (step.singles if num_tokens == 1 else step.longer).append(row)
        step.budget -= num_tokens
        if request.first_token is None:
            self._counters.prompt_tokens += num_tokens
        self._kv.publish(table, request.cache_salt, request.token_ids, request.num_computed)
