"""The whole step loop over a real model: however a request is batched, cut or moved, its tokens are the same."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import psutil
import pytest
import torch

from headrace.core.batch import Batch
from headrace.core.models.base import Model
from headrace.core.request import FinishReason, Request
from headrace.ipc.messages import Sampling
from tests.core.engines import generate, load, make_engine, run

GREEDY = Sampling(max_tokens=24, temperature=0.0)
SAMPLED = Sampling(max_tokens=24, temperature=0.8, top_p=0.95, seed=11)
RULES = [GREEDY, SAMPLED, replace(SAMPLED, repetition_penalty=1.3, frequency_penalty=0.4, min_p=0.02)]
RULE_IDS = ["greedy", "sampled", "penalised"]


@pytest.fixture(scope="module")
def model(small_path: Path) -> Model:
    return load(small_path)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Twelve prompts of 3 to 90 tokens; the last four share their first 40."""
    generator = torch.Generator().manual_seed(3)

    def draw(count: int) -> list[int]:
        ids: list[int] = torch.randint(4, 4000, (count,), generator=generator).tolist()
        return ids

    shared = draw(40)
    return [draw(count) for count in (3, 8, 9, 17, 31, 64, 77, 90)] + [
        shared + draw(n) for n in (1, 8, 20, 33)
    ]


def alone(model: Model, path: Path, prompts: Sequence[Sequence[int]], rules: Sampling) -> list[list[int]]:
    """Each request in an engine of its own, its prompt in one piece."""
    outputs = []
    for index, prompt in enumerate(prompts):
        engine = make_engine(model, path, max_num_batched_tokens=256, prefix_cache=False)
        outputs += generate(engine, [prompt], replace(rules, seed=rules.seed + index))
    return outputs


@pytest.mark.parametrize("rules", RULES, ids=RULE_IDS)
def test_batched_chunked_and_cached_equal_alone(
    model: Model, small_path: Path, prompts: list[list[int]], rules: Sampling
) -> None:
    """Twelve at once under a budget of 32 tokens a step; then all again, over a warm prefix cache."""
    expected = alone(model, small_path, prompts, rules)
    engine = make_engine(model, small_path, max_num_batched_tokens=32)
    assert generate(engine, prompts, rules) == expected
    assert engine.scheduler.counters.prefix_hits > 0, "siblings share their prefix"
    hits = engine.scheduler.counters.prefix_hits
    assert generate(engine, prompts, rules) == expected
    assert engine.scheduler.counters.prefix_hits > hits + 300, "the second round finds its prompts"


@pytest.mark.parametrize("rules", RULES, ids=RULE_IDS)
@pytest.mark.parametrize("overlap", [False, True], ids=["immediate", "overlapped"])
def test_preempted_equals_undisturbed(
    model: Model, small_path: Path, prompts: list[list[int]], rules: Sampling, overlap: bool
) -> None:
    """A pool that holds about three of the twelve requests at a time."""
    expected = alone(model, small_path, prompts, rules)
    engine = make_engine(model, small_path, num_blocks=40, overlap=overlap)
    assert generate(engine, prompts, rules) == expected
    assert engine.scheduler.counters.preemptions > 0


@pytest.mark.parametrize("rules", RULES, ids=RULE_IDS)
def test_overlapped_equals_immediate(
    model: Model, small_path: Path, prompts: list[list[int]], rules: Sampling
) -> None:
    expected = alone(model, small_path, prompts, rules)
    assert generate(make_engine(model, small_path, overlap=True), prompts, rules) == expected


@pytest.mark.parametrize("overlap", [False, True], ids=["immediate", "overlapped"])
def test_stop_ids_and_lengths_end_a_request(
    model: Model, small_path: Path, prompts: list[list[int]], overlap: bool
) -> None:
    """The stop id is part of the output, and nothing comes after it."""
    whole = alone(model, small_path, prompts[:1], GREEDY)[0]
    stop = whole[5]
    rules = replace(GREEDY, stop_token_ids=(stop,))
    request = Request("r", prompts[0], rules)
    outputs = run(make_engine(model, small_path, overlap=overlap), [request])
    assert request.finish_reason is FinishReason.STOP
    assert request.output_ids == whole[: whole.index(stop) + 1]
    assert [token for output in outputs for token in output.token_ids] == request.output_ids
    assert [output.start for output in outputs] == list(range(len(request.output_ids)))


def test_a_request_goes_on_from_output_made_elsewhere(
    model: Model, small_path: Path, prompts: list[list[int]]
) -> None:
    """What another engine had generated is taken over: the rest is what that engine would have made."""
    for rules in RULES:
        whole = alone(model, small_path, prompts[3:4], rules)[0]
        request = Request("r", prompts[3], rules, generated=whole[:10])
        outputs = run(make_engine(model, small_path), [request])
        assert request.output_ids == whole
        assert outputs[0].start == 10


def test_out_of_credit_parks_and_credit_returns(
    model: Model, small_path: Path, prompts: list[list[int]]
) -> None:
    expected = alone(model, small_path, prompts[:2], GREEDY)
    engine = make_engine(model, small_path)
    slow = Request("slow", prompts[0], GREEDY, credit=5)
    quick = Request("quick", prompts[1], GREEDY)
    for request in (slow, quick):
        engine.submit(request)
    while engine.has_work:
        engine.step()
    assert quick.output_ids == expected[1]
    assert slow.output_ids == expected[0][:5]
    assert engine.scheduler.num_parked == 1
    engine.scheduler.grant_credit("slow", 1000)
    run(engine)
    assert slow.output_ids == expected[0]


def test_cancel_frees_blocks_before_the_next_step(
    model: Model, small_path: Path, prompts: list[list[int]]
) -> None:
    engine = make_engine(model, small_path, prefix_cache=False)
    for name in ("a", "b"):
        engine.submit(Request(name, prompts[5], GREEDY))
    for _ in range(4):
        engine.step()
    used = engine.kv.num_used
    engine.cancel("a")
    assert engine.kv.num_used == used - used // 2
    run(engine)


def test_nan_logits_end_that_request_only(model: Model, small_path: Path, prompts: list[list[int]]) -> None:
    """The model is made to answer NaN for one prompt's tokens."""
    expected = alone(model, small_path, prompts[:1], GREEDY)
    engine = make_engine(cast("Model", Poisoned(model, prompts[1])), small_path)
    good, bad = Request("good", prompts[0], GREEDY), Request("bad", prompts[1], GREEDY)
    outputs = run(engine, [good, bad])
    assert good.output_ids == expected[0]
    assert bad.finish_reason is FinishReason.ERROR
    ends = [output for output in outputs if output.request is bad]
    assert [(output.token_ids, output.finish_reason) for output in ends] == [((), FinishReason.ERROR)]
    assert "NaN" in ends[0].message


def test_greedy_equals_a_plain_forward_loop(model: Model, small_path: Path, prompts: list[list[int]]) -> None:
    """The whole sequence is computed anew for each token, without any cache."""
    for prompt in prompts[:4]:
        engine = make_engine(model, small_path)
        tokens = list(prompt)
        for _ in range(8):
            engine_once = make_engine(model, small_path, prefix_cache=False, max_num_batched_tokens=256)
            tokens += generate(engine_once, [tokens], replace(GREEDY, max_tokens=1))[0]
        assert generate(engine, [prompt], replace(GREEDY, max_tokens=8)) == [tokens[len(prompt) :]]


def test_logprobs_belong_to_their_tokens(model: Model, small_path: Path, prompts: list[list[int]]) -> None:
    rules = replace(GREEDY, logprobs=3, max_tokens=6)
    requests = [Request("with", prompts[0], rules), Request("without", prompts[1], GREEDY)]
    for output in run(make_engine(model, small_path), requests):
        if output.request.request_id == "without":
            assert output.logprobs == ()
            continue
        (found,) = output.logprobs
        assert found.top_ids[0] == output.token_ids[0], "greedy takes the likeliest"
        assert found.top[0] == found.chosen
        assert list(found.top) == sorted(found.top, reverse=True)
        assert len(found.top_ids) == 3


def test_memory_is_flat_over_2000_requests(model: Model, small_path: Path) -> None:
    """Queues, tables, the prefix index and torch's allocator all have settled after the first 500."""
    engine = make_engine(model, small_path)
    process = psutil.Process()
    rules = Sampling(max_tokens=2, temperature=0.9, repetition_penalty=1.1, logprobs=1)
    sizes = []
    for round_ in range(4):
        prompts = [[(7 * i + round_) % 4000 + 4, i % 50 + 4, 9] for i in range(500)]
        generate(engine, prompts, replace(rules, seed=1000 * round_), check_each_step=False)
        gc.collect()
        sizes.append(process.memory_info().rss)
    # 2 KiB a request would be 3 MB over the last three rounds.
    assert sizes[-1] - sizes[0] < 3 << 20, sizes


class Poisoned:
    """A model whose hidden states are NaN while it reads `prompt`."""

    def __init__(self, model: Model, prompt: Sequence[int]) -> None:
        self._model = model
        self._marks = torch.tensor(prompt)

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def forward(self, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        hidden = self._model.forward(batch, kv)
        hidden[torch.isin(batch.token_ids, self._marks[-1:])] = float("nan")
        return hidden
