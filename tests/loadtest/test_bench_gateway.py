"""The gateway benchmark: its arithmetic on made-up arrivals, and one short run of everything."""

import json
import subprocess
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest

from headrace.loadtest.exchange import Call, Exchange
from headrace.loadtest.fleet import Cores
from headrace.loadtest.gateway_plan import FASTAPI, HEADRACE, Case, Kind, Setting, cases, table
from headrace.loadtest.gateway_point import Point, _delays, _tokens
from headrace.loadtest.gateway_record import summarise

CALL = Call("chat", {})
SETTING = Setting("saturate", 64, cases((HEADRACE, FASTAPI), ("sse",)), 3, 1.0)


def exchange(*arrivals: float, output_tokens: int | None = None) -> Exchange:
    return Exchange(CALL, 0.0, arrivals=array("d", arrivals), ended=9.0, output_tokens=output_tokens)


def point(tokens_per_s: float, server_us: float = 8.0, busiest: float = 1.0) -> Point:
    return Point(
        tokens_per_s=tokens_per_s,
        tokens_per_event=1.0,
        server_us=server_us,
        server_share=0.9,
        busiest=busiest,
        client_share=0.5,
        engine_share=0.4,
        failed=0,
    )


def test_delays_count_from_the_step_that_made_the_token() -> None:
    """The second stream is more than a step late in the middle, which only its first token's step tells."""
    steps = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    prompt, late = exchange(1.1, 2.1, 3.1), exchange(1.2, 3.5, 3.6, 4.1)
    delays = _delays([prompt, late], steps, 0.0, 10.0)
    assert delays is not None
    assert sorted(delays.tolist()) == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.2, 0.6, 1.5])


def test_a_first_token_that_is_late_moves_its_stream_to_an_earlier_step() -> None:
    steps = np.array([0.0, 1.0, 2.0, 3.0])
    delays = _delays([exchange(1.05, 1.1, 2.1)], steps, 0.0, 10.0)
    assert delays is not None
    assert delays.tolist() == pytest.approx([1.05, 0.1, 0.1])


def test_nothing_within_the_window_has_no_delay() -> None:
    assert _delays([exchange(1.1, 2.1)], np.array([1.0, 2.0]), 5.0, 6.0) is None


def test_tokens_count_within_the_window_by_the_server_count() -> None:
    ended = [exchange(1.0, 2.0, 3.0, 4.0, output_tokens=8), exchange(2.5, 9.0), exchange()]
    assert _tokens(ended, 2.0, 4.0) == (2 * 2 + 1, 10 / 6)


def test_ratios_are_paired_by_round() -> None:
    own, peers = [point(90.0), point(60.0), point(80.0)], [point(30.0), point(10.0), point(20.0)]
    record = summarise(SETTING, SETTING.cases[0], own, peers)
    assert (record.tokens_per_s, record.tokens_per_s_spread) == (80.0, (60.0, 90.0))
    assert (record.ratio, record.ratio_spread) == (4.0, (3.0, 6.0))
    assert summarise(SETTING, SETTING.cases[1], peers).ratio is None


def test_two_workers_scale_by_their_busier_one_and_what_a_token_costs_them() -> None:
    pair, alone = Case(Kind(HEADRACE, 2), "sse"), [point(90.0), point(90.0)]
    even = summarise(SETTING, pair, [point(100.0, 8.0, 0.5), point(100.0, 8.0, 0.5)], single=alone)
    assert (even.workers, even.scale) == (2, 2.0)
    dearer = summarise(SETTING, pair, [point(100.0, 10.0, 0.5), point(100.0, 8.0, 0.8)], single=alone)
    assert dearer.scale_spread == (1.25, 1.6)


def test_only_ours_speaks_websocket_and_has_workers() -> None:
    found = cases((HEADRACE, FASTAPI), ("sse", "ws"), workers=2)
    assert [(case.kind.label, case.transport) for case in found] == [
        ("headrace", "sse"),
        ("headrace", "ws"),
        ("fastapi", "sse"),
        ("headrace-2", "sse"),
        ("headrace-2", "ws"),
    ]


def test_the_table_fits_into_a_coffee_break() -> None:
    """Twelve minutes with the defaults, warm-up and the opening of streams included."""
    seconds = sum(
        len(setting.cases) * setting.rounds * (setting.seconds + 2 if setting.seconds else 25)
        for setting in table(5, 3.0)
    )
    assert seconds < 12 * 60


def test_a_second_worker_has_a_core_of_its_own_where_there_is_one() -> None:
    assert [Cores(0, 1).of_worker(i) for i in range(2)] == [0, 0]
    assert [Cores(0, 3, (1, 2)).of_worker(i) for i in range(4)] == [0, 1, 2, 0]


def test_a_short_run_of_both_front_ends_writes_records(tmp_path: Path) -> None:
    """In a process of its own, because it binds itself to a core."""
    pytest.importorskip("fastapi")
    flags = ("--streams", "8", "--rounds", "1", "--seconds", "0.3", "--record", str(tmp_path / "g.jsonl"))
    argv = [sys.executable, "-P", "-m", "headrace.loadtest.bench_gateway", "--benches", "paced", *flags]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "g.jsonl").read_text().splitlines()]
    assert [(r["front"], r["bench"], r["streams"], r["failed"]) for r in records] == [
        ("headrace", "paced", 8, 0),
        ("fastapi", "paced", 8, 0),
    ]
    assert records[0]["ratio"] > 0
    assert all(r["tokens_per_s"] > 0 and r["p99_ms"] > 0 for r in records)
