"""Chats with tools: definitions in a system message, a call as JSON between tags, a result, an answer from it.

The definitions are written as the model's chat template writes those of an API request.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from training.generator.chat import Turn, ask
from training.generator.tables import Tables
from training.generator.talk import exchange


@dataclass(frozen=True, slots=True)
class Use:
    """One occasion to call a tool."""

    question: str
    arguments: dict[str, object]
    result: dict[str, object]
    answer: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as an API client would define it, and how it comes to be used."""

    name: str
    description: str
    parameters: dict[str, str]  # name -> JSON type
    use: Callable[[Random, Tables], Use]

    def definition(self) -> str:
        """One line of JSON, as `tojson` writes a function of the OpenAI API."""
        properties = {name: {"type": kind} for name, kind in self.parameters.items()}
        schema = {"type": "object", "properties": properties, "required": list(self.parameters)}
        return json.dumps({"name": self.name, "description": self.description, "parameters": schema})


def _city(rng: Random, tables: Tables) -> str:
    return rng.choice(tables.capitals)[1]


def _weather(rng: Random, tables: Tables) -> Use:
    city, degrees, sky = (
        _city(rng, tables),
        rng.randrange(-5, 36),
        rng.choice(("sunny", "cloudy", "rainy", "windy")),
    )
    question = rng.choice(
        (
            f"What is the weather in {city}?",
            f"How is the weather in {city} today?",
            f"Will I need a coat in {city}?",
        )
    )
    answer = f"It is {sky} in {city}, and the temperature is {degrees} degrees."
    return Use(question, {"city": city}, {"temperature": degrees, "sky": sky}, answer)


def _time(rng: Random, tables: Tables) -> Use:
    city, time = _city(rng, tables), f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
    question = rng.choice((f"What time is it in {city}?", f"Tell me the time in {city}."))
    return Use(question, {"city": city}, {"time": time}, f"It is {time} in {city}.")


def _calculate(rng: Random, _: Tables) -> Use:
    a, b = rng.randrange(10, 999), rng.randrange(10, 999)
    sign, result = rng.choice((("*", a * b), ("+", a + b), ("-", a - b)))
    expression = f"{a} {sign} {b}"
    return Use(
        f"What is {expression}?", {"expression": expression}, {"result": result}, f"{expression} = {result}."
    )


def _timer(rng: Random, _: Tables) -> Use:
    minutes = rng.choice((2, 3, 5, 7, 10, 12, 15, 20, 25, 30, 45, 60))
    question = rng.choice((f"Set a timer for {minutes} minutes.", f"Wake me in {minutes} minutes."))
    return Use(question, {"minutes": minutes}, {"ok": True}, f"I have set a timer for {minutes} minutes.")


def _message(rng: Random, tables: Tables) -> Use:
    name = rng.choice(tables.names)
    said = rng.choice(
        ("I am late", "I am at home", "dinner is ready", "I found the key", "I will call tomorrow")
    )
    text = f"{said[0].upper()}{said[1:]}."
    return Use(
        f"Tell {name} that {said}.",
        {"to": name, "text": text},
        {"ok": True},
        f"I have sent your message to {name}.",
    )


def _search(rng: Random, tables: Tables) -> Use:
    topic, found = rng.choice(tables.animals)[0] + "s", rng.randrange(2, 20)
    question = rng.choice((f"Find documents about {topic}.", f"Search for {topic}."))
    return Use(question, {"query": topic}, {"found": found}, f"I found {found} documents about {topic}.")


def _light(rng: Random, _: Tables) -> Use:
    room, state = rng.choice(("kitchen", "bedroom", "hall", "garden", "bathroom")), rng.choice(("on", "off"))
    question = rng.choice(
        (f"Turn {state} the light in the {room}.", f"Please switch {state} the {room} light.")
    )
    return Use(question, {"room": room, "state": state}, {"ok": True}, f"The light in the {room} is {state}.")


def _song(rng: Random, tables: Tables) -> Use:
    song = (
        f"The {rng.choice(tables.world['col']).capitalize()} {rng.choice(tables.world['toy']).capitalize()}"
    )
    question = rng.choice((f'Play the song "{song}".', f'I want to hear "{song}".'))
    return Use(question, {"title": song}, {"playing": True}, f'Now playing "{song}".')


TOOLS = (
    Tool("get_weather", "Get the weather for a city", {"city": "string"}, _weather),
    Tool("get_time", "Get the current time in a city", {"city": "string"}, _time),
    Tool("calculate", "Calculate an arithmetic expression", {"expression": "string"}, _calculate),
    Tool("set_timer", "Set a timer", {"minutes": "integer"}, _timer),
    Tool("send_message", "Send a message to a person", {"to": "string", "text": "string"}, _message),
    Tool("search", "Search for documents", {"query": "string"}, _search),
    Tool("set_light", "Turn a light on or off", {"room": "string", "state": "string"}, _light),
    Tool("play_song", "Play a song", {"title": "string"}, _song),
)


def tool_chat(rng: Random, tables: Tables) -> list[Turn]:
    """One to four tools are offered; one or two questions use them."""
    offered = rng.sample(TOOLS, rng.randrange(1, 5))
    turns = [Turn("system", "You can use these tools:\n" + "\n".join(tool.definition() for tool in offered))]
    if rng.random() < 0.25:
        turns += exchange(rng, tables)
    for _ in range(rng.choice((1, 1, 2))):
        tool = rng.choice(offered)
        use = tool.use(rng, tables)
        call = json.dumps({"name": tool.name, "arguments": use.arguments})
        turns += ask(use.question, f"<tool_call>\n{call}\n</tool_call>")
        turns += [Turn("tool", json.dumps(use.result)), Turn("assistant", use.answer)]
    return turns
