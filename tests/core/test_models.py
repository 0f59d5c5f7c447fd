"""Our logits against transformers' in float32, on the embedded model and on random relatives of each family."""

from pathlib import Path

import pytest
import torch

from headrace.core.models.base import Model
from headrace.core.weights import load_model
from tests.core.hf_models import TINY, embedded_reference, reference_logits, save_tiny
from tests.core.ragged import Row, error_of_scale, make_batch, make_pool, random_tokens, whole

CPU = torch.device("cpu")
LIMIT = 1e-4  # of the largest logit; float32 sums in another order differ by about 1e-6


@pytest.fixture(scope="module")
def embedded(embedded_path: Path) -> Model:
    return load_model(embedded_path, dtype=torch.float32, device=CPU)


def test_embedded_model_equals_transformers(embedded: Model, embedded_path: Path) -> None:
    tokens = random_tokens(0, 150, embedded.spec.vocab_size)
    expected = reference_logits(embedded_reference(embedded_path), tokens)
    assert error_of_scale(whole(embedded, tokens), expected) < LIMIT


def test_small_fixture_equals_transformers(small_path: Path) -> None:
    model = load_model(small_path, dtype=torch.float32, device=CPU)
    tokens = random_tokens(1, 150, model.spec.vocab_size)
    expected = reference_logits(embedded_reference(small_path), tokens)
    assert error_of_scale(whole(model, tokens), expected) < LIMIT


@pytest.mark.parametrize("name", TINY)
def test_tiny_model_equals_transformers(name: str, tmp_path: Path) -> None:
    reference = save_tiny(name, tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, device=CPU)
    tokens = random_tokens(2, 100, model.spec.vocab_size)
    expected = reference_logits(reference, tokens)
    assert error_of_scale(whole(model, tokens), expected) < LIMIT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_near_float32(dtype: torch.dtype, small_path: Path) -> None:
    """A sanity bound, not an accuracy claim: 8 bits of mantissa through 5 layers."""
    exact = load_model(small_path, dtype=torch.float32, device=CPU)
    half = load_model(small_path, dtype=dtype, device=CPU)
    tokens = random_tokens(3, 40, exact.spec.vocab_size)
    found = whole(half, tokens)
    assert found.dtype is torch.float32
    agree = (found.argmax(-1) == whole(exact, tokens).argmax(-1)).float().mean()
    assert agree > 0.9


def test_hidden_states_come_before_the_final_norm(embedded: Model) -> None:
    """MTP needs them so; logits norms what it is given."""
    batch = make_batch([Row([5, 6, 7], 0, [1])])
    hidden = embedded.forward(batch, make_pool(embedded, 2))
    assert torch.allclose(embedded.logits(hidden * 2), embedded.logits(hidden), rtol=1e-3, atol=1e-3)
    assert hidden.pow(2).mean(-1).sub(1).abs().min() > 0.1


@pytest.mark.parametrize("name", TINY)
def test_rows_alone_are_the_same_rows(name: str, tmp_path: Path) -> None:
    """Also the keys that the spared tokens left behind."""
    save_tiny(name, tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, device=CPU)
    batch = make_batch([Row(random_tokens(4, 30, model.spec.vocab_size), 0, list(range(1, 9)))])
    pools = make_pool(model, 9), make_pool(model, 9)
    rows = torch.tensor([29, 3])
    expected = model.forward(batch, pools[0])[rows]
    assert error_of_scale(model.forward_rows(batch, pools[1], rows), expected) < LIMIT
    assert torch.equal(*(pool.nan_to_num(7.0) for pool in pools))
