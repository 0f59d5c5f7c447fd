"""Published request traces, and recorded requests: Mooncake, BurstGPT, Azure LLM, pairs of lengths, replays.

The kind is told by the file itself. Lengths and times are the trace's; the words are made up, so that what shared a
prefix in a Mooncake trace shares one here. Called by plan.py.
"""

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

from headrace.config import ConfigError
from headrace.loadtest.exchange import Call, Kind
from headrace.loadtest.words import TokenRate, block, text
from headrace.loadtest.workload import Session, Turn

MOONCAKE_BLOCK = 512  # tokens behind one hash id


class BadTrace(ConfigError):
    """The file is no trace of a known kind; the message names the entry."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One request of a trace."""

    prompt: int  # tokens
    output: int
    at: float | None  # seconds, from the trace's own zero
    hash_ids: tuple[int, ...] = ()  # of blocks that entries may share
    recorded: Call | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Entries in order of time, the first at 0 s; or in the file's order and without times."""

    kind: str
    entries: tuple[Entry, ...]

    @property
    def timed(self) -> bool:
        """Whether the trace says when."""
        return self.entries[0].at is not None

    def sessions(self, rate: TokenRate, seed: int) -> Iterator[Session]:
        """One after the other; the text of each is made when it is asked for."""
        for index, entry in enumerate(self.entries):
            yield _session(entry, rate, f"{seed}-{index}")

    def endless(self, rate: TokenRate, seed: int) -> Iterator[Session]:
        """Over and over, each round with new words, without times."""
        while True:
            for session in self.sessions(rate, seed):
                yield replace(session, at=None)
            seed += 1


def read_trace(path: Path) -> Trace:
    """Read and check a file.

    Raises:
        BadTrace: not readable, not of a known kind, or an entry that is none.
    """
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadTrace(f"trace {path}: {error}") from None
    kind, rows = _rows(path, content)
    entries = []
    for number, row in enumerate(rows, 1):
        try:
            entry = _READERS[kind](row)
        except (KeyError, TypeError, ValueError) as error:
            what = f"no {kind} entry ({type(error).__name__}: {error})"
            raise BadTrace(f"trace {path}, entry {number}: {what}") from None
        entries.append(entry)
    if not entries:
        raise BadTrace(f"trace {path} is empty")
    return Trace(kind, _from_zero(entries))


def _rows(path: Path, content: str) -> tuple[str, Sequence[Any]]:
    """What kind of trace, and its entries, unread."""
    first = content.lstrip()[:1]
    try:
        if first == "[":
            return "pairs", json.loads(content)
        if first == "{":
            rows = [json.loads(line) for line in content.splitlines() if line.strip()]
            return ("mooncake" if "input_length" in rows[0] else "recorded"), rows
    except ValueError as error:
        raise BadTrace(f"trace {path} is no JSON: {error}") from None
    table = list(csv.DictReader(content.splitlines()))
    names = set(table[0]) if table else set()
    if {"Timestamp", "Request tokens", "Response tokens"} <= names:
        return "burstgpt", [
            row for row in table if row["Response tokens"] != "0"
        ]  # 0 = a request that failed
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= names:
        return "azure", table
    raise BadTrace(
        f"trace {path}: neither Mooncake or recorded JSONL, nor BurstGPT or Azure CSV, nor [[in, out], ...]"
    )


def _pair(row: Sequence[int]) -> Entry:
    prompt, output = row
    return _checked(prompt, output, None)


def _mooncake(row: Mapping[str, Any]) -> Entry:
    """Timestamps in ms; a hash id stands for 512 tokens and all before them."""
    hash_ids = tuple(int(number) for number in row.get("hash_ids") or ())
    return _checked(row["input_length"], row["output_length"], float(row["timestamp"]) / 1000, hash_ids)


def _burstgpt(row: Mapping[str, str]) -> Entry:
    """Timestamps in seconds."""
    return _checked(row["Request tokens"], row["Response tokens"], float(row["Timestamp"]))


def _azure(row: Mapping[str, str]) -> Entry:
    """Timestamps with up to seven digits of a second, with or without an offset from UTC."""
    whole, _, fraction = row["TIMESTAMP"].strip().partition(".")
    digits = fraction.partition("+")[0] or "0"
    # Only differences count, and the offset is the same on every line.
    at = datetime.fromisoformat(whole.partition("+")[0] + "+00:00").timestamp() + float(f"0.{digits}")
    return _checked(row["ContextTokens"], row["GeneratedTokens"], at)


def _recorded(row: Mapping[str, Any]) -> Entry:
    """{"at": seconds, "kind": "chat" | "completion", "body": {...}}; `at` and `kind` may be left out."""
    body = {key: row["body"][key] for key in row["body"] if key not in ("model", "stream", "stream_options")}
    chat = "messages" in body
    if row.get("kind", "chat" if chat else "completion") != ("chat" if chat else "completion"):
        raise ValueError(f"kind = {row['kind']!r}, but the body {'has' if chat else 'has no'} messages")
    kind: Kind = "chat" if chat else "completion"
    at = row.get("at")
    return Entry(0, 0, None if at is None else float(at), recorded=Call(kind, body))


_READERS: dict[str, Callable[[Any], Entry]] = {
    "pairs": _pair,
    "mooncake": _mooncake,
    "burstgpt": _burstgpt,
    "azure": _azure,
    "recorded": _recorded,
}


def _checked(prompt: str | int, output: str | int, at: float | None, hash_ids: tuple[int, ...] = ()) -> Entry:
    num_prompt, num_output = int(prompt), int(output)
    if num_prompt < 0 or num_output < 0:
        raise ValueError(f"{num_prompt} and {num_output} tokens")
    return Entry(max(1, num_prompt), max(1, num_output), at, hash_ids)


def _session(entry: Entry, rate: TokenRate, seed: str) -> Session:
    if entry.recorded is not None:
        return Session((), at=entry.at, recorded=entry.recorded)
    wanted = rate.words(entry.prompt)
    each = max(1, round(MOONCAKE_BLOCK / rate.per_word))
    shared = [block(f"mooncake {number}", each) for number in entry.hash_ids[: wanted // each]]
    own = max(1, wanted - each * len(shared))
    words = f"{seed} {text(Random(seed), own - 1)}".strip()  # noqa: S311 - not for secrets
    return Session((Turn(" ".join([*shared, words]), entry.output),), at=entry.at)


def _from_zero(entries: list[Entry]) -> tuple[Entry, ...]:
    """In order of time and beginning at 0, if they all have times."""
    times = [entry.at for entry in entries if entry.at is not None]
    if len(times) < len(entries):
        return tuple(replace(entry, at=None) for entry in entries)
    start = min(times)
    moved = (replace(entry, at=at - start) for entry, at in zip(entries, times, strict=True))
    return tuple(sorted(moved, key=lambda entry: entry.at or 0.0))
