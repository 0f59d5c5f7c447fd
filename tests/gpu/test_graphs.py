"""A replayed step is the recorded step: the same answers as without graphs, padded or not, overlapped or not."""

from pathlib import Path

import pytest
import torch

from headrace.core.models.base import Model
from headrace.core.request import Request
from headrace.ipc.messages import Sampling
from tests.core.engines import generate
from tests.gpu.models import FAMILIES, error, load, make, prompts, stacked
from tests.gpu.record import LogitRecord

pytestmark = pytest.mark.gpu
GREEDY = Sampling(max_tokens=20, temperature=0.0)
SAMPLED = Sampling(max_tokens=20, temperature=0.9, top_p=0.9, seed=5)


def recorded(
    model: Model, path: Path, count: int, *, eager: bool, deterministic: bool = False
) -> tuple[LogitRecord, list[list[int]]]:
    built = make(model, path, deterministic=deterministic)
    record = LogitRecord(built, eager=eager)
    return record, generate(built.engine, prompts(count, 5, 60), GREEDY, check_each_step=False)


@pytest.mark.parametrize("count", [1, 3, 5, 8, 13, 16], ids="{}_rows".format)
@pytest.mark.parametrize("name", FAMILIES)
def test_deterministic_replays_have_the_bits_of_eager_steps(
    name: str, count: int, folders: dict[str, Path], models: dict[str, Model]
) -> None:
    """3, 5 and 13 rows are padded in the graph and ragged without it."""
    graphs, tokens = recorded(models[name], folders[name], count, eager=False, deterministic=True)
    eager, expected = recorded(models[name], folders[name], count, eager=True, deterministic=True)
    assert graphs.replayed >= 18 and not eager.replayed
    assert tokens == expected
    assert graphs.rows.keys() == eager.rows.keys()
    assert all(torch.equal(graphs.rows[key], eager.rows[key]) for key in eager.rows)


@pytest.mark.parametrize("count", [1, 3, 8], ids="{}_rows".format)
@pytest.mark.parametrize("name", FAMILIES)
def test_float32_replays_choose_what_eager_steps_choose(
    name: str, count: int, folders: dict[str, Path]
) -> None:
    """The kernels of every day may divide a context otherwise, so logits agree but for rounding."""
    model = load(folders[name], torch.float32)
    graphs, tokens = recorded(model, folders[name], count, eager=False)
    eager, expected = recorded(model, folders[name], count, eager=True)
    assert tokens == expected
    keys = sorted(eager.rows)
    found = error(stacked([graphs.rows[key] for key in keys]), stacked([eager.rows[key] for key in keys]))
    assert found < 1e-4


@pytest.mark.parametrize("rules", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", FAMILIES)
def test_overlapped_steps_choose_what_immediate_ones_choose(
    name: str, rules: Sampling, folders: dict[str, Path], models: dict[str, Model]
) -> None:
    texts = prompts(12, 5, 90, seed=1)
    answers = [
        generate(make(models[name], folders[name], overlap=overlap, deterministic=True).engine, texts, rules)
        for overlap in (True, False)
    ]
    assert answers[0] == answers[1]


def test_requests_that_come_and_go_change_no_answer(
    folders: dict[str, Path], models: dict[str, Model]
) -> None:
    """Slots are used again, graphs of every size replayed, prompts computed between decodes."""
    path, model = folders["qwen3_moe"], models["qwen3_moe"]
    texts = prompts(40, 5, 200, seed=2)
    built = make(model, path, deterministic=True)
    requests = [
        Request(f"r{i}", text, Sampling(max_tokens=5 + i % 17, temperature=0.0))
        for i, text in enumerate(texts)
    ]
    waiting = list(requests)
    while waiting or built.engine.has_work:
        if waiting:
            built.engine.submit(waiting.pop())
        built.engine.step()
    for request, text in list(zip(requests, texts, strict=True))[::8]:
        alone = generate(
            make(model, path, deterministic=True).engine,
            [text],
            Sampling(max_tokens=request.sampling.max_tokens, temperature=0.0),
        )
        assert request.output_ids == alone[0]
