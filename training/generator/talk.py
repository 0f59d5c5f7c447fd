"""Small talk: greetings, feelings, names remembered over turns, names given by a system message."""

from random import Random

from training.generator.chat import Skills, Turn, ask
from training.generator.tables import Tables

_PERSONAS = ("Ada", "Nova", "Pico", "Echo", "Wren", "Orla", "Juno", "Robin", "Sage", "Tilly")


def exchange(rng: Random, tables: Tables) -> list[Turn]:
    """A greeting, thanks, a joke: one line and its answer."""
    row = rng.choice(tables.exchanges)
    return ask(rng.choice(row.says), rng.choice(row.answers))


def feeling(rng: Random, tables: Tables) -> list[Turn]:
    """`I feel sad because ...` and two or more kind sentences."""
    name = rng.choice(tuple(tables.feelings))
    reason, known = rng.choice(tables.because[name]), tables.feelings[name]
    kept = sorted(rng.sample(range(len(known)), rng.randrange(2, len(known) + 1)))
    wordings = (f"I feel {name} because {reason}.", f"I am {name} because {reason}.", f"I feel {name} today.")
    return ask(rng.choice(wordings), " ".join(known[i] for i in kept))


def persona(rng: Random, _: Tables) -> list[Turn]:
    """A system message gives a name, and the answer keeps to it."""
    name = rng.choice(_PERSONAS)
    system = rng.choice(
        (
            f"You are {name}, a helpful assistant.",
            f"You are {name}, a friendly small language model.",
            f"Your name is {name}. Answer briefly.",
        )
    )
    question = rng.choice(("What is your name?", "Who are you?", "Hello, who are you?"))
    answer = rng.choice((f"My name is {name}. How can I help you?", f"I am {name}, a small language model."))
    return [Turn("system", system), *ask(question, answer)]


def nameless(rng: Random, _: Tables) -> list[Turn]:
    """Who it is when nobody gave it a name."""
    answer = "I am a small language model. I can tell stories and answer simple questions."
    return ask(rng.choice(("What is your name?", "Who are you?")), answer)


def introduction(rng: Random, tables: Tables) -> tuple[list[Turn], list[Turn]]:
    """What the user tells of himself, and the questions about it that may come any time later."""
    name, colour = rng.choice(tables.names), rng.choice(tables.world["col"])
    told = rng.choice(
        (
            f"My name is {name}.",
            f"Hello, I am {name}.",
            f"Hi! My name is {name} and my favourite colour is {colour}.",
        )
    )
    answer = rng.choice((f"Nice to meet you, {name}!", f"Hello, {name}! How can I help you?"))
    question = rng.choice(("What is my name?", "Do you remember my name?"))
    later = ask(question, rng.choice((f"Your name is {name}.", f"Yes, your name is {name}.")))
    if "colour" in told:
        later += ask("What is my favourite colour?", f"Your favourite colour is {colour}.")
    return ask(told, answer), later


SKILLS: Skills = ((3, exchange), (1.5, feeling), (1.2, persona), (0.5, nameless))
