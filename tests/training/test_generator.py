"""The generator's chats are the same for a seed, well formed, and true."""

import itertools
import json
import operator
import re
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from training.generator import numbers, words
from training.generator.chat import pick, render
from training.generator.chats import make_chat
from training.generator.stories import tell
from training.generator.tables import Tables, load_tables
from training.generator.template import fill, fix_articles, title_case
from training.generator.tools import tool_chat

CHATS = 1500
OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}


@pytest.fixture(scope="module")
def tables() -> Tables:
    return load_tables()


def test_a_seed_gives_one_chat(tables: Tables) -> None:
    again = load_tables()
    for seed in range(200):
        assert make_chat(seed, tables) == make_chat(seed, again)
    assert len({render(make_chat(seed, tables)) for seed in range(200)}) > 180


def test_chats_alternate_and_leave_no_template_behind(tables: Tables) -> None:
    for seed in range(CHATS):
        turns = make_chat(seed, tables)
        roles = [turn.role for turn in turns]
        assert roles[-1] == "assistant"
        assert "system" not in roles[1:]
        for earlier, later in itertools.pairwise(roles):
            assert (earlier, later) in {
                ("system", "user"),
                ("user", "assistant"),
                ("assistant", "user"),
                ("assistant", "tool"),
                ("tool", "assistant"),
            }
        for turn in turns:
            assert turn.text.strip() == turn.text != ""
            assert not re.search(r"\$[A-Za-z]|<\|", turn.text)


def test_sums_are_right(tables: Tables) -> None:
    """Every `a + b = c` that an assistant writes, and `The answer is c` after `a + b` in the question."""
    found: Counter[str] = Counter()
    rng = Random(1)
    for _ in range(CHATS):
        question, answer = (turn.text for turn in pick(numbers.SKILLS, rng)(rng, tables))
        for a, sign, b, c in re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", answer):
            found[sign] += 1
            assert OPERATORS[sign](int(a), int(b)) == int(c)
        bare = re.fullmatch(r"(?:What is )?(\d+) ?([-+*/]) ?(\d+)(?: = )?\??", question)
        if bare and answer.startswith("The answer is"):
            found["answer"] += 1
            assert answer == f"The answer is {OPERATORS[bare[2]](int(bare[1]), int(bare[3]))}."
    assert all(found[kind] > 10 for kind in ("+", "-", "*", "/", "answer"))


def test_sorted_numbers_are_sorted(tables: Tables) -> None:
    rng = Random(2)
    seen = 0
    for _ in range(CHATS):
        question, answer = (turn.text for turn in pick(numbers.SKILLS, rng)(rng, tables))
        if question.startswith("Sort these numbers"):
            seen += 1
            given = [int(x) for x in question.split(": ")[1].split(", ")]
            assert [int(x) for x in answer.split(", ")] == sorted(given, reverse="large to small" in question)
    assert seen > 20


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "zero"), (13, "thirteen"), (20, "twenty"), (21, "twenty-one"), (99, "ninety-nine")],
)
def test_numbers_in_words(number: int, text: str) -> None:
    assert numbers.in_words(number) == text


def test_the_odd_word_is_not_of_the_kind(tables: Tables) -> None:
    rng = Random(3)
    seen = 0
    for _ in range(CHATS):
        question, answer = (turn.text for turn in pick(words.SKILLS, rng)(rng, tables))
        match = re.fullmatch(r'"(.+)" does not belong. The other words are (.+)\.', answer)
        if match:
            seen += 1
            shown = question.removeprefix("Which word does not belong: ").removesuffix("?").split(", ")
            strangers = [word for word in shown if word not in tables.kinds[match[2]]]
            assert [word.lower() for word in strangers] == [match[1].lower()]
    assert seen > 20


def test_answers_about_a_story_hold_in_its_text(tables: Tables) -> None:
    """Names and things that an answer mentions stand in the story."""
    for seed in range(400):
        story = tell(tables, Random(seed))
        assert story.hero in story.text
        for _, answer in story.questions:
            for name in tables.names:
                if re.search(rf"\b{name}\b", answer):
                    assert re.search(rf"\b{name}\b", story.text), (story.plot, answer)
        for word in story.words:
            assert re.search(rf"\b{word}\b", story.text)


def test_every_plot_is_told_with_all_its_wordings_filled(tables: Tables) -> None:
    told = {tell(tables, Random(seed)).plot for seed in range(600)}
    assert told == {plot.key for plot in tables.plots}
    slots = set(tables.world) | {"N", "F", "k", "fk", "he", "his", "him", "himself", "in", "moral", "trait"}
    for plot in tables.plots:
        assert len(plot.beats) == 6
        for text in (
            plot.title,
            plot.phrase,
            plot.moral,
            *(wording for beat in plot.beats for wording in beat),
        ):
            assert text.count("{") == text.count("}")
            used = {slot.lower() if slot not in "NF" else slot for slot in re.findall(r"\$([A-Za-z]+)", text)}
            assert used <= slots, (plot.key, used - slots)


def test_a_tool_call_is_json_for_an_offered_tool(tables: Tables) -> None:
    for seed in range(200):
        turns = tool_chat(Random(seed), tables)
        offered = {tool["name"]: tool for tool in map(json.loads, turns[0].text.splitlines()[1:])}
        calls = [turn.text for turn in turns if turn.text.startswith("<tool_call>")]
        assert calls
        for call in calls:
            called = json.loads(call.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
            schema = offered[called["name"]]["parameters"]
            assert set(called["arguments"]) == set(schema["required"]) == set(schema["properties"])


def test_template_repairs_articles_speech_and_titles() -> None:
    assert fix_articles("a owl, a honest fox, a unicorn and a one-eyed cat") == (
        "an owl, an honest fox, a unicorn and a one-eyed cat"
    )
    assert fill('"{Mine too}" said $N. "Yes"', {"N": "Tom"}, Random(0)) == '"Mine too," said Tom. "Yes."'
    assert title_case("lily learns to ride a bicycle") == "Lily Learns to Ride a Bicycle"
