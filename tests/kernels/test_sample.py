"""The sampling kernel against plain definitions, row by row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.likeliest import likeliest
from headrace.kernels.random_uniform import FRACTION_BITS
from headrace.kernels.sample import INVALID_TOKEN, sample


def choose(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> torch.Tensor:
    rows = logits.shape[0]
    return sample(
        logits,
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        uniform,
    )


def uniforms(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 1 << FRACTION_BITS, (count,), generator=torch.Generator().manual_seed(seed))


def plain_distribution(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """[V] float64 of one row, by the book: sort, cut, renormalise."""
    probs = torch.softmax(logits.double() / temperature, dim=-1)
    probs = torch.where(probs >= min_p * probs.max(), probs, 0.0)
    if top_k:
        probs = torch.where(probs >= probs.sort(descending=True).values[top_k - 1], probs, 0.0)
    probs /= probs.sum()
    ordered, ids = probs.sort(descending=True)
    before = ordered.cumsum(0) - ordered
    dropped = ids[before >= top_p]
    probs[dropped] = 0.0
    return probs / probs.sum()


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 5.0]])
    assert choose(logits, uniforms(2), temperature=0.0).tolist() == [1, 0]


@pytest.mark.parametrize("vocab", [1, 7, 63, 1000])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.7, 0, 0.9, 0.0), (1.3, 5, 1.0, 0.0), (1.0, 20, 0.8, 0.05), (2.0, 0, 0.01, 0.0)],
    ids=["plain", "top_p", "top_k", "all", "tiny_top_p"],
)
def test_draws_follow_the_plain_distribution(
    vocab: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Chi-square over 20,000 draws, rare tokens pooled; the bound is five standard deviations of the statistic."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(vocab, generator=generator) * 2
    expected = plain_distribution(logits, temperature, min(top_k, vocab), top_p, min_p)
    draws = 20_000
    chosen = choose(logits.expand(draws, -1), uniforms(draws), temperature, min(top_k, vocab), top_p, min_p)
    observed, expected = torch.bincount(chosen, minlength=vocab).double(), expected * draws
    assert not observed[expected == 0].any(), "a token that was cut got drawn"
    common = expected >= 10
    observed = torch.cat([observed[common], observed[~common].sum(0, keepdim=True)])
    expected = torch.cat([expected[common], expected[~common].sum(0, keepdim=True)]).clamp(min=1e-9)
    freedom = max(len(expected) - 1, 1)
    assert ((observed - expected) ** 2 / expected).sum() < freedom + 5 * (2 * freedom) ** 0.5


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_batch_mates_never_change_a_choice(data: st.DataObject) -> None:
    rows = data.draw(st.integers(2, 9))
    vocab = data.draw(st.integers(2, 300))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    logits = torch.randn(rows, vocab, generator=generator) * 4
    temperature = torch.tensor(
        data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=rows, max_size=rows))
    )
    top_k = torch.tensor(data.draw(st.lists(st.sampled_from([0, 1, 40]), min_size=rows, max_size=rows)))
    top_p = torch.tensor(data.draw(st.lists(st.sampled_from([0.3, 0.95, 1.0]), min_size=rows, max_size=rows)))
    min_p = torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 0.1]), min_size=rows, max_size=rows)))
    uniform = uniforms(rows)
    together = sample(logits, temperature, top_k, top_p, min_p, uniform)
    for row in range(rows):
        one = slice(row, row + 1)
        alone = sample(logits[one], temperature[one], top_k[one], top_p[one], min_p[one], uniform[one])
        assert alone[0] == together[row]


def test_barred_tokens_are_never_chosen() -> None:
    logits = torch.full((500, 40), float("-inf"))
    logits[:, [3, 17]] = torch.tensor([0.0, 1.0])
    assert set(choose(logits, uniforms(500)).tolist()) == {3, 17}


def test_extreme_uniforms_stay_inside_the_vocabulary() -> None:
    logits = torch.zeros(2, 50)
    uniform = torch.tensor([0, (1 << FRACTION_BITS) - 1])
    assert choose(logits, uniform).tolist() == [0, 49]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nan_is_reported_and_harms_no_other(temperature: float) -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(1))
    clean = choose(logits, uniforms(3), temperature, top_p=0.9)
    logits[1, 50] = float("nan")
    chosen = choose(logits, uniforms(3), temperature, top_p=0.9)
    assert chosen[1] == INVALID_TOKEN
    assert chosen[[0, 2]].tolist() == clean[[0, 2]].tolist()


def test_the_greedy_shortcut_chooses_as_temperature_zero_does() -> None:
    """Ties and NaN included."""
    logits = torch.randint(0, 5, (200, 12), generator=torch.Generator().manual_seed(2)).float()
    logits[7, 3] = float("nan")
    assert likeliest(logits).tolist() == choose(logits, uniforms(200), temperature=0.0).tolist()
