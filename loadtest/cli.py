"""`headrace loadtest`: runs what the flags ask for, shows it, writes record and report.

Started by module name from the `headrace` command. `python -P -m headrace.loadtest.cli -h`.
"""

import argparse
import asyncio
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import uvloop
from rich.console import Console

from headrace.config import ConfigError
from headrace.environ import read_environment
from headrace.loadtest import record as records
from headrace.loadtest.arrivals import Load, describe
from headrace.loadtest.client import Client, SseClient, Target
from headrace.loadtest.client_ws import WsClient
from headrace.loadtest.compare import compare_page, compare_table
from headrace.loadtest.discover import served_model, token_rate
from headrace.loadtest.driver import Driver
from headrace.loadtest.find_rate import Search, find_rate
from headrace.loadtest.live import watching
from headrace.loadtest.options import DEFAULT_URL, parse_arguments
from headrace.loadtest.plan import Plan
from headrace.loadtest.record import SCHEMA, LoadRecord, Run
from headrace.loadtest.report import report_page
from headrace.loadtest.software import commit, machine, versions
from headrace.loadtest.summary import summary

EXIT_FAILED = 1
EXIT_CONFIG = 2


class Interrupted(Exception):
    """The user has had enough; what was measured counts."""


def main(argv: Sequence[str]) -> int:
    """Run a command; the exit code: 1 = no request succeeded, 2 = a flag or the server cannot be used."""
    console = Console(highlight=False)
    try:
        match list(argv):
            case ["compare", *rest]:
                return _compare(rest, console)
            case ["report", *rest]:
                return _report(rest)
        return _load(parse_arguments(argv), console)
    except ConfigError as error:
        sys.stderr.write(f"headrace: {error}\n")
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return 130


def _load(arguments: argparse.Namespace, console: Console) -> int:
    environment = read_environment()
    plan = Plan.of(arguments)
    target = Target(
        url=arguments.url or environment.url or DEFAULT_URL,
        model=arguments.model,
        api_key=arguments.api_key or environment.api_key,
        timeout_s=arguments.timeout,
    )
    if not target.model:
        target = Target(
            url=target.url, model=served_model(target), api_key=target.api_key, timeout_s=target.timeout_s
        )
    console.print(f"{target.url}, {target.model}: {plan.workload()}")
    runs, found = uvloop.run(_run(plan, target, console))
    record = LoadRecord(
        schema=SCHEMA,
        name=arguments.name or target.model,
        url=target.url,
        model=target.model,
        api=arguments.api,
        transport=arguments.transport,
        workload=plan.workload(),
        gpus=arguments.gpus,
        runs=tuple(runs),
        found_rate=found,
        versions=versions(),
        machine=machine(),
        commit=commit(),
    )
    console.print(summary(record))
    if arguments.json:
        records.save(record, arguments.json)
    if arguments.html:
        _write(arguments.html, report_page(record))
    return 0 if any(run.failed < run.requests for run in runs) else EXIT_FAILED


async def _run(plan: Plan, target: Target, console: Console) -> tuple[list[Run], float | None]:
    """All runs, and the rate found if one was looked for."""
    arguments = plan.arguments
    client: Client
    client = WsClient(target, arguments.ws_streams) if arguments.transport == "ws" else SseClient(target)
    runs: list[Run] = []
    try:
        rate, counted = await token_rate(client, plan.asking, arguments.seed)
        if not counted:
            console.print("the server reports no usage: tokens are counted by events, lengths are guesses")

        async def hold(load: Load) -> Run:
            driver = Driver(client, plan.sessions(rate, len(runs)), load, plan.limits, plan.asking, plan.slo)
            async with watching(driver, console, describe(load)):
                run = await _run_or_stop(driver)
            runs.append(run)
            if driver.interrupted:
                raise Interrupted
            return run

        async def attainment(at: float) -> float | None:
            return (await hold(plan.at_rate(at))).attainment

        if arguments.find_rate:
            return runs, await find_rate(attainment, Search(attainment=arguments.attainment))
        for load in plan.loads():
            await hold(load)
        return runs, None
    except Interrupted:
        return runs, None
    finally:
        await client.close()


async def _run_or_stop(driver: Driver) -> Run:
    """The driver's run; Ctrl-C ends it early, with the figures so far."""
    if threading.current_thread() is not threading.main_thread():
        return await driver.run()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, driver.stop)
    try:
        return await driver.run()
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _compare(argv: Sequence[str], console: Console) -> int:
    parser = argparse.ArgumentParser(
        prog="headrace loadtest compare", description="Two records side by side."
    )
    parser.add_argument("records", type=Path, nargs=2, metavar="RECORD")
    parser.add_argument("--html", type=Path, help="write a page")
    arguments = parser.parse_args(argv)
    first, second = (records.load(path) for path in arguments.records)
    console.print(compare_table(first, second))
    if arguments.html:
        _write(arguments.html, compare_page(first, second))
    return 0


def _report(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="headrace loadtest report", description="The page of a record.")
    parser.add_argument("record", type=Path)
    parser.add_argument("--html", type=Path, required=True)
    arguments = parser.parse_args(argv)
    _write(arguments.html, report_page(records.load(arguments.record)))
    return 0


def _write(path: Path, page: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
