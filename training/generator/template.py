"""The little template language of the tables: {a|b} chooses, $slot is filled, grammar is repaired afterwards.

Pure functions of text, slots and a random generator; knows nothing of stories or chats.
"""

# ruff: noqa: SIM905  (a line of words reads better than a column of strings)

import re
from collections.abc import Mapping, Sequence
from random import Random

_CHOICE = re.compile(r"\{([^{}]*)\}")
_SLOT = re.compile(r"\$([A-Za-z]+)")
# "a honest owl" -> "an honest owl", but "a unicorn", "a useful tool", "a one-eyed cat"
_BEFORE_VOWEL = re.compile(r"\b([Aa]) (?=[aeiouAEIOU]|[Hh]ono?u?r|[Hh]onest|[Hh]our)(?!uni|use|one\b|eu)")
_SENTENCE_START = re.compile(r'(^|[.!?] +|\.["\'] +|\n\n?"?|^")([a-z])')
# speech must end in a mark: `"Mine too" said` -> `"Mine too," said`, `"Mine too" He` -> `"Mine too." He`
_OPEN_SPEECH = re.compile(r'(\w)"(?= [a-z$])|(\w)"(?=\s|$)')
_SMALL_WORDS = frozenset("a an and at for from in of on or that the to with".split())


def choose(text: str, rng: Random) -> str:
    """Resolve every {a|b|c}, innermost first."""
    while "{" in text:
        text = _CHOICE.sub(lambda match: rng.choice(match.group(1).split("|")), text)
    return text


def fill(text: str, slots: Mapping[str, str], rng: Random) -> str:
    """Choose, fill slots (a slot's value may name further slots) and repair articles, capitals and quotes."""
    text = choose(text, rng)
    for _ in range(2):
        text = _SLOT.sub(lambda match: slots[match.group(1)], text)
    text = _OPEN_SPEECH.sub(lambda m: f'{m[1]},"' if m[1] else f'{m[2]}."', text)
    text = text.replace('", said', '," said').replace('.", ', '," ').replace('?,"', '?"').replace('!,"', '!"')
    return capitalise(fix_articles(text)).strip()


def fix_articles(text: str) -> str:
    """`a apple` becomes `an apple`."""
    return _BEFORE_VOWEL.sub(r"\1n ", text)


def capitalise(text: str) -> str:
    """Begin each sentence with a capital letter."""
    return _SENTENCE_START.sub(lambda match: match.group(1) + match.group(2).upper(), text)


def title_case(text: str) -> str:
    """Capitals for all but the small words of a title."""
    words = text.split(" ")
    return " ".join(w if i and w in _SMALL_WORDS else w[:1].upper() + w[1:] for i, w in enumerate(words))


def with_article(noun: str) -> str:
    """`owl` becomes `an owl`."""
    return fix_articles(f"a {noun}")


def join_words(words: Sequence[str]) -> str:
    """`a, b and c`."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
