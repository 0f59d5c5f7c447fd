"""What the scheduler promises, one behaviour a test. Blocks of 4 tokens; names give distinct prompts."""

import pytest

from headrace.config import ConfigError
from headrace.core.policy import PROMOTE_EVERY
from headrace.core.rejection import BadRequest, QueueFull, TooLong
from headrace.core.request import FinishReason, Request, RequestState
from tests.core.factories import (
    Loop,
    assert_complete,
    fake_token,
    make_request,
    make_scheduler,
    shape,
    submit,
)

OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["immediate", "overlapped"])


def test_a_step_mixes_decodes_and_chunks_under_the_token_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10, max_num_seqs=4)
    loop = Loop(scheduler)
    short, long = submit(scheduler, make_request("short", 3), make_request("long", 20))
    assert shape(loop.step()) == [("short", 0, 3), ("long", 0, 7)]
    assert shape(loop.step()) == [("short", 3, 1), ("long", 7, 9)]
    assert shape(loop.step()) == [("short", 4, 1), ("long", 16, 4)]
    assert shape(loop.step()) == [("short", 5, 1), ("long", 20, 1)]
    loop.drain()
    assert_complete(scheduler, [short, long])


def test_rows_with_one_token_come_first() -> None:
    """The last token of a chunked prompt is such a row too."""
    scheduler = make_scheduler(max_num_batched_tokens=8)
    loop = Loop(scheduler)
    submit(scheduler, make_request("a", 9), make_request("b", 5))
    loop.step()
    plan = loop.step()
    assert shape(plan) == [("a", 8, 1), ("b", 0, 5)]
    assert plan is not None
    assert (plan.num_decodes, plan.num_tokens) == (1, 6)


def test_only_the_last_chunk_of_a_prompt_samples() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    loop = Loop(scheduler)
    submit(scheduler, make_request("a", 20, max_tokens=1))
    loop.drain()
    assert [row.samples for plan in loop.plans for row in plan.rows] == [False, False, True]


@OVERLAP
def test_siblings_of_one_step_share_their_prefix(overlap: bool) -> None:
    """They are admitted together, so the second finds blocks that the first is only about to fill."""
    scheduler = make_scheduler(max_num_batched_tokens=32)
    loop = Loop(scheduler, overlap=overlap)
    shared = list(range(500, 512))
    siblings = submit(
        scheduler,
        make_request("a", [*shared, 1, 2], seed=1),
        make_request("b", [*shared, 3], seed=2),
        make_request("c", shared, seed=3),
    )
    plan = loop.step()
    assert shape(plan) == [("b", 12, 1), ("a", 0, 14), ("c", 8, 4)]
    assert plan is not None
    tables = [row.block_table for row in plan.rows]
    assert tables[0][:3] == tables[1][:3]
    assert tables[2][:2] == tables[1][:2]
    loop.drain()
    assert_complete(scheduler, siblings)
    assert scheduler.counters.prefix_hits == 12 + 8


@OVERLAP
def test_a_prompt_found_whole_computes_its_last_token_in_a_copy(overlap: bool) -> None:
    scheduler = make_scheduler()
    loop = Loop(scheduler, overlap=overlap)
    prompt = list(range(500, 512))
    (first,) = submit(scheduler, make_request("a", prompt, seed=1))
    loop.step()
    (second,) = submit(scheduler, make_request("b", prompt, seed=2))
    plan = loop.step()
    assert plan is not None
    row = next(row for row in plan.rows if row.request is second)
    assert (row.start, row.num_tokens) == (11, 1)
    assert plan.copies == ((first.table.blocks[2], second.table.blocks[2]),)
    assert second.num_cached_tokens == 11
    loop.drain()
    assert_complete(scheduler, [first, second])


def test_a_finished_request_leaves_prompt_and_output_in_the_cache() -> None:
    """The next turn of a conversation starts where the last one ended."""
    scheduler = make_scheduler()
    loop = Loop(scheduler)
    (turn,) = submit(scheduler, make_request("a", 6, max_tokens=7))
    loop.drain()
    (next_turn,) = submit(scheduler, make_request("b", [*turn.token_ids, 1, 2, 3]))
    loop.drain()
    assert next_turn.num_cached_tokens == 12
    assert scheduler.counters.cached_tokens == 12


def test_different_salts_share_nothing() -> None:
    scheduler = make_scheduler()
    loop = Loop(scheduler)
    prompt = list(range(500, 512))
    submit(scheduler, make_request("a", prompt, salt="one"), make_request("b", prompt, salt="two"))
    loop.drain()
    assert scheduler.counters.prefix_hits == 0


def test_admission_is_first_come_first_served_within_a_class() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    loop = Loop(scheduler)
    submit(
        scheduler,
        make_request("late 1", priority=1, max_tokens=1),
        make_request("early 1", priority=0, max_tokens=1),
        make_request("late 2", priority=1, max_tokens=1),
        make_request("early 2", priority=0, max_tokens=1),
    )
    loop.drain()
    entered = [request.request_id for plan in loop.plans for request in plan.entered]
    assert entered == ["early 1", "early 2", "late 1", "late 2"]


def test_a_low_class_gets_in_under_a_steady_stream_of_a_higher_one() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    loop = Loop(scheduler)
    (humble,) = submit(scheduler, make_request("humble", priority=9))
    for turn in range(4 * PROMOTE_EVERY):
        submit(scheduler, *(make_request(f"{turn}.{i}", priority=0, max_tokens=2) for i in range(2)))
        loop.step()
        if humble.first_scheduled is not None:
            break
    admitted = sum(len(plan.entered) for plan in loop.plans)
    assert 1 < admitted <= PROMOTE_EVERY + 2
    loop.drain()
    assert humble.finished


STATES = ["waiting", "prefill", "decode", "parked", "preempted"]


@pytest.mark.parametrize("state", STATES)
def test_cancel_frees_blocks_before_the_next_step(state: str) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    loop = Loop(scheduler)
    credit = 1 if state == "parked" else 100
    (request,) = submit(scheduler, make_request("a", 12, credit=credit))
    for _ in range({"waiting": 0, "prefill": 1}.get(state, 2)):
        loop.step()
    if state == "preempted":
        scheduler.preempt("a")
    assert request.state.value == state
    assert scheduler.cancel("a") is request
    assert (request.state, request.finish_reason) == (RequestState.FINISHED, FinishReason.CANCELLED)
    assert scheduler.kv.num_used == 0
    assert not scheduler.has_work
    assert scheduler.cancel("a") is None
    assert not scheduler.grant_credit("a", 100)
    scheduler.check_integrity()


def test_cancelled_in_flight_blocks_and_slot_are_free_at_the_commit() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    loop = Loop(scheduler, overlap=True)
    request, heir = submit(scheduler, make_request("a", 6), make_request("b", 6))
    loop.step()
    loop.step()
    scheduler.cancel("a")
    output = request.output_ids
    assert loop.launch() is None, "its slot is still in use on the device"
    assert scheduler.kv.num_used == 2
    outcome = loop.settle()
    assert (outcome.emitted, outcome.finished) == ((), ())
    assert request.output_ids == output, "the token in flight is dropped"
    assert scheduler.kv.num_used == 0
    loop.drain()
    assert heir.finished


def test_a_stop_id_found_while_the_next_step_is_in_flight() -> None:
    scheduler = make_scheduler()
    loop = Loop(scheduler, overlap=True)
    stop = fake_token(0, 8)
    (request,) = submit(scheduler, make_request("a", 6, stop=[stop], max_tokens=50))
    while not request.finished:
        loop.step()
    assert request.finish_reason is FinishReason.STOP
    assert request.output_ids[-1] == stop
    assert loop.in_flight == 1
    assert scheduler.kv.num_used > 0, "the step in flight still writes there"
    assert scheduler.has_work
    loop.drain()
    assert_complete(scheduler, [request])


@pytest.mark.parametrize("limit", ["max_tokens", "credit", "context"])
def test_no_row_is_spent_on_a_token_beyond_a_known_limit(limit: str) -> None:
    scheduler = make_scheduler(max_model_len=9 if limit == "context" else 100)
    loop = Loop(scheduler, overlap=True)
    max_tokens, credit = (3 if limit == "max_tokens" else 100), (3 if limit == "credit" else 100)
    (request,) = submit(scheduler, make_request("a", 6, max_tokens=max_tokens, credit=credit))
    loop.drain()
    assert [row.num_tokens for plan in loop.plans for row in plan.rows] == [6, 1, 1]
    assert request.num_output == 3
    assert request.state is (RequestState.PARKED if limit == "credit" else RequestState.FINISHED)


def test_one_row_more_is_spent_when_a_stop_id_surprises() -> None:
    scheduler = make_scheduler()
    loop = Loop(scheduler, overlap=True)
    submit(scheduler, make_request("a", 6, stop=[fake_token(0, 8)], max_tokens=50))
    loop.drain()
    assert [row.num_tokens for plan in loop.plans for row in plan.rows] == [6, 1, 1, 1]


def test_outcome_names_rows_tokens_and_ends() -> None:
    scheduler = make_scheduler()
    loop = Loop(scheduler)
    short, long = submit(scheduler, make_request("short", seed=1, max_tokens=2), make_request("long", seed=2))
    loop.step()
    plan = loop.launch()
    assert plan is not None
    outcome = loop.settle()
    assert [(e.request, e.start, list(e.token_ids)) for e in outcome.emitted] == [
        (short, 1, [fake_token(1, 7)]),
        (long, 1, [fake_token(2, 7)]),
    ]
    assert [plan.rows[e.row].request for e in outcome.emitted] == [short, long]
    assert outcome.finished == (short,)
    assert short.finish_reason is FinishReason.LENGTH


def test_a_row_may_yield_several_tokens_and_those_after_the_end_are_dropped() -> None:
    scheduler = make_scheduler()
    (request,) = submit(scheduler, make_request("a", stop=[9]))
    plan = scheduler.schedule()
    assert plan is not None
    outcome = scheduler.commit(plan, {"a": [5, 9, 6]})
    assert [list(e.token_ids) for e in outcome.emitted] == [[5, 9]]
    assert outcome.finished == (request,)
    assert request.output_ids == [5, 9]
    assert scheduler.counters.output_tokens == 2


def test_output_made_elsewhere_is_continued() -> None:
    """As after the death of another engine: same tokens, same numbering."""
    scheduler = make_scheduler()
    (whole,) = submit(scheduler, make_request("a", 6, max_tokens=8))
    Loop(scheduler).drain()
    for cut in range(9):
        scheduler = make_scheduler()
        loop = Loop(scheduler)
        (rest,) = submit(scheduler, make_request("a", 6, max_tokens=8, generated=whole.output_ids[:cut]))
        loop.drain()
        assert (rest.output_ids, rest.finish_reason) == (whole.output_ids, FinishReason.LENGTH)
        assert len(loop.plans) == 8 - cut, "what was complete already needs no step"
        assert scheduler.counters.output_tokens == 8 - cut


def test_an_error_takes_the_request_out_of_the_prefix_cache() -> None:
    scheduler = make_scheduler()
    loop = Loop(scheduler, overlap=True)
    prompt = list(range(500, 520))
    submit(scheduler, make_request("bad", prompt))
    loop.step()
    loop.step()
    scheduler.cancel("bad", FinishReason.ERROR)
    (fresh,) = submit(scheduler, make_request("fresh", prompt))
    loop.drain()
    assert fresh.num_cached_tokens == 0
    assert_complete(scheduler, [fresh])


def test_a_full_queue_says_how_many_wait_and_how_many_may() -> None:
    scheduler = make_scheduler(max_waiting=2)
    submit(scheduler, make_request("a"), make_request("b"))
    with pytest.raises(QueueFull, match=r"2 requests are waiting; the limit is 2") as caught:
        scheduler.submit(make_request("c"))
    assert caught.value.code == "queue_full"
    scheduler.check_integrity()
    Loop(scheduler).step()
    scheduler.submit(make_request("c"))


def test_parked_requests_are_bounded_too() -> None:
    scheduler = make_scheduler(max_waiting=2)
    submit(scheduler, make_request("a", credit=0), make_request("b", credit=0))
    with pytest.raises(QueueFull, match=r"2 requests are parked; the limit is 2"):
        scheduler.submit(make_request("c"))


@pytest.mark.parametrize(
    ("prompt", "generated", "fits"),
    [(15, 0, True), (16, 0, False), (10, 5, True), (10, 6, False)],
)
def test_a_request_without_room_for_one_more_token_is_too_long(
    prompt: int, generated: int, fits: bool
) -> None:
    scheduler = make_scheduler(max_model_len=16)
    request = make_request("a", prompt, generated=[1] * generated, max_tokens=100)
    if fits:
        scheduler.submit(request)
        Loop(scheduler).drain()
        assert len(request.token_ids) == 16
    else:
        with pytest.raises(TooLong, match=rf"{prompt} prompt tokens.*holds 16 tokens") as caught:
            scheduler.submit(request)
        assert caught.value.code == "too_long"


def test_the_context_is_no_longer_than_the_pool() -> None:
    scheduler = make_scheduler(max_model_len=128, num_blocks=6)
    assert scheduler.max_model_len == 20
    (request,) = submit(scheduler, make_request("a", 6, max_tokens=100))
    Loop(scheduler).drain()
    assert len(request.token_ids) == 20
    assert_complete(scheduler, [request])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request("a", []), "prompt has 0 tokens"),
        (make_request("a", max_tokens=0), "max_tokens = 0"),
        (make_request("taken"), "'taken' is in use"),
    ],
    ids=["no prompt", "no output", "id in use"],
)
def test_a_request_that_makes_no_sense_is_refused(request_: Request, message: str) -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("taken", 3))
    with pytest.raises(BadRequest, match=message):
        scheduler.submit(request_)
    assert scheduler.num_waiting == 1


def test_a_budget_below_one_token_per_sequence_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens = 4 .*max_num_seqs = 8"):
        make_scheduler(max_num_seqs=8, max_num_batched_tokens=4)


def test_counters_add_up() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    loop = Loop(scheduler)
    prompt = list(range(500, 510))
    requests = submit(scheduler, make_request("a", prompt, seed=1), make_request("b", prompt, seed=2))
    loop.drain()
    counters = scheduler.counters
    assert counters.prompt_tokens + counters.cached_tokens == sum(r.prompt_len for r in requests)
    assert counters.cached_tokens == sum(r.num_cached_tokens for r in requests) == 8
    assert counters.output_tokens == sum(r.num_output for r in requests)
    assert (counters.prefix_queries, counters.prefix_hits) == (20, 8)


def test_steps_are_committed_in_order_and_at_most_two_are_open() -> None:
    scheduler = make_scheduler()
    submit(scheduler, make_request("a"))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert first is not None
    assert second is not None
    with pytest.raises(AssertionError, match="two steps"):
        scheduler.schedule()
    with pytest.raises(AssertionError, match="not the oldest"):
        scheduler.commit(second, {})
