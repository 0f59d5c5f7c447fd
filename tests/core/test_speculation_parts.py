"""The parts of speculation that move no tensor, each against a plain definition of what it promises."""

import random
from collections.abc import Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.speculation.calibration import MAX_DEPTH, PROBABILITY, Calibration
from headrace.core.speculation.ngram import NgramIndex
from headrace.core.speculation.planner import choose
from headrace.core.speculation.step_cost import StepCost


def looked_up(tokens: list[int], count: int, longest: int, shortest: int) -> list[int]:
    """What NgramIndex promises, by trying everything."""
    end = len(tokens)
    for size in range(min(longest, end), shortest - 1, -1):
        for place in range(end - 1, size - 1, -1):
            if tokens[place - size : place] == tokens[end - size :]:
                return [(tokens + tokens[place:] * count)[place + i] for i in range(count)]
    return []


@settings(max_examples=80, deadline=None)
@given(
    parts=st.lists(st.lists(st.integers(0, 3), max_size=90), max_size=6),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
)
def test_a_proposal_is_what_followed_the_longest_and_newest_match(
    parts: list[list[int]], shortest: int, more: int
) -> None:
    """However the tokens came in: one by one, or many at once."""
    index = NgramIndex(max_ngram=shortest + more, min_ngram=shortest)
    tokens: list[int] = []
    for part in parts:
        index.extend(part)
        tokens += part
        assert index.propose(5) == looked_up(tokens, 5, shortest + more, shortest)


def test_the_match_length_is_that_of_the_repeated_phrase() -> None:
    index = NgramIndex(max_ngram=3, min_ngram=2)
    index.extend([9, 1, 2, 3, 4, 5, 6, 7, 8, 2, 3, 4, 5, 6])
    assert index.propose(3) == [7, 8, 2]
    assert index.match_length == 5
    index.extend([99])
    assert index.propose(3) == []
    assert index.match_length == 0


def test_what_was_seen_within_reach_is_found_and_memory_stays_bounded() -> None:
    reach = 100
    index = NgramIndex(max_ngram=2, min_ngram=2, reach=reach)
    index.extend(range(10 * reach))
    index.extend([10 * reach - 90, 10 * reach - 89])
    assert index.propose(2) == [10 * reach - 88, 10 * reach - 87]
    index.extend([5, 6])
    assert index.propose(2) == []
    assert sum(len(table) for table in index._young + index._old) <= 2 * reach


def emitted_per_ms(
    offers: Sequence[Sequence[float]], drafts: Sequence[int], base: int, times: list[float], overhead: float
) -> float:
    emitted = float(len(offers))
    for offer, count in zip(offers, drafts, strict=True):
        worth = 1.0
        for probability in offer[:count]:
            worth *= probability
            emitted += worth
    total = sum(drafts)
    return emitted / (times[base + total] + (overhead if total else 0.0))


@settings(max_examples=200, deadline=None)
@given(
    offers=st.lists(st.lists(st.floats(0, 1), max_size=3), min_size=1, max_size=4),
    rises=st.lists(st.sampled_from([0.0, 0.1, 0.5, 3.0]), min_size=24, max_size=24),
    limit=st.integers(0, 12),
    overhead=st.sampled_from([0.0, 0.3]),
    prefill=st.integers(0, 5),
)
def test_no_other_choice_of_drafts_emits_more_per_millisecond(
    offers: list[list[float]], rises: list[float], limit: int, overhead: float, prefill: int
) -> None:
    """Against every choice there is, on any curve that never falls; none is also one of them: never below plain."""
    times = [1.0]
    for rise in rises:
        times.append(times[-1] + rise)
    base = len(offers) + prefill
    drafts = choose(offers, base, times.__getitem__, limit, overhead_ms=overhead)
    assert sum(drafts) <= limit
    assert all(count <= len(offer) for count, offer in zip(drafts, offers, strict=True))
    best = max(
        emitted_per_ms(offers, other, base, times, overhead)
        for other in product(*(range(len(offer) + 1) for offer in offers))
        if sum(other) <= limit
    )
    assert emitted_per_ms(offers, drafts, base, times, overhead) == pytest.approx(best, rel=1e-12)


def test_a_full_batch_decodes_plainly_and_a_small_one_does_not() -> None:
    cost = StepCost([(1, 5.0), (8, 5.2), (64, 8.0), (256, 24.0), (512, 48.0)])
    offers = [[0.7, 0.6, 0.5]]
    assert choose(offers, 1, cost.ms, 64) == [3]
    assert choose(offers * 256, 256, cost.ms, 256) == [0] * 256


def test_a_step_that_is_padded_anyway_takes_the_drafts_that_fit() -> None:
    cost = StepCost([(1, 5.0), (4, 6.0), (8, 9.0)], padded=True)
    assert choose([[0.05] * 4, [0.1] * 4, [0.2] * 4], 3, cost.ms, 64) == [0, 0, 1]


def test_measured_points_are_met_and_joined_by_lines() -> None:
    cost = StepCost([(8, 4.0), (1, 1.0), (8, 6.0), (16, 7.0)])
    assert [cost.ms(n) for n in (1, 8, 12, 16)] == pytest.approx([1.0, 5.0, 6.0, 7.0])
    assert cost.ms(24) == pytest.approx(9.0), "beyond the last point the last slope goes on"


def test_padded_steps_cost_what_their_size_costs() -> None:
    cost = StepCost([(1, 1.0), (8, 5.0), (16, 7.0)], padded=True)
    assert [cost.ms(n) for n in (1, 2, 8, 9, 16)] == [1.0, 5.0, 5.0, 7.0, 7.0]


@settings(max_examples=60, deadline=None)
@given(
    points=st.lists(st.tuples(st.integers(1, 300), st.floats(0.1, 50)), min_size=1, max_size=8),
    seen=st.lists(st.tuples(st.integers(1, 400), st.floats(0, 1000)), max_size=60),
    padded=st.booleans(),
)
def test_the_curve_never_falls_and_stays_within_its_bounds(
    points: list[tuple[int, float]], seen: list[tuple[int, float]], padded: bool
) -> None:
    cost = StepCost(points, padded=padded)
    top = max(ms for _, ms in points)
    for size, ms in seen:
        cost.observe(size, ms)
    curve = [cost.ms(size) for size in range(1, 301)]
    assert all(b >= a - 1e-9 for a, b in pairwise(curve))
    assert min(curve) > 0
    assert cost.ms(max(size for size, _ in points)) <= 8.0 * top * (1 + 1e-9)


def test_one_outlier_hardly_moves_the_curve_and_a_lasting_change_is_followed() -> None:
    cost = StepCost([(1, 5.0), (64, 8.0), (256, 20.0)])
    for _ in range(100):
        cost.observe(64, 8.0)
    cost.observe(64, 900.0)
    assert cost.ms(64) == pytest.approx(8.0, rel=0.02)
    for _ in range(150):
        cost.observe(64, 11.0)
    assert cost.ms(64) == pytest.approx(11.0, rel=0.02)
    assert 5.0 < cost.ms(1) < 8.5, "longer contexts lift the whole curve, a point's own error does not"


def feed(calibration: Calibration, confidence: float, truth: float, count: int, depth: int = 1) -> None:
    rng = random.Random(f"{confidence} {count}")
    for _ in range(count):
        calibration.record("mtp", depth, confidence, rng.random() < truth)
        calibration.step()


def test_before_any_record_the_prior_speaks() -> None:
    calibration = Calibration()
    assert calibration.probability("mtp", 1, 0.95) == pytest.approx(0.9, abs=0.05)
    assert calibration.probability("mtp", 1, 0.05) < 0.2
    assert calibration.probability("ngram", 1, 2) < calibration.probability("ngram", 1, 20)


def test_an_overconfident_drafter_is_found_out_and_a_change_is_followed() -> None:
    calibration = Calibration()
    feed(calibration, 0.95, 0.5, 1000)
    assert calibration.probability("mtp", 1, 0.95) == pytest.approx(0.5, abs=0.08)
    feed(calibration, 0.95, 0.9, 2000)
    assert calibration.probability("mtp", 1, 0.95) == pytest.approx(0.9, abs=0.06)


def test_drafters_and_depths_are_kept_apart() -> None:
    calibration = Calibration()
    before = calibration.probability("mtp", 2, 0.95), calibration.probability("other", 1, 0.95)
    feed(calibration, 0.95, 0.2, 500)
    assert (calibration.probability("mtp", 2, 0.95), calibration.probability("other", 1, 0.95)) == before


@settings(max_examples=60, deadline=None)
@given(
    records=st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=300),
)
def test_more_confidence_never_means_a_lower_probability(records: list[tuple[float, bool]]) -> None:
    calibration = Calibration()
    for confidence, accepted in records:
        calibration.record("mtp", 3, confidence, accepted)
    curve = [calibration.probability("mtp", 3, i / 100) for i in range(101)]
    assert all(b >= a for a, b in pairwise(curve))
    assert min(curve) > 0
    assert max(curve) < 1


def test_a_bin_of_few_records_follows_its_neighbours() -> None:
    """Two lucky drafts of low confidence do not outweigh hundreds of a higher one."""
    calibration = Calibration()
    feed(calibration, 0.85, 0.3, 600)
    for _ in range(20):
        calibration.record("mtp", 1, 0.75, True)
    assert calibration.probability("mtp", 1, 0.75) < 0.45


def test_what_was_not_seen_for_long_is_believed_in_again() -> None:
    """Else a drafter that once did badly would never be tried again."""
    calibration = Calibration()
    feed(calibration, 0.95, 0.0, 300)
    assert calibration.probability("mtp", 1, 0.95) < 0.1
    for _ in range(60_000):
        calibration.step()
    assert calibration.probability("mtp", 1, 0.95) > 0.7


def test_deep_drafts_share_the_numbers_of_the_deepest_kept() -> None:
    """So that memory is bounded."""
    calibration = Calibration()
    feed(calibration, 0.95, 0.1, 300, depth=MAX_DEPTH + 5)
    assert calibration.probability("mtp", MAX_DEPTH, 0.95) < 0.3
    assert len(PROBABILITY.prior) == len(PROBABILITY.edges) + 1
