"""Skills of knowing: capitals, animals, facts, everyday things, definitions, tips; and of saying "I do not know"."""

from random import Random

from training.generator.chat import Skills, Turn, ask
from training.generator.numbers import in_words
from training.generator.tables import Tables
from training.generator.template import with_article

_SAME_IN_PLURAL = ("mouse", "sheep", "wolf", "fox", "butterfly", "octopus", "deer")


def _capital(rng: Random, tables: Tables) -> list[Turn]:
    country, city = rng.choice(tables.capitals)
    stop = "" if city.endswith(".") else "."
    if rng.random() < 0.15:
        question = f"Which country has the capital {city}?"
        return ask(question, f"{city} is the capital of {country}.")
    wordings = (
        f"What is the capital of {country}?",
        f"Tell me the capital of {country}.",
        f"Which city is the capital of {country}?",
        f"Do you know the capital of {country}?",
        f"what is the capital of {country}",
    )
    return ask(rng.choice(wordings), f"The capital of {country} is {city}{stop}")


def _animal(rng: Random, tables: Tables) -> list[Turn]:
    animal, text = rng.choice(tables.animals)
    plural = f"the {animal}" if animal in _SAME_IN_PLURAL else f"{animal}s"
    wordings = (
        f"Tell me about the {animal}.",
        f"What is {with_article(animal)}?",
        f"Tell me something about {plural}.",
        f"What do you know about {plural}?",
    )
    return ask(rng.choice(wordings), text)


def _fact(rng: Random, tables: Tables) -> list[Turn]:
    question, answer = rng.choice(tables.facts)
    variants = (question, question, question, question.lower(), f"Please tell me: {question}", question[:-1])
    return ask(rng.choice(variants), answer)


def _thing(rng: Random, tables: Tables) -> list[Turn]:
    thing, text = rng.choice(tables.things)
    noun = with_article(thing)
    wordings = (
        f"What is {noun}?",
        f"What is {noun}?",
        f"what is {noun}",
        f'What does the word "{thing}" mean?',
        f'Explain the word "{thing}".',
        f"Describe {noun}.",
        f"Tell me what {noun} is.",
    )
    return ask(rng.choice(wordings), f"{noun[0].upper()}{noun[1:]} {text}.")


def _definition(rng: Random, tables: Tables) -> list[Turn]:
    word, text = rng.choice(tables.definitions)
    wordings = (
        f"What is {with_article(word)}?",
        f'What does "{word}" mean?',
        f'Define "{word}".',
        f'What does the word "{word}" mean?',
        f'Explain the word "{word}".',
    )
    return ask(rng.choice(wordings), text)


def _tips(rng: Random, tables: Tables) -> list[Turn]:
    aim = rng.choice(tuple(tables.tips))
    known = tables.tips[aim]
    tips = rng.sample(known, min(rng.choice((1, 3, 3, 3, 5)), len(known)))
    count = in_words(len(tips))
    asked = "a tip" if len(tips) == 1 else f"{count} tips"
    question = rng.choice(
        (f"How can I {aim}?", f"I want to {aim}. What should I do?", f"Give me {asked} to {aim}.")
    )
    if len(tips) == 1:
        return ask(question, f"{tips[0]}.")
    opening = rng.choice((f"Here are {count} tips to {aim}:\n", "You can try this:\n", ""))
    return ask(question, opening + "\n".join(f"{i}. {tip}." for i, tip in enumerate(tips, start=1)))


def _unknown(rng: Random, tables: Tables) -> list[Turn]:
    place = rng.choice(rng.choice(tables.capitals))
    question = rng.choice(tables.unknown.says).replace("$x", place.rstrip("."))
    return ask(question, rng.choice(tables.unknown.answers))


SKILLS: Skills = (
    (1.6, _capital),
    (1.2, _animal),
    (2.4, _fact),
    (1.8, _thing),
    (4, _definition),
    (1.5, _tips),
    (0.9, _unknown),
)
