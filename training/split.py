"""Splits documents into those to train on and those held out, so that no story stands on both sides.

Documents that share a story, a passage or an answer are found by their common word sequences and stay together:
the same tale as prose and as chat, questions on one passage, two editions of a book, synonyms with one definition.
"""

import functools
import hashlib
import re
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

_WORD = re.compile(r"[a-z0-9]+")
_MARKUP = re.compile(r"<\|im_start\|>\w+\n|<\|im_end\|>")
_ANSWER = re.compile(r"<\|im_start\|>assistant\n([^<]*)<\|im_end\|>\s*$")

SHINGLE = 8
"""Words in a sequence that counts as shared."""
COMMON = 30
"""A sequence found in more documents than this is boilerplate and says nothing."""
RELATED = 0.1
"""Two documents are related when they share this part of the shorter one's sequences ..."""
AT_LEAST = 2
"""... and no fewer sequences than this (one is enough for texts too short to have two)."""
GROUP_LIMIT = 64
"""Larger groups (dialogues from one form) are always trained on."""

Hashes = npt.NDArray[np.uint64]


def fingerprint(text: str) -> Hashes:
    """Hashes of all sequences of SHINGLE words, and of the whole answer where the text is a chat of one answer."""
    words = _WORD.findall(_MARKUP.sub(" ", text).lower())
    codes = np.array([hash_text(word) for word in words], dtype=np.uint64)
    mixed = np.zeros(max(len(words) - SHINGLE + 1, 0), dtype=np.uint64)
    for i in range(SHINGLE if len(mixed) else 0):
        mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + codes[i : i + len(mixed)]
    answer = _ANSWER.search(text)
    if answer and text.count("<|im_start|>assistant") == 1 and len(answer[1].split()) >= 4:
        mixed = np.append(mixed, np.uint64(hash_text("answer: " + answer[1])))
    return np.unique(mixed)


@functools.lru_cache(maxsize=1 << 18)
def hash_text(text: str) -> int:
    """A 64-bit hash that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def related_pairs(fingerprints: Sequence[Hashes]) -> list[tuple[int, int]]:
    """Pairs of documents that share a story by the constants above."""
    sizes = np.array([len(prints) for prints in fingerprints])
    owners = np.repeat(np.arange(len(fingerprints)), sizes)
    hashes = np.concatenate([*fingerprints, np.empty(0, np.uint64)])
    order = np.argsort(hashes, kind="stable")
    hashes, owners = hashes[order], owners[order]
    starts = np.flatnonzero(np.r_[True, hashes[1:] != hashes[:-1]])
    shared: dict[tuple[int, int], int] = {}
    for start, end in zip(starts, np.r_[starts[1:], len(hashes)], strict=True):
        if 1 < end - start <= COMMON:
            members = owners[start:end].tolist()
            for j, later in enumerate(members):
                for earlier in members[:j]:
                    shared[earlier, later] = shared.get((earlier, later), 0) + 1
    return [
        (a, b)
        for (a, b), count in shared.items()
        if count >= max(min(AT_LEAST, sizes[a], sizes[b]), RELATED * min(sizes[a], sizes[b]))
    ]


def group(count: int, pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Connected components of `pairs` over range(count), each in rising order."""
    parent = list(range(count))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    for a, b in pairs:
        parent[root(a)] = root(b)
    groups: dict[int, list[int]] = {}
    for index in range(count):
        groups.setdefault(root(index), []).append(index)
    return list(groups.values())


def held_out(
    texts: Sequence[str], share: float, pinned: Sequence[str] = (), also: Collection[int] = ()
) -> set[int]:
    """Indices of the documents to hold out: about `share` of the groups, chosen by hash.

    Groups that contain one of `also` (hashes of texts; an earlier run's held-out documents) are held out too, and
    groups related to one of `pinned` (texts that are trained on in any case) never are.
    """
    everything = [*texts, *pinned]
    groups = group(len(everything), related_pairs([fingerprint(text) for text in everything]))
    keys = [hash_text(text) for text in everything]
    chosen: set[int] = set()
    for members in groups:
        if len(members) > GROUP_LIMIT or members[-1] >= len(texts):
            continue
        key = min(keys[index] for index in members)
        if key < share * 2**64 or any(keys[index] in also for index in members):
            chosen.update(members)
    return chosen
