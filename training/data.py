"""Token streams: what prepare.py writes, and the windows of them that training and evaluation read.

Knows no text and no model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Tokens = npt.NDArray[np.uint16]
Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stream:
    """Documents of one source, one after the other, each closed by the end-of-text token."""

    tokens: Tokens  # [N]
    starts: Offsets  # where each document begins, rising

    @classmethod
    def join(cls, documents: Sequence[Tokens]) -> "Stream":
        """Make a stream of at least one document."""
        lengths = np.array([len(document) for document in documents], dtype=np.int64)
        return cls(np.concatenate(documents), np.cumsum(lengths) - lengths)

    def save(self, path: Path) -> None:
        """Write to one .npz file."""
        np.savez(path, tokens=self.tokens, starts=self.starts)

    @classmethod
    def load(cls, path: Path) -> "Stream":
        """Read what `save` wrote."""
        with np.load(path) as arrays:
            return cls(arrays["tokens"], arrays["starts"])

    def windows(self, length: int, limit: int) -> Tensor:
        """The first `limit` whole windows of `length` tokens without overlap: int64 [n, length], n may be 0."""
        count = min(len(self.tokens) // length, limit)
        return torch.from_numpy(self.tokens[: count * length].astype(np.int64)).view(count, length)


def load_streams(folder: Path) -> dict[str, Stream]:
    """The streams in a folder by source. Raises FileNotFoundError where there is none."""
    paths = sorted(folder.glob("*.npz"))
    if not paths:
        raise FileNotFoundError(f"no *.npz in {folder}; run training.prepare first")
    return {path.stem: Stream.load(path) for path in paths}


class Mixture:
    """Draws training rows from several streams, by weight; half of the rows begin where a document begins.

    A model that is served begins at position 0 of a chat; one trained on random windows alone has hardly seen that.
    """

    AT_START = 0.5

    def __init__(
        self,
        streams: Mapping[str, Stream],
        weights: Mapping[str, float],
        *,
        length: int,
        seed: int,
        device: torch.device,
    ) -> None:
        """Keep the streams on `device`; those shorter than a window are left out.

        weights: share of rows by source; they need not sum to one. length: tokens in a row.
        """
        kept = {
            name: stream
            for name, stream in streams.items()
            if len(stream.tokens) > length and name in weights
        }
        if not kept:
            raise ValueError(f"no stream is longer than {length} tokens")
        self._rng = np.random.default_rng(seed)
        self._shares = np.array([weights[name] for name in kept], dtype=np.float64)
        self._shares /= self._shares.sum()
        sizes = np.array([len(stream.tokens) for stream in kept.values()])
        self._bases = np.cumsum(sizes) - sizes
        self._last = sizes - length  # last position where a window may begin
        self._starts = [
            stream.starts[stream.starts <= last]
            for stream, last in zip(kept.values(), self._last, strict=True)
        ]
        # token ids are below 2**15
        tokens = np.concatenate([stream.tokens for stream in kept.values()]).astype(np.int16)
        self._tokens = torch.from_numpy(tokens).to(device)
        self._columns = torch.arange(length, device=device)

    def rows(self, count: int) -> Tensor:
        """`count` rows of tokens, int64 [count, length]."""
        begin = np.concatenate(
            [self._begin(source, n) for source, n in enumerate(self._rng.multinomial(count, self._shares))]
        )
        index = torch.from_numpy(begin).to(self._tokens.device)[:, None] + self._columns
        return self._tokens[index].long()

    def _begin(self, source: int, count: int) -> Offsets:
        at_start = int(self._rng.binomial(count, self.AT_START))
        aligned = self._rng.choice(self._starts[source], at_start)
        anywhere = self._rng.integers(0, self._last[source] + 1, count - at_start)
        begin: Offsets = np.concatenate([aligned, anywhere]) + self._bases[source]
        return begin
