"""Builds real engines over the small fixture for tests, and runs them to the end."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from headrace.config import (
    CacheConfig,
    Config,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from headrace.core.build import assemble
from headrace.core.commit import Output
from headrace.core.engine import Engine
from headrace.core.models.base import Model
from headrace.core.request import Request
from headrace.core.weights import load_model
from headrace.ipc.messages import Sampling

OFF = SpeculationConfig(drafters="off")


def load(path: Path) -> Model:
    # The small model gains nothing from a second thread, and loses much where tests share the cores.
    torch.set_num_threads(1)
    return load_model(
        path,
        dtype=torch.float32,
        device=torch.device("cpu"),
        load_format="safetensors",
        seed=0,
        progress=None,
    )


def make_engine(
    model: Model,
    path: Path,
    *,
    num_blocks: int = 200,
    block_size: int = 8,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 64,
    prefix_cache: bool = True,
    overlap: bool = False,
    deterministic: bool = False,
    speculation: SpeculationConfig = OFF,
) -> Engine:
    config = Config(
        model=ModelConfig(path=str(path)),
        cache=CacheConfig(block_size=block_size, num_blocks=num_blocks, prefix_cache=prefix_cache),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
        engine=EngineConfig(deterministic=deterministic),
        speculation=speculation,
    ).resolve()
    return assemble(config, model, overlap=overlap).engine


def run(engine: Engine, requests: Iterable[Request] = (), *, check_each_step: bool = True) -> list[Output]:
    """Submit, step until idle, check that everything was given back."""
    for request in requests:
        engine.submit(request)
    outputs: list[Output] = []
    while engine.has_work:
        outputs += engine.step()
        if check_each_step:
            engine.scheduler.check_integrity()
    engine.scheduler.check_integrity()
    assert engine.kv.num_used == 0, "blocks leaked"
    return outputs


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, *, check_each_step: bool = True
) -> list[list[int]]:
    """Output ids of each prompt, all submitted at once; request i has seed `sampling.seed + i`."""
    requests = [
        Request(f"r{i}", prompt, replace(sampling, seed=sampling.seed + i))
        for i, prompt in enumerate(prompts)
    ]
    run(engine, requests, check_each_step=check_each_step)
    return [request.output_ids for request in requests]
