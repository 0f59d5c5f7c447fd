"""Histograms: bounded error, merging, records."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.loadtest.histogram import ERROR, LARGEST, Histogram

DURATIONS = st.lists(st.floats(1e-6, LARGEST, allow_nan=False), min_size=1, max_size=200)


@given(DURATIONS, st.sampled_from([0.0, 0.5, 0.9, 0.99, 0.999, 1.0]))
def test_a_quantile_is_within_the_stated_error_of_the_exact_one(values: list[float], q: float) -> None:
    histogram = Histogram()
    histogram.add(values)
    exact = sorted(values)[max(1, math.ceil(q * len(values) - 1e-9)) - 1]
    assert histogram.quantile(q) == pytest.approx(exact, rel=ERROR * 1.001)


@given(DURATIONS, DURATIONS)
def test_merging_is_the_same_as_adding_all(first: list[float], second: list[float]) -> None:
    parts, whole = [Histogram(), Histogram()], Histogram()
    for part, values in zip(parts, (first, second), strict=True):
        part.add(values)
        whole.add(values)
    parts[0].merge(parts[1])
    assert parts[0].counts.tolist() == whole.counts.tolist()
    assert parts[0].quantile(0.9) == whole.quantile(0.9)
    assert parts[0].total == pytest.approx(whole.total)


@given(DURATIONS)
def test_a_record_keeps_everything(values: list[float]) -> None:
    histogram = Histogram()
    histogram.add(values)
    again = Histogram.from_data(histogram.to_data())
    assert again.counts.tolist() == histogram.counts.tolist()
    assert (again.total, again.smallest, again.largest) == (
        histogram.total,
        histogram.smallest,
        histogram.largest,
    )


def test_extremes_are_kept_and_never_fall_out_of_the_buckets() -> None:
    histogram = Histogram()
    histogram.add([-1.0, 0.0, 1e-12, 1e9])
    assert len(histogram) == 4
    assert histogram.quantile(0.5) <= 1e-6
    assert histogram.quantile(1) == pytest.approx(LARGEST, rel=ERROR)


def test_an_empty_histogram_has_no_figures() -> None:
    histogram = Histogram()
    histogram.add(np.array([]))
    assert math.isnan(histogram.quantile(0.5))
    assert math.isnan(histogram.mean)
    assert histogram.cdf() == []


def test_the_cdf_rises_to_one() -> None:
    histogram = Histogram()
    histogram.add([1.0, 1.0, 2.0, 5.0])
    assert [share for _, share in histogram.cdf()] == [0.5, 0.75, 1.0]
