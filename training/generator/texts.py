"""Skills with a given text: copying it, JSON from a sentence, one field of a JSON changed, a poem on demand."""

import json
from random import Random

from training.generator.chat import Skills, Turn, ask
from training.generator.stories import tell
from training.generator.tables import Tables
from training.generator.template import choose, fix_articles, with_article


def _city(rng: Random, tables: Tables) -> str:
    return rng.choice(tables.capitals)[1]


def _json(rng: Random, tables: Tables) -> list[Turn]:
    name, age, city = rng.choice(tables.names), rng.randrange(3, 80), _city(rng, tables)
    wordings = (
        f'Give me a JSON object with name "{name}", age {age} and city "{city}".',
        f"Write this as JSON: {name} is {age} years old and lives in {city}.",
        f'Extract name, age and city as JSON: "My name is {name}, I am {age} and I live in {city}."',
    )
    return ask(rng.choice(wordings), json.dumps({"name": name, "age": age, "city": city}))


def _record(rng: Random, tables: Tables) -> dict[str, object]:
    """A flat object of three to six fields."""
    world = tables.world
    fields: dict[str, object] = {
        "name": rng.choice(tables.names),
        "age": rng.randrange(3, 80),
        "city": _city(rng, tables),
        "colour": rng.choice(world["col"]),
        "animal": rng.choice(world["animal"]),
        "toy": rng.choice(world["toy"]),
        "food": rng.choice(world["food"]),
    }
    return {key: fields[key] for key in rng.sample(list(fields), rng.randrange(3, 7))}


def _edit_json(rng: Random, tables: Tables) -> list[Turn]:
    record, other = _record(rng, tables), _record(rng, tables)
    key = rng.choice(list(record))
    value = other.get(key, rng.randrange(3, 80) if key == "age" else rng.choice(tables.names))
    indent = rng.choice((None, None, 2))
    order = rng.choice(("Change", "Please change", "Set"))
    shown = json.dumps(record, indent=indent)
    question = rng.choice(
        (
            f"{order} {key} to {json.dumps(value)} in this JSON:\n{shown}",
            f"{shown}\n\n{order} {key} to {json.dumps(value)}.",
        )
    )
    return ask(question, json.dumps({**record, key: value}, indent=indent))


def _copy(rng: Random, tables: Tables) -> list[Turn]:
    story = tell(tables, rng).text
    if rng.random() < 0.7:
        sentences = story.replace("\n\n", " ").split(". ")
        first = rng.randrange(len(sentences))
        story = ". ".join(sentences[first : first + rng.randrange(1, 7)]).rstrip(".") + "."
    order = rng.choice(
        ("Repeat this text", "Copy this text", "Please repeat this text", "Write this text again")
    )
    return ask(
        rng.choice((f"{order}: {story}", f"{order}:\n\n{story}", f"{order} word for word.\n\n{story}")), story
    )


def _repeat(rng: Random, tables: Tables) -> list[Turn]:
    start = rng.choice(("I like", "The sun is warm and", "Every day is", "We went to see", "My friend has"))
    end = rng.choice((*tables.world["food"], "new things", "bright days", "a story"))
    return ask(f"Repeat after me: {start} {end}.", f"{start} {end}.")


def _poem(rng: Random, tables: Tables) -> list[Turn]:
    animal, trait = rng.choice(tables.world["animal"]), rng.choice(tables.world["trait"])
    poem = choose(rng.choice(tables.poems), rng).replace("$a", animal).replace("$t", trait)
    noun = with_article(animal)
    wordings = (
        f"Write a short poem about {noun}.",
        f"Write a poem with {noun} in it.",
        f"Please write a four line poem about {noun}.",
        f"Write a poem about {noun}.",
    )
    return ask(rng.choice(wordings), fix_articles(poem))


SKILLS: Skills = ((1, _json), (1.2, _edit_json), (1.4, _copy), (0.3, _repeat), (1.4, _poem))
