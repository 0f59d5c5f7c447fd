"""Figures of exchanges whose times are known exactly."""

import math
from array import array

import pytest

from headrace.loadtest.exchange import Call, Exchange
from headrace.loadtest.recorder import CUT, Recorder, Window
from headrace.loadtest.slo import Slo

CALL = Call("chat", {})


def exchange(intended: float, sent: float, arrivals: list[float], ended: float, **more: object) -> Exchange:
    made = Exchange(CALL, intended, sent=sent, arrivals=array("d", arrivals), ended=ended, prompt_tokens=10)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def recorded(
    *exchanges: Exchange, slo: Slo | None = None, begin: float = 0.0, end: float = math.inf
) -> Recorder:
    recorder = Recorder(Window(0.0, begin, end), slo or Slo(), bucket_s=1.0)
    for made in exchanges:
        recorder.add(made)
    recorder.fold()
    return recorder


def test_latencies_count_from_the_intended_time_and_as_sent() -> None:
    """One request sent 2 s late: what its user waited is 2 s more than what the server took."""
    found = recorded(exchange(1.0, 3.0, [3.5, 3.6, 3.8], 4.0, output_tokens=3)).latencies
    expected = {"ttft": 2.5, "ttft_sent": 0.5, "tpot": 0.15, "e2e": 3.0, "e2e_sent": 1.0}
    for name, value in expected.items():
        assert found[name].quantile(0.5) == pytest.approx(value, rel=0.005), name
    assert len(found["itl"]) == 2
    assert found["itl"].largest == pytest.approx(0.2)


def test_gaps_never_span_two_requests() -> None:
    recorder = recorded(
        exchange(0.0, 0.0, [1.0, 1.1], 2.0), exchange(0.0, 0.0, [], 2.0), exchange(0.0, 0.0, [9.0, 9.3], 9.5)
    )
    assert sorted(point[0] for point in recorder.latencies["itl"].cdf()) == pytest.approx(
        [0.1, 0.3], rel=0.01
    )
    assert len(recorder.latencies["ttft"]) == 2
    assert len(recorder.latencies["e2e"]) == 3


def test_merged_events_count_as_the_tokens_that_the_server_reports() -> None:
    recorder = recorded(exchange(0.0, 0.0, [1.0, 2.0], 2.0, output_tokens=8))
    assert recorder.output_tokens == 8
    assert recorder.tokens_per_event == 4
    assert recorder.latencies["tpot"].quantile(0.5) == pytest.approx(1 / 7, rel=0.005)
    assert recorder.series().output_tokens == (0.0, 4.0, 4.0)


def test_requests_count_by_their_intended_time_and_tokens_by_their_arrival() -> None:
    early = exchange(0.5, 0.5, [1.5, 2.5], 2.5)
    late = exchange(2.5, 2.5, [3.5, 4.5], 4.5)
    recorder = recorded(early, late, begin=1.0, end=4.0)
    assert (recorder.requests, recorder.output_tokens) == (1, 3.0)
    assert recorder.ended_within == 1
    assert recorder.input_tokens == 20


def test_failures_are_counted_by_kind_and_stay_out_of_latencies() -> None:
    failed = [exchange(0.0, 0.0, [0.1], 1.0, error="http_429", detail=f"busy {i}") for i in range(3)]
    cut = exchange(0.0, 0.0, [0.1], 1.0, error=CUT)
    recorder = recorded(*failed, cut, exchange(0.0, 0.0, [0.2], 1.0), slo=Slo(ttft=1.0))
    assert (recorder.requests, recorder.failed, recorder.cut, recorder.good) == (4, 3, 1, 1)
    assert recorder.errors == {"http_429": 3}
    assert recorder.error_samples == {"http_429": "busy 0"}
    assert len(recorder.latencies["ttft"]) == 1


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(), 3),
        (Slo(ttft=0.5), 2),
        (Slo(e2e=10.5), 2),
        (Slo(tpot=0.02), 2),
        (Slo(itl=0.05), 2),
        (Slo(ttft=0.5, itl=0.05), 1),
    ],
    ids=str,
)
def test_goodput_counts_what_keeps_every_limit(slo: Slo, good: int) -> None:
    smooth = [0.1 + 0.01 * i for i in range(200)]
    stuttering = [
        *smooth[:100],
        *(time + 3.0 for time in smooth[100:103]),
        *(4.0 + 0.2 * i for i in range(4)),
    ]
    recorder = recorded(
        exchange(0.0, 0.0, smooth, 3.0),
        exchange(0.0, 0.0, stuttering, 5.0),
        exchange(0.0, 0.0, [time + 1.0 for time in smooth], 11.0),
        slo=slo,
    )
    assert recorder.good == good


def test_one_long_gap_in_a_hundred_is_within_a_limit_on_gaps() -> None:
    times = [0.01 * i for i in range(100)]
    one_gap = [*times, times[-1] + 1.0]
    assert recorded(exchange(0.0, 0.0, one_gap, 3.0), slo=Slo(itl=0.05)).good == 1
    two_gaps = [*one_gap, one_gap[-1] + 1.0]
    assert recorded(exchange(0.0, 0.0, two_gaps, 3.0), slo=Slo(itl=0.05)).good == 0


def test_the_series_shows_who_is_open() -> None:
    recorder = recorded(exchange(0.1, 0.1, [0.5], 3.5), exchange(1.1, 1.1, [1.5], 1.9))
    series = recorder.series()
    assert series.open == (1, 1, 1, 0)
    assert series.ended == (0, 1, 0, 1)
