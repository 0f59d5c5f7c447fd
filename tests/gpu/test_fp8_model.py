"""A whole model whose weights stay fp8 on the card, against the same numbers widened."""

from pathlib import Path

import pytest
import torch

from headrace.core.bench.accuracy import text_logits
from headrace.core.weights import load_model
from tests.core.ragged import random_tokens

CARD = torch.device("cuda")
pytestmark = pytest.mark.gpu


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / (expected - expected.mean(-1, keepdim=True)).norm())


# Few tokens meet fp8 weights as sums of two fp8 numbers: an error as bf16's own. Many meet them as one, of 4 bits.
@pytest.mark.parametrize(
    ("tokens", "chunk", "times"), [(40, 1, 1.5), (40, 8, 1.5), (40, 0, 1.5), (600, 0, 4.0)], ids=str
)
def test_kept_weights_cost_little_more_than_bf16(
    tokens: int, chunk: int, times: float, embedded_path: Path
) -> None:
    exact = load_model(embedded_path, dtype=torch.float32, device=CARD, keep_fp8=False)
    text = random_tokens(0, tokens, exact.spec.vocab_size)
    expected = text_logits(exact, text, 0)
    errors = [
        relative_error(text_logits(model, text, chunk), expected)
        for model in (
            load_model(embedded_path, dtype=torch.bfloat16, device=CARD, keep_fp8=keep)
            for keep in (False, True)
        )
    ]
    wide, kept = errors
    assert kept < times * wide, f"bf16 {wide:.3e}, fp8 {kept:.3e}"
