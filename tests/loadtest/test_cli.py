"""The command as a user runs it, against our own gateway with the synthetic engine behind it, over both transports."""

import asyncio
from pathlib import Path

import pytest

from headrace.loadtest import cli
from headrace.loadtest.record import load
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.service import MODEL, say
from tests.gateway.test_over_the_wire import make_engine, wired
from tests.gateway.ws_service import ws_serving


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/engine.sock"


async def loadtest(*arguments: str) -> int:
    """Run the command on a thread, with an event loop of its own, as in a process of its own."""
    return await asyncio.to_thread(cli.main, arguments)


async def test_a_load_over_sse_gives_a_record_a_report_and_exact_counts(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--users", "3", "--requests", "9", "--output-tokens", "12", "--prompt-tokens", "30")
    outputs = ("--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html"))
    with make_engine(address, step_ms=1.0):
        async with wired([address]) as gateway:
            code = await loadtest("--url", gateway.url, *flags, *outputs, "--slo", "ttft=30s")
    assert code == 0
    record = load(tmp_path / "a.json")
    (run,) = record.runs
    assert (run.requests, run.failed, run.output_tokens) == (9, 0, 9 * 12)
    assert run.attainment == 1.0
    assert run.latencies["itl"].count <= 9 * 11
    assert abs(run.prompt_tokens / 9 - 30) < 8  # words are no tokens, but the rate was measured
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert "9 requests, 0 failed" in " ".join(capsys.readouterr().out.split())


async def test_streams_over_websockets_are_counted_the_same_way(tmp_path: Path) -> None:
    flags = (
        "--transport",
        "ws",
        "--ws-streams",
        "2",
        "--users",
        "5",
        "--requests",
        "10",
        "--output-tokens",
        "4",
    )
    engine = FakeEngine(say("One two three four five.", stop=False))
    async with ws_serving(engine) as service:
        assert (
            await loadtest(
                "--url",
                f"http://127.0.0.1:{service.port}",
                "--model",
                MODEL,
                *flags,
                "--json",
                str(tmp_path / "a.json"),
            )
            == 0
        )
    (run,) = load(tmp_path / "a.json").runs
    assert (run.requests, run.failed, run.output_tokens, run.health.connections) == (10, 0, 40, 3)


async def test_a_sweep_of_chats_as_completions(address: str, tmp_path: Path) -> None:
    chats = (
        "--workload",
        "chat",
        "--turns",
        "2",
        "--think",
        "0",
        "--system-tokens",
        "40",
        "--prompt-tokens",
        "8",
    )
    flags = ("--api", "completion", "--sweep", "users=1,2", "--requests", "4", "--output-tokens", "6")
    with make_engine(address, step_ms=1.0):
        async with wired([address]) as gateway:
            assert (
                await loadtest("--url", gateway.url, *chats, *flags, "--json", str(tmp_path / "a.json")) == 0
            )
    record = load(tmp_path / "a.json")
    assert [(run.load, run.requests, run.failed) for run in record.runs] == [
        ("1 user", 4, 0),
        ("2 users", 4, 0),
    ]


async def test_a_server_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert await loadtest("--url", "http://127.0.0.1:1") == 2
    assert capsys.readouterr().err.startswith("headrace: no server at http://127.0.0.1:1")


async def test_requests_that_all_fail_are_exit_code_1(address: str, tmp_path: Path) -> None:
    """Prompts beyond the context: each is refused, counted and shown."""
    with make_engine(address, max_model_len=400):
        async with wired([address]) as gateway:
            flags = ("--requests", "3", "--prompt-tokens", "2000", "--json", str(tmp_path / "a.json"))
            assert await loadtest("--url", gateway.url, *flags) == 1
    (run,) = load(tmp_path / "a.json").runs
    assert run.errors == {"http_400": 3}


async def test_two_records_are_compared(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(tmp_path / f"{name}.json") for name in "ab"]
    with make_engine(address):
        async with wired([address]) as gateway:
            for path in paths:
                flags = ("--requests", "2", "--output-tokens", "3", "--name", Path(path).stem, "--json", path)
                assert await loadtest("--url", gateway.url, *flags) == 0
    capsys.readouterr()
    assert await loadtest("compare", *paths, "--html", str(tmp_path / "c.html")) == 0
    assert "b / a" in capsys.readouterr().out
    assert (tmp_path / "c.html").stat().st_size > 5000


@pytest.mark.parametrize(
    "flags",
    [
        ("--find-rate",),
        ("--trace-times",),
        ("--users", "0"),
        ("--sweep", "speed=1"),
        ("--duration", "3", "--warmup", "3"),
        ("--users", "1", "--rate", "1"),
        ("--prompt-tokens", "0"),
    ],
    ids=" ".join,
)
def test_flags_that_make_no_sense_are_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(flags)
