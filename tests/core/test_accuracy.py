"""The accuracy figures: nothing against itself, something against a rounded model, and a text's own likelihood."""

import json
from pathlib import Path

import pytest
import torch

from headrace.config import ConfigError
from headrace.core.bench.accuracy import measure, text_logits
from headrace.core.bench.workload import read_tokens
from headrace.core.weights import load_model
from tests.core.ragged import error_of_scale, random_tokens, whole

CPU = torch.device("cpu")


def test_a_format_costs_nothing_against_itself_and_rounding_costs_something(small_path: Path) -> None:
    records = measure(small_path, ("float32", "bfloat16"), device=CPU, prompts=(2, 20))
    exact, rounded = records
    assert (exact.relative_rms, exact.top1_agreement, exact.mean_kl) == (0, 1, 0)
    assert 1e-4 < rounded.relative_rms < 0.1
    assert 0 < rounded.mean_kl < 0.1
    assert exact.num_tokens == 40 and rounded.reference == "float32"


def test_likelihood_is_of_the_text_that_follows(small_path: Path) -> None:
    model = load_model(small_path, dtype=torch.float32, device=CPU)
    text = random_tokens(0, 15, model.spec.vocab_size)
    likely = whole(model, text).log_softmax(-1)
    expected = -sum(float(likely[i, text[i + 1]]) for i in range(14)) / 14
    (record,) = measure(small_path, ("float32",), device=CPU, texts=[text])
    assert record.nats_per_token == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_of_a_text_give_the_logits_of_the_whole(chunk: int, small_path: Path) -> None:
    model = load_model(small_path, dtype=torch.float32, device=CPU)
    text = random_tokens(1, 37, model.spec.vocab_size)
    assert error_of_scale(text_logits(model, text, chunk), text_logits(model, text, 0)) < 1e-5


def test_tokens_are_read_from_json_or_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps([[1, 2, 3], [4]]))
    assert read_tokens(path) == [[1, 2, 3]]
    path.write_text("{}x")
    with pytest.raises(ConfigError, match="no JSON list of lists of token ids"):
        read_tokens(path)
