"""Skills with words: opposites, plurals, rhymes, lists of a kind, spelling, the calendar, colours."""

# ruff: noqa: SIM905  (a line of words reads better than a column of strings)

from random import Random

from training.generator.chat import Skills, Turn, ask
from training.generator.numbers import in_words
from training.generator.tables import Tables
from training.generator.template import capitalise, join_words

_DAYS = tuple("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split())
_MONTHS = tuple(
    "January February March April May June July August September October November December".split()
)
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
_MIXTURES = {
    ("red", "yellow"): "orange",
    ("blue", "yellow"): "green",
    ("red", "blue"): "purple",
    ("red", "white"): "pink",
    ("black", "white"): "grey",
}


def _opposite(rng: Random, tables: Tables) -> list[Turn]:
    word, other = rng.choice(tables.opposites)
    wordings = (
        f"What is the opposite of {word}?",
        f'What is the opposite of "{word}"?',
        f"Opposite of {word}?",
    )
    return ask(rng.choice(wordings), f"The opposite of {word} is {other}.")


def _plural(rng: Random, tables: Tables) -> list[Turn]:
    word, plural = rng.choice(tables.plurals)
    return ask(f'What is the plural of "{word}"?', f'The plural of "{word}" is "{plural}".')


def _past(rng: Random, tables: Tables) -> list[Turn]:
    word, past = rng.choice(tables.past)
    return ask(f'What is the past tense of "{word}"?', f'The past tense of "{word}" is "{past}".')


def _rhyme(rng: Random, tables: Tables) -> list[Turn]:
    word, other = rng.sample(rng.choice(tables.rhymes), 2)
    wordings = (f'What rhymes with "{word}"?', f"Give me a word that rhymes with {word}.")
    return ask(rng.choice(wordings), f'"{other.capitalize()}" rhymes with "{word}".')


def _list(rng: Random, tables: Tables) -> list[Turn]:
    kind = rng.choice(tuple(tables.kinds))
    words = rng.sample(tables.kinds[kind], rng.randrange(2, min(6, len(tables.kinds[kind]))))
    count = in_words(len(words))
    wordings = (f"Name {count} {kind}.", f"List {count} {kind}.", f"Give me {count} {kind}.")
    prose = capitalise(join_words(words)) + "."
    numbered = "\n".join(f"{i}. {capitalise(word)}" for i, word in enumerate(words, start=1))
    return ask(rng.choice(wordings), rng.choice((prose, numbered)))


def _odd_one_out(rng: Random, tables: Tables) -> list[Turn]:
    kind, other_kind = rng.sample(tuple(tables.kinds), 2)
    words = rng.sample(tables.kinds[kind], 3)
    strangers = [word for word in tables.kinds[other_kind] if word not in tables.kinds[kind]]
    odd = rng.choice(strangers)
    shown = rng.sample([*words, odd], 4)
    answer = f'"{odd.capitalize()}" does not belong. The other words are {kind}.'
    return ask(f"Which word does not belong: {', '.join(shown)}?", answer)


def _colour(rng: Random, tables: Tables) -> list[Turn]:
    if rng.random() < 0.5:
        thing, colour = rng.choice(tables.colour_of)
        return ask(f"What colour is {thing}?", f"{capitalise(thing)} is {colour}.")
    (a, b), mixture = rng.choice(tuple(_MIXTURES.items()))
    return ask(
        f"What colour do you get when you mix {a} and {b}?", f"When you mix {a} and {b}, you get {mixture}."
    )


def _calendar(rng: Random, _: Tables) -> list[Turn]:
    kind, names = rng.choice((("day", _DAYS), ("month", _MONTHS)))
    index = rng.randrange(len(names))
    word, step = rng.choice((("after", 1), ("after", 1), ("before", -1)))
    other = names[(index + step) % len(names)]
    return ask(f"Which {kind} comes {word} {names[index]}?", f"{other} comes {word} {names[index]}.")


def _alphabet(rng: Random, _: Tables) -> list[Turn]:
    index = rng.randrange(1, 25)
    letter = _ALPHABET[index].upper()
    word, step = rng.choice((("after", 1), ("before", -1)))
    other = _ALPHABET[index + step].upper()
    return ask(f"Which letter comes {word} {letter}?", f"{other} comes {word} {letter}.")


def _spell(rng: Random, tables: Tables) -> list[Turn]:
    kind = rng.choice(tuple(tables.kinds))
    word = rng.choice(tables.kinds[kind])
    return ask(rng.choice((f'Spell the word "{word}".', f"How do you spell {word}?")), "-".join(word))


def _order(rng: Random, tables: Tables) -> list[Turn]:
    kind = rng.choice(tuple(tables.kinds))
    words = rng.sample(tables.kinds[kind], 3)
    return ask(f"Put these words in alphabetical order: {', '.join(words)}", ", ".join(sorted(words)))


SKILLS: Skills = (
    (1, _opposite),
    (0.7, _plural),
    (0.7, _past),
    (0.8, _rhyme),
    (1, _list),
    (0.7, _odd_one_out),
    (0.7, _colour),
    (0.8, _calendar),
    (0.3, _alphabet),
    (0.5, _spell),
    (0.3, _order),
)
