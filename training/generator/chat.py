"""What a chat is: turns of roles and text, and how they are written for the model (ChatML).

Every other module of the generator makes turns; prepare.py writes them.
"""

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import NamedTuple

from training.generator.tables import Tables


class Turn(NamedTuple):
    """One message of a chat."""

    role: str  # system, user, assistant or tool
    text: str


Skill = Callable[[Random, Tables], list[Turn]]
Skills = tuple[tuple[float, Skill], ...]  # weight and maker of a question with its answer


def ask(question: str, answer: str) -> list[Turn]:
    """One question and its answer."""
    return [Turn("user", question), Turn("assistant", answer)]


def render(turns: Iterable[Turn]) -> str:
    """The text that the chat template of the embedded model would write."""
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)


def pick(skills: Sequence[tuple[float, Skill]], rng: Random) -> Skill:
    """Draw one skill by weight."""
    return rng.choices([skill for _, skill in skills], [weight for weight, _ in skills])[0]
