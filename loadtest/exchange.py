"""One request of a load test and what came back: the record that a client fills and the recorder reads.

Knows no socket. Times are seconds of time.perf_counter.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

Kind = Literal["chat", "completion"]


@dataclass(frozen=True, slots=True)
class Call:
    """What to ask: the API and its body, without `model` and the streaming fields, which the client adds."""

    kind: Kind
    body: Mapping[str, Any]


@dataclass(slots=True, eq=False)
class Exchange:
    """The call and its answer. `arrivals` holds one time for each event that brought text."""

    call: Call
    intended: float  # when it should have been sent
    keep_text: bool = False
    sent: float = 0.0  # when the client took it up; connecting, if needed, comes after
    arrivals: "array[float]" = field(default_factory=lambda: array("d"))
    ended: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int | None = None  # by the server's count; None = it did not say
    finish_reason: str = ""
    error: str = ""  # its kind, "" = none
    detail: str = ""  # of the error, for people
    pieces: list[bytes] = field(default_factory=list)  # the text, as the insides of JSON strings

    @property
    def tokens(self) -> int:
        """Output tokens: the server's count, else one for each event."""
        return len(self.arrivals) if self.output_tokens is None else self.output_tokens

    def fail(self, kind: str, detail: str) -> None:
        """Keep the first error."""
        if not self.error:
            self.error, self.detail = kind, detail[:500]

    def take_usage(self, usage: Mapping[str, Any]) -> None:
        """The `usage` object of an OpenAI-compatible server."""
        self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        self.output_tokens = int(usage.get("completion_tokens") or 0)
        details = usage.get("prompt_tokens_details") or {}
        self.cached_tokens = int(details.get("cached_tokens") or 0)

    def text(self) -> str:
        """The answer, if `keep_text` was set; as it came, if that is no JSON text."""
        try:
            return str(orjson.loads(b'"%b"' % b"".join(self.pieces)))
        except orjson.JSONDecodeError:
            return b"".join(self.pieces).decode(errors="replace")
