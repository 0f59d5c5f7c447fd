"""Steps are timed through the executor's real path, and leave nothing behind."""

from pathlib import Path

import pytest
import torch

from headrace.config import CacheConfig, Config, ModelConfig, SchedulerConfig, SpeculationConfig
from headrace.core.build import Built, assemble
from headrace.core.models.base import Model
from headrace.core.step_timer import time_steps
from headrace.ipc.messages import Sampling
from tests.core.engines import generate, load

PROMPTS = [[5, 6, 7, 8] * 6, [9, 10] * 9]
GREEDY = Sampling(max_tokens=20, temperature=0.0)


@pytest.fixture(scope="module")
def model(small_path: Path) -> Model:
    return load(small_path)


def make(model: Model, path: Path) -> Built:
    config = Config(
        model=ModelConfig(path=str(path)),
        cache=CacheConfig(block_size=8, num_blocks=80),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
        speculation=SpeculationConfig(drafters="auto"),
    ).resolve()
    return assemble(config, model, overlap=False)


def test_timed_steps_leave_answers_and_blocks_alone(model: Model, small_path: Path) -> None:
    expected = generate(make(model, small_path).engine, PROMPTS, GREEDY)
    built = make(model, small_path)
    costs = time_steps(
        built.parts.executor,
        rows=(1, 4),
        drafting_rows=(1, 2),
        tokens=(1, 2, 7, 16),
        ahead=3,
        spare_slot=4,
        block_size=8,
        max_model_len=built.max_model_len,
        padded=False,
    )
    assert costs.most_tokens == 16
    assert costs.most_rows == 2
    assert min(costs.plain_ms(4), costs.verify_ms(16), costs.draft_ms(2)) >= 0
    assert costs.verify_ms(16) > 0
    assert torch.isfinite(built.parts.executor.last_token.float()).all()
    assert generate(built.engine, PROMPTS, GREEDY) == expected
