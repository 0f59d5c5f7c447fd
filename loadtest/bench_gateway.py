"""`headrace bench gateway`: one gateway worker beside the usual FastAPI pattern, in interleaved rounds of one run.

Server on one core, client and synthetic engine on another. `python -P -m headrace.loadtest.bench_gateway -h`.
"""

import argparse
import importlib.util
import os
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import uvloop
from rich.console import Console

from headrace.config import ConfigError
from headrace.loadtest.fleet import FASTAPI, HEADRACE, Fleet, fleet
from headrace.loadtest.gateway_point import Load, NothingCame, Point, idle_bytes, measure
from headrace.loadtest.gateway_record import GatewayRecord, append, idle_record, summarise
from headrace.loadtest.show import number, percent

BENCHES = ("saturate", "paced", "new", "idle")
STREAMS = {"saturate": (64, 512, 2000), "paced": (512,), "new": (64,), "idle": (10_000,)}
OUTPUT_TOKENS = {"saturate": 1000, "paced": 1000, "new": 16}
PACED_TOKENS_PER_S = 20_000
IDLE_STEP_MS = 5000.0
EXIT_FAILED, EXIT_CONFIG = 1, 2


def main(argv: Sequence[str]) -> int:
    """Measure, print, append records; 1 = a ratio is below --least, 2 = it cannot be measured here."""
    arguments = _parse(argv)
    console = Console(highlight=False)
    os.sched_setaffinity(0, {arguments.client_core})
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    records: list[GatewayRecord] = []
    try:
        for bench in arguments.benches:
            for streams in arguments.streams or STREAMS[bench]:
                records += _bench(bench, streams, arguments, console)
    except (ConfigError, NothingCame) as error:
        sys.stderr.write(f"headrace bench: {error}\n")
        return EXIT_CONFIG
    finally:
        for record in records:
            append(arguments.record, record)
            console.print(_line(record))
    ratios = [record.ratio for record in records if record.ratio is not None]
    low = arguments.least is not None and min(ratios, default=0.0) < arguments.least
    if low:
        console.print(f"a ratio is below {arguments.least:g}")
    return EXIT_FAILED if low else 0


def _bench(bench: str, streams: int, arguments: argparse.Namespace, console: Console) -> list[GatewayRecord]:
    """All fronts and transports at one number of streams, round by round in turn."""
    step_ms = {"paced": streams / PACED_TOKENS_PER_S * 1e3, "idle": IDLE_STEP_MS}.get(bench, 0.0)
    cases = [
        (front, way) for front in arguments.fronts for way in arguments.transports if _speaks(front, way)
    ]
    points: dict[tuple[str, str], list[Point]] = {case: [] for case in cases}
    sizes: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    with fleet(arguments.fronts, step_ms, arguments.server_core, arguments.client_core) as running:
        for number_ in range(arguments.rounds):
            for case in cases:
                console.print(f"{bench}, {streams} streams, round {number_ + 1}: {case[0]} over {case[1]}")
                if bench == "idle":
                    sizes[case].append(_idle(running, case, streams))
                else:
                    points[case].append(_measure(running, case, bench, streams, arguments.seconds))
    if bench == "idle":
        return [idle_record(front, way, streams, found) for (front, way), found in sizes.items()]
    peers = points.get((FASTAPI, "sse"), [])
    return [
        summarise(bench, front, way, streams, found, peers if front != FASTAPI else [])
        for (front, way), found in points.items()
    ]


def _measure(running: Fleet, case: tuple[str, str], bench: str, streams: int, seconds: float) -> Point:
    front = next(front for front in running.fronts if front.name == case[0])
    load = Load(transport=case[1], streams=streams, output_tokens=OUTPUT_TOKENS[bench], seconds=seconds)
    return uvloop.run(measure(running, front, load, paced=bench == "paced"))


def _idle(running: Fleet, case: tuple[str, str], streams: int) -> float:
    front = next(front for front in running.fronts if front.name == case[0])
    return uvloop.run(idle_bytes(front, case[1], streams))


def _speaks(front: str, transport: str) -> bool:
    return front == HEADRACE or transport == "sse"


def _line(record: GatewayRecord) -> str:
    """A record for people."""
    parts = []
    if record.tokens_per_s_spread is not None:
        low, high = record.tokens_per_s_spread
        parts.append(f"{number(record.tokens_per_s)} tokens/s ({number(low)} - {number(high)})")
        parts.append(f"{number(record.cpu_us_per_token)} us of CPU a token")
    if record.ratio is not None and record.ratio_spread is not None:
        parts.append(
            f"{record.ratio:.2f} times {FASTAPI} ({record.ratio_spread[0]:.2f} - {record.ratio_spread[1]:.2f})"
        )
    if record.p50_ms is not None:
        parts.append(f"added delay p50 {number(record.p50_ms)} ms, p99 {number(record.p99_ms)} ms")
    if record.kb_per_stream is not None:
        parts.append(f"{number(record.kb_per_stream)} KiB a stream")
    if record.server_share is not None:
        shares = (record.server_share, record.client_share, record.engine_share)
        parts.append("of a core: server {}, client {}, engine {}".format(*map(percent, shares)))
    if record.failed:
        parts.append(f"{record.failed} failed")
    return f"{record.bench}, {record.streams} streams, {record.front} over {record.transport}: " + "; ".join(
        parts
    )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    cores = sorted(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="headrace bench gateway", description=__doc__)
    parser.add_argument("--benches", type=_words(BENCHES), default=["saturate", "paced", "new"])
    parser.add_argument("--fronts", type=_words((HEADRACE, FASTAPI)), default=[HEADRACE, FASTAPI])
    parser.add_argument("--transports", type=_words(("sse", "ws")), default=["sse"])
    parser.add_argument("--streams", type=_numbers, help="comma-separated; default: those of each bench")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="of one measurement, after a second of warm-up"
    )
    parser.add_argument("--server-core", type=int, default=cores[0])
    parser.add_argument("--client-core", type=int, default=cores[-1], help="of client and engine")
    parser.add_argument("--least", type=float, help="exit with 1 if a ratio to the peer is smaller")
    parser.add_argument("--record", type=Path, default=Path("loadtest/results/gateway.jsonl"))
    arguments = parser.parse_args(argv)
    if FASTAPI in arguments.fronts and importlib.util.find_spec("fastapi") is None:
        parser.error("the peer needs FastAPI: pip install 'headrace[peers]', or --fronts headrace")
    return arguments


def _words(known: Sequence[str]) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        words = text.split(",")
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word} is none of {', '.join(known)}")
        return words

    return read


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
