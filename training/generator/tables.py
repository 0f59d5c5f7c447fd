"""The generator's data, read from the files in tables/: words, plots, what the model shall know.

Knows no grammar and no chance; stories.py and the skills draw from it.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "tables"

Pairs = tuple[tuple[str, str], ...]
Lists = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Plot:
    """A story's skeleton: six beats in several wordings, and questions whose answers hold in every telling."""

    key: str
    phrase: str  # completes "a mouse who ..."
    title: str
    moral: str
    questions: Pairs
    beats: tuple[tuple[str, ...], ...]
    friend: str = ""  # the friend's kind, where the plot demands one


@dataclass(frozen=True, slots=True)
class Exchange:
    """Small talk: any of `says` may be answered by any of `answers`."""

    says: tuple[str, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tables:
    """Everything the generator draws from."""

    plots: tuple[Plot, ...]
    world: Lists
    # words.toml
    rhymes: tuple[tuple[str, ...], ...]
    opposites: Pairs
    plurals: Pairs
    past: Pairs
    kinds: Lists
    colour_of: Pairs
    # knowledge.toml
    facts: Pairs
    capitals: Pairs
    animals: Pairs
    things: Pairs
    tips: Lists
    feelings: Lists
    because: Lists
    definitions: Pairs
    # talk.toml
    poems: tuple[str, ...]
    exchanges: tuple[Exchange, ...]
    unknown: Exchange

    @property
    def names(self) -> tuple[str, ...]:
        """First names, girls' before boys'."""
        return self.world["girl"] + self.world["boy"]


def load_tables(folder: Path = FOLDER) -> Tables:
    """Read all tables. Raises KeyError or tomllib.TOMLDecodeError where a file is broken."""
    words, knowledge, talk = (_read(folder / f"{name}.toml") for name in ("words", "knowledge", "talk"))
    definitions = (folder / "definitions.tsv").read_text(encoding="utf-8").splitlines()
    return Tables(
        plots=tuple(_plot(key, fields) for key, fields in _read(folder / "plots.toml").items()),
        world=_lists(_read(folder / "world.toml")),
        rhymes=tuple(tuple(row) for row in words["rhymes"]),
        opposites=_pairs(words["opposites"]),
        plurals=_pairs(words["plurals"]),
        past=_pairs(words["past"]),
        kinds=_lists(words["kinds"]),
        colour_of=_pairs(words["colour_of"]),
        facts=tuple((question, answer) for question, answer in knowledge["facts"]),
        capitals=_pairs(knowledge["capitals"]),
        animals=_pairs(knowledge["animals"]),
        things=_pairs(knowledge["things"]),
        tips=_lists(knowledge["tips"]),
        feelings=_lists(knowledge["feelings"]),
        because=_lists(knowledge["because"]),
        definitions=tuple((word, text) for word, text in (line.split("\t") for line in definitions)),
        poems=tuple(talk["poems"]),
        exchanges=tuple(Exchange(tuple(row["says"]), tuple(row["answers"])) for row in talk["exchange"]),
        unknown=Exchange(tuple(talk["unknown"]["questions"]), tuple(talk["unknown"]["answers"])),
    )


def _read(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _pairs(table: Mapping[str, str]) -> Pairs:
    return tuple(table.items())


def _lists(table: Mapping[str, list[str]]) -> Lists:
    return {key: tuple(values) for key, values in table.items()}


def _plot(key: str, fields: Mapping[str, Any]) -> Plot:
    return Plot(
        key=key,
        phrase=fields["phrase"],
        title=fields["title"],
        moral=fields["moral"],
        questions=tuple((question, answer) for question, answer in fields["questions"]),
        beats=tuple(tuple(beat) for beat in fields["beats"]),
        friend=fields.get("friend", ""),
    )
