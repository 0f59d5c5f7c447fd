"""The gateway benchmark: its arithmetic on made-up arrivals, and one short run of everything."""

import json
import subprocess
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest

from headrace.loadtest.exchange import Call, Exchange
from headrace.loadtest.gateway_point import Point, _delays, _tokens
from headrace.loadtest.gateway_record import summarise

CALL = Call("chat", {})


def exchange(*arrivals: float, output_tokens: int | None = None) -> Exchange:
    return Exchange(CALL, 0.0, arrivals=array("d", arrivals), ended=9.0, output_tokens=output_tokens)


def point(tokens_per_s: float) -> Point:
    return Point(
        tokens_per_s=tokens_per_s,
        tokens_per_event=1.0,
        server_us=8.0,
        server_share=0.9,
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
    record = summarise("saturate", "headrace", "sse", 64, own, peers)
    assert (record.tokens_per_s, record.tokens_per_s_spread) == (80.0, (60.0, 90.0))
    assert (record.ratio, record.ratio_spread) == (4.0, (3.0, 6.0))
    assert summarise("saturate", "fastapi", "sse", 64, peers, []).ratio is None


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
