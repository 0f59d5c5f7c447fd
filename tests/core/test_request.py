"""The request's state machine and its counters."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

import headrace.core
from headrace.core.request import FinishReason, IllegalTransition, Request, RequestState
from tests.core.factories import make_request

S = RequestState


def in_state(state: RequestState) -> Request:
    """A request with a prompt of 6 tokens that was led there by legal moves."""
    request = make_request(prompt=6, credit=4)
    if state is S.WAITING:
        return request
    if state is S.PARKED:
        request.park()
        return request
    request.admit(slot=0, num_computed=0, now=1.0)
    if state is S.PREFILL:
        return request
    if state is S.FINISHED:
        request.finish(FinishReason.CANCELLED)
        return request
    request.dispatch(6)
    request.take([7], now=2.0)
    if state is S.PREEMPTED:
        request.preempt()
    return request


MOVES: dict[str, tuple[Callable[[Request], object], set[RequestState]]] = {
    "admit": (lambda r: r.admit(1, 0, 1.0), {S.WAITING, S.PREEMPTED}),
    "dispatch": (lambda r: r.dispatch(1), {S.PREFILL, S.DECODE}),
    "park": (lambda r: r.park(), {S.WAITING, S.DECODE, S.PREEMPTED}),
    "unpark": (lambda r: r.unpark(), {S.PARKED}),
    "preempt": (lambda r: r.preempt(), {S.PREFILL, S.DECODE}),
    "finish": (lambda r: r.finish(FinishReason.STOP), set(S) - {S.FINISHED}),
}


@pytest.mark.parametrize("state", S, ids=lambda s: s.value)
@pytest.mark.parametrize("move", MOVES)
def test_each_move_is_legal_from_its_states_and_raises_elsewhere(move: str, state: RequestState) -> None:
    act, legal = MOVES[move]
    request = in_state(state)
    assert request.state is state
    if state in legal:
        act(request)
    else:
        with pytest.raises(IllegalTransition, match=state.value):
            act(request)
        assert request.state is state


def test_only_its_methods_write_a_request() -> None:
    """No other module of core assigns to an attribute that is a request's, unless it is its own."""
    fields = set(Request.__slots__)
    writes = []
    for path in Path(headrace.core.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
                continue
            own = isinstance(node.value, ast.Name) and node.value.id == "self"
            if node.attr in fields and not own:
                writes.append(f"{path.name}:{node.lineno}")
    assert not writes


def test_a_prompt_in_chunks_samples_on_its_last_chunk_only() -> None:
    request = make_request(prompt=6)
    request.admit(slot=0, num_computed=0, now=1.0)
    history = [(request.dispatch(count), request.state) for count in (4, 2)]
    assert history == [(False, S.PREFILL), (True, S.DECODE)]
    assert (request.num_computed, request.num_pending, request.in_flight) == (6, 1, 2)


def test_times_and_cached_tokens_are_those_of_the_first_life() -> None:
    request = make_request(prompt=6)
    request.admit(slot=0, num_computed=4, now=1.0)
    request.dispatch(2)
    request.take([5], now=2.0)
    request.preempt()
    request.admit(slot=1, num_computed=0, now=3.0)
    request.dispatch(7)
    request.take([6], now=4.0)
    assert (request.first_scheduled, request.first_token, request.last_token) == (1.0, 2.0, 4.0)
    assert request.num_cached_tokens == 4
    assert request.num_preemptions == 1
    assert request.output_ids == [5, 6]


@pytest.mark.parametrize(
    ("tokens", "kept", "reason"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 9, 3], [1, 9], FinishReason.STOP),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5], FinishReason.LENGTH),
        ([1, 2, 3, 4, 9, 6], [1, 2, 3, 4, 9], FinishReason.STOP),
    ],
    ids=["goes on", "stop id", "length", "stop id in the last place"],
)
def test_tokens_after_the_end_are_cut(
    tokens: list[int], kept: list[int], reason: FinishReason | None
) -> None:
    request = make_request(max_tokens=5, stop=[9])
    request.admit(slot=0, num_computed=0, now=1.0)
    request.dispatch(6)
    assert request.take(tokens, now=2.0) is reason
    assert request.output_ids == kept


@pytest.mark.parametrize(("min_tokens", "kept"), [(0, [9]), (1, [9, 9]), (2, [9, 9, 9])])
def test_a_stop_id_within_min_tokens_does_not_stop(min_tokens: int, kept: list[int]) -> None:
    request = make_request(max_tokens=5, stop=[9], min_tokens=min_tokens)
    request.admit(slot=0, num_computed=0, now=1.0)
    request.dispatch(6)
    assert request.take([9, 9, 9, 9], now=2.0) is FinishReason.STOP
    assert request.output_ids == kept


def test_the_context_limit_ends_a_request() -> None:
    request = make_request(prompt=6, max_tokens=100)
    assert request.enter_queue(sequence=1, max_model_len=8) is None
    request.admit(slot=0, num_computed=0, now=1.0)
    request.dispatch(6)
    assert request.take([1], now=2.0) is None
    request.dispatch(1)
    assert request.take([2], now=2.0) is FinishReason.LENGTH


def test_credit_only_grows() -> None:
    request = make_request(credit=2)
    request.grant(10)
    request.grant(5)
    assert request.credit == 10


@pytest.mark.parametrize(
    ("generated", "reason"),
    [([1, 2], None), ([1, 9], FinishReason.STOP), ([1, 2, 3], FinishReason.LENGTH)],
    ids=["unfinished", "ended by a stop id", "as long as it may be"],
)
def test_output_made_elsewhere_counts(generated: list[int], reason: FinishReason | None) -> None:
    request = make_request(max_tokens=3, stop=[9], generated=generated)
    assert request.enter_queue(sequence=1, max_model_len=100) is reason
    assert request.num_output == len(generated)
    assert request.output_ids == generated


def test_a_slot_in_flight_is_not_given_up() -> None:
    request = in_state(S.PREFILL)
    request.dispatch(6)
    request.preempt()
    with pytest.raises(AssertionError, match="in flight"):
        request.release_slot()
    request.take([1], now=2.0)
    assert request.release_slot() == 0
    assert request.slot == -1


def test_a_running_request_cannot_lose_its_blocks_silently() -> None:
    with pytest.raises(AssertionError, match="cannot lose"):
        in_state(S.DECODE).lose_blocks()


def test_accepted_drafts_count_as_computed_at_the_commit() -> None:
    request = in_state(S.DECODE)
    computed, known = request.num_computed, len(request.token_ids)
    request.dispatch(1)
    request.carry(3)
    assert request.num_computed == computed + 1
    assert request.take([11, 12], now=1.0) is None
    assert (request.num_computed, len(request.token_ids)) == (computed + 2, known + 2)
    assert (request.num_drafted, request.num_accepted, request.num_drafts) == (3, 1, 0)


def test_drafts_of_a_preempted_request_leave_its_tokens_only() -> None:
    request = in_state(S.DECODE)
    request.dispatch(1)
    request.carry(2)
    request.preempt()
    request.take([11, 12], now=1.0)
    assert request.num_computed == 0
    assert request.token_ids[-2:] == [11, 12]
