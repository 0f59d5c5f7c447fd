"""Typed reading of a config.json section: every refusal names the key and the value found.

Knows JSON only. Called by core/hf_config.py and core/hf_rope.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.config import ConfigError


class UnsupportedModel(ConfigError):
    """A config.json that the models cannot honour."""


@dataclass(frozen=True, slots=True)
class Keys:
    """One JSON object; `prefix` is where it stands in the file, for messages. null counts as absent."""

    data: Mapping[str, Any]
    prefix: str = ""

    def present(self, key: str) -> bool:
        return self.data.get(key) is not None

    def child(self, key: str) -> "Keys":
        value = self.data[key]
        if not isinstance(value, dict):
            raise self._bad(key, "must be an object")
        return Keys(value, f"{self.prefix}{key}.")

    def positive(self, key: str, default: int | None = None) -> int:
        value = self._integer(key, default)
        if value < 1:
            raise self._bad(key, "must be at least 1")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self._integer(key, default)
        if value < 0:
            raise self._bad(key, "must not be negative")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._bad(key, "must be a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._bad(key, "must be true or false")
        return value

    def choice(self, key: str, allowed: Sequence[str], default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise self._bad(key, f"is not supported (only {', '.join(allowed)})")
        return value

    def require(self, key: str, value: Any, default: Any = None) -> None:
        """The one value we support; `default` is what an absent key means."""
        if self._get(key, default) != value:
            raise self._bad(key, f"is not supported (only {value!r})")

    def _integer(self, key: str, default: int | None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._bad(key, "must be an integer")
        return value

    def _get(self, key: str, default: Any) -> Any:
        value = self.data.get(key)
        if value is not None:
            return value
        if default is None:
            raise UnsupportedModel(f"{self.prefix}{key} is missing from config.json")
        return default

    def _bad(self, key: str, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.prefix}{key} = {self.data.get(key)!r} {what}")
