"""The drafter of a set acceptance: as often right as it says, repeatable, and quiet about what it does not know."""

from typing import NamedTuple

import pytest

from headrace.loadtest.synthetic_drafts import SyntheticDrafter

PROMPT = (5, 6, 7)
ANSWER = tuple(range(100, 20_100))
Proposed = tuple[str, list[int], list[float]]


class Asking(NamedTuple):
    """A request with some of its answer out."""

    request_id: str
    token_ids: tuple[int, ...]
    prompt_len: int = len(PROMPT)


def make_drafter(acceptance: float, seed: int = 0) -> SyntheticDrafter[Proposed]:
    return SyntheticDrafter(
        {PROMPT: ANSWER},
        acceptance,
        1 << 16,
        lambda name, tokens, sure: (name, list(tokens), list(sure)),
        seed=seed,
    )


def drafts(drafter: SyntheticDrafter[Proposed], done: int, limit: int) -> list[int]:
    proposed = drafter.propose(Asking("r", PROMPT + ANSWER[:done]), limit)
    return [] if proposed is None else proposed[1]


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.7, 0.9, 1.0])
def test_drafts_are_right_as_often_as_set(acceptance: float) -> None:
    """Within five standard deviations of 20,000 coins."""
    found = drafts(make_drafter(acceptance), 0, len(ANSWER))
    right = sum(a == b for a, b in zip(found, ANSWER, strict=True))
    spread = (acceptance * (1 - acceptance) * len(ANSWER)) ** 0.5
    assert abs(right - acceptance * len(ANSWER)) <= 5 * spread


def test_drafts_are_the_same_in_every_run_and_others_with_another_seed() -> None:
    assert drafts(make_drafter(0.5), 10, 200) == drafts(make_drafter(0.5), 10, 200)
    assert drafts(make_drafter(0.5), 10, 200) != drafts(make_drafter(0.5, seed=1), 10, 200)


def test_drafts_go_on_where_the_output_ends() -> None:
    drafter = make_drafter(1.0)
    assert drafts(drafter, 0, 3) == [100, 101, 102]
    assert drafts(drafter, 4, 2) == [104, 105]
    assert drafts(drafter, len(ANSWER) - 1, 4) == [ANSWER[-1]]


def test_nothing_is_offered_for_what_was_not_recorded() -> None:
    drafter = make_drafter(1.0)
    assert drafter.propose(Asking("other", (1, 2, 3)), 4) is None
    assert drafts(drafter, len(ANSWER), 4) == []


def test_a_request_that_ended_leaves_its_name_free() -> None:
    drafter = make_drafter(1.0)
    ended = Asking("r", (1, 2, 3))
    assert drafter.propose(ended, 4) is None
    drafter.forget(ended)
    assert drafts(drafter, 0, 1) == [100]


def test_an_impossible_acceptance_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1\.5"):
        make_drafter(1.5)
