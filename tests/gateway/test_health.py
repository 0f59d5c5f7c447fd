"""/health, /ready and /metrics over real sockets, with the engines' states set by hand."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestClient, TestServer

from headrace.gateway.dispatcher import Dispatcher
from headrace.gateway.health import add_health
from headrace.gateway.http_counter import count_requests
from headrace.gateway.metrics import Metrics
from headrace.gateway.stats import WorkerStats
from headrace.gateway.tally import Tally
from headrace.ipc.messages import ToEngine, ToGateway, Welcome


class SilentSocket:
    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def send(self, _message: ToEngine) -> bool:
        return True


def silent(
    _address: str, _on_message: Callable[[ToGateway], None], _on_state: Callable[[str, str], None]
) -> SilentSocket:
    return SilentSocket()


async def no_peers() -> list[Tally]:
    return []


Client = TestClient[web.Request, web.Application]


@pytest.fixture
def dispatcher() -> Dispatcher:
    return Dispatcher(["ipc://0", "ipc://1"], silent, max_streams=4)


@pytest.fixture
async def client(dispatcher: Dispatcher) -> AsyncIterator[Client]:
    stats = WorkerStats()
    app = web.Application(middlewares=[count_requests(stats)])
    ask: Callable[[], Awaitable[list[Tally]]] = no_peers
    add_health(app, dispatcher, Metrics("m", dispatcher, stats), ask)
    async with TestClient(TestServer(app)) as client:
        yield client


def up(dispatcher: Dispatcher, index: int) -> None:
    dispatcher.engines[index].on_message(Welcome(1, "e", "f", "m", 100, 128, 8, 64, 16))
    dispatcher.engines[index].on_state("ready", "")


async def test_health_is_200_even_without_an_engine(client: Client, dispatcher: Dispatcher) -> None:
    response = await client.get("/health")
    assert response.status == 200
    body = await response.json()
    assert body["status"] == "degraded"
    assert [engine["state"] for engine in body["engines"]] == ["connecting", "connecting"]
    up(dispatcher, 0)
    assert (await (await client.get("/health")).json())["status"] == "degraded"
    up(dispatcher, 1)
    assert (await (await client.get("/health")).json())["status"] == "ok"


async def test_health_shows_no_addresses(client: Client) -> None:
    assert "ipc://" not in await (await client.get("/health")).text()


async def test_ready_needs_one_engine(client: Client, dispatcher: Dispatcher) -> None:
    response = await client.get("/ready")
    assert response.status == 503
    assert "engine 1: connecting" in (await response.json())["reason"]
    up(dispatcher, 1)
    assert (await client.get("/ready")).status == 200
    dispatcher.engines[1].on_state("lost", "no heartbeat for 10 s")
    response = await client.get("/ready")
    assert response.status == 503
    assert "no heartbeat for 10 s" in (await response.json())["reason"]


async def test_a_draining_worker_is_not_ready_but_healthy(client: Client, dispatcher: Dispatcher) -> None:
    up(dispatcher, 0)
    dispatcher.drain()
    response = await client.get("/ready")
    assert (response.status, (await response.json())["reason"]) == (503, "the server is shutting down")
    assert (await client.get("/health")).status == 200


async def test_requests_are_counted_by_route_not_by_path(client: Client) -> None:
    for path in ("/health", "/etc/passwd", "/admin.php"):
        await client.get(path)
    async with ClientSession() as session:
        await session.request("PROPFIND", client.make_url("/health"))
    page = await (await client.get("/metrics")).text()
    assert 'headrace:http_requests_total{method="GET",route="/health",status="200"} 1.0' in page
    assert 'headrace:http_requests_total{method="GET",route="unmatched",status="404"} 2.0' in page
    assert 'headrace:http_requests_total{method="other",route="unmatched",status="405"} 1.0' in page
