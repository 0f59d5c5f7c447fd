"""What the users of a load test say: sessions of turns, endless and made up, or read from a trace.

Pure functions of a seed. Knows no server and no clock; conversation.py plays a session, arrivals.py says when.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from random import Random

from headrace.loadtest.exchange import Call
from headrace.loadtest.words import TokenRate, block, text


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user says, after `think_s` from the end of the last answer, and how long the answer is to be."""

    prompt: str
    max_tokens: int
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """One user's turns. `recorded` is a request to be sent as it is, instead of turns."""

    turns: tuple[Turn, ...]
    system: str = ""
    at: float | None = None  # seconds after the start of the trace
    recorded: Call | None = None


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens: fixed, or lognormal with this mean and coefficient of variation, cut at 16 times the mean."""

    mean: float
    variation: float = 0.0

    def draw(self, rng: Random) -> int:
        """At least 1."""
        if not self.variation:
            return max(1, round(self.mean))
        variance = math.log1p(self.variation**2)
        drawn = rng.lognormvariate(math.log(self.mean) - variance / 2, variance**0.5)
        return max(1, min(round(drawn), round(16 * self.mean)))


def independent(prompt: Lengths, output: Lengths, rate: TokenRate, seed: int) -> Iterator[Session]:
    """Requests that share nothing, not even their first word."""
    for index in count():
        rng = Random(f"{seed} {index}")  # noqa: S311 - not for secrets
        words = rate.words(prompt.draw(rng))
        yield Session((Turn(f"{index} {text(rng, words)}", output.draw(rng)),))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape:
    """Conversations that begin with one of a few system prompts."""

    groups: int = 8  # different system prompts
    system_tokens: int = 512
    turns: int = 4
    think_s: float = 1.0  # mean, exponential


def chats(
    shape: ChatShape, prompt: Lengths, output: Lengths, rate: TokenRate, seed: int
) -> Iterator[Session]:
    """Endless conversations; a turn's prompt holds the whole history, as chat clients send it."""
    system_words = rate.words(shape.system_tokens)
    for index in count():
        rng = Random(f"{seed} chat {index}")  # noqa: S311 - not for secrets
        turns = []
        for turn in range(shape.turns):
            words = max(1, round(prompt.draw(rng) / rate.per_word))
            think_s = rng.expovariate(1 / shape.think_s) if turn and shape.think_s else 0.0
            turns.append(Turn(f"{index} {text(rng, words)}", output.draw(rng), think_s))
        system = block(f"{seed} system {rng.randrange(shape.groups)}", system_words)
        yield Session(tuple(turns), system=system)
