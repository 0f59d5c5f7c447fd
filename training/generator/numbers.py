"""Skills with numbers: sums, counting, sorting, clock times and short word problems. Every answer is computed."""

# ruff: noqa: SIM905  (a line of words reads better than a column of strings)

from random import Random

from training.generator.chat import Skills, Turn, ask
from training.generator.tables import Tables

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
).split()
_TENS = "- - twenty thirty forty fifty sixty seventy eighty ninety".split()
_THINGS = "apples nuts books stones flowers cookies pencils balls shells eggs marbles stickers".split()


def in_words(number: int) -> str:
    """A number from 0 to 99 in words."""
    if number < len(_ONES):
        return _ONES[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")


def _operand(rng: Random) -> int:
    """Mostly small, sometimes up to three digits."""
    return rng.randrange(rng.choice((11, 21, 61, 61, 100, 100, 1000)))


def _result(rng: Random, left: int, sign: str, right: int, result: int) -> str:
    return rng.choice((f"{left} {sign} {right} = {result}.", f"The answer is {result}."))


def _add(rng: Random, _: Tables) -> list[Turn]:
    a, b = _operand(rng), _operand(rng)
    wordings = (
        f"What is {a} + {b}?",
        f"Add {a} and {b}.",
        f"{a} + {b} = ?",
        f"How much is {a} plus {b}?",
        f"{a}+{b}",
    )
    return ask(rng.choice(wordings), _result(rng, a, "+", b, a + b))


def _subtract(rng: Random, _: Tables) -> list[Turn]:
    b, a = sorted((_operand(rng), _operand(rng)))
    wordings = (
        f"What is {a} - {b}?",
        f"How much is {a} minus {b}?",
        f"Take {b} away from {a}.",
        f"{a} - {b} = ?",
    )
    return ask(rng.choice(wordings), _result(rng, a, "-", b, a - b))


def _times(rng: Random, _: Tables) -> list[Turn]:
    a, b = rng.randrange(13), rng.randrange(13)
    wordings = (
        f"What is {a} times {b}?",
        f"What is {a} * {b}?",
        f"Multiply {a} by {b}.",
        f"What is {a} x {b}?",
    )
    return ask(rng.choice(wordings), _result(rng, a, "*", b, a * b))


def _divide(rng: Random, _: Tables) -> list[Turn]:
    b, result = rng.randrange(1, 13), rng.randrange(1, 13)
    a = b * result
    wordings = (f"What is {a} / {b}?", f"Divide {a} by {b}.", f"What is {a} divided by {b}?")
    return ask(rng.choice(wordings), _result(rng, a, "/", b, result))


def _count(rng: Random, _: Tables) -> list[Turn]:
    start, step, length = rng.randrange(1, 90), rng.choice((1, 1, 2, 5, 10)), rng.randrange(4, 11)
    numbers = [start + step * i for i in range(length)]
    last = numbers[-1]
    wordings = [
        f"Count from {start} in steps of {step}. Give me {length} numbers.",
        f"Write {length} numbers, starting with {start}, in steps of {step}.",
    ]
    if step == 1:
        wordings = [f"Count from {start} to {last}.", f"Please count from {start} to {last}."]
    return ask(rng.choice(wordings), ", ".join(map(str, numbers)))


def _sort(rng: Random, _: Tables) -> list[Turn]:
    numbers = rng.sample(range(1, 100), rng.randrange(3, 8))
    falling = rng.random() < 0.3
    order = "large to small" if falling else "small to large"
    question = f"Sort these numbers from {order}: {', '.join(map(str, numbers))}"
    return ask(question, ", ".join(map(str, sorted(numbers, reverse=falling))))


def _compare(rng: Random, _: Tables) -> list[Turn]:
    a, b = rng.sample(range(1, 200), 2)
    if rng.random() < 0.7:
        return ask(f"Which number is larger, {a} or {b}?", f"{max(a, b)} is larger than {min(a, b)}.")
    return ask(f"Which number is smaller, {a} or {b}?", f"{min(a, b)} is smaller than {max(a, b)}.")


def _parity(rng: Random, _: Tables) -> list[Turn]:
    number = rng.randrange(1, 200)
    return ask(f"Is {number} odd or even?", f"{number} is {'odd' if number % 2 else 'even'}.")


def _words(rng: Random, _: Tables) -> list[Turn]:
    number = rng.randrange(100)
    if rng.random() < 0.5:
        return ask(f"Write {number} in words.", in_words(number).capitalize() + ".")
    return ask(f"Write {in_words(number)} as a number.", f"{number}")


def _clock(rng: Random, _: Tables) -> list[Turn]:
    hour, later = rng.randrange(1, 13), rng.randrange(1, 7)
    then = (hour + later - 1) % 12 + 1
    unit = "hour" if later == 1 else "hours"
    return ask(
        f"It is {hour} o'clock. What time will it be in {later} {unit}?",
        f"In {later} {unit} it will be {then} o'clock.",
    )


def _have(count: int, things: str) -> str:
    return f"{count} {things if count != 1 else things[:-1]}"


def _problem(rng: Random, tables: Tables) -> list[Turn]:
    name, other = rng.sample(tables.names, 2)
    things = rng.choice(_THINGS)
    a, b = rng.randrange(2, 30), rng.randrange(1, 20)
    if rng.random() < 0.5:
        given = rng.choice((f"{other} gives {name} {b} more.", f"Then {name} finds {b} more."))
        story, total, sum_ = given, a + b, f"{a} + {b}"
    else:
        a, b = max(a, b) + 1, min(a, b)
        gone = rng.choice((f"{name} gives {b} to {other}.", f"{name} loses {b} of them."))
        story, total, sum_ = gone, a - b, f"{a} - {b}"
    question = f"{name} has {a} {things}. {story} How many {things} does {name} have now?"
    answer = rng.choice((f"{sum_} = {total}. ", "")) + f"{name} has {_have(total, things)} now."
    return ask(question, answer)


def _groups(rng: Random, tables: Tables) -> list[Turn]:
    name, things = rng.choice(tables.names), rng.choice(_THINGS)
    bags, each = rng.randrange(2, 11), rng.randrange(2, 11)
    total = bags * each
    if rng.random() < 0.5:
        question = f"{name} has {bags} bags with {each} {things} in each bag. How many {things} are there?"
        return ask(question, f"{bags} * {each} = {total}. There are {total} {things}.")
    question = f"{name} shares {total} {things} equally among {bags} friends. How many does each friend get?"
    return ask(question, f"{total} / {bags} = {each}. Each friend gets {each} {things}.")


SKILLS: Skills = (
    (3, _add),
    (2, _subtract),
    (1.5, _times),
    (0.7, _divide),
    (0.8, _count),
    (0.8, _sort),
    (0.6, _compare),
    (0.3, _parity),
    (0.5, _words),
    (0.4, _clock),
    (1.2, _problem),
    (0.6, _groups),
)
