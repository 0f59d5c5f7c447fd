"""When speculation is tried and when it rests: by what steps cost, and by what there is to verify."""

from itertools import pairwise

from headrace.core.launched import Chosen
from headrace.core.plan import PlanRow, StepPlan
from headrace.core.request import Request
from headrace.core.speculation.ngram_drafter import NgramDrafter
from headrace.core.speculation.outlook import Outlook
from headrace.core.speculation.pace import LONGEST_REST, SHORTEST_REST, Pace
from headrace.core.speculation.proposal import Proposal
from headrace.core.speculation.step_cost import StepCost
from headrace.core.speculation.step_costs import StepCosts
from headrace.core.speculator import Speculator
from headrace.ipc.messages import Sampling


def make_costs(per_token: float, *, draft_ms: float = 0.0, most_rows: int = 64) -> StepCosts:
    """Steps of 10 ms and so much more for each query token."""
    points = [(size, 10 + per_token * size) for size in (1, 2, 4, 8, 16, 32, 64, 128)]
    draft = StepCost([(1, draft_ms), (64, draft_ms)])
    return StepCosts(StepCost(points), StepCost(points), draft, most_tokens=128, most_rows=most_rows)


def make_speculator(costs: StepCosts | None = None, *, ahead: int = 0) -> Speculator:
    speculator = Speculator([NgramDrafter()], ahead=ahead, limit=8, exact=False)
    if costs is not None:
        speculator.use_costs(costs)
    return speculator


def repeating(count: int, speculation: str = "auto") -> list[Request]:
    """Requests whose prompt says the same twelve times."""
    sampling = Sampling(max_tokens=100, temperature=0.0, speculation=speculation)
    return [Request(f"r{i}", [i, 1, 2, 3] * 12, sampling) for i in range(count)]


def test_everything_is_verified_until_costs_are_known() -> None:
    (request,) = repeating(1)
    wanted = make_speculator().propose([request])
    assert list(wanted.proposals[request].tokens) == [0, 1, 2, 3, 0, 1, 2, 3]


def test_cheap_tokens_are_verified_and_dear_ones_are_not() -> None:
    requests = repeating(3)
    cheap = make_speculator(make_costs(0.01))
    assert cheap.awake(requests)
    assert all(len(proposal.tokens) == 8 for proposal in cheap.propose(requests).proposals.values())
    assert not make_speculator(make_costs(200.0)).propose(requests).proposals


def test_the_model_drafts_where_that_pays_and_the_host_goes_on_without_it() -> None:
    requests = repeating(1)
    cheap = make_speculator(make_costs(0.1, draft_ms=1.0), ahead=3).propose(requests)
    dear = make_speculator(make_costs(0.1, draft_ms=1000.0), ahead=3).propose(requests)
    assert (cheap.ahead, dear.ahead) == (3, 0)
    assert cheap.proposals and dear.proposals


def test_a_request_is_drafted_for_by_whom_it_allows() -> None:
    speculator = make_speculator()
    for speculation, offered in (("auto", True), ("ngram", True), ("mtp", False), ("off", False)):
        assert bool(speculator.propose(repeating(1, speculation)).proposals) is offered


def test_wrong_drafts_are_believed_less() -> None:
    """Each verification shows the first draft wrong; after some dozens none is worth a query token."""
    (request,) = repeating(1)
    speculator = make_speculator(make_costs(2.0))
    assert speculator.propose([request]).proposals
    for _ in range(60):
        speculator.learn(*_verified(request, Proposal("ngram", [5, 6], [32.0, 32.0]), accepted=0))
    assert not speculator.propose([request]).proposals
    assert speculator.counters.accepted[0] == 0
    assert speculator.counters.drafted == 120


def _verified(request: Request, drafts: Proposal, accepted: int) -> tuple[StepPlan, Chosen]:
    row = PlanRow(request, 0, 47, 1 + len(drafts.tokens), True, [1], drafts)
    plan = StepPlan(1, (row,), 0, (), (), num_drafted=1)
    return plan, Chosen([7] * row.num_tokens, [accepted], None, [], [])


def test_a_batch_too_large_for_drafts_is_left_alone() -> None:
    requests = repeating(9)
    speculator = make_speculator(make_costs(0.01, most_rows=8))
    assert not speculator.awake(requests)
    assert speculator.awake(requests[:8])


def test_the_drafts_of_the_model_wait_for_the_tokens_they_were_made_behind() -> None:
    """A request that went on without them has no use for them."""
    (request,) = repeating(1, "mtp")
    request.admit(0, 0, 1.0)
    request.dispatch(48)
    request.take([4], 1.0)
    speculator = make_speculator(ahead=2)
    row = PlanRow(request, 0, 0, 48, True, [1])
    plan = StepPlan(1, (row,), 0, (), (), ahead=2)
    speculator.learn(plan, Chosen([4], None, None, [[8, 9]], [[0.9, 0.8]]))
    wanted = speculator.propose([request])
    assert wanted.ahead == 2
    assert list(wanted.proposals[request].tokens) == [8, 9]
    request.dispatch(1)
    request.take([8], 2.0)
    assert not speculator.propose([request]).proposals


def awake_steps(pace: Pace, steps: int, *, gain: float, running: int = 10) -> list[int]:
    """In which of so many steps speculation was tried, each of which gained so much."""
    tried = []
    for step in range(steps):
        if pace.awake(running):
            tried.append(step)
            pace.record(gain, running)
    return tried


def test_rests_become_longer_and_stay_bounded() -> None:
    tried = awake_steps(Pace(), 8000, gain=0.6)
    rests = [later - earlier - 1 for earlier, later in pairwise(tried) if later > earlier + 1]
    assert rests[:3] == [SHORTEST_REST, 2 * SHORTEST_REST, 4 * SHORTEST_REST]
    assert max(rests) == LONGEST_REST
    assert len(tried) < 40, "what gains nothing costs next to nothing"


def test_what_gains_goes_on_and_single_failures_do_not_end_it() -> None:
    pace = Pace()
    assert len(awake_steps(pace, 50, gain=1.4)) == 50
    assert len(awake_steps(pace, 1, gain=0.5)) == 1
    assert len(awake_steps(pace, 50, gain=1.4)) == 50


def test_success_shortens_the_next_rest() -> None:
    pace = Pace()
    awake_steps(pace, 400, gain=0.6)
    pace.wake()
    awake_steps(pace, 50, gain=1.5)
    tried = awake_steps(pace, 60, gain=0.2)
    rests = [later - earlier - 1 for earlier, later in pairwise(tried) if later > earlier + 1]
    assert rests[0] == SHORTEST_REST


def test_looking_ahead_goes_as_far_as_it_pays() -> None:
    outlook = Outlook(4)
    assert outlook.depth(1, make_costs(0.01)) == 4
    assert outlook.depth(1, make_costs(200.0)) == 0
    assert outlook.depth(1, make_costs(0.01, draft_ms=1000.0)) == 0
    few = outlook.depth(16, make_costs(0.5))
    assert 0 < few < 4
    for _ in range(200):
        outlook.record(0, stood=False)
    assert outlook.depth(1, make_costs(0.5, draft_ms=2.0)) == 0
    for _ in range(40):
        outlook.forget()
    assert outlook.depth(1, make_costs(0.5, draft_ms=2.0)) > 0


def test_a_shrunken_batch_ends_a_rest() -> None:
    pace = Pace()
    pace.rest(100)
    assert not pace.awake(76)
    assert pace.awake(75)
