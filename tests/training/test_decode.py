"""Cached and speculative generation equal the plain forward pass."""

from pathlib import Path

import pytest
import torch

from tests.training.tiny import TINY, make_model
from training.attention import LatentCache
from training.decode import Decoder
from training.export import load_export


def test_cached_steps_equal_one_pass() -> None:
    model = make_model()
    ids = torch.randint(0, TINY.vocab, (1, 24))
    caches = [LatentCache() for _ in model.blocks]
    pieces = [model.trunk(ids[:, a:b], a, caches) for a, b in ((0, 10), (10, 11), (11, 24))]
    torch.testing.assert_close(torch.cat(pieces, 1), model.trunk(ids), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_speculative_decoding_equals_plain(depth: int) -> None:
    decoder = Decoder(make_model(), stop_ids=(5,))
    torch.manual_seed(1)
    for _ in range(6):
        prompt = torch.randint(0, TINY.vocab, (9,)).tolist()
        plain, speculative = decoder.generate(prompt, 40), decoder.generate(prompt, 40, depth)
        assert speculative.ids == plain.ids
        assert speculative.steps <= plain.steps == len(plain.ids)


def test_every_draft_of_a_perfect_drafter_is_accepted(small_path: Path) -> None:
    """On text of its own kind the trained small model accepts most drafts, so the counts are not idle."""
    model = load_export(small_path)
    prompt = [1, 80, 265, 10]
    run = Decoder(model, stop_ids=(0,)).generate(prompt, 48, 2)
    assert run.drafted[0] == run.steps - 1
    assert run.accepted[0] >= run.drafted[1] >= run.accepted[1] > 0
