"""Long runs on a card: no memory that grows, no wait that hides, no kernel that is compiled in service."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from headrace.core.models.base import Model
from headrace.core.request import Request
from headrace.core.warm_up import warm_up_card
from headrace.ipc.messages import Sampling
from tests.core.engines import generate
from tests.gpu.models import FAMILIES, make, prompts

pytestmark = pytest.mark.gpu
PLAIN = Sampling(max_tokens=40, temperature=0.8, top_p=0.9, seed=1)
DEMANDING = replace(
    PLAIN, repetition_penalty=1.2, logit_bias=((3, -1.0),), logprobs=3, min_tokens=3, stop_token_ids=(1,)
)


@pytest.mark.timeout(300)
def test_memory_is_flat_over_10000_decode_steps(folders: dict[str, Path], models: dict[str, Model]) -> None:
    """Requests come and go all the while; everything has settled after the first 2000 steps."""
    built = make(models["deepseek_v2"], folders["deepseek_v2"], max_num_seqs=8)
    engine, process = built.engine, psutil.Process()
    texts, count = prompts(50, 5, 60), 0
    sizes: list[tuple[int, int]] = []
    for steps in range(2000, 12001, 2000):
        while engine.clock.steps < steps:
            if engine.scheduler.num_running + engine.scheduler.num_waiting < 8:
                count += 1
                rules = replace(PLAIN, max_tokens=30 + count % 50, seed=count)
                engine.submit(Request(f"r{count}", texts[count % 50], rules))
            engine.step()
        torch.cuda.synchronize()
        gc.collect()
        sizes.append((torch.cuda.memory_allocated(), process.memory_info().rss))
    card, host = zip(*sizes, strict=True)
    assert max(card) - min(card) < 1 << 20, card
    assert host[-1] - host[0] < 8 << 20, host


@pytest.fixture
def waits_forbidden() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rules", [PLAIN, DEMANDING], ids=["plain", "demanding"])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_step_waits_for_the_card(
    name: str, rules: Sampling, folders: dict[str, Path], models: dict[str, Model], request: Any
) -> None:
    """Prompts, chunks, decodes, ends; only the commit waits, for the event of its own step."""
    engine = make(models[name], folders[name], prefix_cache=True).engine
    texts = prompts(24, 5, 300, seed=4)
    generate(engine, texts[:4], rules, check_each_step=False)
    request.getfixturevalue("waits_forbidden")
    answers = generate(engine, texts, rules, check_each_step=False)
    assert all(1 < len(answer) <= 40 for answer in answers)


class Compiled:
    """Names of the Triton kernels compiled while it listens."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, **kwargs: Any) -> None:
        self.names.append(str(kwargs["fn"].name))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    from triton import knobs

    listener = Compiled()
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", listener)
    return listener


@pytest.mark.parametrize("deterministic", [False, True], ids=["usual", "deterministic"])
@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_is_compiled_in_service(
    name: str, deterministic: bool, folders: dict[str, Path], models: dict[str, Model], compiled: Compiled
) -> None:
    """Prompts of every kind of length, alone and together, with and without rules."""
    built = make(models[name], folders[name], prefix_cache=True, deterministic=deterministic)
    # As core/build.py does at start.
    warm_up_card(built.engine, 16, 256, recorded=not deterministic)
    compiled.names.clear()
    for count, shortest, longest in (
        (1, 1, 1),
        (1, 17, 17),
        (1, 100, 100),
        (3, 5, 9),
        (16, 1, 300),
        (20, 250, 600),
    ):
        texts = prompts(count, shortest, longest, seed=count + shortest)
        for rules in (PLAIN, DEMANDING):
            generate(built.engine, texts, replace(rules, max_tokens=6), check_each_step=False)
    assert not compiled.names, f"compiled in service: {sorted(set(compiled.names))}"
