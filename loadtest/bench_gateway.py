"""`headrace bench gateway`: one gateway worker beside the usual FastAPI pattern, in interleaved rounds of one run.

Server on one core, client and synthetic engine on another. `python -P -m headrace.loadtest.bench_gateway -h`.
"""

import argparse
import importlib.util
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import uvloop
from rich.console import Console

from headrace.config import ConfigError
from headrace.loadtest.fleet import Cores, Fleet, fleet
from headrace.loadtest.gateway_plan import (
    BENCHES,
    FASTAPI,
    FRONTS,
    HEADRACE,
    STREAMS,
    TRANSPORTS,
    Case,
    Kind,
    Setting,
    cases,
    quick,
    table,
)
from headrace.loadtest.gateway_point import Load, NothingCame, Point, idle_bytes, measure
from headrace.loadtest.gateway_record import GatewayRecord, append, idle_record, summarise
from headrace.loadtest.show import number, percent

OUTPUT_TOKENS = {"saturate": 1000, "paced": 1000, "new": 16}
SPARE_DESCRIPTORS = 200
EXIT_FAILED, EXIT_CONFIG = 1, 2


def main(argv: Sequence[str]) -> int:
    """Measure, print, append records; 1 = a ratio is below --least, 2 = it cannot be measured here."""
    arguments = _parse(argv)
    taken = (arguments.server_core, arguments.client_core)
    cores = Cores(*taken, tuple(core for core in sorted(os.sched_getaffinity(0)) if core not in taken))
    console = Console(highlight=False, soft_wrap=True)
    os.sched_setaffinity(0, {arguments.client_core})
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    begin = time.monotonic()
    ratios: list[float] = []
    try:
        for setting in _settings(arguments):
            if setting.streams + SPARE_DESCRIPTORS > hard:
                raise ConfigError(f"{setting.streams} streams need as many open files; ulimit -Hn is {hard}")
            for record in _bench(setting, cores, console):
                append(arguments.record, record)
                console.print(_line(record))
                if record.ratio is not None:
                    ratios.append(record.ratio)
    except (ConfigError, NothingCame) as error:
        sys.stderr.write(f"headrace bench: {error}\n")
        return EXIT_CONFIG
    console.print(f"{time.monotonic() - begin:.0f} s; records in {arguments.record}")
    low = arguments.least is not None and min(ratios, default=0.0) < arguments.least
    if low:
        console.print(f"a ratio is below {arguments.least:g}")
    return EXIT_FAILED if low else 0


def _settings(arguments: argparse.Namespace) -> Sequence[Setting]:
    if arguments.table:
        return table(arguments.rounds or 5, arguments.seconds or 3.0)
    if arguments.quick:
        return quick()
    chosen = cases(arguments.fronts, arguments.transports, arguments.workers)
    return [
        Setting(bench, streams, group, arguments.rounds or 5, arguments.seconds or 4.0)
        for bench in arguments.benches
        for streams in arguments.streams or STREAMS[bench]
        for group in ([(case,) for case in chosen] if bench == "idle" else [chosen])
    ]


def _bench(setting: Setting, cores: Cores, console: Console) -> list[GatewayRecord]:
    """All cases of a setting, round by round in turn."""
    points: dict[Case, list[Point]] = {case: [] for case in setting.cases}
    sizes: dict[Case, list[float]] = {case: [] for case in setting.cases}
    with fleet(setting.kinds, setting.step_ms, cores) as running:
        for round_ in range(setting.rounds):
            for case in setting.cases:
                place = f"{setting.bench}, {setting.streams} streams, round {round_ + 1}"
                console.print(f"[dim]{place}: {case.kind.label} over {case.transport}[/dim]")
                if setting.bench == "idle":
                    sizes[case].append(_idle(running, case, setting.streams))
                else:
                    points[case].append(_measure(running, case, setting))
    if setting.bench == "idle":
        return [idle_record(setting, case, found) for case, found in sizes.items()]
    peers = points.get(Case(Kind(FASTAPI), "sse"), [])
    return [
        summarise(
            setting,
            case,
            found,
            peers if case.kind.name == HEADRACE else (),
            points.get(Case(Kind(HEADRACE), case.transport), ()) if case.kind.workers > 1 else (),
        )
        for case, found in points.items()
    ]


def _measure(running: Fleet, case: Case, setting: Setting) -> Point:
    front = next(front for front in running.fronts if front.kind == case.kind)
    load = Load(
        transport=case.transport,
        streams=setting.streams,
        output_tokens=OUTPUT_TOKENS[setting.bench],
        seconds=setting.seconds,
    )
    return uvloop.run(measure(running, front, load, paced=setting.bench == "paced"))


def _idle(running: Fleet, case: Case, streams: int) -> float:
    front = next(front for front in running.fronts if front.kind == case.kind)
    return uvloop.run(idle_bytes(front, case.transport, streams))


def _line(record: GatewayRecord) -> str:
    """A record for people."""
    parts = []
    if record.tokens_per_s_spread is not None:
        low, high = record.tokens_per_s_spread
        parts.append(f"{number(record.tokens_per_s)} tokens/s ({number(low)} - {number(high)})")
        parts.append(f"{number(record.cpu_us_per_token)} us of CPU a token")
    for value, spread, words in (
        (record.ratio, record.ratio_spread, f"times {FASTAPI}"),
        (record.scale, record.scale_spread, "times one worker by CPU a token"),
    ):
        if value is not None and spread is not None:
            parts.append(f"{value:.2f} {words} ({spread[0]:.2f} - {spread[1]:.2f})")
    if record.p50_ms is not None:
        parts.append(f"added delay p50 {number(record.p50_ms)} ms, p99 {number(record.p99_ms)} ms")
    if record.kb_per_stream is not None:
        parts.append(f"{number(record.kb_per_stream)} KiB a stream")
    if record.server_share is not None:
        shares = (record.server_share, record.client_share, record.engine_share)
        parts.append("of a core: server {}, client {}, engine {}".format(*map(percent, shares)))
    if record.failed:
        parts.append(f"{record.failed} failed")
    front = Kind(record.front, record.workers).label
    return f"{record.bench}, {record.streams} streams, {front} over {record.transport}: " + "; ".join(parts)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    cores = sorted(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="headrace bench gateway", description=__doc__)
    parser.add_argument("--table", action="store_true", help="everything that docs/performance.md reports")
    parser.add_argument("--quick", action="store_true", help="one ratio in half a minute, for CI")
    parser.add_argument("--benches", type=_words(BENCHES), default=["saturate", "paced", "new"])
    parser.add_argument("--fronts", type=_words(FRONTS), default=[HEADRACE, FASTAPI])
    parser.add_argument("--transports", type=_words(TRANSPORTS), default=["sse"])
    parser.add_argument("--streams", type=_numbers, help="comma-separated; default: those of each bench")
    parser.add_argument("--workers", type=int, default=1, help="measure so many workers beside one")
    parser.add_argument("--rounds", type=int, help="default: 5")
    parser.add_argument("--seconds", type=float, help="of one measurement, after a second of warm-up; 4")
    parser.add_argument("--server-core", type=int, default=cores[0])
    parser.add_argument("--client-core", type=int, default=cores[-1], help="of client and engine")
    parser.add_argument("--least", type=float, help="exit with 1 if a ratio to the peer is smaller")
    parser.add_argument("--record", type=Path, default=Path("loadtest/results/gateway.jsonl"))
    arguments = parser.parse_args(argv)
    needs_peer = arguments.table or arguments.quick or FASTAPI in arguments.fronts
    if needs_peer and importlib.util.find_spec("fastapi") is None:
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
