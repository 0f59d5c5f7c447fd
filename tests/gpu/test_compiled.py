"""`--compile` on a card: the same kernels, so the same bits; and nothing is compiled anew in service."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.core.models.base import Model
from headrace.ipc.messages import Sampling
from tests.core.engines import generate
from tests.gpu.models import FAMILIES, make, prompts
from tests.gpu.record import LogitRecord

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
GREEDY = Sampling(max_tokens=20, temperature=0.0)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Models of one process share the count of what was compiled, and of what may be."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def graphs_compiled() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("name", FAMILIES)
def test_compiled_layers_give_the_same_logits_and_are_compiled_once(
    name: str, folders: dict[str, Path], models: dict[str, Model]
) -> None:
    path, model = folders[name], models[name]
    texts = prompts(11, 5, 200)
    engines = [make(model, path, max_num_batched_tokens=400, compiled=flag) for flag in (True, False)]
    records = [LogitRecord(built) for built in engines]
    engines[0].engine.warm_up(300)
    before = graphs_compiled()
    assert 1 <= before <= 6, "one for each kind of layer and of step"
    answers = [generate(built.engine, texts, GREEDY, check_each_step=False) for built in engines]
    assert answers[0] == answers[1]
    assert all(torch.equal(records[0].rows[key], row) for key, row in records[1].rows.items())
    for count, shortest, longest in ((1, 1, 1), (1, 17, 90), (3, 2, 9), (16, 1, 300), (2, 390, 600)):
        generate(
            engines[0].engine,
            prompts(count, shortest, longest, seed=count),
            replace(GREEDY, max_tokens=4),
            check_each_step=False,
        )
    assert graphs_compiled() == before, "compiled anew in service"
