"""Frozen dataclasses from JSON, each value checked against its annotation. Used for records and price sheets.

Knows dataclasses, tuples, mappings, optional and plain values; nothing else, and nothing of what they mean.
"""

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, cast

T = TypeVar("T")


class BadValue(ValueError):
    """A value is not what its place asks for; the message names the place."""


def build(cls: type[T], data: Any, where: str = "") -> T:
    """An instance of the dataclass `cls` from what `json.loads` or `tomllib.loads` gave.

    Raises:
        BadValue: a field is missing, unknown, or of another type.
    """
    assert is_dataclass(cls)
    if not isinstance(data, dict):
        raise BadValue(f"{where or cls.__name__} must be an object, not {type(data).__name__}")
    hints = typing.get_type_hints(cls)
    known = {entry.name: entry for entry in fields(cls)}
    for name in data:
        if name not in known:
            raise BadValue(f"{_join(where, str(name))} is unknown; known are {', '.join(known)}")
    values = {}
    for name, entry in known.items():
        if name in data:
            values[name] = _value(hints[name], data[name], _join(where, name))
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise BadValue(f"{_join(where, name)} is missing")
    return cls(**values)


def _value(hint: Any, data: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if data is None and type(None) in arguments:
            return None
        rest = [argument for argument in arguments if argument is not type(None)]
        return _value(rest[0], data, where)
    if origin is tuple:
        return _tuple(arguments, data, where)
    if origin is Mapping:
        if not isinstance(data, dict):
            raise BadValue(f"{where} must be an object")
        return {str(key): _value(arguments[1], value, _join(where, str(key))) for key, value in data.items()}
    if is_dataclass(hint):
        return build(cast("type[Any]", hint), data, where)
    return _plain(hint, data, where)


def _tuple(arguments: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise BadValue(f"{where} must be an array")
    if arguments[-1] is Ellipsis:
        hints = (arguments[0],) * len(data)
    elif len(arguments) == len(data):
        hints = arguments
    else:
        raise BadValue(f"{where} must have {len(arguments)} entries, not {len(data)}")
    return tuple(
        _value(hint, entry, f"{where}[{i}]") for i, (hint, entry) in enumerate(zip(hints, data, strict=True))
    )


def _plain(hint: Any, data: Any, where: str) -> Any:
    if hint is float and type(data) in (int, float):
        return float(data)
    if type(data) is not hint:
        raise BadValue(f"{where} must be {hint.__name__}, not {data!r:.60}")
    return data


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
