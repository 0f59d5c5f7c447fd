"""The token log: numbering, reading from any point, the bound and how it is told."""

import pytest

from headrace.gateway.token_log import LogCut, TokenLog, TokenLogprob, merge


def filled(count: int, max_bytes: int = 1 << 20) -> TokenLog:
    log = TokenLog(max_bytes)
    for i in range(count):
        log.append(f"piece {i} ", [10 * i, 10 * i + 1], 2 * i + 2, None)
    return log


def test_events_are_numbered_from_one_and_read_back_as_written() -> None:
    log = filled(3)
    assert log.last == 3
    assert [(event.seq, event.text, event.token_ids, event.end) for event in log.since(1)] == [
        (2, "piece 1 ", [10, 11], 4),
        (3, "piece 2 ", [20, 21], 6),
    ]
    assert log.since(3) == []


def test_the_bound_drops_the_oldest_and_says_so() -> None:
    log = filled(1000, max_bytes=3000)
    kept = log.since(log.last - 10)
    assert [event.seq for event in kept] == list(range(991, 1001))
    assert kept[0].token_ids == [9900, 9901]
    with pytest.raises(LogCut, match="were dropped"):
        log.since(0)


def test_the_newest_event_stays_however_large() -> None:
    log = TokenLog(10)
    log.append("x" * 1000, [1], 1, None)
    log.append("y" * 1000, [2], 2, None)
    assert [event.text for event in log.since(1)] == ["y" * 1000]


def test_merging_loses_nothing() -> None:
    log = TokenLog(1 << 20)
    for i in range(3):
        log.append(f"{i}", [i], i + 1, [TokenLogprob(i, -1.0, (), i)])
    event = merge(log.since(0))
    assert (event.seq, event.text, event.token_ids, event.end) == (3, "012", [0, 1, 2], 3)
    assert [entry.token_id for entry in event.logprobs or ()] == [0, 1, 2]


def test_end_of_tells_the_output_index_behind_an_event() -> None:
    log = filled(3)
    assert [log.end_of(seq) for seq in range(5)] == [0, 2, 4, 6, 0]
