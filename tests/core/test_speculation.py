"""Speculation over a real model: whoever drafts, and however much, the tokens are the plain engine's."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from headrace.config import SpeculationConfig
from headrace.core.batch import Batch
from headrace.core.engine import Engine
from headrace.core.models.base import Model
from headrace.core.request import FinishReason, Request
from headrace.core.speculator import SpeculationCounters
from headrace.ipc.messages import Sampling
from tests.core.engines import generate, load, make_engine, run

GREEDY = Sampling(max_tokens=24, temperature=0.0)
SAMPLED = Sampling(max_tokens=24, temperature=0.8, top_p=0.95, seed=11)
SEEDED = replace(SAMPLED, seeded=True)
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


@pytest.fixture(scope="module")
def answers(model: Model, small_path: Path, prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    """The plain engine's, by rule."""
    return {
        name: generate(make_engine(model, small_path), prompts, rules, check_each_step=False)
        for name, rules in RULES.items()
    }


def drafting(drafters: Any = "mtp", tokens: int = 3) -> SpeculationConfig:
    return SpeculationConfig(drafters=drafters, draft_tokens=tokens)


def counters(engine: Engine) -> SpeculationCounters:
    assert engine.speculator is not None
    return engine.speculator.counters


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("drafters", "tokens"), [("mtp", 1), ("mtp", 3), ("mtp", 8), ("ngram", 3), ("auto", 4)]
)
def test_any_drafter_gives_the_plain_tokens(
    model: Model,
    small_path: Path,
    prompts: list[list[int]],
    answers: dict[str, list[list[int]]],
    rule: str,
    drafters: str,
    tokens: int,
) -> None:
    """Ten at once, their prompts in chunks between verifications."""
    speculation = drafting(drafters, tokens)
    engine = make_engine(model, small_path, max_num_batched_tokens=48, speculation=speculation)
    assert generate(engine, prompts, RULES[rule]) == answers[rule]
    assert counters(engine).drafted > (0 if drafters == "ngram" else 20)


@pytest.mark.parametrize("tokens", [2, 4, 5, 6, 7])
def test_any_depth_gives_the_plain_tokens(
    model: Model,
    small_path: Path,
    prompts: list[list[int]],
    answers: dict[str, list[list[int]]],
    tokens: int,
) -> None:
    engine = make_engine(model, small_path, speculation=drafting("mtp", tokens))
    assert generate(engine, prompts, GREEDY, check_each_step=False) == answers["greedy"]


def test_one_request_alone_gives_the_plain_tokens(
    model: Model, small_path: Path, prompts: list[list[int]], answers: dict[str, list[list[int]]]
) -> None:
    engine = make_engine(model, small_path, speculation=drafting("auto"))
    for prompt, expected in zip(prompts, answers["greedy"], strict=True):
        assert generate(engine, [prompt], GREEDY) == [expected]


def test_ngrams_change_no_drawn_token_either(
    model: Model, small_path: Path, prompts: list[list[int]]
) -> None:
    """They are certain, so they are verified by equality, whoever gave the seed. Three tokens come up, in any order."""
    rules = replace(SAMPLED, logit_bias=((7, 30.0), (8, 30.0), (9, 30.0)), top_p=1.0)
    expected = generate(make_engine(model, small_path), prompts, rules)
    engine = make_engine(model, small_path, speculation=drafting("ngram"))
    assert generate(engine, prompts, rules) == expected
    assert counters(engine).drafted > 100
    assert counters(engine).accepted[0] > 20


def test_a_deterministic_engine_draws_no_draft(
    model: Model, small_path: Path, prompts: list[list[int]]
) -> None:
    expected = generate(make_engine(model, small_path, deterministic=True), prompts[:5], SAMPLED)
    engine = make_engine(model, small_path, deterministic=True, speculation=drafting("mtp"))
    assert generate(engine, prompts[:5], SAMPLED) == expected
    assert counters(engine).drafted > 20


@pytest.mark.parametrize("rule", ["greedy", "seeded, penalised"])
@pytest.mark.parametrize("overlap", [False, True], ids=["immediate", "overlapped"])
def test_preempted_requests_give_the_plain_tokens(
    model: Model,
    small_path: Path,
    prompts: list[list[int]],
    answers: dict[str, list[list[int]]],
    rule: str,
    overlap: bool,
) -> None:
    """A pool that holds about three of the ten requests at a time."""
    engine = make_engine(model, small_path, num_blocks=24, overlap=overlap, speculation=drafting("auto"))
    assert generate(engine, prompts, RULES[rule]) == answers[rule]
    assert engine.scheduler.counters.preemptions > 0
    assert counters(engine).drafted > 0


def test_a_warm_prefix_cache_gives_the_plain_tokens(
    model: Model, small_path: Path, prompts: list[list[int]], answers: dict[str, list[list[int]]]
) -> None:
    """The drafter's KV of cached blocks is used too, and blocks of rejected drafts are never found."""
    engine = make_engine(model, small_path, speculation=drafting("mtp", 8))
    for _ in range(2):
        assert generate(engine, prompts, GREEDY) == answers["greedy"]
    assert engine.scheduler.counters.prefix_hits > 200
    whole = [prompt + answer for prompt, answer in zip(prompts, answers["greedy"], strict=True)]
    longer = replace(GREEDY, max_tokens=10)
    expected = generate(make_engine(model, small_path), whole, longer)
    assert generate(engine, whole, longer) == expected


def test_parked_requests_go_on_where_they_were(
    model: Model, small_path: Path, prompts: list[list[int]], answers: dict[str, list[list[int]]]
) -> None:
    """No draft runs ahead of the reader's credit."""
    engine = make_engine(model, small_path, speculation=drafting("auto"))
    requests = [Request(f"r{i}", prompt, GREEDY, credit=1 + i % 4) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.submit(request)
    limit = 0
    while any(not request.finished for request in requests):
        while engine.has_work:
            engine.step()
            engine.scheduler.check_integrity()
            assert all(request.num_output <= request.credit for request in requests)
        limit += 3
        for i, request in enumerate(requests):
            engine.scheduler.grant_credit(request.request_id, limit + i % 4)
    assert [request.output_ids for request in requests] == answers["greedy"]


def test_a_stop_id_among_accepted_drafts_ends_the_answer(
    model: Model, small_path: Path, prompts: list[list[int]], answers: dict[str, list[list[int]]]
) -> None:
    engine = make_engine(model, small_path, speculation=drafting("auto", 8))
    for index, (prompt, whole) in enumerate(zip(prompts, answers["greedy"], strict=True)):
        stop = whole[4 + index]
        request = Request("r", prompt, replace(GREEDY, stop_token_ids=(stop,)))
        outputs = run(engine, [request])
        assert request.output_ids == whole[: whole.index(stop) + 1]
        assert request.finish_reason is FinishReason.STOP
        assert [token for output in outputs for token in output.token_ids] == request.output_ids


def test_every_accepted_token_has_its_logprobs(
    model: Model, small_path: Path, prompts: list[list[int]]
) -> None:
    rules = replace(GREEDY, logprobs=3)
    requests = [Request(f"r{i}", prompt, rules) for i, prompt in enumerate(prompts)]
    twins = [Request(f"r{i}", prompt, rules) for i, prompt in enumerate(prompts)]
    engine = make_engine(model, small_path, speculation=drafting("auto"))
    found, expected = _logprobs(engine, requests), _logprobs(make_engine(model, small_path), twins)
    assert counters(engine).accepted[0] > 10
    assert found.keys() == expected.keys()
    for key, (chosen, top) in expected.items():
        assert found[key][0] == pytest.approx(chosen, abs=1e-4)
        assert found[key][1] == pytest.approx(top, abs=1e-4)


def _logprobs(
    engine: Engine, requests: Sequence[Request]
) -> dict[tuple[str, int], tuple[float, list[float]]]:
    """By request and output index."""
    found = {}
    for output in run(engine, requests):
        assert len(output.logprobs) == len(output.token_ids)
        for at, entry in enumerate(output.logprobs):
            found[output.request.request_id, output.start + at] = (entry.chosen, list(entry.top))
    return found


def test_requests_choose_their_drafters(
    model: Model, small_path: Path, prompts: list[list[int]], answers: dict[str, list[list[int]]]
) -> None:
    engine = make_engine(model, small_path, speculation=drafting("auto"))
    wishes = ("off", "ngram", "mtp", "auto")
    for wish in wishes:
        rules = replace(GREEDY, speculation=wish)
        requests = [Request(f"r{i}", prompt, rules) for i, prompt in enumerate(prompts)]
        run(engine, requests)
        assert [request.output_ids for request in requests] == answers["greedy"]
        drafted = sum(request.num_drafted for request in requests)
        assert (drafted == 0) is (wish == "off")
        assert all(0 <= request.num_accepted <= request.num_drafted for request in requests)


def test_drafts_are_counted_as_they_fall(model: Model, small_path: Path, prompts: list[list[int]]) -> None:
    engine = make_engine(model, small_path, speculation=drafting("auto"))
    requests = [Request(f"r{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]
    run(engine, requests)
    total = counters(engine)
    assert total.drafted == sum(request.num_drafted for request in requests)
    assert sum(total.accepted) == sum(request.num_accepted for request in requests)
    assert total.accepted == sorted(total.accepted, reverse=True), (
        "a place is reached through those before it"
    )
    assert total.rows >= total.accepted[0] > 0


def test_nan_logits_end_that_request_only(
    model: Model, small_path: Path, prompts: list[list[int]], answers: dict[str, list[list[int]]]
) -> None:
    """Wherever in a row of drafts they come up; the drafter may see them too."""
    poison = 4_001
    engine = make_engine(cast("Model", _Poisoned(model, poison)), small_path, speculation=drafting("mtp", 4))
    requests = [Request(f"r{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]
    requests.append(Request("bad", [*prompts[1], poison], GREEDY))
    run(engine, requests)
    assert requests[-1].finish_reason is FinishReason.ERROR
    assert [request.output_ids for request in requests[:-1]] == answers["greedy"]


class _Poisoned:
    """The model, but hidden states behind one token are NaN."""

    def __init__(self, model: Model, token: int) -> None:
        self._model = model
        self._token = token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        hidden = self._model.forward(batch, kv)
        return hidden.masked_fill((batch.token_ids == self._token).unsqueeze(-1), float("nan"))
