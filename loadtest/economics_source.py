"""Throughput per GPU out of a record: a load test's (JSON) or an engine benchmark's (JSONL).

Reads files; knows nothing of money.
"""

import json
from pathlib import Path
from typing import Any

from headrace.config import ConfigError
from headrace.loadtest import record as records
from headrace.loadtest.economics import Source


def read_source(path: Path, gpus: int) -> tuple[Source, dict[str, float]]:
    """The measurement, and the assumptions that it replaces (a load test knows its mix of tokens).

    Args:
        path: of the record.
        gpus: behind the figures; 0 = what the record says, else 1.

    Raises:
        ConfigError: not readable, no record, or one without throughput.
    """
    try:
        first = path.read_text().lstrip().partition("\n")[0]
        head = json.loads(first)
    except (OSError, ValueError) as error:
        raise ConfigError(f"record {path}: {error}") from None
    if isinstance(head, dict) and "runs" in head:
        return _load_test(path, gpus)
    return _engine(path, gpus), {}


def _load_test(path: Path, gpus: int) -> tuple[Source, dict[str, float]]:
    record = records.load(path)
    run = record.best
    count = gpus or record.gpus or 1
    if not run.output_tokens_per_s or not run.prompt_tokens:
        raise ConfigError(f"record {path} has no throughput: no tokens, or a server that reports no usage")
    hit = run.cached_tokens / run.prompt_tokens
    inputs, output = run.input_tokens_per_s / count, run.output_tokens_per_s / count
    name = f"{record.name}, {run.load}, {count} GPU{'s' * (count != 1)}"
    mix = {"input_per_output": inputs / output, "cache_hit": hit}
    return Source(name, None, None, (inputs * (1 - hit), inputs * hit, output)), mix


def _engine(path: Path, gpus: int) -> Source:
    """The fastest decode, and the fastest prefill if there is one."""
    points: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            point = json.loads(line) if line.strip() else None
            if point is not None:
                points.append(
                    {"bench": str(point["bench"]), "tokens_per_s": float(point["tokens_per_s"]), **point}
                )
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"record {path}, line {number}: no result of an engine benchmark") from None
    decode = max(
        (p for p in points if p["bench"] == "decode"), key=lambda p: float(p["tokens_per_s"]), default=None
    )
    if decode is None:
        raise ConfigError(f"record {path} has no decode result")
    same = [p for p in points if p["bench"] == "prefill" and p.get("model") == decode.get("model")]
    prefill = max((float(p["tokens_per_s"]) for p in same), default=None)
    count = gpus or 1
    name = (
        f"{decode.get('model', 'engine')}, batch {decode.get('batch', '?')}, {decode.get('card', '')}".rstrip(
            ", "
        )
    )
    return Source(name, None if prefill is None else prefill / count, float(decode["tokens_per_s"]) / count)
