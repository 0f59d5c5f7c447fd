"""Incremental decoding equals decoding the whole, for every kind of tokenizer, and shows whole characters only."""

from functools import cache
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from headrace.config import embedded_model
from headrace.gateway.detokenizer import detokenizer
from headrace.gateway.vocabulary import Vocabulary
from tests.gateway.tokenizers_for_tests import (
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    metaspace_tokenizer,
)

EMBEDDED = Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))
BYTE_LEVEL, BYTE_FALLBACK, METASPACE = (
    byte_level_tokenizer(),
    byte_fallback_tokenizer(),
    metaspace_tokenizer(),
)


@cache
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer)


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


def pieces(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    decoder = detokenizer(vocabulary(tokenizer))
    return [*map(decoder.push, token_ids), decoder.flush()]


def ids(tokenizer: Tokenizer, beyond: int = 0) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.get_vocab_size() - 1 + beyond), max_size=24)


@given(ids(EMBEDDED, beyond=50))
def test_random_tokens_of_the_embedded_model(token_ids: list[int]) -> None:
    """Also ids beyond the tokenizer's, which models with a padded vocabulary may choose."""
    assert "".join(pieces(EMBEDDED, token_ids)) == EMBEDDED.decode(token_ids)


@given(ids(BYTE_LEVEL))
def test_random_tokens_of_a_byte_level_tokenizer_full_of_broken_characters(token_ids: list[int]) -> None:
    assert "".join(pieces(BYTE_LEVEL, token_ids)) == BYTE_LEVEL.decode(token_ids)


@given(ids(METASPACE))
def test_random_tokens_of_a_metaspace_tokenizer(token_ids: list[int]) -> None:
    assert "".join(pieces(METASPACE, token_ids)) == METASPACE.decode(token_ids)


byte_runs = st.text(max_size=2).map(
    lambda text: [id_of(BYTE_FALLBACK, f"<0x{byte:02X}>") for byte in text.encode()]
)
whole_tokens = st.lists(st.integers(259, BYTE_FALLBACK.get_vocab_size() - 1), max_size=3)


@given(st.lists(byte_runs | whole_tokens, max_size=8).map(lambda parts: list(chain(*parts))))
def test_random_tokens_of_a_byte_fallback_tokenizer(token_ids: list[int]) -> None:
    """Where the byte tokens are UTF-8; what the library makes of other bytes depends on what follows them."""
    assert "".join(pieces(BYTE_FALLBACK, token_ids)) == BYTE_FALLBACK.decode(token_ids)


@given(ids(BYTE_FALLBACK))
def test_byte_fallback_never_fails_and_loses_no_text(token_ids: list[int]) -> None:
    out = "".join(pieces(BYTE_FALLBACK, token_ids))
    assert out.replace("�", "").count("the") >= token_ids.count(id_of(BYTE_FALLBACK, "▁the"))


@given(st.text(max_size=40))
def test_any_text_comes_back(text: str) -> None:
    for tokenizer in (EMBEDDED, BYTE_LEVEL):
        assert "".join(pieces(tokenizer, tokenizer.encode(text, add_special_tokens=False).ids)) == text


def test_a_split_character_comes_out_once_and_whole() -> None:
    token_ids = EMBEDDED.encode("a😀b").ids
    shown = pieces(EMBEDDED, token_ids)
    assert "".join(shown) == "a😀b"
    assert all("�" not in piece for piece in shown)
    assert len(token_ids) > 3, "the emoji is split over tokens, or this test shows nothing"


def test_what_never_becomes_a_character_is_flushed_as_a_replacement() -> None:
    half = EMBEDDED.encode("😀").ids[:-1]
    assert pieces(EMBEDDED, half)[-1] == "�"


def test_endless_broken_bytes_are_not_held_for_ever() -> None:
    decoder = detokenizer(vocabulary(BYTE_FALLBACK))
    byte = id_of(BYTE_FALLBACK, "<0xE4>")
    assert any(decoder.push(byte) for _ in range(40))


def test_tokens_by_themselves_have_bytes_and_a_readable_form() -> None:
    table = vocabulary(EMBEDDED)
    half = EMBEDDED.encode("😀").ids[0]
    assert table.token_bytes(half) == "😀".encode()[: len(table.token_bytes(half))]
    assert table.token_text(half).startswith("bytes:\\xf0")
    assert table.token_text(2) == "<|im_end|>"
    assert table.token_bytes(10**6) == b""
