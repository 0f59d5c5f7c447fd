"""Tokenises a text piece by piece, cut at the tokenizer's added tokens, and remembers pieces that come again.

What stands between two added tokens is tokenised on its own anyway, so a system prompt or a template's phrase that
was seen before need not be tokenised again. Knows no template. text.py owns one where the tokenizer allows it, and
calls it from several threads.
"""

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import Any

from tokenizers import Tokenizer

MAX_CHARACTERS = 4 << 20  # of remembered pieces, in all


class Segments:
    """The tokenizer without its post-processor.

    Args:
        tokenizer: `cuttable(tokenizer)` is true.
        max_characters: what is remembered; the pieces longest unused are forgotten first.
    """

    def __init__(self, tokenizer: Tokenizer, max_characters: int = MAX_CHARACTERS) -> None:
        self._tokenizer = tokenizer
        self._max_characters = max_characters
        self._characters = 0
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = Lock()  # of what is remembered; never held while tokenising
        added = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        # The tokenizer takes the longest of those that begin at one place; so does an alternation in this order.
        names = sorted(added, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, names))})").split if added else None
        self._added = {name: array("i", (token_id,)) for name, token_id in added.items()}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, added tokens in it recognised."""
        found = array("i")
        for piece in self._cut(text) if self._cut else (text,):
            if piece:
                found += self._added.get(piece) or self._piece(piece)
        return found.tolist()

    def _piece(self, piece: str) -> "array[int]":
        known = self._known
        with self._lock:
            found = known.get(piece)
            if found is not None:
                known.move_to_end(piece)
                return found
        found = array("i", self._tokenizer.encode(piece, add_special_tokens=False).ids)
        if len(piece) <= self._max_characters // 4:
            with self._lock:
                if piece not in known:
                    self._characters += len(piece)
                known[piece] = found
                while self._characters > self._max_characters:
                    forgotten, _ = known.popitem(last=False)
                    self._characters -= len(forgotten)
        return found


def cuttable(tokenizer: Tokenizer) -> bool:
    """Whether pieces can be tokenised apart: nothing depends on where in the text a piece stands."""
    spec: Mapping[str, Any] = json.loads(tokenizer.to_str())
    plain = all(not (t["lstrip"] or t["rstrip"] or t["single_word"]) for t in spec["added_tokens"])
    steps = [spec["pre_tokenizer"] or {}]
    steps += steps[0].get("pretokenizers", [])
    place_free = all(step.get("type") != "Metaspace" and not step.get("add_prefix_space") for step in steps)
    return plain and place_free and spec["normalizer"] is None
