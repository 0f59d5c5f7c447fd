"""The tokens of the synthetic engine: a pure function of (seed, output index), over a table of ids.

So a resumed or repeated request gets the same tokens, and a test can say what they must be. Knows no wire.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_WORD = re.compile(r"[Ġ▁]?[A-Za-z]{1,12}")


def printable_ids(model_path: Path) -> tuple[int, ...]:
    """Ids of the model's tokenizer that are ASCII words or pieces of them, with or without a space in front.

    Raises:
        ValueError: the folder has no tokenizer.json, or its vocabulary holds no such token.
    """
    path = model_path / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{path} is missing; give --token-ids")
    vocabulary = json.loads(path.read_text())["model"]["vocab"]
    entries = (
        vocabulary.items() if isinstance(vocabulary, dict) else ((e[0], i) for i, e in enumerate(vocabulary))
    )
    ids = sorted(index for piece, index in entries if _WORD.fullmatch(piece))
    if not ids:
        raise ValueError(f"{path} has no token that is an ASCII word; give --token-ids")
    return tuple(ids)


class TokenSource:
    """Draws from `table` (token ids, at least one).

    The draw is SplitMix64 (Steele, Lea, Flood 2014) of seed and index: uniform, and cheap on whole arrays.
    """

    def __init__(self, table: Sequence[int]) -> None:
        assert len(table) > 0
        self._table = np.array(table, np.int32)
        self._ids = frozenset(int(entry) for entry in table)

    def __contains__(self, token_id: int) -> bool:
        return token_id in self._ids

    def at(self, seeds: NDArray[np.uint64], indices: NDArray[np.int64]) -> NDArray[np.int32]:
        """Token ids for seeds and output indices of one (broadcast) shape."""
        draws = _mix(seeds, indices) % np.uint64(len(self._table))
        chosen: NDArray[np.int32] = self._table[draws]
        return chosen

    def sequence(self, seed: int, start: int, count: int) -> list[int]:
        """The tokens of one request, output indices start..start+count-1."""
        ids: list[int] = self.at(np.array([seed], np.uint64), np.arange(start, start + count)).tolist()
        return ids

    def likeliest(
        self, seed: int, start: int, chosen: NDArray[np.int32], top_k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
        """Made-up log-probabilities of one row: chosen [N], ids of the likeliest [N, K], theirs [N, K].

        The chosen token is always the likeliest; the others follow it in the table. K is cut to the table.
        """
        top_k = min(top_k, len(self._table))
        indices = np.arange(start, start + len(chosen))
        draws = _mix(np.array([seed], np.uint64), indices) >> np.uint64(40)  # 24 bits
        best = draws.astype(np.float32) * np.float32(-2.0 / (1 << 24))
        order = np.argsort(self._table, kind="stable")
        at = order[np.searchsorted(self._table[order], chosen)]
        ranks = np.arange(top_k)
        top_ids: NDArray[np.int32] = self._table[(at[:, None] + ranks) % len(self._table)]
        return best, top_ids, best[:, None] - ranks.astype(np.float32)


def _mix(seeds: NDArray[np.uint64], indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    mixed = seeds * _GOLDEN + (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(0xD1342543DE82EF95)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    drawn: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return drawn
