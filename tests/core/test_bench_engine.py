"""`headrace bench engine`: what is measured, what it is laid beside, what is written down."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.config import ConfigError
from headrace.core.bench import engine
from headrace.core.bench.arguments import parse
from headrace.core.bench.flops import attention_flops, parameters, product_flops
from headrace.core.bench.published import CARD, Workload, published
from headrace.core.bench.step_profile import KernelShare, StepProfile, kind_of, profile_table
from headrace.core.bench.synthetic import Coins
from headrace.core.bench.workload import draw_prompts, read_trace
from headrace.core.hf_config import read_spec
from headrace.core.model_spec import MlaSpec, MoeSpec
from headrace.core.sampler import Drafts
from headrace.kernels.verify import Verified


def test_the_command_measures_decode_prefill_and_trace_and_records_each(
    small_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, record = tmp_path / "trace.json", tmp_path / "records" / "engine.jsonl"
    trace.write_text("[[20, 3], [7, 5]]")
    flags = ["--batches", "2", "--prompt-tokens", "8,12", "--outputs", "2,6", "--prefill", "3x40"]
    more = ["--trace", str(trace), "--repeats", "1", "--threads", "1", "--commit", "abc"]
    paths = ["--model", str(small_path), "--record", str(record)]
    monkeypatch.setattr(sys, "argv", ["bench", *flags, *more, *paths])
    assert engine.main() == 0
    points = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(p["bench"], p["batch"], p["prompt_tokens"]) for p in points] == [
        ("decode", 2, 10),
        ("prefill", 3, 40),
        ("mixed", 2, 14),
    ]
    decode, prefill, mixed = points
    assert decode["tokens_per_s"] == pytest.approx(2 / decode["step_ms"] * 1e3)
    assert prefill["tokens_per_s"] == pytest.approx(120 / prefill["step_ms"] * 1e3)
    assert mixed["tokens_per_s"] == pytest.approx(35 / mixed["step_ms"] * 1e3)
    assert mixed["output_tokens_per_s"] == pytest.approx(8 / mixed["step_ms"] * 1e3)
    assert {p["commit"] for p in points} == {"abc"}
    assert "decode = prefill checked" in capsys.readouterr().out


def test_models_and_dtypes_make_one_engine_each(small_path: Path) -> None:
    plan = parse(["--model", str(small_path), "--dtype", "bf16,fp8", "--batches", "1,64"], None)
    kinds = [(config.model.dtype, config.model.quantization) for config in plan.configs]
    assert kinds == [("bfloat16", ""), ("bfloat16", "fp8")]
    config = plan.configs[0]
    assert config.scheduler.max_num_seqs == 64
    assert not config.cache.prefix_cache, "a cached prefix would make a prefill vanish"
    assert config.model.max_model_len == read_spec(small_path).max_position, "shorter than the default"


def test_given_prompts_are_taken_in_turn_and_both_runs_of_a_pair_have_the_same(
    small_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.json"
    path.write_text("[[1, 2], [3, 4, 5], [6, 7, 8, 9]]")
    shape = parse(["--model", str(small_path), "--tokens", str(path)], None).decode
    assert shape.mean_prompt == 3
    short, long_run = (draw_prompts(2, shape, vocab_size=10, seed=seed) for seed in (2, 3))
    assert short == long_run == [[6, 7, 8, 9], [1, 2]]
    assert draw_prompts(2, shape, vocab_size=10, seed=4) == [[3, 4, 5], [6, 7, 8, 9]]


@pytest.mark.parametrize("content", ["", "{}", "[3]", "[[1, 2, 3]]", '[["a", 2]]'])
def test_a_trace_that_is_none_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"trace\.json"):
        read_trace(path)


def test_a_published_figure_is_given_for_its_own_card_and_workload_only() -> None:
    workload = Workload("prefill", "qwen3-30b-a3b", "bfloat16", 32, 4096, 1)
    assert published(workload, CARD) == 65_000
    assert published(workload, "NVIDIA H100 PCIe") is None
    assert published(replace(workload, prompt_tokens=4095), CARD) is None
    assert published(replace(workload, dtype="float16"), CARD) is None


def test_prefill_operations_agree_with_a_count_by_hand(small_path: Path) -> None:
    spec = read_spec(small_path)
    attention, moe = spec.attention, spec.moe
    assert isinstance(attention, MlaSpec)
    assert isinstance(moe, MoeSpec)
    pairs = sum(range(1, 8)) + sum(range(1, 4))
    width = attention.nope_dim + attention.rope_dim + attention.v_dim
    expected = 2 * pairs * attention.num_heads * width * spec.num_layers
    assert attention_flops(spec, [7, 3]) == expected
    # A token more costs its share of every weight but the table and the experts it does not take.
    number = parameters(spec)
    per_token = product_flops(spec, number, 1, 0)
    assert product_flops(spec, number, 10, 2) == 10 * per_token + 4 * spec.vocab_size * spec.hidden_size
    idle = (moe.num_experts - moe.router.top_k) * 3 * spec.hidden_size * moe.intermediate_size
    tables = spec.vocab_size * spec.hidden_size * (1 if spec.tied_embeddings else 2)
    assert per_token == 2 * (number - tables - idle * sum(spec.moe_layers))


def test_a_profile_sums_kernels_of_a_kind_and_says_how_fast_they_read() -> None:
    kernels = (
        KernelShare(name="_gate_up_kernel", calls=48, us=300.0, share=0.5),
        KernelShare(name="_down_kernel", calls=48, us=200.0, share=1 / 3),
        KernelShare(name="_rms_norm_kernel", calls=96, us=100.0, share=1 / 6),
    )
    found = StepProfile(span_us=800.0, busy_us=600.0, kernels=kernels)
    assert found.idle == pytest.approx(0.25)
    assert kind_of("nvjet_tst_64x8") == "dense products"
    table = profile_table(found, {"experts": 1e9})
    cells = list(zip(*(column.cells for column in table.columns), strict=True))
    assert ("all experts", "", "500", "83.3%", "1000", "2.00") in cells


def test_an_engine_is_measured_at_a_set_acceptance(
    small_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its answers were checked, which no coin decides about."""
    record = tmp_path / "engine.jsonl"
    flags = ["--batches", "2", "--prompt-tokens", "8,12", "--outputs", "4,20", "--repeats", "1"]
    paths = ["--model", str(small_path), "--record", str(record), "--commit", "abc", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["bench", "--speculate", "synthetic:0.9", *flags, *paths])
    assert engine.main() == 0
    assert json.loads(record.read_text())["speculate"] == "synthetic:0.9"


@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
def test_coins_accept_drafts_as_often_as_set_and_none_behind_a_wrong_one(acceptance: float) -> None:
    """4,000 rows of three drafts; within five standard deviations."""
    rows, coins = 4000, Coins()
    starts = torch.arange(0, 4 * rows + 1, 4, dtype=torch.int32)
    tokens = torch.randint(0, 1000, (rows, 4), generator=torch.Generator().manual_seed(0))
    tokens[:, 3] = -1
    slots = torch.arange(rows).repeat_interleave(4)
    drafts = Drafts(starts, tokens.flatten(), None, None, torch.arange(4).repeat(rows))
    plain = Verified(torch.full((4 * rows,), 5000), torch.zeros(rows, dtype=torch.int64))
    untouched = coins.decide(plain, drafts, slots, drafts.depths)
    assert torch.equal(untouched.tokens, plain.tokens)
    assert torch.equal(untouched.accepted, plain.accepted)
    coins.fix(acceptance)
    found = coins.decide(plain, drafts, slots, drafts.depths)
    for depth in range(3):
        reached = int((found.accepted >= depth).sum())
        stood = int((found.accepted > depth).sum())
        assert abs(stood - acceptance * reached) <= 5 * (acceptance * (1 - acceptance) * reached) ** 0.5
    emitted = found.tokens.view(rows, 4)
    for row in range(0, rows, 500):
        count = int(found.accepted[row])
        assert emitted[row, : count + 1].tolist() == [*tokens[row, :count].tolist(), 5000]


@pytest.mark.parametrize("text", ["synthetic", "synthetic:1.5", "synthetic:x", "eagle"])
def test_a_drafter_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--speculate", text], None)
    assert text in capsys.readouterr().err
