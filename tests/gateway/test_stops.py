"""Stop strings: the cut text equals a plain search on the whole text, however the text is cut into pieces."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.stops import StopCutter, StopStrings

letters = st.text(alphabet="ab\n", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=4)


def plain_cut(text: str, stops: list[str]) -> tuple[str, str]:
    """The reference: the stop string that is complete first, the longest of those; and the text before it."""
    found = [(at + len(stop), at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return text, ""
    _, at, stop = min(found)
    return text[:at], stop


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(borders)]


@given(letters, stop_lists, st.lists(st.integers(0, 100), max_size=8))
def test_cut_text_equals_a_search_on_the_whole(text: str, stops: list[str], cuts: list[int]) -> None:
    cutter = StopCutter(StopStrings(stops))
    out = ""
    for piece in pieces_of(text, cuts):
        out += cutter.push(piece)
        if cutter.match:
            break
    else:
        out += cutter.flush()
    assert (out, cutter.match) == plain_cut(text, stops)


@given(letters, stop_lists)
def test_nothing_that_may_become_a_stop_string_is_let_through(text: str, stops: list[str]) -> None:
    """After every character the text so far, continued in the worst way, would still be cut in time."""
    cutter = StopCutter(StopStrings(stops))
    out = ""
    for at, character in enumerate(text):
        out += cutter.push(character)
        if cutter.match:
            return
        seen = text[: at + 1]
        held = len(seen) - len(out)
        assert all(
            held >= length for stop in stops for length in range(1, len(stop)) if seen.endswith(stop[:length])
        )
        assert out == seen[: len(out)]


def test_text_without_a_beginning_of_a_stop_string_is_not_held() -> None:
    cutter = StopCutter(StopStrings(["</s>", "\n\n"]))
    assert cutter.push("one line\nanother") == "one line\nanother"
    assert cutter.push(" and\n") == " and"
    assert cutter.push("x") == "\nx"


def test_a_stop_string_inside_another_is_found() -> None:
    """`b` is complete before `abc` is: the earlier end wins."""
    cutter = StopCutter(StopStrings(["abc", "b"]))
    assert cutter.push("xab") == "xa"
    assert cutter.match == "b"
