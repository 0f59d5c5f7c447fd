"""Typed reading of a JSON object: every getter checks type and range and names both in its error.

Knows no API. The parse functions of gateway/openai read request bodies through it.
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from headrace.gateway.errors import bad_request


class Fields:
    """A JSON object under inspection. `null` counts as absent, as OpenAI has it; unknown names are ignored."""

    __slots__ = ("_body", "_path")

    def __init__(self, body: Mapping[str, Any], path: str = "") -> None:
        self._body = body
        self._path = path

    def param(self, name: str) -> str:
        """The field's full name, for error messages."""
        return f"{self._path}.{name}" if self._path else name

    def get(self, name: str) -> Any:
        """The raw value; None when absent."""
        return self._body.get(name)

    def present(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that the object has, `null` or not."""
        body = self._body
        return [name for name in names if name in body]

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong_type(name, "true or false")
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self._body.get(name)
        if value is None:
            return None
        if not is_integer(value):
            raise self.wrong_type(name, "an integer")
        if not low <= value <= high:
            raise self.out_of_range(name, value, low, high)
        return int(value)

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self._body.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong_type(name, "a number")
        if not isfinite(value) or not low <= value <= high:
            raise self.out_of_range(name, value, low, high)
        return float(value)

    def string(self, name: str, max_length: int) -> str | None:
        value = self._body.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.wrong_type(name, "a string")
        if len(value) > max_length:
            raise bad_request(
                f"{self.param(name)} has {len(value)} characters, the limit is {max_length}", self.param(name)
            )
        return value

    def choice(self, name: str, allowed: Sequence[str], default: str) -> str:
        value = self._body.get(name)
        if value is None:
            return default
        if value not in allowed:
            names = ", ".join(f'"{choice}"' for choice in allowed)
            raise self.wrong_type(name, f"one of {names}")
        return str(value)

    def object(self, name: str) -> dict[str, Any] | None:
        value = self._body.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong_type(name, "an object")
        return value

    def array(self, name: str, max_items: int) -> list[Any] | None:
        value = self._body.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong_type(name, "an array")
        if len(value) > max_items:
            raise bad_request(
                f"{self.param(name)} has {len(value)} items, the limit is {max_items}", self.param(name)
            )
        return value

    def wrong_type(self, name: str, expected: str) -> Exception:
        """The error for a value that is not `expected`."""
        param = self.param(name)
        return bad_request(f"{param} must be {expected}, got {kind(self._body.get(name))}", param)

    def out_of_range(self, name: str, value: float, low: float, high: float) -> Exception:
        """The error for a value outside low..high."""
        param = self.param(name)
        return bad_request(f"{param} = {value} is outside {low}..{high}", param)


def is_integer(value: Any) -> bool:
    """True for a JSON integer; `true` is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_token_ids(value: Sequence[Any]) -> bool:
    """True for a sequence of non-negative int32."""
    return all(is_integer(item) and 0 <= item < 2**31 for item in value)


def kind(value: Any) -> str:
    """A JSON value's type in words, with the value where it is short."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"the number {value}"
        case str():
            return f'the string "{value}"' if len(value) <= 40 else f"a string of {len(value)} characters"
        case list():
            return f"an array of {len(value)} items"
        case _:
            return "an object"
