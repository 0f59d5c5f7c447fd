"""The arithmetic of money: against published figures, against hand calculations, and within its own ranges."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import ConfigError
from headrace.loadtest import economics_cli
from headrace.loadtest import record as records
from headrace.loadtest.economics import (
    Range,
    Result,
    Sheet,
    Source,
    Speed,
    Values,
    answer,
    evaluate,
    gpu_hour,
    gpus_for,
    swings,
)
from headrace.loadtest.economics_claims import DEEPINFER_CLAIM, DEEPSEEK_DAY_6
from headrace.loadtest.economics_sheet import MEANING, read_settings, read_sheet
from headrace.loadtest.economics_source import read_source
from tests.loadtest.test_records import check_page, make_record

MIDDLE = Sheet().middle()


def values(**changes: float) -> Values:
    """A GPU at $3.60/h, fully used, two input tokens for each output token, half of them cached and free."""
    base = replace(
        MIDDLE,
        hourly=3.6,
        utilisation=1.0,
        input_per_output=2.0,
        cache_hit=0.5,
        cached_weight=0.0,
        decode_weight=10.0,
    )
    return replace(base, **{"price_input": 1.0, "price_cached": 0.1, "price_output": 4.0, **changes})


def test_day_6_is_recomputed_from_its_own_counts() -> None:
    day = DEEPSEEK_DAY_6
    assert day.cost == pytest.approx(87_072)
    assert day.revenue == pytest.approx(562_027, rel=5e-4)  # the token counts are rounded to a billion
    assert day.published_revenue / day.published_cost - 1 == pytest.approx(5.45, abs=0.005)
    assert day.cached_tokens / day.input_tokens == pytest.approx(0.563, abs=0.001)
    assert day.tokens_per_gpu_s == pytest.approx(4951, rel=1e-3)
    hours = day.input_tokens / day.prefill_per_node / 3600 + day.output_tokens / day.decode_per_node / 3600
    assert hours == pytest.approx(
        day.nodes * 24, rel=2e-3
    )  # the published speeds fill exactly the nodes they had


def test_the_claim_means_what_its_totals_say() -> None:
    claim = DEEPINFER_CLAIM
    assert claim.price_per_million == pytest.approx(0.142, abs=5e-4)
    assert claim.cost == pytest.approx(4.4e6)
    assert claim.hardware == pytest.approx(1.43e9, rel=5e-3)


def test_the_claim_implies_more_of_a_gpu_the_dearer_it_is() -> None:
    rented = DEEPINFER_CLAIM.implied("hourly", 2.0)
    assert rented.gpus == pytest.approx(4.4e6 / 48)
    assert rented.tokens_per_gpu_s == pytest.approx(155e12 / 91_666.67 / 86_400, rel=1e-6)
    assert rented.purchase == pytest.approx(1.4256e9 / 91_666.67, rel=1e-6)
    bought = DEEPINFER_CLAIM.implied("purchase", rented.purchase)
    assert bought.gpus == pytest.approx(rented.gpus)
    assert bought.hourly == pytest.approx(2.0)
    needed = DEEPINFER_CLAIM.needed(Range(1, 2, 4), Range(20_000, 30_000, 40_000))
    assert needed.low <= needed.mid <= needed.high
    assert needed.mid == pytest.approx(rented.tokens_per_gpu_s)


def test_a_day_of_one_gpu_by_hand() -> None:
    """0.001 s for an output token and 1 computed input token of 0.0001 s with it."""
    result = evaluate(Speed(prefill=10_000, decode=1_000), values())
    output = 86_400 / 0.0011
    assert result.output_tokens == pytest.approx(output)
    assert result.input_tokens == pytest.approx(2 * output)
    assert result.tokens == pytest.approx(3 * output)
    assert result.cost == pytest.approx(86.4)
    assert result.cost_output == pytest.approx(1.0)  # $0.001 a second, 1,000 tokens
    assert result.cost_input == pytest.approx(0.1)
    assert result.cost_cached == 0
    assert result.revenue == pytest.approx(output * (4.0 + 1.0 + 0.1) / 1e6)
    assert result.margin == pytest.approx(1 - 86.4 / result.revenue)
    assert result.price_per_million == pytest.approx(5.1 / 3)
    assert gpus_for(3e12, result.tokens) == pytest.approx(1e12 / output)


def test_a_bought_gpu_is_written_off_and_fed() -> None:
    bought = replace(
        MIDDLE, hourly=0.0, purchase=35_040, life_years=4, power_kw=1.0, pue=1.5, kwh=0.1, overhead=0.25
    )
    assert gpu_hour(bought) == pytest.approx(1.0 + 0.15 + 0.25)


def test_payback_comes_from_what_running_leaves() -> None:
    speed = Speed(prefill=10_000, decode=1_000)
    earning = values(purchase=10_000, power_kw=1.0, pue=1.0, kwh=0.0, overhead=0.0)
    assert evaluate(speed, earning).payback_days == pytest.approx(10_000 / evaluate(speed, earning).revenue)
    losing = replace(earning, overhead=1e6)
    assert evaluate(speed, losing).payback_days is None


SHARES = st.floats(0.01, 1.0)
SPEEDS = st.floats(1.0, 1e6)


@given(SPEEDS, SPEEDS, SHARES, SHARES, SHARES, st.floats(0.0, 50.0))
def test_what_the_kinds_cost_adds_up_to_what_the_gpu_costs(
    prefill: float, decode: float, utilisation: float, hit: float, cached: float, ratio: float
) -> None:
    chosen = values(utilisation=utilisation, cache_hit=hit, cached_weight=cached, input_per_output=ratio)
    result = evaluate(Speed(prefill, decode), chosen)
    total = (
        result.output_tokens * result.cost_output
        + result.input_tokens * (1 - hit) * result.cost_input
        + result.input_tokens * hit * result.cost_cached
    )
    assert total / 1e6 == pytest.approx(result.cost)
    assert result.tokens * result.cost_per_million / 1e6 == pytest.approx(result.cost)


@given(SPEEDS, SPEEDS, SPEEDS, st.floats(0.5, 20), SHARES)
def test_a_mixed_measurement_is_reproduced_whatever_the_weights(
    computed: float, cached: float, output: float, decode_weight: float, cached_weight: float
) -> None:
    """The weights say how the GPU's time is shared out; they must not change what was measured."""
    source = Source("x", None, None, (computed, cached, output))
    chosen = values(
        decode_weight=decode_weight,
        cached_weight=cached_weight,
        input_per_output=(computed + cached) / output,
        cache_hit=cached / (computed + cached),
    )
    result = evaluate(source.speed(chosen), chosen)
    assert result.output_tokens / 86_400 == pytest.approx(output)
    assert result.tokens / 86_400 == pytest.approx(computed + cached + output)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=15, max_size=15))
def test_no_choice_within_the_ranges_leaves_the_bounds(places: list[float]) -> None:
    sheet = replace(Sheet(), power_kw=Range.point(1.0), pue=Range.point(1.2), life_years=Range.point(4))
    source = Source("x", None, 1_000.0)
    found = answer(source, sheet)
    chosen = {}
    for entry, place in zip(fields(sheet), places, strict=True):
        span: Range = getattr(sheet, entry.name)
        chosen[entry.name] = span.low + place * (span.high - span.low)
    result = evaluate(source.speed(Values(**chosen)), Values(**chosen))
    for entry in fields(Result):
        value = getattr(result, entry.name)
        value = float("inf") if value is None else value
        slack = 1e-9 * abs(value) if value != float("inf") else 0.0
        assert found.lowest[entry.name] - slack <= value <= found.highest[entry.name] + slack, entry.name


def test_swings_are_ordered_and_leave_out_what_is_known() -> None:
    found = swings(
        Source("x", None, 1_000.0), replace(Sheet(), utilisation=Range.point(0.5)), "cost_per_million"
    )
    sizes = [abs(low - high) for _, low, high in found]
    assert sizes == sorted(sizes, reverse=True)
    assert "utilisation" not in {name for name, _, _ in found}
    assert "price_output" not in {name for name, _, _ in found}


def test_every_assumption_has_a_meaning() -> None:
    assert set(MEANING) == {entry.name for entry in fields(Sheet)}


def test_a_price_sheet_gives_numbers_and_ranges(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text("hourly = 2\ncache_hit = [0.1, 0.2, 0.3]\n")
    sheet = read_sheet(path, Sheet())
    assert (sheet.hourly, sheet.cache_hit) == (Range.point(2.0), Range(0.1, 0.2, 0.3))
    assert read_settings(["kwh=0.1", "pue=1.1,1.2,1.3"], sheet).pue == Range(1.1, 1.2, 1.3)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("speed=1", "speed is unknown"),
        ("hourly", "NAME=VALUE"),
        ("hourly=1,2", "a number or"),
        ("hourly=3,2,1", "not in order"),
        ("cache_hit=1.2", "within 0..1"),
        ("utilisation=0", "not in order within"),
    ],
)
def test_an_impossible_entry_is_named(setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_settings([setting], Sheet())


def test_a_load_test_gives_its_mix_and_its_throughput_per_gpu(tmp_path: Path) -> None:
    record = make_record(gpus=2)
    records.save(record, tmp_path / "a.json")
    source, mix = read_source(tmp_path / "a.json", gpus=0)
    (run,) = record.runs
    assert mix == {
        "input_per_output": run.input_tokens_per_s / run.output_tokens_per_s,
        "cache_hit": run.cached_tokens / run.prompt_tokens,
    }
    assert source.mixed is not None
    assert sum(source.mixed) == pytest.approx((run.input_tokens_per_s + run.output_tokens_per_s) / 2)


def test_an_engine_benchmark_gives_its_best_decode_and_prefill(tmp_path: Path) -> None:
    lines = [
        {"bench": "decode", "model": "m", "batch": 1, "tokens_per_s": 243.0, "card": "H200"},
        {"bench": "decode", "model": "m", "batch": 256, "tokens_per_s": 11_312.0, "card": "H200"},
        {"bench": "prefill", "model": "m", "batch": 32, "tokens_per_s": 65_000.0, "card": "H200"},
        {"bench": "prefill", "model": "other", "batch": 32, "tokens_per_s": 99_000.0, "card": "H200"},
    ]
    path = tmp_path / "engine.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source, mix = read_source(path, gpus=1)
    assert (source.prefill, source.decode, mix) == (65_000.0, 11_312.0, {})
    assert source.speed(MIDDLE) == Speed(65_000.0, 11_312.0)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"bench": "prefill", "tokens_per_s": 3}'])
def test_what_has_no_throughput_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x").write_text(content)
    with pytest.raises(ConfigError, match="record"):
        read_source(tmp_path / "x", 1)


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command and returns what it printed, spaces and line ends squeezed."""

    def command(*arguments: str) -> str:
        assert (
            economics_cli.main(
                [*arguments, "--html", str(tmp_path / "e.html"), "--json", str(tmp_path / "e.json")]
            )
            == 0
        )
        check_page((tmp_path / "e.html").read_text())
        return " ".join(capsys.readouterr().out.split())

    return command


def test_the_command_prints_every_assumption_and_the_published_figures(
    run: Callable[..., str], tmp_path: Path
) -> None:
    records.save(make_record(), tmp_path / "a.json")
    said = run(str(tmp_path / "a.json"), "--target", "1T", "--set", "cache_hit=0,0.5,0.9")
    for name in MEANING:
        assert name in said or name == "life_years"  # which counts only for a bought GPU
    for figure in ("$87,072", "$562,027", "545 %", "$0.142", "$4.40M", "$1.43B", "91,667"):
        assert figure in said
    assert "GPUs for 1T tokens a day" in said.replace("1.00T", "1T")
    data = json.loads((tmp_path / "e.json").read_text())
    assert data["lowest"]["tokens"] < data["middle"]["tokens"] < data["highest"]["tokens"]


def test_without_a_record_the_published_figures_stand_alone(run: Callable[..., str]) -> None:
    said = run()
    assert "$87,072" in said
    assert "Results" not in said


def test_a_payback_that_never_comes_is_said_and_is_null_in_json(
    run: Callable[..., str], tmp_path: Path
) -> None:
    records.save(make_record(), tmp_path / "a.json")
    said = run(
        str(tmp_path / "a.json"),
        "--set",
        "price_output=0.001",
        "--set",
        "price_input=0.001",
        "--set",
        "price_cached=0",
    )
    assert "never" in said
    assert json.loads((tmp_path / "e.json").read_text())["highest"]["payback_days"] is None
