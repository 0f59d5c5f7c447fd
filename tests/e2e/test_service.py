"""The whole service: supervisor, workers on one port, synthetic engines; what dies comes back, what runs ends well."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from headrace.config import embedded_model
from headrace.gateway.text import Text
from headrace.loadtest.synthetic_tokens import TokenSource, printable_ids
from tests.e2e.service import RunningService, gone, running, stream_tokens

WORKER, ENGINE = "headrace.gateway.worker", "headrace.loadtest.synthetic"
STREAMS, TOKENS = 200, 40


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield session


async def status(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(url) as response:
        return response.status


async def drain(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass


async def becomes(session: aiohttp.ClientSession, url: str, wanted: int) -> None:
    while await status(session, url) != wanted:  # noqa: ASYNC110 - another process's state
        await asyncio.sleep(0.02)


async def test_200_concurrent_streams_lose_and_double_nothing(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    """Two workers, two engines: each stream gets exactly the tokens that its seed makes, in order."""
    source, text = TokenSource(printable_ids(embedded_model())), Text.load(embedded_model())

    async def one(service: RunningService, seed: int) -> None:
        events = [event async for event in stream_tokens(session, service.url, seed, TOKENS)]
        assert "".join(piece for _, piece, _ in events) == text.decode(source.sequence(seed, 0, TOKENS))
        numbers = [int(number) for number, _, _ in events]
        assert numbers == sorted(set(numbers))
        assert events[-1][2] == "length"

    async with running(tmp_path, "--workers", "2", "--engines", "2", "--step-ms", "5") as service:
        await asyncio.gather(*(one(service, seed) for seed in range(STREAMS)))
        async with session.get(f"{service.url}/metrics") as response:
            page = await response.text()
        assert total(page, "generation_tokens_total") == STREAMS * TOKENS
        assert total(page, "request_success_total") == STREAMS
        assert total(page, "time_to_first_token_seconds_count") == STREAMS
        assert total(page, "inter_token_latency_seconds_count") == STREAMS * (TOKENS - 1)
        assert total(page, "workers_up") == 2
        assert total(page, "open_streams") == 0
        for index in range(2):
            assert f'headrace:engine_up{{engine="{index}",model_name="tiny"}} 1.0' in page
    text.close()


def total(page: str, name: str) -> float:
    """The sum of a metric's samples over all labels."""
    samples = [line for line in page.splitlines() if line.startswith(f"headrace:{name}")]
    return sum(float(line.rpartition(" ")[2]) for line in samples if line[len(f"headrace:{name}")] in " {")


def modes(*paths: Path) -> list[int]:
    return [path.stat().st_mode & 0o777 for path in paths]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def test_every_worker_answers_on_the_port(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    """The kernel spreads connections over both; each also shows what the other counted."""
    async with running(tmp_path, "--workers", "2") as service:
        assert await asyncio.gather(*(status(session, f"{service.url}/health") for _ in range(64)))
        counts = []
        for index in range(2):
            async with (
                aiohttp.ClientSession(connector=service.worker_connector(index)) as direct,
                direct.get("http://worker/metrics") as response,
            ):
                counts.append(total(await response.text(), "workers_up"))
        assert counts == [2, 2]
        sockets = [
            connection
            for child in service.children(WORKER)
            for connection in child.net_connections("tcp")
            if connection.status == "LISTEN"
        ]
        assert len(sockets) == 2
        assert len({connection.laddr.port for connection in sockets}) == 1


async def test_memory_is_flat_over_2000_requests(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    """What a request leaves behind in the worker would show: 2 KiB each would be past the limit."""

    async def requests(count: int) -> int:
        """Resident bytes of the worker after so many requests, 50 at a time."""
        seeds = iter(range(count))

        async def client() -> None:
            for seed in seeds:
                await drain(stream_tokens(session, service.url, seed, 8))

        await asyncio.gather(*(client() for _ in range(50)))
        return int(service.child(WORKER, 0).memory_info().rss)

    async with running(tmp_path) as service:
        warm = await requests(1000)
        assert await requests(2000) - warm < 4 << 20


async def test_a_killed_engine_is_restarted(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    async with running(tmp_path, "--step-ms", "2") as service:
        ready = f"{service.url}/ready"
        assert await status(session, ready) == 200
        service.child(ENGINE, 0).kill()
        await becomes(session, ready, 503)
        assert await status(session, f"{service.url}/health") == 200
        await service.says(r"engine 0 ended with SIGKILL after .*; starting it again in")
        await becomes(session, ready, 200)
        reasons = [reason async for _, _, reason in stream_tokens(session, service.url, 1, 3)]
        assert reasons[-1] == "length"


async def test_a_killed_worker_is_restarted_and_its_counts_go_on(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    async with running(tmp_path) as service:
        await drain(stream_tokens(session, service.url, 1, 5))
        async with session.get(f"{service.url}/metrics") as response:
            before = total(await response.text(), "generation_tokens_total")
        assert before == 5
        service.child(WORKER, 0).kill()
        await service.says("worker 0 ended with SIGKILL")
        await service.says("worker 0: INFO engine 0 .*: ready")
        while True:
            try:
                async with session.get(f"{service.url}/metrics") as response:
                    after = total(await response.text(), "generation_tokens_total")
                break
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.02)
        assert after >= before


async def test_sigterm_lets_a_running_stream_end(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    async with running(tmp_path, "--workers", "2", "--step-ms", "10") as service:
        stream = stream_tokens(session, service.url, 7, 60)
        await anext(stream)
        service.process.send_signal(signal.SIGTERM)
        await service.says("draining 1 streams")
        reasons = [reason async for _, _, reason in stream]
        assert (len(reasons), reasons[-1]) == (60, "length")
        assert await service.process.wait() == 0


async def test_new_work_is_refused_while_draining(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    async with running(tmp_path, "--step-ms", "10") as service:
        stream = stream_tokens(session, service.url, 7, 100)
        await anext(stream)
        service.process.send_signal(signal.SIGTERM)
        await service.says("draining 1 streams")
        body = {"model": "tiny", "prompt": "Once"}
        async with session.post(f"{service.url}/v1/completions", json=body) as response:
            assert response.status == 503
            assert "shutting down" in (await response.json())["error"]["message"]
            assert "Retry-After" in response.headers
        assert await status(session, f"{service.url}/ready") == 503
        await drain(stream)


async def test_a_second_signal_kills(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    async with running(tmp_path, "--step-ms", "1000") as service:
        stream = asyncio.create_task(drain(stream_tokens(session, service.url, 7, 1000)))
        service.process.send_signal(signal.SIGINT)
        await service.says("SIGINT: ending running streams")
        while service.process.returncode is None:
            service.process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.05)
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)


async def test_the_service_outlives_the_reader_of_its_log(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    """`headrace serve 2>&1 | head`: what cannot be written is dropped, nothing blocks or dies."""
    async with running(tmp_path, "--log-level", "debug") as service:
        service.stop_listening()
        for _ in range(200):
            assert await status(session, f"{service.url}/health") == 200
        service.child(ENGINE, 0).kill()
        await becomes(session, f"{service.url}/ready", 503)
        await becomes(session, f"{service.url}/ready", 200)


async def test_children_do_not_outlive_a_killed_supervisor(tmp_path: Path) -> None:
    async with running(tmp_path, "--workers", "2", "--engines", "2") as service:
        children = service.children()
        assert len(children) == 4
        service.process.kill()
        await service.process.wait()
        await gone(children)


async def test_keys_are_asked_for_and_kept_secret(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    async with running(tmp_path, "--api-key", "hush-hush") as service:
        assert await status(session, f"{service.url}/v1/models") == 401
        assert await status(session, f"{service.url}/ready") == 200
        headers = {"Authorization": "Bearer hush-hush"}
        async with session.get(f"{service.url}/v1/models", headers=headers) as response:
            assert response.status == 200
        config = tmp_path / "config.json"
        assert modes(tmp_path, config) == [0o700, 0o600]
        assert all("hush-hush" not in " ".join(child.cmdline()) for child in service.children())
        assert not any("hush-hush" in line for line in service.lines)
        await service.end()
        assert "config.json" not in names(tmp_path)
