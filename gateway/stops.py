"""Stop strings in a stream of text: nothing that may still become one is let through, and the text ends before it.

The automaton is Aho and Corasick's (CACM 18, 1975): one dictionary look-up a character, however many strings.
Knows no tokens. stream.py feeds it decoded text.
"""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The compiled strings of one request; its choices share it.

    The string that is complete first wins, and of those complete at the same character the longest; so the result
    does not depend on how the text was cut into pieces.

    Args:
        strings: non-empty strings, at least one.
    """

    __slots__ = ("_found", "_next", "depth", "first")

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]  # state -> character -> state
        self.depth = [0]  # characters of the longest suffix that begins a stop string
        self._found: list[str] = [""]  # the longest stop string that ends in this state
        for string in strings:
            self._add(string)
        self._link()
        self.first = frozenset(string[0] for string in strings)

    def step(self, state: int, character: str) -> int:
        return self._next[state].get(character, 0)

    def found(self, state: int) -> str:
        """The stop string that ends here; "" = none."""
        return self._found[state]

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self._found.append("")
                self._next[state][character] = following
            state = following
        self._found[state] = string

    def _link(self) -> None:
        """Complete the transitions breadth first, so that a step never has to fall back."""
        fallback = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            behind = fallback[state]
            self._found[state] = self._found[state] or self._found[behind]
            for character, child in self._next[state].items():
                fallback[child] = self._next[behind].get(character, 0)
                queue.append(child)
            self._next[state] = {**self._next[behind], **self._next[state]}


class StopCutter:
    """One choice's text on its way through the automaton."""

    __slots__ = ("_held", "_state", "_stops", "match")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""  # the end of the text that may yet become a stop string
        self.match = ""  # the stop string found; nothing comes after it

    def push(self, text: str) -> str:
        """Take the next piece; return what is certain to belong to the answer."""
        assert not self.match, "push after a match"
        stops, state = self._stops, self._state
        if not state and stops.first.isdisjoint(text):
            return text
        step, found = stops.step, stops.found
        for at, character in enumerate(text, start=1):
            state = step(state, character)
            if found(state):
                self.match = found(state)
                whole = self._held + text[:at]
                self._held = ""
                return whole[: -len(self.match)]
        self._state = state
        whole = self._held + text
        certain = len(whole) - stops.depth[state]
        self._held = whole[certain:]
        return whole[:certain]

    def flush(self) -> str:
        """The text is over: what was held back belongs to the answer."""
        held, self._held, self._state = self._held, "", 0
        return held
