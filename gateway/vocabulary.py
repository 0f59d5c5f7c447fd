"""A tokenizer's tokens as bytes and text: built once per process, read by every stream.

Knows no stream. text.py builds it; detokenizer.py and the logprob shapes read it.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """Per token id: its bytes, and its text where that stands alone.

    Attributes:
        raw: bytes of each token as they appear in text; special tokens have none.
        pieces: the text of each token whose bytes are whole UTF-8; None where they are not.
        special: ids that are never shown.
        byte_level: True when text is exactly the concatenation of `raw`, as UTF-8 (byte-level BPE).
        longest: bytes of the longest token.
        verbatim: True when encoding neither drops nor shortens text: n bytes are at least n / longest tokens.
    """

    __slots__ = ("_tokens", "byte_level", "longest", "pieces", "raw", "special", "tokenizer", "verbatim")

    def __init__(self, tokenizer: Tokenizer) -> None:
        spec: Mapping[str, Any] = json.loads(tokenizer.to_str())
        size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.tokenizer = tokenizer
        self.byte_level = (spec["decoder"] or {}).get("type") == "ByteLevel"
        self.verbatim = self.byte_level and spec["normalizer"] is None
        self.special = frozenset(t["id"] for t in spec["added_tokens"] if t["special"])
        self._tokens = [tokenizer.id_to_token(token_id) or "" for token_id in range(size)]
        to_bytes = _byte_level_bytes if self.byte_level else _plain_bytes
        self.raw = [
            b"" if token_id in self.special else to_bytes(token)
            for token_id, token in enumerate(self._tokens)
        ]
        self.pieces: list[str | None] = [_whole(raw) for raw in self.raw]
        self.longest = max(map(len, self.raw), default=1)

    def __len__(self) -> int:
        return len(self._tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token by itself; those of a special token are its name."""
        if token_id in self.special:
            return self._tokens[token_id].encode()
        return self.raw[token_id] if token_id < len(self.raw) else b""

    def token_text(self, token_id: int) -> str:
        r"""A token by itself; bytes that are no text are written `bytes:\xe4\xbd`, as OpenAI does."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _whole(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _byte_level_bytes(token: str) -> bytes:
    """Undo GPT-2's byte alphabet; a token with a character outside of it was added and stands for itself."""
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:
        return token.encode()


def _plain_bytes(token: str) -> bytes:
    """Metaspace marks spaces, byte fallback spells single bytes."""
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's `bytes_to_unicode`, inverted: printable Latin-1 stands for itself, the rest for U+0100 and up."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_ALPHABET = _byte_alphabet()
