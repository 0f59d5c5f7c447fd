"""Records survive their file, and reports are whole, self-contained pages."""

import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config import ConfigError
from headrace.loadtest import record as records
from headrace.loadtest.compare import compare_page, compare_rows, matched
from headrace.loadtest.histogram import Histogram
from headrace.loadtest.record import SCHEMA, Health, Latency, LoadRecord, Run, Series
from headrace.loadtest.recorder import LATENCIES
from headrace.loadtest.report import report_page
from headrace.loadtest.typed_json import BadValue, build

VOID = {"meta", "link", "br", "img", "input"}


def make_run(load: str = "8 users", speed: float = 1.0, reasons: tuple[str, ...] = ()) -> Run:
    rng = np.random.default_rng(0)
    latencies = {}
    for name in LATENCIES:
        histogram = Histogram()
        histogram.add(rng.lognormal(-3, 0.5, 500) / speed)
        latencies[name] = Latency.of(histogram)
    health = Health(
        lag_p50_s=1e-4,
        lag_p99_s=2e-3,
        late_p50_s=1e-4,
        late_p99_s=1e-3,
        cpu_share=0.3,
        connections=8,
        reasons=reasons,
    )
    series = Series(bucket_s=0.5, output_tokens=(100.0, 120.0, 90.0), ended=(1, 2, 3), open=(8, 8, 0))
    return Run(
        load=load,
        users=8,
        rate=0.0,
        started="2026-12-01T00:00:00+00:00",
        window_s=1.5,
        requests=50,
        failed=2,
        cut=1,
        errors={"http_429": 2},
        error_samples={"http_429": "<b>busy</b> & full"},
        prompt_tokens=6400,
        cached_tokens=1600,
        output_tokens=3200.0,
        requests_per_s=32.0,
        input_tokens_per_s=4266.0,
        output_tokens_per_s=2133.0 * speed,
        tokens_by_usage=False,
        tokens_per_event=1.5,
        latencies=latencies,
        slo="ttft=500ms",
        good=40,
        attainment=0.8,
        goodput_per_s=26.7,
        interactivity=50.0 * speed,
        series=series,
        health=health,
    )


def make_record(name: str = "a <model>", runs: tuple[Run, ...] | None = None, gpus: int = 0) -> LoadRecord:
    return LoadRecord(
        schema=SCHEMA,
        name=name,
        url="http://x",
        model="m",
        api="chat",
        transport="sse",
        workload="independent",
        gpus=gpus,
        runs=runs or (make_run(),),
        found_rate=None,
        versions={"python": "3.11"},
        machine="a processor",
        commit="abc+",
    )


def test_a_record_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    record = make_record(runs=(make_run(), make_run("16 users", 2.0, ("it took 99 % of a core",))))
    records.save(record, tmp_path / "new" / "record.json")
    assert records.load(tmp_path / "new" / "record.json") == record


def change(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    place: Any = data
    *parents, last = path.split(".")
    for name in parents:
        place = place[int(name) if name.isdigit() else name]
    place[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("schema", 99, "schema 99"),
        ("runs", [], "no runs"),
        ("runs.0.requests", "50", r"runs\[0\].requests must be int"),
        ("runs.0.series.open", [1, None], r"runs\[0\].series.open\[1\]"),
        ("surprise", 1, "surprise is unknown"),
        ("runs.0.latencies.ttft.histogram.buckets", [10**6], "as many counts|out of range"),
    ],
)
def test_what_is_no_record_is_refused_by_name(tmp_path: Path, path: str, value: Any, says: str) -> None:
    data = change(json.loads(json.dumps(asdict(make_record()))), path, value)
    (tmp_path / "record.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=says):
        records.load(tmp_path / "record.json")


def test_a_missing_field_is_named() -> None:
    with pytest.raises(BadValue, match="lag_p50_s is missing"):
        build(Health, {})


class Balanced(HTMLParser):
    """Collects links and checks that every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_page(page: str) -> None:
    parser = Balanced()
    parser.feed(page)
    assert not parser.open
    assert not parser.outside
    assert "<script" not in page
    assert not re.search(r"url\(|@import", page)
    assert "nan" not in re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL).replace("finance", "")


def test_a_report_is_one_file_with_everything_escaped() -> None:
    page = report_page(make_record())
    check_page(page)
    assert "a &lt;model&gt;" in page
    assert "&lt;b&gt;busy&lt;/b&gt; &amp; full" in page
    assert page.count("<svg") == 6


def test_a_report_of_several_runs_has_a_pareto_plot_and_says_when_the_client_was_the_limit() -> None:
    runs = (make_run("1 user"), make_run("2 users", 1.5, ("it took 99 % of a core",)))
    page = report_page(make_record(runs=runs, gpus=2))
    check_page(page)
    assert "Throughput against interactivity" in page
    assert "output tokens/s per GPU" in page
    assert "the client may have been the limit: it took 99 % of a core" in page


def test_a_report_of_nothing_is_still_a_page() -> None:
    """All requests failed: no latency has a figure."""
    empty = {name: Latency.of(Histogram()) for name in LATENCIES}
    run = replace(
        make_run(),
        latencies=empty,
        interactivity=None,
        series=Series(bucket_s=1.0, output_tokens=(), ended=(), open=()),
    )
    check_page(report_page(make_record(runs=(run, run))))


def test_runs_are_compared_under_the_same_load() -> None:
    first = make_record("a", (make_run("1 user"), make_run("8 users")))
    second = make_record("b", (make_run("8 users", 2.0), make_run("9 users")))
    assert [(a.load, b.load) for a, b in matched(first, second)] == [("8 users", "8 users")]
    rows = {row[0]: row[1:] for row in compare_rows(first.runs[1], second.runs[0])}
    assert rows["output tokens/s"] == ["2,133", "4,266", "2.00x"]
    assert rows["ITL p99"][2] == "0.50x"
    check_page(compare_page(first, second))


def test_records_without_a_common_load_compare_their_best() -> None:
    first = make_record("a", (make_run("1 user"), make_run("8 users", 3.0)))
    second = make_record("b", (make_run("9 users"),))
    assert [(a.load, b.load) for a, b in matched(first, second)] == [("8 users", "9 users")]


def test_the_rate_that_was_found_is_shown_and_not_a_faster_one_that_broke_the_slo() -> None:
    runs = tuple(replace(make_run(f"{rate}/s", rate), rate=rate) for rate in (1.0, 2.0, 3.0))
    record = make_record(runs=runs)
    assert record.best.rate == 3.0
    assert replace(record, found_rate=2.0).best.rate == 2.0


def test_labels_of_near_points_do_not_overlap_nor_leave_the_plot() -> None:
    """Also where the highest point lies at the plot's top."""
    runs = tuple(make_run(f"{users} users", 1.0 + users / 1000) for users in range(4))
    page = report_page(make_record(runs=runs))
    found = re.findall(
        r'<text class="tick" x="[\d.]+"(?: text-anchor="end")? y="([\d.]+)">\d users</text>', page
    )
    heights = sorted(map(float, found))
    assert len(heights) == 4
    assert heights[0] >= 12
    assert all(b - a >= 13.9 or a == 12 for a, b in pairwise(heights))


def test_two_records_of_one_name_are_told_apart_in_every_legend() -> None:
    pair = [make_record("m", (make_run("1 user"), make_run("2 users", 2.0))) for _ in range(2)]
    assert ">m</span>" not in compare_page(*pair)
