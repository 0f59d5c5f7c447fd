"""Token ids to text, one at a time: a character split over tokens comes out only when it is whole.

What all pushes and the flush return, joined, is what `tokenizer.decode` gives for the whole sequence.
Knows no stop strings. Each stream has one detokenizer; the tables behind it are shared.
"""

from codecs import getincrementaldecoder
from typing import Protocol

from headrace.gateway.vocabulary import Vocabulary

MAX_WINDOW = 16  # tokens; no character takes so many, so a longer window is not UTF-8 and may go out

_Utf8Decoder = getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Incremental decoding of one sequence."""

    @property
    def incomplete(self) -> bool:
        """True while the newest token's character is not whole."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is not whole, and for special tokens."""

    def flush(self) -> str:
        """The sequence is over: what is left, with U+FFFD for what never became a character."""


def detokenizer(vocabulary: Vocabulary) -> Detokenizer:
    """The fitting kind for a vocabulary."""
    return ByteDetokenizer(vocabulary) if vocabulary.byte_level else WindowDetokenizer(vocabulary)


class ByteDetokenizer:
    """Byte-level BPE: a table look-up for tokens that are whole text, an incremental UTF-8 decoder for the rest.

    Invalid bytes become one U+FFFD per maximal subpart, in Python as in Rust's `from_utf8_lossy`.
    """

    __slots__ = ("_decoder", "_pieces", "_raw", "incomplete")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._pieces = vocabulary.pieces
        self._raw = vocabulary.raw
        self._decoder = _Utf8Decoder(errors="replace")
        self.incomplete = False

    def push(self, token_id: int) -> str:
        if not self.incomplete:
            try:
                piece = self._pieces[token_id]
            except IndexError:  # models pad their vocabulary; such ids have no text
                return ""
            if piece is not None:
                return piece
        elif token_id >= len(self._raw):
            return ""
        text = self._decoder.decode(self._raw[token_id])
        self.incomplete = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        if not self.incomplete:
            return ""
        self.incomplete = False
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Any other tokenizer: decode a short window before and after each token and take the difference.

    The window begins at the token before the first one not yet shown, which keeps the space that SentencePiece
    drops at the start of a sequence. `tokenizers.DecodeStream` does the same, but raises on byte-fallback tokens
    that are not UTF-8, which a sampling model does produce. Where a run of byte tokens turns out to be invalid
    only after its first characters were shown, the run's number of U+FFFD differs from `tokenizer.decode`.
    """

    __slots__ = ("_decode", "_num_shown", "_shown", "_special", "_window")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._decode = vocabulary.tokenizer.decode
        self._special = vocabulary.special
        self._window: list[int] = []
        self._num_shown = 0  # leading tokens of the window whose text is out
        self._shown = ""  # their text

    @property
    def incomplete(self) -> bool:
        return len(self._window) > self._num_shown

    def push(self, token_id: int) -> str:
        if token_id in self._special:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith("�") and len(self._window) < MAX_WINDOW:
            return ""
        return self._take(text)

    def flush(self) -> str:
        return self._take(self._decode(self._window)) if self.incomplete else ""

    def _take(self, text: str) -> str:
        piece = text[len(self._shown) :]
        self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        self._shown = self._decode(self._window)
        return piece
