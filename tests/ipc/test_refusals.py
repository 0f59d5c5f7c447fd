"""Everything refused is counted; the log stays short and the memory bounded."""

import logging

import pytest

from headrace.ipc import refusals
from headrace.ipc.refusals import Refusals


def test_counts_by_reason() -> None:
    counted = Refusals()
    for reason in ("malformed", "unknown", "malformed"):
        counted.count(reason)
    assert counted.total == 3
    assert counted.by_reason == {"malformed": 2, "unknown": 1}


def test_a_peer_is_logged_once_however_often_it_offends(caplog: pytest.LogCaptureFixture) -> None:
    counted = Refusals()
    for second in range(0, 600, 10):
        counted.report("peer 1", "malformed", "as ever", float(second))
    assert [record.getMessage() for record in caplog.records] == ["refused peer 1: malformed: as ever"]


def test_a_minute_has_few_lines_and_the_next_one_starts_anew(caplog: pytest.LogCaptureFixture) -> None:
    counted = Refusals()
    with caplog.at_level(logging.WARNING):
        for index in range(500):
            counted.report(f"peer {index}", "malformed", "", 0.0)
        assert len(caplog.records) == refusals.LINES_PER_MINUTE + 1
        assert "counted, not logged" in caplog.records[-1].getMessage()
        counted.report("peer 500", "malformed", "", 60.0)
    assert caplog.records[-1].getMessage() == "refused peer 500: malformed: "


def test_names_are_forgotten_after_many_newer_ones(caplog: pytest.LogCaptureFixture) -> None:
    counted = Refusals()
    counted.report("peer", "malformed", "", 0.0)
    for index in range(refusals.MAX_NAMES):
        counted.report(f"peer {index}", "malformed", "", 1.0)
    caplog.clear()
    counted.report("peer", "malformed", "", 120.0)
    assert len(caplog.records) == 1
