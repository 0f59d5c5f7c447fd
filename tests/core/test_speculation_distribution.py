"""Sampling with drafts has the model's own distribution: counts over many seeds at fixed prefixes.

The drafter is the embedded model's MTP module, its drafts drawn below the request's temperature. The same statistic
must notice a verification that is broken on purpose.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from headrace.core.models.base import Model
from headrace.core.weights import load_model
from headrace.kernels import verify as verification
from headrace.kernels.random_uniform import Purpose, random_uniform
from headrace.kernels.sample import kept_weights, sample
from tests.core.ragged import Row, make_batch, make_pool, make_tables

DRAWS = 20_000
# The likeliest tokens of model and drafter; the others' mass is left out so that a draw costs microseconds.
VOCAB = 120
STORY = "<|im_start|>user\nTell me a story about a fox.<|im_end|>\n<|im_start|>assistant\nOnce upon a time,"
PREFIXES = [STORY, STORY + " there was a", STORY + " there was a little fox named"]
# The drafter is surer than the model: at equal temperatures the two nearly agree there, and little is rejected.
DRAFT_HEAT = 0.4
BOUND = 5  # standard deviations of the statistic
RULES = [(0.6, 1.0), (1.0, 0.9), (1.5, 0.95)]  # temperature, top_p


@pytest.fixture(scope="module")
def states(embedded_path: Path) -> list[tuple[Tensor, Tensor]]:
    """Of each prefix: the logits of the next token, the model's and the drafter's, [VOCAB] each."""
    model = load_model(embedded_path, dtype=torch.float32, device=torch.device("cpu"))
    tokenizer = Tokenizer.from_file(str(embedded_path / "tokenizer.json"))
    return [_both(model, tokenizer.encode(text, add_special_tokens=False).ids) for text in PREFIXES]


def _both(model: Model, tokens: list[int]) -> tuple[Tensor, Tensor]:
    assert model.mtp is not None
    table = make_tables(0, 1, 8)[0]
    kv = make_pool(model, 9, mtp=True)
    hidden = model.forward(make_batch([Row(tokens, 0, table)]), kv)
    drafted = model.mtp.forward(make_batch([Row(tokens[1:], 0, table)]), hidden[:-1], kv)
    logits, guess = model.logits(hidden[-1:])[0], model.mtp.logits(drafted[-1:])[0]
    mixture = logits.softmax(-1) + guess.softmax(-1)
    ids = mixture.topk(VOCAB).indices.sort().values
    return logits[ids], guess[ids]


def first_tokens(logits: Tensor, guess: Tensor, temperature: float, top_p: float) -> Tensor:
    """[DRAWS] int64: what a verified row of one draft emits first, for as many seeds."""
    seeds, position = torch.arange(DRAWS), torch.full((DRAWS,), 40)
    uniforms = {purpose: random_uniform(seeds, position, purpose) for purpose in Purpose}
    off = torch.zeros(DRAWS, dtype=torch.int64)
    heat, no_top_p, no_min_p = torch.full((DRAWS,), temperature), torch.ones(DRAWS), torch.zeros(DRAWS)
    drafts = sample(
        guess.expand(DRAWS, -1), heat * DRAFT_HEAT, off, no_top_p, no_min_p, uniforms[Purpose.DRAFT]
    )
    # Each row is its draft's query token and the one behind it, whose token is not looked at.
    both = torch.stack((drafts, torch.full_like(drafts, -1)), 1).flatten()
    verified = verification.verify(
        logits.expand(2 * DRAWS, -1),
        torch.arange(0, 2 * DRAWS + 1, 2, dtype=torch.int32),
        both,
        torch.softmax(guess / (temperature * DRAFT_HEAT), -1)[None],
        torch.where(both < 0, -1, 0),
        heat.repeat(2),
        off.repeat(2),
        torch.full((2 * DRAWS,), top_p),
        no_min_p.repeat(2),
        uniforms[Purpose.ACCEPT].repeat_interleave(2),
        uniforms[Purpose.SAMPLE].repeat_interleave(2),
    )
    return verified.tokens[::2]


def excess(tokens: Tensor, logits: Tensor, temperature: float, top_p: float) -> float:
    """Chi-square of the counts against what `sample` draws from, in standard deviations above its mean."""
    rules = [torch.tensor([value]) for value in (temperature, 0, top_p, 0.0)]
    weights = kept_weights(logits[None], *rules)[0].double()
    expected = weights / weights.sum() * DRAWS
    observed = torch.bincount(tokens, minlength=VOCAB).double()
    assert not observed[expected == 0].any(), "a token that was cut got drawn"
    common = expected >= 10
    observed = torch.cat([observed[common], observed[~common].sum(0, keepdim=True)])
    expected = torch.cat([expected[common], expected[~common].sum(0, keepdim=True)]).clamp(min=1e-9)
    freedom = max(len(expected) - 1, 1)
    chi_square = ((observed - expected) ** 2 / expected).sum()
    return float((chi_square - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize(("temperature", "top_p"), RULES)
def test_sampling_with_drafts_follows_the_models_distribution(
    states: list[tuple[Tensor, Tensor]], temperature: float, top_p: float
) -> None:
    for logits, guess in states:
        tokens = first_tokens(logits, guess, temperature, top_p)
        assert len(tokens.unique()) >= 3, "the prefix leaves nothing to choose"
        assert excess(tokens, logits, temperature, top_p) < BOUND


def _plain_residual(weights: Tensor, drafted: Tensor) -> Tensor:
    return weights


def _half_residual(weights: Tensor, drafted: Tensor) -> Tensor:
    """The drafter's share taken at half its size."""
    return (weights - drafted // 2).clamp(min=0)


@pytest.mark.parametrize("broken", [_plain_residual, _half_residual])
@pytest.mark.parametrize(("temperature", "top_p"), RULES)
def test_a_broken_residual_is_noticed(
    broken: Callable[[Tensor, Tensor], Tensor],
    states: list[tuple[Tensor, Tensor]],
    temperature: float,
    top_p: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mutation of the test above: drawing from the model itself after a rejection favours the accepted."""
    monkeypatch.setattr(verification, "residual", broken)
    logits, guess = states[0]
    assert excess(first_tokens(logits, guess, temperature, top_p), logits, temperature, top_p) > BOUND
