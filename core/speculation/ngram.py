"""Finds what followed the newest tokens of a request when they stood in it before: prompt look-up decoding.

One index per request, in plain Python: it needs no model and costs microseconds a step. Knows no requests.
Source of the idea: Saxena, Prompt Lookup Decoding (2023). Called by the n-gram drafter.
"""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_BULK = 64  # so many tokens at once are hashed by numpy
_LONGEST = 32  # a match is measured no further back


class NgramIndex:
    """The token ids of one request, and where each of its n-grams was seen last.

    Args:
        max_ngram: longest suffix that is looked up; the longest that was seen before wins.
        min_ngram: shortest one.
        reach: memory is bounded by forgetting what was not seen in the last `reach` to 2 * `reach` tokens; about
            100 bytes for each of those and each length. The ids themselves take 4 bytes a token.
    """

    def __init__(self, *, max_ngram: int = 4, min_ngram: int = 2, reach: int = 16384) -> None:
        assert 1 <= min_ngram <= max_ngram
        assert reach >= 1
        self._sizes = range(min_ngram, max_ngram + 1)
        self._reach = reach
        self._tokens = array("i")
        # By n-gram: the place behind it. Hash of its tokens -> place, checked at look-up.
        self._young: list[dict[int, int]] = [{} for _ in self._sizes]
        self._old: list[dict[int, int]] = [{} for _ in self._sizes]
        self._age = 0  # tokens since the young ones were empty
        self._match_length = 0

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def match_length(self) -> int:
        """Tokens before the newest proposal that equal the newest tokens; 0 = nothing was proposed."""
        return self._match_length

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens; O(1) each."""
        done = 0
        while done < len(token_ids):
            part = token_ids[done : done + self._reach - self._age]
            before = len(self._tokens)
            self._tokens.extend(part)
            if len(part) < _BULK:
                self._note(before)
            else:
                self._note_bulk(before)
            done += len(part)
            self._age += len(part)
            if self._age >= self._reach:
                self._old, self._young, self._age = self._young, [{} for _ in self._sizes], 0

    def propose(self, count: int) -> list[int]:
        """`count` tokens that followed the longest known suffix where it was seen last; empty = not seen.

        A continuation that reaches the end goes on with itself, as a repeated phrase does.
        """
        tokens, end = self._tokens, len(self._tokens)
        self._match_length = 0
        keys = []
        key = 0
        for size in range(1, min(self._sizes.stop - 1, end) + 1):
            key = (key * _FACTOR + tokens[end - size] + 1) & _MASK
            keys.append(key)
        for size in reversed(range(self._sizes.start, len(keys) + 1)):
            at = size - self._sizes.start
            place = self._young[at].get(keys[size - 1])
            if place is None:
                place = self._old[at].get(keys[size - 1])
            if place is None:
                continue
            length = self._measure(place)
            if length < size:
                continue  # another n-gram of the same hash
            self._match_length = length
            found = tokens[place : place + count].tolist()
            period = end - place
            while len(found) < count:
                found.append(found[len(found) - period])
            return found
        return []

    def _measure(self, place: int) -> int:
        """Tokens before `place` that equal the newest ones."""
        tokens, end = self._tokens, len(self._tokens)
        length = 0
        while length < _LONGEST and length < place and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length

    def _note(self, first: int) -> None:
        """Remember the n-grams before each token from `first` on: what ends with the newest token has no sequel."""
        tokens, young = self._tokens, self._young
        for place in range(first, len(tokens)):
            key = 0
            for size in range(1, min(self._sizes.stop - 1, place) + 1):
                key = (key * _FACTOR + tokens[place - size] + 1) & _MASK
                if size >= self._sizes.start:
                    young[size - self._sizes.start][key] = place

    def _note_bulk(self, first: int) -> None:
        reach = self._sizes.stop - 1
        start = max(0, first - reach)
        ids: NDArray[np.uint64] = np.array(self._tokens[start:], np.int64).astype(np.uint64) + np.uint64(1)
        key: NDArray[np.uint64] = np.zeros(len(ids), np.uint64)
        for size in range(1, reach + 1):
            # key[i] covers the `size` tokens before place i; the first ones have fewer.
            key = key * np.uint64(_FACTOR)
            key[size:] += ids[: len(ids) - size]
            if size >= self._sizes.start:
                places = range(max(first, start + size), len(self._tokens))
                hashes = key[places.start - start :].tolist()
                self._young[size - self._sizes.start].update(zip(hashes, places, strict=True))
