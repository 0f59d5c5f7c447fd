"""`headrace bench tune`: what is chosen, what is written, and that kernels can read it."""

import json
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from headrace.core.bench import tune
from headrace.core.bench.tunables import Tunable
from headrace.kernels.tuned import TABLE, entry, read_table, tuned


@dataclass(frozen=True)
class Choice:
    value: float
    us: float
    fits: bool = True


def one(choice: Choice) -> Tensor:
    if not choice.fits:
        raise RuntimeError("out of shared memory")
    return torch.full((3,), choice.value)


@pytest.mark.parametrize(
    ("others", "chosen"),
    [
        ([Choice(1.0, 90.0), Choice(1.0, 95.0)], 90.0),
        ([Choice(2.0, 50.0)], 100.0),
        ([Choice(float("nan"), 50.0)], 100.0),
        ([Choice(1.0, 50.0, fits=False), Choice(1.0, 99.9)], 100.0),
    ],
    ids=["fastest", "wrong", "unwritten", "does not fit, or gains nothing"],
)
def test_the_fastest_candidate_that_agrees_is_chosen(
    others: list[Choice], chosen: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(tune, "_time", lambda _, choice: choice.us)
    candidates = (Choice(1.0, 100.0), *others)
    tunable = Tunable("x", 1.0, candidates, lambda choice, count: [partial(one, choice)] * count)
    assert tune.choose(tunable, Console(file=StringIO())).us == chosen


def test_writing_keeps_what_other_cards_and_entries_have(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"Other": {"a": {"n": 1}}, "Mine": {"a": {"n": 1}, "b": {"n": 2}}}))
    tune.write(path, "Mine", {"b": {"n": 3}, "c": {"m": {"n": 4}}})
    assert read_table(path) == {
        "Other": {"a": {"n": 1}},
        "Mine": {"a": {"n": 1}, "b": {"n": 3}, "c": {"m": {"n": 4}}},
    }


def test_a_cpu_has_no_choices() -> None:
    assert tuned("gqa_prefill", torch.zeros(1), (128,)) is None


def test_every_committed_choice_is_one_that_its_kernel_takes() -> None:
    pytest.importorskip("triton")
    from headrace.kernels.experts_tiles import TileTuning
    from headrace.kernels.gqa_prefill import GqaPrefillTuning
    from headrace.kernels.mla_expanded import MlaPrefillTuning

    for choices in read_table(TABLE).values():
        for name, found in choices.items():
            match name.split()[0]:
                case "experts":
                    assert {
                        TileTuning(**found["gate_up"]).num_warps,
                        TileTuning(**found["down"]).num_warps,
                    } <= {4, 8}
                    assert found["block_m"] >= 16
                case "gqa_prefill":
                    assert GqaPrefillTuning(**found).block_m >= 16
                case "mla_expanded":
                    assert MlaPrefillTuning(**found).block_m >= 16
                case kernel:
                    pytest.fail(f"{kernel} reads no table")


def test_entries_name_kernel_type_and_shape() -> None:
    assert entry("experts", torch.bfloat16, (128, 1536, 2048, 3)) == "experts bfloat16 128x1536x2048x3"
