"""A WebSocket service on a real socket, in the test's loop, in front of a FakeEngine; and a client for it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgpack
from aiohttp import web

from headrace.config import Config, GatewayConfig, ModelConfig, embedded_model
from headrace.gateway.app import JOBS, KEYS, make_app
from headrace.gateway.connection import connections
from headrace.gateway.dispatcher import Dispatcher
from headrace.gateway.listen import worker_socket
from headrace.gateway.stats import WorkerStats
from headrace.gateway.websocket import add_websocket
from headrace.gateway.ws_format import MSGPACK_PROTOCOL
from headrace.gateway.ws_session import SocketServices
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.service import MODEL, embedded_text, say, settle

Socket = aiohttp.ClientWebSocketResponse[bool]


@dataclass
class WsService:
    """What a test needs of it."""

    url: str
    port: int
    engine: FakeEngine
    dispatcher: Dispatcher
    stats: WorkerStats
    session: aiohttp.ClientSession
    runner: web.AppRunner


class Talk:
    """A client's end of one socket, in either encoding."""

    def __init__(self, socket: Socket) -> None:
        self.socket = socket
        self.binary = socket.protocol == MSGPACK_PROTOCOL

    async def send(self, frame: dict[str, Any]) -> None:
        if self.binary:
            await self.socket.send_bytes(msgpack.packb(frame))
        else:
            await self.socket.send_json(frame)

    async def receive(self) -> dict[str, Any]:
        frame = (
            msgpack.unpackb(await self.socket.receive_bytes())
            if self.binary
            else await self.socket.receive_json()
        )
        assert isinstance(frame, dict)
        return frame

    async def start(self, stream_id: str, *, kind: str = "completion", **extra: Any) -> None:
        body = {"prompt": "Once", **extra.pop("body", {})}
        await self.send({"type": "start", "id": stream_id, "kind": kind, "body": body, **extra})

    async def until_ended(self, *stream_ids: str) -> dict[str, list[dict[str, Any]]]:
        """Every frame of some streams, by id, up to the last of each."""
        frames: dict[str, list[dict[str, Any]]] = {stream_id: [] for stream_id in stream_ids}
        running = set(stream_ids)
        while running:
            frame = await self.receive()
            frames[frame["id"]].append(frame)
            if frame["type"] == "error" or (frame["type"] == "done" and frame["usage"] is not None):
                running.discard(frame["id"])
        return frames

    async def closed(self) -> int | None:
        """Read on to the close; its code."""
        while (await self.socket.receive()).type not in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED):
            pass
        return self.socket.close_code


@asynccontextmanager
async def ws_serving(engine: FakeEngine | None = None, **gateway: Any) -> AsyncIterator[WsService]:
    """A running service; on the way out no stream may be left."""
    engine = engine or FakeEngine(say("Hello there."))
    config = Config(
        model=ModelConfig(path=str(embedded_model()), served_name=MODEL),
        gateway=replace(GatewayConfig(), **gateway),
    )
    dispatcher = Dispatcher(["fake"], engine.connect, config.gateway.max_streams)
    dispatcher.start()
    stats = WorkerStats()
    app = make_app(config, dispatcher, embedded_text(), stats)
    add_websocket(
        app,
        SocketServices(app[JOBS], app[KEYS], stats, config.gateway.header_timeout_s),
        origins=config.gateway.cors_origins,
        max_frame_bytes=config.gateway.max_body_bytes,
    )
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
    await runner.setup()
    assert runner.server is not None
    listener = worker_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = await asyncio.get_running_loop().create_server(
        connections(runner.server, config.gateway), sock=listener
    )
    try:
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{port}/v1/ws"
            yield WsService(url, port, engine, dispatcher, stats, session, runner)
    finally:
        server.close()
        await runner.cleanup()
        await settle(lambda: not dispatcher.num_streams)
        dispatcher.close()


@asynccontextmanager
async def talking(
    service: WsService, *protocols: str, headers: dict[str, str] | None = None
) -> AsyncIterator[Talk]:
    """A connected client."""
    async with service.session.ws_connect(service.url, protocols=protocols, headers=headers) as socket:
        yield Talk(socket)
