"""`--deterministic` on a CPU: a token's numbers depend on that token and its context, on nothing else."""

from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from headrace.core.models.base import Model
from headrace.core.models.decoder import Decoder
from headrace.core.models.invariant import InvariantDecoder
from headrace.core.request import Request
from headrace.ipc.messages import Sampling
from tests.core.engines import generate, load, make_engine, run
from tests.core.ragged import BLOCK_SIZE, Row, make_batch, make_pool, make_tables, random_tokens

GREEDY = Sampling(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def model(small_path: Path) -> Model:
    return load(small_path)


@pytest.fixture(scope="module")
def invariant(model: Model) -> Model:
    return InvariantDecoder(cast("Decoder", model))


def in_pieces(model: Model, tokens: list[int], table: list[int], ends: list[int], kv: Tensor) -> Tensor:
    """[len(tokens), V] logits of a sequence computed in pieces that end at `ends`."""
    logits, start = [], 0
    for end in ends:
        logits.append(model.logits(model.forward(make_batch([Row(tokens[start:end], start, table)]), kv)))
        start = end
    return torch.cat(logits)


def test_chunks_and_decodes_have_the_bits_of_one_prompt(invariant: Model) -> None:
    tokens = random_tokens(1, 37, invariant.spec.vocab_size)
    (table,) = make_tables(1, 1, -(-37 // BLOCK_SIZE))
    whole, cut = make_pool(invariant, 12), make_pool(invariant, 12)
    expected = in_pieces(invariant, tokens, table, [37], whole)
    found = in_pieces(invariant, tokens, table, [1, 20, 35, 36, 37], cut)
    assert torch.equal(found, expected)
    assert torch.equal(cut.nan_to_num(), whole.nan_to_num()), "the KV pools differ"


def test_the_plain_decoder_agrees_but_for_rounding(model: Model, invariant: Model) -> None:
    tokens = random_tokens(2, 21, model.spec.vocab_size)
    table = list(range(1, 7))
    expected = in_pieces(model, tokens, table, [21], make_pool(model, 7))
    found = in_pieces(invariant, tokens, table, [21], make_pool(model, 7))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_greedy_answer_is_the_same_alone_and_among_others(model: Model, small_path: Path) -> None:
    """Tokens and log-probabilities, digit by digit, under a budget that cuts prompts."""
    prompts = [random_tokens(seed, 5 + 9 * seed, 4000) for seed in range(4)]
    rules = Sampling(max_tokens=12, temperature=0.0, logprobs=5)

    def logprobs(prompts: list[list[int]]) -> dict[str, list[object]]:
        engine = make_engine(model, small_path, max_num_batched_tokens=32, deterministic=True)
        requests = [Request(f"r{i}", prompt, rules) for i, prompt in enumerate(prompts)]
        found: dict[str, list[object]] = {request.request_id: [] for request in requests}
        for output in run(engine, requests):
            found[output.request.request_id].append((output.token_ids, output.logprobs))
        return found

    together = logprobs(prompts)
    for index, prompt in enumerate(prompts):
        assert together[f"r{index}"] == logprobs([prompt])["r0"]


def test_preempted_answers_are_the_same(model: Model, small_path: Path) -> None:
    """What a preempted request computes again by prefill has the bits of its decodes."""
    prompts = [random_tokens(10 + seed, 30, 4000) for seed in range(6)]
    easy = make_engine(model, small_path, deterministic=True)
    tight = make_engine(model, small_path, num_blocks=16, deterministic=True)
    assert generate(tight, prompts, GREEDY) == generate(easy, prompts, GREEDY)
    assert tight.scheduler.counters.preemptions > 0
