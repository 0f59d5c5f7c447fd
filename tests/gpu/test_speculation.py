"""Speculation on a card: recorded steps with drafts choose what eager ones and plain ones choose."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from headrace.config import SpeculationConfig
from headrace.core.build import Built
from headrace.core.models.base import Model
from headrace.ipc.messages import Sampling
from tests.core.engines import generate
from tests.gpu.models import load, make, prompts

pytestmark = pytest.mark.gpu
GREEDY = Sampling(max_tokens=40, temperature=0.0)
SEEDED = Sampling(max_tokens=40, temperature=0.8, top_p=0.95, seed=3, seeded=True)
DRAWN = replace(SEEDED, seeded=False)
RULES = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "penalised": replace(GREEDY, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias=((7, 2.0),)),
}
QUESTIONS = [
    "Tell me a story about a brave mouse who finds an old map.",
    "What is 12 + 7?",
    "What is the capital of France?",
    "Give me three tips to sleep better.",
    "Write a short story about Mia the fox.",
    "I feel sad because my friend moved away.",
    "Explain what a bottle is.",
]


@pytest.fixture(scope="module")
def embedded(embedded_path: Path) -> Model:
    return load(embedded_path, torch.bfloat16)


@pytest.fixture(scope="module")
def chats(embedded_path: Path) -> list[list[int]]:
    """Questions, and each again behind its first asking: n-grams find some."""
    tokenizer = Tokenizer.from_file(str(embedded_path / "tokenizer.json"))
    texts = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    texts += [f"{text}Yes.<|im_end|>\n{text}" for text in texts]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def drafting(drafters: Any, tokens: int = 3) -> SpeculationConfig:
    return SpeculationConfig(drafters=drafters, draft_tokens=tokens)


def counted(built: Built) -> int:
    """Drafts verified."""
    assert built.engine.speculator is not None
    return built.engine.speculator.counters.drafted


def replays(built: Built) -> list[int]:
    """Grows by the query tokens of each recorded step with drafts, from now on."""
    graphs = built.parts.draft_graphs
    assert graphs is not None
    sizes: list[int] = []
    run = graphs.run

    def counting(inputs: Any) -> Any:
        sizes.append(inputs.num_tokens)
        return run(inputs)

    graphs.run = counting  # type: ignore[method-assign]
    return sizes


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("drafters", ["mtp", "ngram", "auto"])
def test_deterministic_speculation_gives_the_plain_tokens(
    drafters: str, rules: Sampling, embedded: Model, embedded_path: Path, chats: list[list[int]]
) -> None:
    plain = make(embedded, embedded_path, deterministic=True, overlap=True)
    expected = generate(plain.engine, chats, rules)
    built = make(embedded, embedded_path, deterministic=True, overlap=True, speculation=drafting(drafters))
    sizes = replays(built)
    assert generate(built.engine, chats, rules) == expected
    assert counted(built) > 50
    assert max(sizes) > len(chats)


@pytest.mark.parametrize("tokens", [2, 8])
def test_float32_replays_choose_what_eager_steps_choose(
    tokens: int, embedded_path: Path, chats: list[list[int]]
) -> None:
    """Alone and together: padded rows, and rows without tokens, leave no trace."""
    model = load(embedded_path, torch.float32)
    expected = generate(make(model, embedded_path).engine, chats, GREEDY)
    recorded = make(model, embedded_path, speculation=drafting("mtp", tokens))
    eager = make(model, embedded_path, speculation=drafting("mtp", tokens))
    eager.parts.executor.use_draft_graphs(None)
    sizes = replays(recorded)
    assert generate(recorded.engine, chats, GREEDY) == expected
    assert generate(eager.engine, chats, GREEDY) == expected
    assert len(sizes) > 10
    assert counted(recorded) > 50
    for chat, answer in list(zip(chats, expected, strict=True))[:3]:
        assert generate(recorded.engine, [chat], GREEDY) == [answer]


def test_drawn_drafts_of_recorded_steps_are_those_of_eager_ones(
    embedded_path: Path, chats: list[list[int]]
) -> None:
    """Rejection sampling: equal draws, equal distributions, equal answers, but for what rounding tips over."""
    model = load(embedded_path, torch.float32)
    recorded = make(model, embedded_path, speculation=drafting("mtp"))
    eager = make(model, embedded_path, speculation=drafting("mtp"))
    eager.parts.executor.use_draft_graphs(None)
    found, expected = (generate(built.engine, chats, DRAWN) for built in (recorded, eager))
    assert sum(a == b for a, b in zip(found, expected, strict=True)) >= len(chats) - 4
    assert recorded.engine.speculator is not None
    counters = recorded.engine.speculator.counters
    assert counters.accepted[0] > 0.4 * counters.rows


def test_ngrams_speed_up_a_model_without_a_drafter_and_change_nothing(
    folders: dict[str, Path], models: dict[str, Model]
) -> None:
    texts = [text * 3 for text in prompts(9, 4, 12, seed=5)]
    path, model = folders["qwen3_moe"], models["qwen3_moe"]
    expected = generate(make(model, path, deterministic=True).engine, texts, GREEDY)
    built = make(model, path, deterministic=True, speculation=drafting("auto"))
    assert generate(built.engine, texts, GREEDY) == expected
    assert counted(built) > 20
