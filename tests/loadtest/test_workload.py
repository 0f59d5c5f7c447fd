"""Workloads, traces, arrivals, SLOs: pure functions of files and seeds."""

import statistics
from itertools import islice, pairwise
from pathlib import Path
from random import Random

import pytest

from headrace.config import ConfigError
from headrace.loadtest.arrivals import ClosedLoop, OpenLoop, describe, times
from headrace.loadtest.find_rate import Search, find_rate
from headrace.loadtest.slo import Slo, parse_slo
from headrace.loadtest.traces import BadTrace, read_trace
from headrace.loadtest.words import TokenRate
from headrace.loadtest.workload import ChatShape, Lengths, chats, independent

ONE = TokenRate()


def words(text: str) -> int:
    return len(text.split())


def test_fixed_lengths_become_that_many_words() -> None:
    sessions = list(islice(independent(Lengths(50), Lengths(7), TokenRate(1.25, 10), seed=0), 20))
    assert {words(session.turns[0].prompt) for session in sessions} == {
        33
    }  # (50 - 10) / 1.25, and the number
    assert {session.turns[0].max_tokens for session in sessions} == {7}


def test_independent_requests_differ_from_their_first_word_and_repeat_with_the_seed() -> None:
    first = [s.turns[0].prompt for s in islice(independent(Lengths(5), Lengths(1), ONE, seed=1), 50)]
    again = [s.turns[0].prompt for s in islice(independent(Lengths(5), Lengths(1), ONE, seed=1), 50)]
    other = [s.turns[0].prompt for s in islice(independent(Lengths(5), Lengths(1), ONE, seed=2), 50)]
    assert first == again
    assert first != other
    assert len({prompt.split()[0] for prompt in first}) == 50


def test_lognormal_lengths_have_the_mean_and_the_variation_asked_for() -> None:
    rng = Random(0)
    drawn = [Lengths(200, 0.5).draw(rng) for _ in range(5000)]
    assert statistics.mean(drawn) == pytest.approx(200, rel=0.05)
    assert statistics.stdev(drawn) / statistics.mean(drawn) == pytest.approx(0.5, rel=0.1)
    assert min(drawn) >= 1


def test_chats_share_system_prompts_and_nothing_else() -> None:
    shape = ChatShape(groups=3, system_tokens=40, turns=4, think_s=1.0)
    sessions = list(islice(chats(shape, Lengths(10), Lengths(5), ONE, seed=0), 60))
    assert len({session.system for session in sessions}) == 3
    assert all(words(session.system) == 40 and len(session.turns) == 4 for session in sessions)
    assert len({session.turns[0].prompt for session in sessions}) == 60
    assert all(session.turns[0].think_s == 0 < session.turns[1].think_s for session in sessions)


def test_poisson_arrivals_have_the_rate_and_the_spread_of_one() -> None:
    gaps = [b - a for a, b in pairwise(islice(times(OpenLoop(rate=10, seed=3)), 5000))]
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.07)


def test_a_larger_gap_shape_is_more_even() -> None:
    gaps = [b - a for a, b in pairwise(islice(times(OpenLoop(rate=10, shape=4, seed=3)), 5000))]
    assert statistics.stdev(gaps) == pytest.approx(0.05, rel=0.1)


def test_a_trace_gives_its_own_times_at_the_speed_asked_for() -> None:
    assert list(times(OpenLoop(rate=0, speed=2), [0.0, 1.0, 5.0])) == [0.0, 0.5, 2.5]


def test_loads_are_named() -> None:
    assert describe(ClosedLoop(1)) == "1 user"
    assert describe(OpenLoop(rate=2.5)) == "2.5/s Poisson"
    assert describe(OpenLoop(rate=0, speed=2)) == "the trace's own times, 2 times as fast"


def write(folder: Path, content: str) -> Path:
    path = folder / "trace"
    path.write_text(content)
    return path


MOONCAKE = """\
{"timestamp": 27000, "input_length": 1030, "output_length": 5, "hash_ids": [46, 47, 48]}
{"timestamp": 30000, "input_length": 1030, "output_length": 6, "hash_ids": [46, 47, 99]}
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,Conversation log
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00+00:00,2399,6
"""


def test_a_mooncake_trace_keeps_times_lengths_and_shared_blocks(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, MOONCAKE))
    first, second = trace.sessions(ONE, seed=0)
    assert (trace.kind, first.at, second.at) == ("mooncake", 0.0, 3.0)
    a, b = first.turns[0].prompt.split(), second.turns[0].prompt.split()
    assert len(a) == len(b) == 1030
    assert a[:1024] == b[:1024]
    assert a[1024:] != b[1024:]


def test_a_burstgpt_trace_leaves_out_what_failed(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, BURSTGPT))
    assert trace.kind == "burstgpt"
    found = [(s.at, words(s.turns[0].prompt), s.turns[0].max_tokens) for s in trace.sessions(ONE, seed=0)]
    assert found == [(0.0, 472, 18), (113.0, 417, 276)]


@pytest.mark.parametrize(("content", "gap"), [(AZURE, 4.314579), (AZURE_2024, 0.00993)], ids=["2023", "2024"])
def test_an_azure_trace_may_have_any_digits_and_order(tmp_path: Path, content: str, gap: float) -> None:
    trace = read_trace(write(tmp_path, content))
    assert trace.kind == "azure"
    assert [entry.at for entry in trace.entries] == [0.0, pytest.approx(gap, abs=1e-6)]


def test_pairs_of_lengths_have_no_times_and_repeat_with_new_words(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, "[[12, 3], [5, 2]]"))
    assert not trace.timed
    sessions = list(islice(trace.endless(ONE, seed=0), 4))
    assert [session.turns[0].max_tokens for session in sessions] == [3, 2, 3, 2]
    assert sessions[0].turns[0].prompt != sessions[2].turns[0].prompt


def test_recorded_requests_are_sent_as_they_were(tmp_path: Path) -> None:
    lines = (
        '{"at": 7.5, "body": {"messages": [], "stream": true, "model": "x", "top_k": 3}}\n'
        '{"at": 8.5, "kind": "completion", "body": {"prompt": "a"}}\n'
    )
    first, second = read_trace(write(tmp_path, lines)).sessions(ONE, seed=0)
    assert first.recorded is not None
    assert (first.at, first.recorded.kind, first.recorded.body) == (0.0, "chat", {"messages": [], "top_k": 3})
    assert second.recorded is not None
    assert (second.at, second.recorded.kind) == (1.0, "completion")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "neither Mooncake"),
        ("a,b\n1,2\n", "neither Mooncake"),
        ("[[1, 2], [3]]", "entry 2"),
        ('{"input_length": 4}\n', "output_length"),
        ("[", "no JSON"),
        ("[]", "empty"),
        ('{"kind": "chat", "body": {"prompt": "a"}}', "has no messages"),
        ("[[-1, 2]]", "-1 and 2 tokens"),
    ],
)
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, content: str, says: str) -> None:
    with pytest.raises(BadTrace, match=says):
        read_trace(write(tmp_path, content))


def test_slos_are_read_and_shown() -> None:
    slo = parse_slo("ttft=500ms, itl=50ms,e2e=2.5s")
    assert slo == Slo(ttft=0.5, itl=0.05, e2e=2.5)
    assert str(slo) == "ttft=500ms,itl=50ms,e2e=2500ms"
    for wrong in ("ttft", "ttft=5", "speed=3ms", "ttft=-1ms", ""):
        with pytest.raises(ConfigError, match="--slo"):
            parse_slo(wrong)


@pytest.mark.parametrize("limit", [0.3, 1.0, 7.3, 100.0])
async def test_the_search_ends_within_its_precision_below_the_limit(limit: float) -> None:
    asked = []

    async def measure(rate: float) -> float:
        asked.append(rate)
        return 1.0 if rate <= limit else 0.5

    found = await find_rate(measure, Search(precision=0.05))
    assert found is not None
    assert limit / 1.05 <= found <= limit
    assert len(asked) < 20


async def test_a_server_that_never_keeps_the_slo_has_no_rate() -> None:
    async def measure(_rate: float) -> None:
        return None

    assert await find_rate(measure, Search()) is None
