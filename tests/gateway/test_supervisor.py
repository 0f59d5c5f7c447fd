"""Children under a supervisor: restarts, give-ups, orderly ends. The children are one-line Python programs."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

import psutil
import pytest

from headrace.gateway.children import Child, ChildSpec, RestartPolicy, Role, describe_exit
from headrace.gateway.supervisor import Supervisor

QUICK = RestartPolicy(quick_s=60, max_quick=3, first_delay_s=0.01, max_delay_s=0.02)
SLEEP = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: 0); print('up', flush=True); time.sleep(600)"


def spec(program: str, name: str = "engine 0", role: Role = "engine") -> ChildSpec:
    return ChildSpec(name, role, (sys.executable, "-P", "-c", program))


class Lines:
    """What was echoed; waits for a line."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._news = asyncio.Event()

    def __call__(self, line: str) -> None:
        self.all.append(line)
        self._news.set()

    async def wait_for(self, text: str, times: int = 1) -> None:
        while sum(text in line for line in self.all) < times:
            self._news.clear()
            await self._news.wait()


async def test_a_dead_child_is_started_again() -> None:
    lines = Lines()
    child = Child(spec("print('hello'); raise SystemExit(3)"), QUICK, lines)
    reason = await child.run()
    assert child.starts == 3
    assert lines.all.count("engine 0: hello") == 3
    assert sum("exit code 3" in line and "starting it again in" in line for line in lines.all) == 2
    assert "quick death 3 in a row" in reason
    assert reason.endswith("; its last lines:\n  | hello")


async def test_a_child_that_lived_long_is_not_counted_against_it() -> None:
    policy = RestartPolicy(quick_s=0.0, max_quick=2, first_delay_s=0.001)
    child = Child(spec("raise SystemExit(1)"), policy, Lines())
    run = asyncio.create_task(child.run())
    while child.starts < 4:  # noqa: ASYNC110 - counted by another task
        await asyncio.sleep(0.01)
    await child.stop(5)
    assert await run == ""


@pytest.mark.parametrize(("deaths", "delay"), [(0, 0.25), (1, 0.25), (2, 0.5), (4, 2.0), (20, 10.0)])
def test_the_back_off_doubles_to_a_limit(deaths: int, delay: float) -> None:
    assert RestartPolicy().delay_s(deaths) == delay


async def test_a_child_that_cannot_be_helped_is_given_up_at_once() -> None:
    child = Child(spec("print('no such tensor'); raise SystemExit(2)"), QUICK, Lines())
    reason = await child.run()
    assert child.starts == 1
    assert "exit code 2" in reason
    assert "no such tensor" in reason


async def test_a_stubborn_child_is_killed_after_its_grace() -> None:
    lines = Lines()
    child = Child(spec(STUBBORN), QUICK, lines)
    run = asyncio.create_task(child.run())
    await lines.wait_for("up")
    pid = child.pid
    assert pid is not None
    await child.stop(0.05)
    assert await run == ""
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_what_a_child_started_dies_with_it() -> None:
    lines = Lines()
    program = (
        "import subprocess, sys; "
        f"p = subprocess.Popen([sys.executable, '-P', '-c', {SLEEP!r}]); print('pid', p.pid, flush=True); p.wait()"
    )
    child = Child(spec(program), QUICK, lines)
    run = asyncio.create_task(child.run())
    await lines.wait_for("up")
    grandchild = int(next(line for line in lines.all if "pid" in line).split()[-1])
    child.kill()
    await run
    while is_alive(grandchild):  # noqa: ASYNC110 - an orphan; nobody here is told of its end
        await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    """In a container without an init nobody reaps orphans: a zombie is dead."""
    return bool(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)


async def test_overlong_lines_do_not_stop_the_echo() -> None:
    lines = Lines()
    child = Child(spec("print('x' * 300_000); print('after'); raise SystemExit(2)"), QUICK, lines)
    await child.run()
    assert lines.all[-1] == "engine 0: after"


async def run_supervisor(
    specs: Sequence[ChildSpec], lines: Lines, *, signals: int = 0, after: str = "up"
) -> int:
    """Run one; send SIGTERM `signals` times once every child has said `after`."""
    supervisor = Supervisor(specs, policy=QUICK, drain_s=0.2, echo=lines)

    async def greet() -> None:
        if signals:
            await lines.wait_for(after, len(specs))
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0)

    return await supervisor.run(greet)


async def test_workers_end_before_engines() -> None:
    lines = Lines()
    program = (
        "import signal, sys, time\n"
        "def end(*_):\n    print('ending', flush=True); time.sleep(0.05); print('ended', flush=True); sys.exit()\n"
        "signal.signal(signal.SIGTERM, end); print('up', flush=True)\ntime.sleep(600)"
    )
    specs = [
        spec(program, "engine 0"),
        spec(program, "worker 0", "worker"),
        spec(program, "worker 1", "worker"),
    ]
    assert await run_supervisor(specs, lines, signals=1) == 0
    engine_ends = lines.all.index("engine 0: ending")
    assert {lines.all.index(f"worker {i}: ended") < engine_ends for i in range(2)} == {True}


async def test_a_second_signal_waits_for_nobody() -> None:
    lines = Lines()
    supervisor = Supervisor([spec(STUBBORN)], policy=QUICK, drain_s=600, echo=lines)

    async def greet() -> None:
        await lines.wait_for("up")
        os.kill(os.getpid(), signal.SIGINT)
        await lines.wait_for("SIGINT: ending")
        while "SIGINT again: killing" not in lines.all:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.05)

    assert await supervisor.run(greet) == 0
    assert "SIGINT again: killing" in lines.all


async def test_one_signal_that_arrives_twice_still_drains() -> None:
    """`make serve`: the terminal's signal reaches the supervisor, and so does make's."""
    lines = Lines()
    assert await run_supervisor([spec(SLEEP)], lines, signals=2) == 0
    assert not any("killing" in line for line in lines.all)


async def test_the_service_goes_on_while_a_role_has_a_child_left() -> None:
    lines = Lines()
    specs = [
        spec("raise SystemExit(2)", "engine 0"),
        spec(SLEEP, "engine 1"),
        spec(SLEEP, "worker 0", "worker"),
    ]
    supervisor = Supervisor(specs, policy=QUICK, drain_s=0.1, echo=lines)

    async def greet() -> None:
        await lines.wait_for("going on with 1 engine(s)")
        await lines.wait_for(": up", 2)
        os.kill(os.getpid(), signal.SIGTERM)

    assert await supervisor.run(greet) == 0


async def test_the_service_stops_when_a_role_has_no_child_left() -> None:
    lines = Lines()
    specs = [spec("print('out of memory'); raise SystemExit(1)"), spec(SLEEP, "worker 0", "worker")]
    assert await run_supervisor(specs, lines) == 1
    given_up = next(line for line in lines.all if line.startswith("giving up: engine 0"))
    assert "out of memory" in given_up
    assert "no engine(s) left, stopping" in lines.all


@pytest.mark.parametrize(("code", "text"), [(3, "exit code 3"), (-9, "SIGKILL"), (-200, "signal 200")])
def test_exits_are_described(code: int, text: str) -> None:
    assert describe_exit(code) == text
