"""Who yields when blocks are short, and who is parked for want of credit. Blocks of 4 tokens."""

import pytest

from headrace.core.request import RequestState
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


@OVERLAP
def test_short_of_blocks_the_worst_class_and_in_it_the_youngest_yields(overlap: bool) -> None:
    scheduler = make_scheduler(num_blocks=13)
    loop = Loop(scheduler, overlap=overlap)
    requests = submit(
        scheduler,
        make_request("low old", 6, priority=1, max_tokens=14),
        make_request("low young", 6, priority=1, max_tokens=14),
        make_request("high", 6, priority=0, max_tokens=14),
    )
    while not scheduler.counters.preemptions:
        loop.step()
    old, young, high = requests
    assert young.state is RequestState.PREEMPTED
    assert young.output_ids, "it keeps its output"
    assert not young.table.blocks
    loop.drain()
    assert (high.num_preemptions, old.num_preemptions) == (0, 0)
    assert_complete(scheduler, requests)


def test_a_prompt_in_chunks_is_admitted_only_if_the_whole_of_it_fits() -> None:
    scheduler = make_scheduler(num_blocks=11, max_num_batched_tokens=8)
    loop = Loop(scheduler)
    first, second = submit(scheduler, make_request("first", 8, max_tokens=4), make_request("second", 32))
    loop.step()
    loop.step()
    assert scheduler.kv.num_available == 7, "its first chunk needs 2 blocks, the whole of it 8"
    assert second.state is RequestState.WAITING
    loop.drain()
    assert scheduler.counters.preemptions == 0
    assert_complete(scheduler, [first, second])


def test_an_admission_leaves_one_block_for_each_running_request() -> None:
    scheduler = make_scheduler(num_blocks=6)
    loop = Loop(scheduler)
    running, waiting = submit(
        scheduler, make_request("a", 10, max_tokens=4), make_request("b", 8, max_tokens=1)
    )
    loop.step()
    assert scheduler.kv.num_available == 2, "as many as the second one's prompt"
    assert waiting.state is RequestState.WAITING
    loop.drain()
    assert scheduler.counters.preemptions == 0
    assert_complete(scheduler, [running, waiting])


def test_nobody_is_admitted_to_what_a_preempted_request_gave_up_in_the_same_step() -> None:
    scheduler = make_scheduler(num_blocks=9)
    loop = Loop(scheduler)
    submit(scheduler, make_request("old", 11, max_tokens=20), make_request("young", 11, max_tokens=20))
    while scheduler.kv.num_available:
        loop.step()
    submit(scheduler, make_request("urgent", 2, priority=-1))
    while not scheduler.counters.preemptions:
        loop.step()
    assert shape(loop.plans[-1]) == [("old", 16, 1)], "the 3 blocks left would have been enough"


def test_a_preempted_request_comes_back_before_others_of_its_class() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    loop = Loop(scheduler)
    submit(scheduler, make_request("a"), make_request("b"), make_request("c"))
    loop.step()
    assert scheduler.preempt("b")
    assert not scheduler.preempt("c"), "it does not run"
    plan = loop.step()
    assert plan is not None
    assert [request.request_id for request in plan.entered] == ["b"]


@OVERLAP
def test_preemption_in_flight_loses_no_token(overlap: bool) -> None:
    scheduler = make_scheduler()
    loop = Loop(scheduler, overlap=overlap)
    (request,) = submit(scheduler, make_request("a", max_tokens=12))
    while scheduler.has_work:
        loop.step()
        if request.num_output % 3 == 2:
            scheduler.preempt("a")
            scheduler.check_integrity()
    assert request.num_preemptions >= 3
    assert_complete(scheduler, [request])


@OVERLAP
def test_out_of_credit_a_request_parks_without_slot_and_with_its_blocks(overlap: bool) -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    loop = Loop(scheduler, overlap=overlap)
    slow, other = submit(scheduler, make_request("slow", 6, credit=3), make_request("other", 6, max_tokens=2))
    loop.drain()
    assert slow.state is RequestState.PARKED
    assert slow.num_output == 3
    assert slow.slot == -1
    assert slow.num_computed == 8
    assert scheduler.kv.num_used == len(slow.table.blocks) == 2
    assert other.finished, "the slot was free for others"
    assert (scheduler.num_parked, scheduler.has_work) == (1, False)
    assert scheduler.grant_credit("slow", 100)
    assert shape(loop.step()) == [("slow", 8, 1)], "nothing is computed twice"
    loop.drain()
    assert_complete(scheduler, [slow, other])


def test_credit_that_comes_in_time_parks_nobody() -> None:
    scheduler = make_scheduler()
    loop = Loop(scheduler, overlap=True)
    (request,) = submit(scheduler, make_request("a", credit=2))
    loop.step()
    loop.step()
    assert (request.num_output, request.num_pending) == (1, 1), "the last token of its credit is in flight"
    scheduler.grant_credit("a", 100)
    loop.drain()
    assert request.num_preemptions == 0
    assert sum(len(plan.entered) for plan in loop.plans) == 1


def test_a_request_without_credit_starts_parked() -> None:
    scheduler = make_scheduler()
    (request,) = submit(scheduler, make_request("a", credit=0))
    assert request.state is RequestState.PARKED
    assert scheduler.schedule() is None
    scheduler.grant_credit("a", 0)
    assert request.state is RequestState.PARKED
    scheduler.grant_credit("a", 8)
    Loop(scheduler).drain()
    assert_complete(scheduler, [request])


@OVERLAP
def test_parked_requests_lose_their_blocks_before_a_running_one_is_preempted(overlap: bool) -> None:
    scheduler = make_scheduler(num_blocks=9)
    loop = Loop(scheduler, overlap=overlap)
    parked, running = submit(
        scheduler, make_request("parked", 14, credit=1), make_request("running", 6, max_tokens=20)
    )
    while not running.finished:
        loop.step()
    assert scheduler.counters.preemptions == 0
    assert not parked.table.blocks
    assert parked.num_computed == 0
    scheduler.grant_credit("parked", 8)
    loop.drain()
    assert_complete(scheduler, [parked, running])


def test_a_waiting_request_takes_the_blocks_of_parked_ones_only_if_it_then_fits() -> None:
    scheduler = make_scheduler(num_blocks=13)
    loop = Loop(scheduler)
    parked, running = submit(
        scheduler, make_request("parked", 6, credit=1), make_request("running", 18, max_tokens=12)
    )
    loop.step()
    submit(scheduler, make_request("big", 41))
    loop.step()
    assert parked.table.blocks, "41 tokens would not fit beside the running request anyway"
    while not running.finished:
        loop.step()
    loop.step()
    assert not parked.table.blocks


def test_rather_than_preempt_a_decode_waits_for_blocks_that_a_commit_will_free() -> None:
    """Of 4 blocks each request holds 2 when one of them has ended, and the other needs a third."""
    scheduler = make_scheduler(num_blocks=5)
    loop = Loop(scheduler, overlap=True)
    ending, growing = submit(
        scheduler,
        make_request("ending", 2, seed=1, stop=[fake_token(1, 5)], max_tokens=12),
        make_request("growing", 4, seed=2, max_tokens=8),
    )
    while not ending.finished:
        loop.step()
    assert (scheduler.kv.num_available, growing.num_computed) == (0, 8)
    assert loop.launch() is None
    loop.drain()
    assert scheduler.counters.preemptions == 0
    assert_complete(scheduler, [ending, growing])
