"""A gateway on a real socket with production's settings, in the test's loop, in front of a FakeEngine."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import aiohttp
from aiohttp import web

from headrace.config import Config, GatewayConfig, ModelConfig, embedded_model
from headrace.gateway.app import make_app
from headrace.gateway.connection import connections
from headrace.gateway.dispatcher import Dispatcher
from headrace.gateway.listen import BACKLOG, worker_socket
from headrace.gateway.stats import WorkerStats
from headrace.gateway.text import Text
from headrace.ipc.messages import Submit
from tests.gateway.fake_engine import FakeEngine

MODEL = "tiny"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me a story."}]}
COMPLETION = {"model": MODEL, "prompt": "Once upon a time"}


@cache
def embedded_text() -> Text:
    """The embedded model's text side, loaded once; its pool lives as long as the test process."""
    return Text.load(embedded_model())


def say(text: str, stop: bool = True) -> Callable[[Submit], Sequence[int]]:
    """A script: the tokens of a text, and the end token unless `stop` is false."""
    token_ids = embedded_text()._tokenizer.encode(text, add_special_tokens=False).ids
    return lambda _submit: [*token_ids, *([2] if stop else [])]


@dataclass
class Gateway:
    """What a test needs of a running gateway."""

    url: str
    port: int
    dispatcher: Dispatcher
    stats: WorkerStats
    session: aiohttp.ClientSession
    server: web.Server

    def connections(self) -> list[web.RequestHandler]:
        """The open connections, but for the session's own."""
        return self.server.connections

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        """Status, JSON and headers of a POST; `body` is sent as it is when bytes."""
        data = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.session.post(self.url + path, headers=headers, **data) as response:
            return response.status, await response.json(), response.headers

    async def get(self, path: str, **headers: str) -> tuple[int, Any, Any]:
        async with self.session.get(self.url + path, headers=headers) as response:
            return response.status, await response.json(), response.headers

    async def events(self, path: str, body: dict[str, Any]) -> list["SseEvent"]:
        """All events of a streaming POST."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            return parse_events(await response.read())


@dataclass
class Service(Gateway):
    """A gateway and the fake engine behind it."""

    engine: FakeEngine


@dataclass
class SseEvent:
    id: str
    data: str
    comment: str


def parse_events(stream: bytes) -> list[SseEvent]:
    """Server-sent events by the HTML standard's rules."""
    events = []
    *blocks, rest = stream.decode().split("\n\n")
    assert rest == "", f"the stream ends in the middle of an event: {rest!r}"
    for block in blocks:
        event = SseEvent("", "", "")
        for line in block.split("\n"):
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            match field:
                case "":
                    event.comment = value
                case "id":
                    event.id = value
                case "data":
                    event.data = value
                case _:
                    raise AssertionError(f"unexpected field {field!r}")
        events.append(event)
    return events


@asynccontextmanager
async def serving(
    answer: Callable[[Submit], Sequence[int]] | None = None,
    engine: FakeEngine | None = None,
    **settings: Any,
) -> AsyncIterator[Service]:
    """A running service in front of a fake engine; `settings` are GatewayConfig's."""
    engine = engine or FakeEngine(answer or say("Hello there."))
    config = make_config(**settings)
    dispatcher = Dispatcher(["fake"], engine.connect, config.gateway.max_streams)
    async with listening(config, dispatcher) as gateway:
        yield Service(**vars(gateway), engine=engine)


def make_config(**settings: Any) -> Config:
    return Config(
        model=ModelConfig(path=str(embedded_model()), served_name=MODEL), gateway=GatewayConfig(**settings)
    )


@asynccontextmanager
async def listening(config: Config, dispatcher: Dispatcher) -> AsyncIterator[Gateway]:
    """A gateway in front of the dispatcher's engines.

    On the way out no stream and no task may be left, or this waits for ever.
    """
    before = asyncio.all_tasks()
    dispatcher.start()
    stats = WorkerStats()
    app = make_app(config, dispatcher, embedded_text(), stats)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
    await runner.setup()
    assert runner.server is not None
    listener = worker_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    loop = asyncio.get_running_loop()
    factory = connections(runner.server, config.gateway)
    server = await loop.create_server(factory, sock=listener, backlog=BACKLOG)
    url = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            yield Gateway(url, port, dispatcher, stats, session, runner.server)
    finally:
        server.close()
        await runner.cleanup()
        await settle(lambda: not dispatcher.num_streams)
        dispatcher.close()
        await settle(lambda: asyncio.all_tasks() <= before)


async def settle(condition: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds; pytest's timeout is the limit."""
    while not condition():  # noqa: ASYNC110 - states of several parties; no one event tells
        await asyncio.sleep(0.001)
