"""One WebSocket from its first frame to its last: reads the client's frames, owns its streams.

Knows the protocol's client frames (docs/websocket.md). websocket.py makes one per connection.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from aiohttp import WSCloseCode, WSMsgType, web

from headrace.gateway.auth import KeyRing, unauthorized
from headrace.gateway.dispatcher import NoEngine, TooManyStreams
from headrace.gateway.errors import ApiError, bad_request, busy, unavailable
from headrace.gateway.jobs import Jobs
from headrace.gateway.openai.chat import parse_chat
from headrace.gateway.openai.chat_shape import ChatShape
from headrace.gateway.openai.completion_shape import CompletionShape
from headrace.gateway.openai.completions import parse_completion
from headrace.gateway.stats import WorkerStats
from headrace.gateway.ws_format import BadFrame, Format
from headrace.gateway.ws_outbox import Outbox
from headrace.gateway.ws_stream import SocketStream, StartOptions

log = logging.getLogger(__name__)

MAX_STREAMS = 256  # of one socket, open at once
MAX_ID_CHARACTERS = 128
MAX_BAD_FRAMES = 100  # frames that are none; beyond it the client is broken or hostile


@dataclass(frozen=True, slots=True)
class SocketServices:
    """What every socket of a worker shares."""

    jobs: Jobs
    keys: KeyRing
    stats: WorkerStats
    auth_timeout_s: float  # a socket without a key may stay silent so long


class Session:
    """The protocol of one socket.

    Args:
        socket: prepared.
        request: of the handshake.
        format: as negotiated.
        services: of the worker.
        tenant: of the key in the handshake; None = an `auth` frame must come first.
    """

    def __init__(
        self,
        socket: web.WebSocketResponse,
        request: web.Request,
        format: Format,  # noqa: A002 - the word of the protocol
        services: SocketServices,
        tenant: str | None,
    ) -> None:
        self._socket = socket
        self._format = format
        self._services = services
        self._tenant = tenant
        self._outbox = Outbox(request, format.opcode)
        self._streams: dict[str, SocketStream] = {}
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._bad_frames = 0

    async def run(self) -> None:
        """Serve until the client leaves; all its streams end with it."""
        pump = asyncio.create_task(self._outbox.pump(self._catch_up))
        try:
            if self._tenant is not None or await self._authenticate():
                async for message in self._socket:
                    if message.type in (WSMsgType.TEXT, WSMsgType.BINARY):
                        await self._take(message.data)
        finally:
            pump.cancel()
            for task in self._starting.values():
                task.cancel()
            for stream in self._streams.values():
                stream.abandon()

    async def close(self, code: int, reason: str) -> None:
        """Say why and close."""
        self._outbox.flush()
        await self._socket.close(code=code, message=reason.encode())

    async def _authenticate(self) -> bool:
        """Wait for the `auth` frame; False = closed."""
        try:
            async with asyncio.timeout(self._services.auth_timeout_s):
                message = await self._socket.receive()
        except TimeoutError:
            await self.close(WSCloseCode.POLICY_VIOLATION, "no auth frame came in time")
            return False
        if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
            return False
        key: object = None
        try:
            frame = self._format.decode(message.data)
            key = frame.get("key") if frame.get("type") == "auth" else None
        except BadFrame as error:
            self._services.stats.on_refused_frame(error.code)
        self._tenant = self._services.keys.tenant(key) if isinstance(key, str) else None
        if self._tenant is None:
            refusal = unauthorized(key if isinstance(key, str) else "")
            self._send({"type": "error", **refusal.to_dict()})
            await self.close(WSCloseCode.POLICY_VIOLATION, "the first frame must be auth with a known key")
            return False
        self._send({"type": "authenticated"})
        return True

    async def _take(self, data: str | bytes) -> None:
        """One frame of the client. What is wrong with it is said, and harms no stream."""
        try:
            frame = self._format.decode(data)
            match frame.get("type"):
                case "start":
                    await self._start(frame)
                case "cancel":
                    self._cancel(_stream_id(frame))
                case "ack":
                    self._acknowledge(frame)
                case "ping":
                    await self._reply({"type": "pong"})
                case "auth":
                    await self._reply({"type": "authenticated"})
                case other:
                    raise BadFrame("unknown_type", f"{_short(other)} is no frame type of this protocol")
        except BadFrame as error:
            self._services.stats.on_refused_frame(error.code)
            await self._reply({"type": "error", **bad_request(str(error), code=error.code).to_dict()})
            self._bad_frames += 1
            if self._bad_frames > MAX_BAD_FRAMES:
                reason = f"more than {MAX_BAD_FRAMES} malformed frames"
                await self.close(WSCloseCode.POLICY_VIOLATION, reason)

    async def _reply(self, frame: dict[str, Any]) -> None:
        """Answer a frame; a client that does not read what it causes is not read on."""
        await self._outbox.drained()
        self._send(frame)

    def _send(self, frame: dict[str, Any]) -> None:
        self._outbox.send(self._format.encode(frame))

    async def _start(self, frame: dict[str, Any]) -> None:
        stream_id = _stream_id(frame)
        if stream_id in self._streams:
            raise BadFrame("id_in_use", f"the id {stream_id!r} belongs to a running stream")
        if len(self._streams) >= MAX_STREAMS:
            await self._outbox.drained()
            error = busy(f"{MAX_STREAMS} streams are open, the limit of a socket", "too_many_streams")
            self._send({"type": "error", "id": stream_id, **error.to_dict()})
            return
        kind, body = frame.get("kind"), frame.get("body")
        if kind not in ("chat", "completion"):
            raise BadFrame("malformed", f"kind = {_short(kind)}; it must be chat or completion")
        if not isinstance(body, dict):
            raise BadFrame("malformed", "body must be a map, as in the HTTP API")
        options = StartOptions(stream_id, _flag(frame, "acks"), _flag(frame, "token_ids"))
        stream = SocketStream(options, self._format, self._outbox, self._services.stats, self._forget)
        self._streams[stream_id] = stream
        self._starting[stream_id] = asyncio.create_task(self._begin(stream, str(kind), body))

    async def _begin(self, stream: SocketStream, kind: str, body: dict[str, Any]) -> None:
        """Parse, tokenise, submit; in a task of its own, so that a long prompt delays no other frame."""
        jobs = self._services.jobs
        assert self._tenant is not None
        try:
            await self._outbox.drained()
            asked = parse_chat(body) if kind == "chat" else parse_completion(body)
            job = await jobs.prepare(asked, self._tenant, "chatcmpl" if kind == "chat" else "cmpl")
            if any(job.echoes):
                raise bad_request("echo is not available over the WebSocket", "echo")
            make_shape = ChatShape if kind == "chat" else CompletionShape
            stream.begin(jobs, job, make_shape(job, jobs.text.vocabulary, jobs.text.defaults.eos_ids))
        except ApiError as error:
            stream.fail(error)
        except NoEngine as error:
            stream.fail(unavailable(str(error)))
        except TooManyStreams as error:
            stream.fail(busy(str(error), "too_many_streams"))
        except Exception:
            log.exception("a start frame failed")
            stream.fail(ApiError(500, "internal error", code="internal_error"))
        finally:
            self._starting.pop(stream.options.stream_id, None)

    def _cancel(self, stream_id: str) -> None:
        """A stream that is not known has just ended: the two crossed."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        task = self._starting.pop(stream_id, None)
        if task is not None:
            task.cancel()
        stream.cancel()

    def _acknowledge(self, frame: dict[str, Any]) -> None:
        stream_id, seq, index = _stream_id(frame), frame.get("seq"), frame.get("index", 0)
        if type(seq) is not int or type(index) is not int:
            raise BadFrame(
                "malformed", f"seq = {_short(seq)}, index = {_short(index)}; both must be integers"
            )
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        try:
            stream.acknowledge(index, seq)
        except ValueError as error:
            raise BadFrame("malformed", str(error)) from None

    def _catch_up(self) -> None:
        for stream in list(self._streams.values()):
            if self._outbox.slow:
                return
            stream.catch_up()

    def _forget(self, stream_id: str) -> None:
        self._streams.pop(stream_id, None)


def _stream_id(frame: dict[str, Any]) -> str:
    stream_id = frame.get("id")
    if not isinstance(stream_id, str) or not 0 < len(stream_id) <= MAX_ID_CHARACTERS:
        raise BadFrame(
            "malformed",
            f"id = {_short(stream_id)}; it must be a string of 1 to {MAX_ID_CHARACTERS} characters",
        )
    return stream_id


def _flag(frame: dict[str, Any], name: str) -> bool:
    value = frame.get(name, False)
    if not isinstance(value, bool):
        raise BadFrame("malformed", f"{name} = {_short(value)}; it must be true or false")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
