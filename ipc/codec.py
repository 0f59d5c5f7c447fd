"""Messages to frames and back: one MessagePack array, `[tag, field, ...]`, checked the same way on both ends.

Owns the tags and the rules between fields; field types and bounds are ipc/schema.py's and ipc/limits.py's.
What cannot be decoded cannot be encoded either, so an honest peer is never refused for what a user typed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, cast

import msgpack
import numpy as np

from headrace.ipc import messages as m
from headrace.ipc.limits import MAX_TEXT_BYTES
from headrace.ipc.packed import INT32
from headrace.ipc.schema import BadField, Field, expect_length, lowering, members_of

Reason = Literal["malformed", "oversized", "unknown"]


class MalformedFrame(ValueError):
    """A frame that is not taken, or a message that would make one.

    `reason` is a Refused.reason; `detail` names the field, its value and what is allowed.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: Reason = reason
        self.detail = detail


def _check_packed(where: str, data: bytes, count: int | None = None) -> None:
    if count is None and len(data) % 4:
        raise BadField(f"{where} has {len(data)} bytes, not a multiple of 4")
    if count is not None and len(data) != 4 * count:
        raise BadField(f"{where} has {len(data)} bytes, not 4 x {count}")


def _check_ids(where: str, data: bytes) -> None:
    # A little-endian int32 is negative exactly when its last byte is above 127.
    if not data[3::4].isascii():
        raise BadField(f"{where} holds the token id {int(np.frombuffer(data, INT32).min())}")


def _check_submit(message: m.Submit) -> None:
    for where, data in (("Submit.prompt", message.prompt), ("Submit.generated", message.generated)):
        _check_packed(where, data)
        _check_ids(where, data)


def _check_tokens(message: m.Tokens) -> None:
    counts = message.counts
    _check_packed("Tokens.streams", message.streams, len(counts))
    _check_packed("Tokens.starts", message.starts, len(counts))
    if 0 in counts:
        raise BadField("Tokens.counts holds a row without tokens")
    _check_packed("Tokens.token_ids", message.token_ids, sum(counts))
    _check_ids("Tokens.token_ids", message.token_ids)
    previous = -1
    for row in message.logprobs:
        if not previous < row.row < len(counts):
            raise BadField(f"Logprobs.row = {row.row} after row {previous} of {len(counts)} rows")
        previous = row.row
        _check_packed("Logprobs.chosen", row.chosen, counts[row.row])
        _check_packed("Logprobs.top_ids", row.top_ids, counts[row.row] * row.top_k)
        _check_packed("Logprobs.top", row.top, counts[row.row] * row.top_k)


@dataclass(frozen=True, slots=True)
class _Form:
    """How one message type is written and read."""

    tag: int
    message: type
    members: tuple[Field, ...]
    lower: Callable[[Any], tuple[Any, ...]]
    check: Callable[[Any], None] | None


def _forms(tags: dict[int, type]) -> tuple[_Form, ...]:
    checks: dict[type, Callable[[Any], None]] = {m.Submit: _check_submit, m.Tokens: _check_tokens}
    forms = []
    for tag, message in tags.items():
        members = members_of(message)
        forms.append(_Form(tag, message, members, lowering(message, members), checks.get(message)))
    return tuple(forms)


# A tag never changes its meaning; a message that changes raises PROTOCOL_VERSION.
_TO_ENGINE = _forms({1: m.Hello, 2: m.Submit, 3: m.Credit, 4: m.Cancel, 5: m.Ping, 6: m.Goodbye})
_TO_GATEWAY = _forms({6: m.Goodbye, 17: m.Welcome, 18: m.Refused, 19: m.Rejected, 20: m.Tokens, 21: m.Load})

_BY_TYPE: Mapping[type, _Form] = MappingProxyType({form.message: form for form in _TO_ENGINE + _TO_GATEWAY})
_ENGINE_TAGS: Mapping[int, _Form] = MappingProxyType({form.tag: form for form in _TO_ENGINE})
_GATEWAY_TAGS: Mapping[int, _Form] = MappingProxyType({form.tag: form for form in _TO_GATEWAY})


def encode(message: m.ToEngine | m.ToGateway) -> bytes:
    """The frame of `message`.

    Raises:
        MalformedFrame: the other side would refuse it (`malformed`).
    """
    form = _BY_TYPE[type(message)]
    try:
        values = form.lower(message)
        if form.check is not None:
            form.check(message)
        return cast("bytes", msgpack.packb((form.tag, *values)))
    except (BadField, ValueError) as error:
        raise MalformedFrame("malformed", str(error)) from None


def decode_to_engine(frame: bytes) -> m.ToEngine:
    """The message of a frame from a gateway.

    Raises:
        MalformedFrame: `unknown` for a tag that is not a gateway's, `malformed` for anything else.
    """
    return cast("m.ToEngine", _decode(frame, _ENGINE_TAGS))


def decode_to_gateway(frame: bytes) -> m.ToGateway:
    """The message of a frame from an engine.

    Raises:
        MalformedFrame: `unknown` for a tag that is not an engine's, `malformed` for anything else.
    """
    return cast("m.ToGateway", _decode(frame, _GATEWAY_TAGS))


def _decode(frame: bytes, tags: Mapping[int, _Form]) -> object:
    size = len(frame)
    if not size:
        raise MalformedFrame("malformed", "the frame is empty")
    unpacker = msgpack.Unpacker(
        None,
        raw=False,
        read_size=size,
        max_buffer_size=size,
        max_str_len=MAX_TEXT_BYTES,
        max_bin_len=size,
        # Zero: a container where a value belongs is refused before it is built. Those that belong are opened
        # by read_array_header.
        max_array_len=0,
        max_map_len=0,
        max_ext_len=0,
    )
    unpacker.feed(frame)
    try:
        count = unpacker.read_array_header()
        tag = unpacker.unpack()
        form = tags.get(tag) if type(tag) is int else None
        if form is None:
            raise MalformedFrame("unknown", f"tag {str(tag)[:40]}")
        expect_length(form.message.__name__, count, 1 + len(form.members))
        message = form.message(*[member.read(unpacker) for member in form.members])
        if unpacker.tell() != size:
            raise BadField(f"{size - unpacker.tell()} bytes after the message")
        if form.check is not None:
            form.check(message)
        return message
    except msgpack.OutOfData:
        raise MalformedFrame("malformed", f"the frame ends early, after {size} bytes") from None
    except MalformedFrame:
        raise
    except (BadField, ValueError, msgpack.UnpackException) as error:
        raise MalformedFrame("malformed", str(error) or type(error).__name__) from None
