"""Readers and writers of message fields, built once from the dataclass annotations and ipc/limits.py.

A frame is read by the schema, never the other way round: only the schema opens an array, so nothing is
allocated that a message does not ask for, and nesting is as deep as the dataclasses are. ipc/codec.py calls.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, get_args, get_origin, get_type_hints

from msgpack import Unpacker

from headrace.ipc import limits


class BadField(Exception):
    """A value that its field does not allow; the message names both."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field: `read` takes it from a frame, `lower` turns it into what msgpack packs. Both check it."""

    read: Callable[[Unpacker], Any]
    lower: Callable[[Any], Any]


def scalar(check: Callable[[Any], Any]) -> Field:
    """A field that is one MessagePack value; `check` returns it or raises BadField."""
    return Field(lambda unpacker: check(unpacker.unpack()), check)


def integer(where: str) -> Field:
    low, high = limits.INT_RANGES.get(where, limits.NATURAL)

    def check(value: Any) -> Any:
        if type(value) is not int:
            raise BadField(f"{where} is {_kind(value)}, not an integer")
        if not low <= value <= high:
            raise BadField(f"{where} = {value} is outside {low}..{high}")
        return value

    return scalar(check)


def real(where: str) -> Field:
    low, high = limits.FLOAT_RANGES.get(where, (-math.inf, math.inf))

    def check(value: Any) -> Any:
        if type(value) is int and abs(value) < 1 << 53:
            value = float(value)
        if type(value) is not float:
            raise BadField(f"{where} is {_kind(value)}, not a number")
        if not math.isfinite(value) or not low <= value <= high:
            raise BadField(f"{where} = {value} is outside {low}..{high}")
        return value

    return scalar(check)


def string(where: str) -> Field:
    max_bytes = limits.STRING_BYTES.get(where, limits.MAX_NAME_BYTES)
    choices = limits.CHOICES.get(where)

    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise BadField(f"{where} is {_kind(value)}, not a string")
        if len(value) > max_bytes or (not value.isascii() and _utf8_len(where, value) > max_bytes):
            raise BadField(f"{where} is longer than {max_bytes} bytes")
        if choices is not None and value not in choices:
            raise BadField(f"{where} = {value[:40]!r} is none of {', '.join(sorted(choices))}")
        return value

    def cut(value: Any) -> str:
        if isinstance(value, str):
            value = value.encode(errors="replace")[:max_bytes].decode(errors="ignore")
        return check(value)

    return Field(scalar(check).read, cut if where in limits.TEXTS else check)


def boolean(where: str) -> Field:
    def check(value: Any) -> bool:
        if not isinstance(value, bool):
            raise BadField(f"{where} is {_kind(value)}, not a boolean")
        return value

    return scalar(check)


def binary(where: str) -> Field:
    def check(value: Any) -> bytes:
        if not isinstance(value, bytes):
            raise BadField(f"{where} is {_kind(value)}, not bytes")
        return value

    return scalar(check)


def repeated(where: str, item: Field) -> Field:
    """tuple[X, ...], at most limits.TUPLE_LENGTHS long."""
    longest = limits.TUPLE_LENGTHS[where]

    def read(unpacker: Unpacker) -> tuple[Any, ...]:
        count = unpacker.read_array_header()
        if count > longest:
            raise BadField(f"{where} has {count} entries, at most {longest} are allowed")
        return tuple([item.read(unpacker) for _ in range(count)])

    def lower(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, tuple):
            raise BadField(f"{where} is {_kind(value)}, not a tuple")
        if len(value) > longest:
            raise BadField(f"{where} has {len(value)} entries, at most {longest} are allowed")
        return tuple([item.lower(entry) for entry in value])

    return Field(read, lower)


def fixed(where: str, items: tuple[Field, ...]) -> Field:
    """tuple[X, Y]: an array of exactly these."""

    def read(unpacker: Unpacker) -> tuple[Any, ...]:
        expect_length(where, unpacker.read_array_header(), len(items))
        return tuple([item.read(unpacker) for item in items])

    def lower(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, tuple):
            raise BadField(f"{where} is {_kind(value)}, not a tuple")
        expect_length(where, len(value), len(items))
        return tuple([item.lower(entry) for item, entry in zip(items, value, strict=True)])

    return Field(read, lower)


def nested(message: type) -> Field:
    """A dataclass inside another: an array of its fields."""
    members = members_of(message)
    where = message.__name__

    def read(unpacker: Unpacker) -> Any:
        expect_length(where, unpacker.read_array_header(), len(members))
        return message(*[member.read(unpacker) for member in members])

    def lower(value: Any) -> tuple[Any, ...]:
        if type(value) is not message:
            raise BadField(f"{where} is expected, not {_kind(value)}")
        return lower_members(value)

    lower_members = lowering(message, members)
    return Field(read, lower)


def members_of(message: type) -> tuple[Field, ...]:
    """The fields of a dataclass, in order."""
    hints = get_type_hints(message)
    return tuple(_field(f"{message.__name__}.{f.name}", hints[f.name]) for f in fields(message))


def lowering(message: type, members: tuple[Field, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """A function from an instance to the plain tuple of its checked fields."""
    names = [f.name for f in fields(message)]
    if len(names) < 2:  # attrgetter of one name returns no tuple
        return lambda value: tuple(m.lower(getattr(value, n)) for m, n in zip(members, names, strict=True))
    get = attrgetter(*names)
    lowers = [member.lower for member in members]
    return lambda value: tuple([lower(entry) for lower, entry in zip(lowers, get(value), strict=True)])


def expect_length(where: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise BadField(f"{where} has {found} fields, not {wanted}")


def _field(where: str, annotation: Any) -> Field:
    if get_origin(annotation) is tuple:
        arguments = get_args(annotation)
        if arguments[-1] is Ellipsis:
            return repeated(where, _field(where, arguments[0]))
        return fixed(where, tuple(_field(where, argument) for argument in arguments))
    makers: dict[type, Callable[[str], Field]] = {
        int: integer,
        float: real,
        str: string,
        bytes: binary,
        bool: boolean,
    }
    maker = makers.get(annotation)
    return nested(annotation) if maker is None else maker(where)


def _kind(value: object) -> str:
    return type(value).__name__


def _utf8_len(where: str, value: str) -> int:
    try:
        return len(value.encode())
    except UnicodeEncodeError as error:
        raise BadField(f"{where} is not valid Unicode: {error.reason}") from None
