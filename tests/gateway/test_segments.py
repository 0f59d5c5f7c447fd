"""Tokenising in pieces gives what tokenising in one piece gives, and remembers no more than it may."""

from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from headrace.config import embedded_model
from headrace.gateway.segments import Segments, cuttable
from tests.gateway.tokenizers_for_tests import (
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    metaspace_tokenizer,
)


@cache
def embedded() -> Tokenizer:
    return Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))


MARKS = (
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "<|im_",
    "<|",
    "|>",
    "\n",
    " ",
    "  ",
    "a",
    " the",
    "12",
    "é😀",
)


@given(st.lists(st.sampled_from(MARKS) | st.text(max_size=8), max_size=12).map("".join))
@example("<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n")
def test_pieces_give_the_tokens_of_the_whole(text: str) -> None:
    whole = embedded().encode(text, add_special_tokens=False).ids
    segments = Segments(embedded())
    assert segments.encode(text) == whole
    assert segments.encode(text) == whole, "and from memory"


@given(
    st.lists(
        st.sampled_from(("<|end|>", "<tool>", "mit ö 空", "mit", " the", "ab")) | st.text(max_size=4)
    ).map("".join)
)
def test_added_tokens_of_each_sort_are_recognised(text: str) -> None:
    tokenizer = byte_level_tokenizer()
    assert Segments(tokenizer).encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_the_longest_added_token_is_taken() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("<tool>ab", special=False), AddedToken("ab<t", special=False)])
    for text in ("<tool>ab", "<tool>a", "ab<tool>ab<tool>"):
        assert Segments(tokenizer).encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_the_memory_is_bounded_and_forgets_the_longest_unused() -> None:
    calls: list[str] = []

    class Counting:
        """A tokenizer that notes what it is asked."""

        def encode(self, text: str, add_special_tokens: bool) -> object:
            calls.append(text)
            return embedded().encode(text, add_special_tokens=add_special_tokens)

        def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
            return embedded().get_added_tokens_decoder()

    segments = Segments(Counting(), max_characters=40)  # type: ignore[arg-type]
    for text in ("a" * 10, "b" * 10, "c" * 10, "d" * 10, "a" * 10, "e" * 10):
        segments.encode(text)
    assert len(calls) == 5, "the second a came from memory"
    segments.encode("a" * 10)
    assert len(calls) == 5
    segments.encode("b" * 10)
    assert calls[-1] == "b" * 10, "b was forgotten for e"
    segments.encode("f" * 100)
    segments.encode("f" * 100)
    assert calls[-2:] == ["f" * 100] * 2, "a piece that fills the memory is not kept"


@pytest.mark.parametrize("make", [byte_fallback_tokenizer, metaspace_tokenizer])
def test_a_tokenizer_that_marks_the_beginning_is_not_cut(make: object) -> None:
    assert callable(make)
    assert not cuttable(make())


def test_an_added_token_that_takes_spaces_along_is_not_cut() -> None:
    tokenizer = byte_level_tokenizer()
    assert cuttable(tokenizer)
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert not cuttable(tokenizer)
    spaced = Tokenizer(models.BPE({"a": 0}, []))
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert not cuttable(spaced)
    assert cuttable(embedded())
