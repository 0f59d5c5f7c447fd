"""A run learns; its schedules and rows are as described."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.tiny import TINY
from training.data import Mixture, Stream, load_streams
from training.model import MTP_DEPTH, Model
from training.optim import make_optimizers, orthogonalise
from training.train import Moment, train_step


def make_mixture(length: int) -> Mixture:
    """One source whose text repeats."""
    documents = [np.arange(3 + i, 40 + i, dtype=np.uint16) % TINY.vocab for i in range(50)]
    return Mixture(
        {"x": Stream.join(documents)}, {"x": 1.0}, length=length, seed=0, device=torch.device("cpu")
    )


def test_a_tiny_run_lowers_the_losses() -> None:
    torch.manual_seed(0)
    model = Model(TINY).train()
    optimizers = make_optimizers(model)
    mixture = make_mixture(33 + MTP_DEPTH)
    history = []
    for step in range(40):
        losses, load = train_step(model, mixture.rows(8), optimizers, Moment(60 + step, step / 40))
        history.append(torch.cat([losses.main[None], losses.mtp]).detach())
        assert 1 <= load <= TINY.experts / TINY.top_k
    first, last = torch.stack(history[:4]).mean(0), torch.stack(history[-4:]).mean(0)
    assert (last < 0.85 * first).all(), (first, last)


def test_schedules_warm_up_hold_and_fall() -> None:
    assert Moment(0, 0.0).rate == pytest.approx(0.01)
    assert Moment(500, 0.5).rate == 1.0
    assert Moment(500, 0.775).rate == pytest.approx(0.5)
    assert Moment(500, 1.0).rate == pytest.approx(0.01)
    assert Moment(500, 0.95).balance_rate == 0.0


def test_orthogonalised_matrices_have_like_singular_values() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(2, 24, 40)).float())
    assert ((values > 0.4) & (values < 1.4)).all()


def test_half_of_the_rows_begin_where_a_document_begins() -> None:
    documents = [np.array([7, *[1] * 30, 0], dtype=np.uint16) for _ in range(40)]
    streams = {"x": Stream.join(documents), "short": Stream.join([np.zeros(3, np.uint16)])}
    mixture = Mixture(streams, {"x": 1.0, "short": 1.0}, length=16, seed=0, device=torch.device("cpu"))
    rows = mixture.rows(1000)
    assert rows.shape == (1000, 16)
    assert 0.45 < (rows[:, 0] == 7).float().mean() < 0.6


def test_rows_follow_the_weights() -> None:
    streams = {str(i): Stream.join([np.full(200, i, np.uint16)]) for i in range(3)}
    mixture = Mixture(streams, {"0": 1, "1": 3}, length=10, seed=0, device=torch.device("cpu"))
    counts = mixture.rows(2000)[:, 0].bincount(minlength=3).tolist()
    assert counts[2] == 0
    assert 0.2 < counts[0] / 2000 < 0.3


def test_streams_come_back_from_disk(tmp_path: Path) -> None:
    stream = Stream.join([np.array([4, 5, 0], np.uint16), np.array([6, 0], np.uint16)])
    stream.save(tmp_path / "x.npz")
    (loaded,) = load_streams(tmp_path).values()
    assert loaded.tokens.tolist() == [4, 5, 0, 6, 0]
    assert loaded.starts.tolist() == [0, 3]
    assert loaded.windows(2, 9).tolist() == [[4, 5], [0, 6]]
    with pytest.raises(FileNotFoundError, match=r"training\.prepare"):
        load_streams(tmp_path / "absent")
