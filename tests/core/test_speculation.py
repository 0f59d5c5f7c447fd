"""Speculation over a real model: whoever drafts, and however much, the tokens are the plain engine's."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.config import SpeculationConfig
from headrace.core.models.base import Model
from headrace.ipc.messages import Sampling
from tests.core.engines import generate, load, make_engine

GREEDY = Sampling(max_tokens=24, temperature=0.0)
SEEDED = Sampling(max_tokens=24, temperature=0.8, top_p=0.95, seed=11, seeded=True)
RULES = {
    "greedy": GREEDY,
    "penalised": replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    "biased": replace(GREEDY, logit_bias=((7, 3.0), (300, -5.0)), min_tokens=9, stop_token_ids=(7, 40, 41)),
    "seeded": SEEDED,
    "seeded, penalised": replace(SEEDED, repetition_penalty=1.2, frequency_penalty=0.3, min_p=0.02),
}


@pytest.fixture(scope="module")
def model(small_path: Path) -> Model:
    return load(small_path)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Ten prompts of 1 to 90 tokens, three of them with repeated phrases; the last two share their first 40."""
    generator = torch.Generator().manual_seed(3)

    def draw(count: int) -> list[int]:
        ids: list[int] = torch.randint(4, 4000, (count,), generator=generator).tolist()
        return ids

    phrase, shared = draw(6), draw(40)
    repeated = [phrase * 4, draw(9) + phrase * 3, phrase * 2 + draw(3) + phrase]
    return [draw(count) for count in (1, 8, 17, 64, 90)] + repeated + [shared + draw(3), shared + draw(20)]


def drafting(drafters: str = "mtp", tokens: int = 3) -> SpeculationConfig:
    return SpeculationConfig(drafters=drafters, draft_tokens=tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("tokens", range(1, 9))
def test_any_depth_gives_the_plain_tokens(
    model: Model, small_path: Path, prompts: list[list[int]], rules: Sampling, tokens: int
) -> None:
    """Ten at once, their prompts in chunks between verifications."""
    expected = generate(make_engine(model, small_path), prompts, rules)
    engine = make_engine(model, small_path, max_num_batched_tokens=48, speculation=drafting(tokens=tokens))
    assert generate(engine, prompts, rules) == expected
    assert engine.speculator is not None and engine.speculator.counters.drafted > 50
