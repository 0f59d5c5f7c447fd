"""Hypothesis strategies: any message that is allowed on the wire, built from the annotations and the limits."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from headrace.ipc import limits
from headrace.ipc.messages import (
    Cancel,
    Credit,
    Finished,
    Goodbye,
    Hello,
    Load,
    Logprobs,
    Ping,
    Refused,
    Rejected,
    Sampling,
    Submit,
    Tokens,
    Welcome,
)
from headrace.ipc.packed import pack_int32

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
IDS = st.lists(st.integers(0, limits.COUNT[1]), max_size=12).map(pack_int32)


def value_of(where: str, annotation: Any) -> st.SearchStrategy[Any]:
    """Any value of one field."""
    if get_origin(annotation) is tuple:
        inner = get_args(annotation)
        if inner[-1] is Ellipsis:
            return st.lists(value_of(where, inner[0]), max_size=4).map(tuple)
        return st.tuples(*(value_of(where, part) for part in inner))
    scalars: dict[type, Callable[[], st.SearchStrategy[Any]]] = {
        int: lambda: st.integers(*limits.INT_RANGES.get(where, limits.NATURAL)),
        float: lambda: st.floats(
            *limits.FLOAT_RANGES.get(where, (None, None)), allow_nan=False, allow_infinity=False
        ),
        str: lambda: st.sampled_from(sorted(limits.CHOICES[where])) if where in limits.CHOICES else TEXT,
        bytes: lambda: IDS,
        bool: st.booleans,
    }
    return scalars[annotation]() if annotation in scalars else build(annotation)


def build(message: type) -> st.SearchStrategy[Any]:
    """Any instance whose fields are allowed one by one."""
    hints = get_type_hints(message)
    return st.builds(
        message, *(value_of(f"{message.__name__}.{f.name}", hints[f.name]) for f in fields(message))
    )


@st.composite
def tokens(draw: st.DrawFn) -> Tokens:
    """Any Tokens message whose columns belong together."""
    counts = draw(st.lists(st.integers(1, 255), max_size=4))
    num_rows, num_tokens = len(counts), sum(counts)
    with_logprobs = draw(st.sets(st.integers(0, num_rows - 1))) if num_rows else set()
    logprobs = []
    for row in sorted(with_logprobs):
        top_k = draw(st.integers(0, limits.MAX_LOGPROBS))
        cells = counts[row] * top_k
        logprobs.append(Logprobs(row, bytes(4 * counts[row]), top_k, bytes(4 * cells), bytes(4 * cells)))
    return Tokens(
        step=draw(st.integers(*limits.NATURAL)),
        streams=draw(st.binary(min_size=4 * num_rows, max_size=4 * num_rows)),
        starts=draw(st.binary(min_size=4 * num_rows, max_size=4 * num_rows)),
        counts=bytes(counts),
        token_ids=pack_int32(
            draw(st.lists(st.integers(0, limits.COUNT[1]), min_size=num_tokens, max_size=num_tokens))
            if num_tokens < 16
            else range(num_tokens)
        ),
        logprobs=tuple(logprobs),
        finished=tuple(draw(st.lists(build(Finished), max_size=3))),
    )


TO_ENGINE = st.one_of([build(kind) for kind in (Hello, Submit, Credit, Cancel, Goodbye, Ping)])
TO_GATEWAY = st.one_of([build(kind) for kind in (Welcome, Refused, Rejected, Load, Goodbye)] + [tokens()])
SAMPLING = build(Sampling)
