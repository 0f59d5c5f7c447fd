"""The command line of `headrace loadtest`: flags, and what each may be.

Parsing only; plan.py makes a load of it, cli.py runs it.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from headrace.loadtest.workload import Lengths

DEFAULT_URL = "http://127.0.0.1:8000"
EPILOG = """\
other commands:
  headrace loadtest report RECORD.json --html FILE       the page of a record
  headrace loadtest compare A.json B.json [--html FILE]  two records side by side

examples:
  headrace loadtest --users 16 --duration 30
  headrace loadtest --rate 4 --slo ttft=500ms,itl=50ms --html report.html
  headrace loadtest --sweep users=1,4,16,64 --html pareto.html
  headrace loadtest --trace mooncake.jsonl --speed 2
  headrace loadtest --find-rate --slo ttft=500ms,itl=50ms
"""


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of a load."""
    parser = argparse.ArgumentParser(
        prog="headrace loadtest",
        description="Load on any OpenAI-compatible server, and what its users saw.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    server = parser.add_argument_group("server")
    server.add_argument("--url", default="", help=f"default: HEADRACE_URL, else {DEFAULT_URL}")
    server.add_argument("--api-key", default="", help="default: HEADRACE_API_KEY")
    server.add_argument("--model", default="", help="default: the first that the server lists")
    server.add_argument("--api", choices=("chat", "completion"), default="chat")
    server.add_argument("--transport", choices=("sse", "ws"), default="sse", help="ws: Headrace only")
    server.add_argument("--ws-streams", type=_whole, default=64, help="streams on one WebSocket (64)")
    server.add_argument("--timeout", type=_positive, default=600.0, help="seconds of a request (600)")
    server.add_argument("--gpus", type=_whole, default=0, help="behind the server, for figures per GPU")

    load = parser.add_argument_group("load")
    how = load.add_mutually_exclusive_group()
    how.add_argument("--users", type=_whole, help="closed loop: so many at a time (8)")
    how.add_argument("--rate", type=_positive, help="open loop: sessions per second, Poisson")
    how.add_argument("--trace-times", action="store_true", help="open loop: when the trace says")
    how.add_argument("--sweep", type=_sweep, metavar="users=1,4,16", help="one run each; also rate=...")
    how.add_argument("--find-rate", action="store_true", help="the highest rate that keeps --slo")
    load.add_argument("--gap-shape", type=_positive, default=1.0, help="gamma: 1 = Poisson, below = bursts")
    load.add_argument("--speed", type=_positive, default=1.0, help="of the trace's times")
    load.add_argument("--ramp", type=_seconds, default=0.0, help="seconds over which users start")
    load.add_argument("--duration", type=_positive, help="seconds of a run, warm-up included (30)")
    load.add_argument("--requests", type=_whole, default=0, help="instead of --duration")
    load.add_argument("--warmup", type=_seconds, default=0.0, help="seconds that do not count")
    load.add_argument("--drain", type=_seconds, default=30.0, help="seconds for what runs at the end (30)")
    load.add_argument("--max-open", type=_whole, default=16384, help="sessions at once in an open loop")
    load.add_argument("--slo", default="", metavar="ttft=500ms,itl=50ms", help="also tpot, e2e")
    load.add_argument("--attainment", type=_share, default=0.99, help="of --find-rate: share to keep it")

    work = parser.add_argument_group("workload")
    work.add_argument("--workload", choices=("independent", "chat"), default="independent")
    work.add_argument("--trace", type=Path, help="Mooncake, BurstGPT, Azure, [[in, out], ...], recorded")
    work.add_argument("--prompt-tokens", type=_lengths, default=Lengths(128), metavar="MEAN[:CV]")
    work.add_argument("--output-tokens", type=_lengths, default=Lengths(64), metavar="MEAN[:CV]")
    work.add_argument("--turns", type=_whole, default=4, help="of a chat (4)")
    work.add_argument("--groups", type=_whole, default=8, help="system prompts shared by chats (8)")
    work.add_argument("--system-tokens", type=_whole, default=512, help="of a system prompt (512)")
    work.add_argument("--think", type=_seconds, default=1.0, help="mean seconds between turns (1)")
    work.add_argument("--temperature", type=float, default=1.0)
    work.add_argument("--stop-at-eos", action="store_true", help="let answers end when the model wants")
    work.add_argument("--seed", type=int, default=0)

    out = parser.add_argument_group("results")
    out.add_argument("--name", default="", help="of the record; default: the model")
    out.add_argument("--json", type=Path, help="write the record")
    out.add_argument("--html", type=Path, help="write the report")
    arguments = parser.parse_args(argv)
    _check(parser, arguments)
    return arguments


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.find_rate and not arguments.slo:
        parser.error("--find-rate needs an --slo to keep")
    if arguments.trace_times and arguments.trace is None:
        parser.error("--trace-times needs a --trace")
    if arguments.duration and arguments.requests:
        parser.error("--duration and --requests both say when a run ends; give one")
    if arguments.requests and arguments.warmup:
        parser.error("--warmup needs a --duration")
    if arguments.warmup >= (arguments.duration or 30.0):
        parser.error("--warmup must be shorter than --duration")


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is outside 0..1")
    return value


def _whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def _lengths(text: str) -> Lengths:
    mean, _, variation = text.partition(":")
    lengths = Lengths(float(mean), float(variation or 0))
    if lengths.mean < 1 or lengths.variation < 0:
        raise argparse.ArgumentTypeError(f"{text}: write MEAN or MEAN:CV, such as 512:0.8")
    return lengths


def _sweep(text: str) -> tuple[str, tuple[float, ...]]:
    name, _, values = text.partition("=")
    levels = tuple(_positive(value) for value in values.split(","))
    if name not in ("users", "rate") or (name == "users" and any(level % 1 for level in levels)):
        raise argparse.ArgumentTypeError(f"{text}: write users=1,4,16 or rate=0.5,1,2")
    return name, levels
