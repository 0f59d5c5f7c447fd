"""Story worlds: a hero, a friend, things and a place, held consistent over six beats of a plot.

The answers to a story's questions are true by construction. chats.py asks for stories and asks about them.
"""

import re
from dataclasses import dataclass
from random import Random

from training.generator.tables import Pairs, Plot, Tables
from training.generator.template import fill, title_case, with_article

_OPENINGS = (
    "Once upon a time, there was a $size $k named $N. $N was very $trait and lived {$in|near} a $place.",
    "Once upon a time, $in a {quiet|green|faraway|sunny} $place, there lived a $trait $k named $N.",
    "$N was a $size $k who lived {$in|near} a $place. Everyone knew that $N was $trait.",
    "There was once a $trait $size $k. $His name was $N, and $he lived {$in|near} a $place.",
    "$In a {little|beautiful|busy} $place lived a $k called $N. $He was {very|really|quite} $trait.",
    "This is the story of $N, a $trait $k who lived {$in|near} a $place.",
    "Long ago, {$in|near} a $place, there lived a $size $k. $His name was $N, and $he was {rather|very} $trait.",
)
_ENDINGS = (
    "",
    "",
    "$N had learned something: $moral",
    "$moral",
    "And that is the end of the story.",
    "The end.",
)
# before which beats a new paragraph begins
_PARAGRAPHS = ((2, 4), (1, 3, 5), (3,), (1, 2, 3, 4, 5))
_WHERE = {"hill": "on", "beach": "on", "farm": "on", "island": "on", "lake": "by", "river": "by"}
_PRONOUNS = {
    True: {"he": "she", "his": "her", "him": "her", "himself": "herself"},
    False: {"he": "he", "his": "his", "him": "him", "himself": "himself"},
}
_CAPITALISED = ("he", "his", "him", "toy", "skill", "col", "food", "in")
_CHILDREN = ("girl", "boy")
_CHILD_SHARE = 0.36
_WEATHER_SHARE = 0.35
_THAT_DAY = 0.3
# slots whose value a request may ask for by name, where it occurs in the text
_ASKED_FOR = ("toy", "place", "food", "col", "elder", "thing", "craft", "music", "skill")


@dataclass(frozen=True, slots=True)
class Story:
    """A told story and what is true in it."""

    plot: str
    title: str
    text: str  # paragraphs separated by an empty line
    phrase: str  # "loses his red ball"
    moral: str
    hero: str
    kind: str  # "fox", "girl"
    trait: str
    friend: str
    friend_kind: str
    place: str
    questions: Pairs
    words: tuple[str, ...]  # things that occur in the text

    @property
    def who(self) -> str:
        """`a shy fox`."""
        return with_article(f"{self.trait} {self.kind}")


def tell(tables: Tables, rng: Random) -> Story:
    """Tell one story; equal states of `rng` tell the same one."""
    plot = rng.choice(tables.plots)
    slots = _world(tables, plot, rng)
    beats = [fill(rng.choice(beat), slots, rng) for beat in plot.beats]
    opening = fill(rng.choice(_OPENINGS), slots, rng)
    if rng.random() < _WEATHER_SHARE:
        weather = rng.choice(tables.world["weather"])
        opening += (
            f" {weather} that day." if "day" not in weather and rng.random() < _THAT_DAY else f" {weather}."
        )
    moral = fill(plot.moral, slots, rng)
    ending = fill(rng.choice(_ENDINGS), {**slots, "moral": moral}, rng)
    breaks = rng.choice(_PARAGRAPHS)
    text = f"{opening} {beats[0]}"
    for index, beat in enumerate(beats[1:], start=1):
        text += ("\n\n" if index in breaks else " ") + beat
    text = f"{text} {ending}" if ending else text
    phrase = fill(plot.phrase, slots, rng)
    return Story(
        plot=plot.key,
        title=title_case(fill(plot.title, slots, rng)),
        text=text,
        phrase=phrase[0].lower() + phrase[1:],
        moral=moral,
        hero=slots["N"],
        kind=slots["k"],
        trait=slots["trait"],
        friend=slots["F"],
        friend_kind=slots["fk"],
        place=slots["place"],
        questions=tuple((fill(q, slots, rng), fill(a, slots, rng)) for q, a in plot.questions),
        words=tuple(value for slot in _ASKED_FOR if re.search(rf"\b{(value := slots[slot])}\b", text)),
    )


def _world(tables: Tables, plot: Plot, rng: Random) -> dict[str, str]:
    """One value for every slot, the same for the whole story."""
    world = tables.world
    slots = {name: rng.choice(values) for name, values in world.items()}
    kind = rng.choice(_CHILDREN) if rng.random() < _CHILD_SHARE else rng.choice(world["animal"])
    female = kind == "girl" or (kind != "boy" and rng.random() < 0.5)
    hero = rng.choice(world["girl" if female else "boy"])
    friends = [name for name in tables.names if name != hero]
    friend_kinds = [animal for animal in world["animal"] if animal != kind]
    slots |= _PRONOUNS[female]
    slots |= {"N": hero, "k": kind, "F": rng.choice(friends), "fk": plot.friend or rng.choice(friend_kinds)}
    slots["in"] = _WHERE.get(slots["place"], "in")
    return slots | {name.capitalize(): slots[name][0].upper() + slots[name][1:] for name in _CAPITALISED}
