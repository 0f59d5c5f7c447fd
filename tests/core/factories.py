"""Schedulers, requests and a fake device for tests of everything that decides and moves no tensor.

The fake model answers a token as a pure function of (seed, position). The fake device remembers, for each cell of
the KV pool, what was written there, and refuses to run a row whose context is not its own.
"""

import random
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from headrace.core.kv_cache import KVCache
from headrace.core.outcome import Outcome
from headrace.core.plan import PlanRow, StepPlan
from headrace.core.policy import NOTHING, Wanted
from headrace.core.request import UNLIMITED, FinishReason, Request
from headrace.core.scheduler import Scheduler
from headrace.core.speculation.proposal import Proposal
from headrace.ipc.messages import Sampling

BLOCK_SIZE = 4


def make_kv(num_blocks: int = 64, *, block_size: int = BLOCK_SIZE, prefix_cache: bool = True) -> KVCache:
    return KVCache(num_blocks, block_size, prefix_cache=prefix_cache)


def make_scheduler(
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_waiting: int = 64,
    max_model_len: int = 128,
    num_blocks: int = 64,
    block_size: int = BLOCK_SIZE,
    prefix_cache: bool = True,
) -> Scheduler:
    return Scheduler(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_waiting=max_waiting,
        max_model_len=max_model_len,
        kv=make_kv(num_blocks, block_size=block_size, prefix_cache=prefix_cache),
    )


def make_request(
    name: str = "r",
    prompt: int | Sequence[int] = 6,
    *,
    max_tokens: int = 8,
    seed: int = 0,
    priority: int = 0,
    salt: str = "",
    stop: Sequence[int] = (),
    min_tokens: int = 0,
    generated: Sequence[int] = (),
    credit: int = UNLIMITED,
) -> Request:
    """A number as prompt means so many tokens that no other name has."""
    if isinstance(prompt, int):
        first = 1000 * (1 + sum(name.encode()))
        prompt = range(first, first + prompt)
    sampling = Sampling(max_tokens=max_tokens, seed=seed, stop_token_ids=tuple(stop), min_tokens=min_tokens)
    return Request(
        name, prompt, sampling, priority=priority, cache_salt=salt, generated=generated, credit=credit
    )


def fake_token(seed: int, position: int) -> int:
    """What the fake model says at `position`: 0..96."""
    mixed = (seed * 1_000_003 + position * 7_919 + 12_345) * 2_654_435_761 & 0xFFFF_FFFF
    return (mixed >> 15) % 97


def expected_output(request: Request, max_model_len: int) -> tuple[list[int], FinishReason]:
    """What a request must yield whatever happens to it on the way."""
    sampling, output = request.sampling, request.output_ids[:0]
    while True:
        output.append(fake_token(sampling.seed, request.prompt_len + len(output)))
        if output[-1] in sampling.stop_token_ids and len(output) > sampling.min_tokens:
            return output, FinishReason.STOP
        if len(output) >= sampling.max_tokens or request.prompt_len + len(output) >= max_model_len:
            return output, FinishReason.LENGTH


def guesses(scheduler: Scheduler, rng: random.Random, *, ahead: int = 0) -> Wanted:
    """Up to 8 drafts for some of the requests that may have them; most drafts are right."""
    proposals: dict[Request, Proposal] = {}
    for request in scheduler.decoding():
        count = rng.randrange(9)
        if request.in_flight or not count:
            continue
        at = len(request.token_ids)
        right = [fake_token(request.sampling.seed, at + i) for i in range(count)]
        drafts = [token if rng.random() < 0.8 else 98 for token in right]
        proposals[request] = Proposal("guess", drafts, [1.0] * count)
    return Wanted(proposals, ahead)


class Cell(NamedTuple):
    """The KV of one position. It depends on all tokens up to there, as the real one does."""

    salt: str
    position: int
    token: int
    history: int  # hash of the tokens before


class FakeDevice:
    """Runs plans in order: copies, then every row's KV, then every row's attention, then sampling."""

    def __init__(self, block_size: int = BLOCK_SIZE) -> None:
        self._block_size = block_size
        self._cells: dict[tuple[int, int], Cell] = {}
        self._slots: dict[int, tuple[Request, int]] = {}  # who has the slot, and the token it sampled last

    def run(self, plan: StepPlan) -> dict[str, tuple[int, ...]]:
        """The sampled tokens by request id."""
        for source, target in plan.copies:
            for offset in range(self._block_size):
                if (source, offset) in self._cells:
                    self._cells[target, offset] = self._cells[source, offset]
        for request in plan.entered:
            self._slots[request.slot] = (request, -1)
        contexts = [self._context(row) for row in plan.rows]
        written: set[tuple[int, int]] = set()
        for row, context in zip(plan.rows, contexts, strict=True):
            for position in range(row.start, row.start + row.num_tokens):
                cell = self._cell(row, position)
                assert cell[0] != 0, f"{row.request} writes into the padding block"
                assert cell not in written, f"{row.request} writes where another row of the step does"
                written.add(cell)
                self._cells[cell] = context[position]
        for row, context in zip(plan.rows, contexts, strict=True):
            for position, wanted in enumerate(context):
                found = self._cells.get(self._cell(row, position))
                assert found == wanted, f"{row.request} attends to {found} instead of {wanted}"
        sampled = {row.request.request_id: self._sample(row) for row in plan.rows if row.samples}
        for row in plan.rows:
            if row.samples and plan.ahead:
                self._draft(row, len(sampled[row.request.request_id]), plan.ahead)
        return sampled

    def _cell(self, row: PlanRow, position: int) -> tuple[int, int]:
        return row.block_table[position // self._block_size], position % self._block_size

    def _context(self, row: PlanRow) -> list[Cell]:
        """What the row must find at each position, its own tokens included."""
        request, end = row.request, row.start + row.num_tokens
        holder, newest = self._slots[row.slot]
        assert holder is request, f"{request} runs in the slot of {holder}"
        tokens = request.token_ids[:end]
        if row.drafts is not None:
            assert len(tokens) == row.start + 1, f"{request}: drafts do not follow its last token"
            tokens += row.drafts.tokens
            assert len(tokens) == end
        if len(tokens) < end:
            assert end == len(tokens) + 1, f"{request}: more than one token is unknown"
            tokens.append(newest)
        history, context = 0, []
        for position, token in enumerate(tokens):
            context.append(Cell(request.cache_salt, position, token, history))
            history = hash((history, token))
        return context

    def _sample(self, row: PlanRow) -> tuple[int, ...]:
        """The row's next token, and those that follow as long as the drafts foresaw it."""
        seed, drafts = row.request.sampling.seed, row.drafts.tokens if row.drafts is not None else ()
        at = row.start + row.num_tokens - len(drafts)
        tokens = [fake_token(seed, at)]
        for draft in drafts:
            if draft != tokens[-1]:
                break
            tokens.append(fake_token(seed, at + len(tokens)))
        self._slots[row.slot] = (row.request, tokens[-1])
        return tuple(tokens)

    def _draft(self, row: PlanRow, emitted: int, ahead: int) -> None:
        """The model's drafter leaves traces behind the row's last true position, in blocks that the row has."""
        drafts = 0 if row.drafts is None else len(row.drafts.tokens)
        last = row.start + row.num_tokens - 1 - drafts + emitted - 1
        for position in range(last + 1, last + ahead):
            if position < len(row.block_table) * self._block_size:
                self._cells[self._cell(row, position)] = Cell("a guess", position, -1, -1)


class Loop:
    """The engine's step loop over the fake device; checks every plan and the scheduler's integrity.

    `overlap` leaves one step in flight, as the engine does on a GPU.
    """

    def __init__(self, scheduler: Scheduler, *, overlap: bool = False, block_size: int = BLOCK_SIZE) -> None:
        self.scheduler = scheduler
        self.plans: list[StepPlan] = []
        self._depth = 1 if overlap else 0
        self._device = FakeDevice(block_size)
        self._launched: deque[tuple[StepPlan, dict[str, tuple[int, ...]]]] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._launched)

    def launch(self, wanted: Wanted = NOTHING) -> StepPlan | None:
        """Schedule a step and run it; its commit is to come."""
        plan = self.scheduler.schedule(wanted)
        if plan is not None:
            check_plan(plan)
            self.plans.append(plan)
            self._launched.append((plan, self._device.run(plan)))
        self.scheduler.check_integrity()
        return plan

    def settle(self) -> Outcome:
        """Commit the oldest step in flight."""
        plan, tokens = self._launched.popleft()
        outcome = self.scheduler.commit(plan, tokens)
        self.scheduler.check_integrity()
        return outcome

    def step(self) -> StepPlan | None:
        """One turn of the engine's loop."""
        plan = self.launch()
        while len(self._launched) > (self._depth if plan is not None else 0):
            self.settle()
        return plan

    def drain(self, limit: int = 10_000) -> int:
        """Step until nothing is left to do; how many steps it took."""
        for steps in range(limit):
            if not self.scheduler.has_work:
                return steps
            self.step()
        raise AssertionError(f"still at work after {limit} steps")


def check_plan(plan: StepPlan) -> None:
    """Assert what every plan promises."""
    counts = [row.num_tokens for row in plan.rows]
    assert counts, "an empty plan"
    assert all(count == 1 for count in counts[: plan.num_decodes]), "a longer row among the single ones"
    assert all(count > 1 for count in counts[plan.num_decodes :]), "a single row among the longer ones"
    drafted = [index for index, row in enumerate(plan.rows) if row.drafts is not None]
    assert drafted == list(range(plan.num_decodes, plan.num_decodes + plan.num_drafted)), (
        "drafts are elsewhere"
    )
    assert len({row.slot for row in plan.rows}) == len(plan.rows), "two rows share a slot"
    assert set(plan.entered) <= {row.request for row in plan.rows}, "a request entered without a row"


def submit(scheduler: Scheduler, *requests: Request) -> Sequence[Request]:
    """The requests, queued in this order."""
    for request in requests:
        scheduler.submit(request)
    return requests


def shape(plan: StepPlan | None) -> list[tuple[str, int, int]]:
    """(request, start, query tokens) of each row."""
    return [(row.request.request_id, row.start, row.num_tokens) for row in plan.rows] if plan else []


def assert_complete(scheduler: Scheduler, requests: Sequence[Request]) -> None:
    """All ended as the fake model would have it, and gave everything back."""
    for request in requests:
        assert (request.output_ids, request.finish_reason) == expected_output(
            request, scheduler.max_model_len
        )
    assert not scheduler.has_work
    assert scheduler.kv.num_used == 0
