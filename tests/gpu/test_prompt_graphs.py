"""Recorded passes over prompts: the same tokens as launching kernel by kernel, whatever a step holds."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from headrace.core.prepare import StepInputs
from headrace.core.request import Request
from headrace.ipc.messages import Sampling
from tests.gpu.models import FAMILIES, load, make, prompts

pytestmark = pytest.mark.gpu


class Watched:
    """Recorded passes that count what fits; or none, if they shall not be used."""

    def __init__(self, inner: object, *, used: bool) -> None:
        self.inner: object = inner
        self.used = used
        self.counts: Counter[bool] = Counter()

    def fits(self, inputs: StepInputs) -> bool:
        fits = self.used and bool(self.inner.fits(inputs))  # type: ignore[attr-defined]
        self.counts[fits] += 1
        return fits

    def run(self, inputs: StepInputs) -> torch.Tensor:
        hidden: torch.Tensor = self.inner.run(inputs)  # type: ignore[attr-defined]
        return hidden


@pytest.mark.parametrize("budget", [200, 700])
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_passes_choose_what_launched_ones_choose(
    family: str, budget: int, folders: dict[str, Path]
) -> None:
    """Prompts of every length beside decodes, cut by the budget, over cached prefixes; in float32, so without ties.

    With the larger budget, launched passes spare their last layer most tokens.
    """
    path = folders[family]
    built = make(load(path, torch.float32), path, max_num_batched_tokens=budget, prefix_cache=True)
    executor = built.parts.executor
    texts = prompts(24, 1, 400, seed=5)
    texts += [texts[-1][:180] + more for more in prompts(4, 1, 60, seed=6)]
    outputs = []
    for used in (True, False):
        watched = Watched(executor._prompt_graphs, used=used)
        executor.use_prompt_graphs(watched)
        requests = [
            Request(
                f"{used}-{i}", text, Sampling(max_tokens=5 + i % 20, temperature=0.0), cache_salt=str(used)
            )
            for i, text in enumerate(texts)
        ]
        for request in requests:
            built.engine.submit(request)
        while built.engine.has_work:
            built.engine.step()
        outputs.append([request.output_ids for request in requests])
        executor.use_prompt_graphs(watched.inner)  # type: ignore[arg-type]
        assert watched.counts[True] > 5 if used else not watched.counts[True]
    assert outputs[0] == outputs[1]
