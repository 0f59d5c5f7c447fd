"""Whole chats: stories asked for and asked about, questions in a row, tools, long talks. A seed gives one chat."""

from random import Random

from training.generator import knowledge, numbers, talk, texts, tools, words
from training.generator.chat import Skills, Turn, ask, pick, render
from training.generator.stories import Story, tell
from training.generator.tables import Tables
from training.generator.template import with_article

HELD_OUT_SEED = 9_000_000
"""Chats of seeds from here on are never trained on; they measure."""

_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Use simple words.",
    "You are a storyteller.",
    "Answer briefly.",
)
_VERBS = ("Write", "Tell me", "Please write", "Can you write", "Can you tell me")
_NOUNS = ("a story", "a short story", "a little story", "a bedtime story")
_PLAIN = (
    "Tell me a story.",
    "Write a short story.",
    "I want to hear a story.",
    "Please tell me a bedtime story.",
    "Can you tell me a story?",
    "A story, please.",
    "Tell me another story.",
)
_CONTINUE = (
    "Continue this story: ",
    "Finish this story: ",
    "Here is the beginning of a story. Please write the rest.\n\n",
)
_LESSON = ("What is the lesson of the story?", "What can we learn from it?", "What is the moral?")


def _subject(story: Story, rng: Random) -> str:
    """What a request may say about the story it wants."""
    kind, hero = with_article(story.kind), story.hero
    subjects = [
        f"{kind} named {hero} who {story.phrase}",
        f"{story.who} who {story.phrase}",
        f"{kind} who {story.phrase}",
        f"{hero}, {story.who}, who {story.phrase}",
        f"{hero} the {story.kind}",
        story.who,
        kind,
        f"{kind} and {with_article(story.friend_kind)}",
        f"{hero} and {story.friend}",
        f"{kind} near a {story.place}",
    ]
    if len(story.words) > 1:
        subjects.append(f"{kind}. Use the words {' and '.join(rng.sample(story.words, 2))}")
    return rng.choice(subjects)


def _request(story: Story, rng: Random) -> tuple[str, str]:
    """A request and the text that answers it."""
    draw = rng.random()
    if draw < 0.12:
        return rng.choice(_PLAIN), story.text
    if draw < 0.20:
        return f'Write a story with the title "{story.title}".', story.text
    if draw < 0.28:
        return f"Write a story that teaches this lesson: {story.moral}", story.text
    if draw < 0.40:
        cut = story.text.find(". ", len(story.text) // 4) + 1
        return rng.choice(_CONTINUE) + story.text[:cut], story.text[cut:].strip()
    subject = _subject(story, rng)
    question = f"{rng.choice(_VERBS)} {rng.choice(_NOUNS)} about {subject}"
    question += "?" if question.startswith("Can") and "Use the words" not in question else "."
    if draw < 0.50:
        return question + rng.choice((" Give it a title.", " Add a title.")), f"{story.title}\n\n{story.text}"
    return question, story.text


def _followed(turns: list[Turn], story: Story, rng: Random, questions: int) -> list[Turn]:
    """Add questions about the story that was told or shown."""
    for question, answer in rng.sample(story.questions, min(questions, len(story.questions))):
        turns += ask(question, answer)
    if rng.random() < 0.2:
        turns += ask(rng.choice(_LESSON), story.moral)
    if rng.random() < 0.12:
        question = rng.choice(("Who is the story about?", "Who is the main character?"))
        turns += ask(question, f"The story is about {story.hero}, {story.who}.")
    if rng.random() < 0.1:
        thanks = rng.choice(("Thank you!", "That was nice.", "I liked that story."))
        turns += ask(thanks, rng.choice(("You are welcome!", "I am glad that you liked it.")))
    return turns


def _storytelling(rng: Random, tables: Tables) -> list[Turn]:
    story = tell(tables, rng)
    return _followed(ask(*_request(story, rng)), story, rng, rng.choice((0, 0, 1, 2, 3)))


def _reading(rng: Random, tables: Tables) -> list[Turn]:
    story = tell(tables, rng)
    question, answer = rng.choice(story.questions)
    text = story.text
    draw = rng.random()
    if draw < 0.55:
        form = rng.choice(
            (
                f"Read this story and answer the question.\n\n{text}\n\nQuestion: {question}",
                f"{text}\n\n{question}",
                f"Here is a story.\n\n{text}\n\n{question}",
            )
        )
        turns = ask(form, answer)
    elif draw < 0.75:
        form = rng.choice(
            (
                f"Summarise this story in one sentence.\n\n{text}",
                f"{text}\n\nGive me a one sentence summary.",
                f"What is this story about?\n\n{text}",
            )
        )
        turns = ask(form, f"{story.hero} the {story.kind} {story.phrase}.")
    elif draw < 0.88:
        turns = ask(f"Give this story a title.\n\n{text}", story.title)
    else:
        turns = ask(f"What is the lesson of this story?\n\n{text}", story.moral)
    return _followed(turns, story, rng, rng.choice((0, 0, 1, 2)))


_QUESTIONS: tuple[tuple[float, Skills], ...] = (
    (12, numbers.SKILLS),
    (8, words.SKILLS),
    (13, knowledge.SKILLS),
    (5, texts.SKILLS),
)


def _question(rng: Random, tables: Tables) -> list[Turn]:
    families = [skills for _, skills in _QUESTIONS]
    family = rng.choices(families, [weight for weight, _ in _QUESTIONS])[0]
    return pick(family, rng)(rng, tables)


def _questions(rng: Random, tables: Tables) -> list[Turn]:
    return [turn for _ in range(rng.choice((1, 1, 1, 2, 3, 4))) for turn in _question(rng, tables)]


def _smalltalk(rng: Random, tables: Tables) -> list[Turn]:
    if rng.random() < 0.25:
        told, later = talk.introduction(rng, tables)
        return told + (_question(rng, tables) if rng.random() < 0.5 else []) + later
    return pick(talk.SKILLS, rng)(rng, tables)


def _long_talk(rng: Random, tables: Tables) -> list[Turn]:
    """Many turns with something to remember from the first: what a context of 2,048 tokens is for."""
    told, later = talk.introduction(rng, tables)
    turns = told
    for _ in range(rng.randrange(3, 9)):
        makers = (_storytelling, _question, _question, _question, talk.exchange, talk.feeling)
        turns += rng.choice(makers)(rng, tables)
    return turns + later


_CHATS: Skills = (
    (40, _storytelling),
    (12, _reading),
    (30, _questions),
    (7, _smalltalk),
    (7, tools.tool_chat),
    (4, _long_talk),
)


def make_chat(seed: int, tables: Tables) -> list[Turn]:
    """The chat of this seed."""
    rng = Random(seed ^ 0x5BD1E995)  # noqa: S311  (text, not secrets)
    turns = pick(_CHATS, rng)(rng, tables)
    if turns[0].role != "system" and rng.random() < 0.12:
        turns = [Turn("system", rng.choice(_SYSTEMS)), *turns]
    return turns


def chat_text(seed: int, tables: Tables) -> str:
    """The chat of this seed as the model reads it."""
    return render(make_chat(seed, tables)).strip("\n")
