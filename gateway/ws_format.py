"""The two encodings of the WebSocket protocol: JSON in text frames, MessagePack in binary frames.

A frame is a mapping with a `type`; docs/websocket.md lists them. Token frames are cut open once per stream and
filled per token. Knows no socket; ws_session.py uses a Format.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgpack
import orjson

JSON_PROTOCOL = "headrace.v1.json"
MSGPACK_PROTOCOL = "headrace.v1.msgpack"
TEXT_FRAME, BINARY_FRAME = 0x1, 0x2


class BadFrame(ValueError):
    """What the client sent is no frame of the protocol.

    Args:
        code: malformed | unknown_type | wrong_kind, for programs and the metrics page.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class TokenFrame(Protocol):
    """The token frames of one choice, all but what changes per event."""

    def fill(
        self, seq: int, text: str, token_ids: Sequence[int] | None, logprobs: dict[str, Any] | None
    ) -> bytes:
        """The frame's payload; None leaves a field out."""


class Format(Protocol):
    """One encoding."""

    opcode: int

    def decode(self, data: str | bytes) -> dict[str, Any]:
        """A client's frame; raises BadFrame."""

    def encode(self, frame: dict[str, Any]) -> bytes:
        """A server's frame."""

    def token_frame(self, stream_id: str, index: int) -> TokenFrame:
        """For choice `index` of a stream."""


class JsonFormat:
    """Text frames."""

    opcode = TEXT_FRAME

    def decode(self, data: str | bytes) -> dict[str, Any]:
        if isinstance(data, bytes):
            raise BadFrame("wrong_kind", f"{JSON_PROTOCOL} has text frames; this one is binary")
        try:
            return _mapping(orjson.loads(data))
        except orjson.JSONDecodeError as error:
            raise BadFrame("malformed", f"the frame is not valid JSON: {error}") from None

    def encode(self, frame: dict[str, Any]) -> bytes:
        return orjson.dumps(frame)

    def token_frame(self, stream_id: str, index: int) -> TokenFrame:
        return _JsonTokenFrame(stream_id, index)


class _JsonTokenFrame:
    __slots__ = ("_head",)

    def __init__(self, stream_id: str, index: int) -> None:
        head = orjson.dumps({"type": "token", "id": stream_id, "index": index})
        self._head = head[:-1] + b',"seq":'

    def fill(
        self, seq: int, text: str, token_ids: Sequence[int] | None, logprobs: dict[str, Any] | None
    ) -> bytes:
        if token_ids is None and logprobs is None:
            return b'%b%d,"text":%b}' % (self._head, seq, orjson.dumps(text))
        extra = b""
        if token_ids is not None:
            extra += b',"token_ids":' + orjson.dumps(list(token_ids))
        if logprobs is not None:
            extra += b',"logprobs":' + orjson.dumps(logprobs)
        return b'%b%d,"text":%b%b}' % (self._head, seq, orjson.dumps(text), extra)


class MsgpackFormat:
    """Binary frames."""

    opcode = BINARY_FRAME

    def decode(self, data: str | bytes) -> dict[str, Any]:
        if isinstance(data, str):
            raise BadFrame("wrong_kind", f"{MSGPACK_PROTOCOL} has binary frames; this one is text")
        try:
            return _mapping(msgpack.unpackb(data))
        except (ValueError, msgpack.UnpackException) as error:
            reason = str(error) or type(error).__name__
            raise BadFrame("malformed", f"the frame is not valid MessagePack: {reason}") from None

    def encode(self, frame: dict[str, Any]) -> bytes:
        return _pack(frame)

    def token_frame(self, stream_id: str, index: int) -> TokenFrame:
        return _MsgpackTokenFrame(stream_id, index)


class _MsgpackTokenFrame:
    """A map's first byte holds its size, so there is one head per size."""

    __slots__ = ("_fields",)

    def __init__(self, stream_id: str, index: int) -> None:
        values = ("type", "token", "id", stream_id, "index", index, "seq")
        self._fields = b"".join(_pack(value) for value in values)

    def fill(
        self, seq: int, text: str, token_ids: Sequence[int] | None, logprobs: dict[str, Any] | None
    ) -> bytes:
        parts = [b"", self._fields, _pack(seq), _TEXT_KEY, _pack(text)]
        if token_ids is not None:
            parts += (_pack("token_ids"), _pack(list(token_ids)))
        if logprobs is not None:
            parts += (_pack("logprobs"), _pack(logprobs))
        parts[0] = bytes((0x80 | (len(parts) - 1) // 2 + 3,))
        return b"".join(parts)


def frame_bytes(opcode: int, payload: bytes) -> bytes:
    """One unfragmented, unmasked frame of a server (RFC 6455, section 5.2)."""
    size = len(payload)
    if size < 126:
        return bytes((0x80 | opcode, size)) + payload
    if size < 1 << 16:
        return bytes((0x80 | opcode, 126)) + size.to_bytes(2, "big") + payload
    return bytes((0x80 | opcode, 127)) + size.to_bytes(8, "big") + payload


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadFrame("malformed", "a frame must be a map with a type")
    return value


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


_TEXT_KEY = _pack("text")
