"""Drafts in the scheduler: they ride along where there is room, and take nothing from anyone."""

from collections.abc import Mapping

from headrace.core.policy import Wanted
from headrace.core.request import FinishReason, Request
from headrace.core.speculation.proposal import Proposal
from tests.core.factories import (
    Loop,
    assert_complete,
    fake_token,
    make_request,
    make_scheduler,
    shape,
    submit,
)


def right(request: Request, count: int, *, wrong_from: int = 99) -> Proposal:
    """`count` drafts for it, the fake model's own up to the one of index `wrong_from`."""
    at, seed = len(request.token_ids), request.sampling.seed
    tokens = [fake_token(seed, at + i) if i < wrong_from else 98 for i in range(count)]
    return Proposal("test", tokens, [1.0] * count)


def wanted(proposals: Mapping[Request, Proposal], ahead: int = 0) -> Wanted:
    return Wanted(dict(proposals), ahead)


def test_accepted_drafts_are_emitted_and_the_rest_is_computed_again() -> None:
    scheduler = make_scheduler()
    loop = Loop(scheduler)
    (request,) = submit(scheduler, make_request(prompt=6, max_tokens=8))
    loop.step()
    plan = loop.launch(wanted({request: right(request, 4, wrong_from=2)}))
    assert shape(plan) == [("r", 6, 5)]
    (emitted,) = loop.settle().emitted
    assert emitted.start == 1
    assert list(emitted.token_ids) == [fake_token(0, 7), fake_token(0, 8), fake_token(0, 9)]
    assert shape(loop.step()) == [("r", 9, 1)]
    loop.drain()
    assert_complete(scheduler, [request])


def test_no_draft_goes_beyond_the_last_token_that_may_be_sampled() -> None:
    scheduler = make_scheduler()
    loop = Loop(scheduler)
    short, slow = submit(
        scheduler, make_request("short", prompt=6, max_tokens=3), make_request("slow", prompt=6, credit=4)
    )
    loop.step()
    plan = loop.launch(wanted({short: right(short, 8), slow: right(slow, 8)}))
    assert shape(plan) == [("short", 6, 2), ("slow", 6, 3)]
    loop.settle()
    assert short.finish_reason is FinishReason.LENGTH
    assert slow.out_of_credit
    assert scheduler.num_parked == 1


def test_a_stop_id_among_accepted_drafts_ends_the_request_there() -> None:
    scheduler = make_scheduler()
    loop = Loop(scheduler)
    stop = fake_token(0, 8)
    (request,) = submit(scheduler, make_request(prompt=6, stop=[stop]))
    loop.step()
    loop.launch(wanted({request: right(request, 4)}))
    (emitted,) = loop.settle().emitted
    assert emitted.token_ids[-1] == stop
    assert request.finish_reason is FinishReason.STOP
    assert_complete(scheduler, [request])


def test_drafts_are_dropped_where_their_blocks_are_another_ones_next() -> None:
    """Two requests of 8 tokens fill four blocks of 4; two blocks are left, one for each's next token."""
    scheduler = make_scheduler(num_blocks=7, prefix_cache=False)
    loop = Loop(scheduler)
    first, second = submit(
        scheduler, make_request("a", prompt=7, max_tokens=5), make_request("b", prompt=7, max_tokens=5)
    )
    loop.step()
    plan = loop.launch(wanted({first: right(first, 4), second: right(second, 4)}, ahead=4))
    assert shape(plan) == [("a", 7, 1), ("b", 7, 1)]
    loop.settle()
    loop.drain()
    assert scheduler.counters.preemptions == 0
    assert_complete(scheduler, [first, second])


def test_prompts_keep_half_of_what_decodes_leave() -> None:
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=9)
    loop = Loop(scheduler)
    (request,) = submit(scheduler, make_request("a", prompt=6, max_tokens=20))
    loop.step()
    submit(scheduler, make_request("b", prompt=20))
    plan = loop.launch(wanted({request: right(request, 8)}))
    assert shape(plan) == [("a", 6, 5), ("b", 0, 4)]


def test_nothing_follows_drafts_in_flight() -> None:
    """How many are accepted decides where the request goes on: it waits, others run."""
    scheduler = make_scheduler()
    loop = Loop(scheduler)
    first, second = submit(scheduler, make_request("a"), make_request("b"))
    loop.step()
    loop.launch(wanted({first: right(first, 2)}))
    assert shape(loop.launch()) == [("b", 7, 1)]
    loop.settle()
    loop.settle()
    loop.drain()
    assert_complete(scheduler, [first, second])


def test_a_token_in_flight_is_followed_by_no_draft() -> None:
    scheduler = make_scheduler()
    loop = Loop(scheduler)
    (request,) = submit(scheduler, make_request())
    loop.step()
    proposal = right(request, 2)
    loop.launch()
    assert shape(loop.launch(wanted({request: proposal}))) == [("r", 7, 1)]
