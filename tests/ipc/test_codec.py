"""What goes in comes out; what is not exactly right is refused, on the sending side as on the receiving one."""

import random
import tracemalloc
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.ipc import limits
from headrace.ipc.codec import MalformedFrame, decode_to_engine, decode_to_gateway, encode
from headrace.ipc.messages import (
    Cancel,
    Credit,
    Goodbye,
    Hello,
    Logprobs,
    Ping,
    Refused,
    Rejected,
    ToEngine,
    ToGateway,
)
from headrace.ipc.packed import pack_float32, pack_int32
from tests.ipc.samples import FINISHED, HELLO, LOAD, SAMPLING, SUBMIT, TOKENS, USAGE, WELCOME
from tests.ipc.strategies import TO_ENGINE, TO_GATEWAY

FRAMES = [
    encode(m) for m in (HELLO, SUBMIT, Credit(1, 9), Cancel(1), Ping(1.0), Goodbye(), WELCOME, TOKENS, LOAD)
]


def refusal(decode: Any, frame: bytes) -> MalformedFrame:
    with pytest.raises(MalformedFrame) as caught:
        decode(frame)
    return caught.value


def frame_of(message: ToEngine | ToGateway, **changes: object) -> bytes:
    """The frame of a message with some fields replaced by what the codec would not have written."""
    values = msgpack.unpackb(encode(message))
    names = list(type(message).__slots__)
    for name, value in changes.items():
        values[1 + names.index(name)] = value
    return bytes(msgpack.packb(values))


@given(TO_ENGINE)
def test_every_message_to_an_engine_survives_the_wire(message: ToEngine) -> None:
    assert decode_to_engine(encode(message)) == message


@given(TO_GATEWAY)
def test_every_message_to_a_gateway_survives_the_wire(message: ToGateway) -> None:
    assert decode_to_gateway(encode(message)) == message


def test_the_format_is_an_array_of_tag_and_fields() -> None:
    """Pins the wire: an engine of this version must understand a gateway of this version built elsewhere."""
    assert encode(Hello(1, "g", "")) == b"\x94\x01\x01\xa1g\xa0"
    assert encode(Credit(7, 300)) == b"\x93\x03\x07\xcd\x01\x2c"
    tags = [frame[1] if frame[0] != 0xDC else frame[3] for frame in FRAMES]
    assert tags == [1, 2, 3, 4, 5, 6, 17, 20, 21]
    assert encode(Refused("version", ""))[1] == 18
    assert encode(Rejected(1, "draining", ""))[1] == 19


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("stream", -1, "stream = -1"),
        ("stream", 1 << 32, "stream = 4294967296"),
        ("stream", True, "bool, not an integer"),
        ("stream", 1.0, "float, not an integer"),
        ("stream", None, "NoneType, not an integer"),
        ("stream", [1], "max_array_len"),
        ("stream", {1: 2}, "max_map_len"),
        ("stream", [], "list, not an integer"),
        ("stream", {}, "dict, not an integer"),
        ("stream", msgpack.ExtType(5, b""), "ExtType, not an integer"),
        ("stream", msgpack.ExtType(5, b"abc"), "max_ext_len"),
        ("stream", msgpack.Timestamp(1, 2), "max_ext_len"),
        ("request_id", b"bytes", "bytes, not a string"),
        ("request_id", "x" * 257, "longer than 256 bytes"),
        ("request_id", "é" * 129, "longer than 256 bytes"),
        ("request_id", "x" * 4000, "max_str_len"),
        ("priority", 1 << 31, "priority = 2147483648"),
        ("prompt", "text", "str, not bytes"),
        ("prompt", b"12345", "5 bytes, not a multiple of 4"),
        ("prompt", pack_int32([4, -5]), "the token id -5"),
        ("generated", pack_int32([-1]), "the token id -1"),
        ("credit", -1, "credit = -1"),
        ("credit", 1 << 63, "outside"),
    ],
)
def test_a_submit_with_a_wrong_field_is_refused_by_name(field: str, value: object, says: str) -> None:
    error = refusal(decode_to_engine, frame_of(SUBMIT, **{field: value}))
    assert error.reason == "malformed"
    assert says in error.detail


@pytest.mark.parametrize(
    ("index", "value", "says"),
    [
        (0, 0, "Sampling.max_tokens = 0"),
        (1, float("nan"), "Sampling.temperature = nan"),
        (1, -0.5, "Sampling.temperature = -0.5"),
        (2, 1.5, "Sampling.top_p = 1.5"),
        (2, "1", "str, not a number"),
        (5, float("inf"), "presence_penalty = inf"),
        (8, [[1, 2.0, 3]], "has 3 fields, not 2"),
        (8, [[-1, 2.0]], "logit_bias = -1"),
        (8, [1], "Unexpected type"),
        (8, [[1, 0.0]] * 1025, "1025 entries, at most 1024"),
        (9, -1, "Sampling.seed = -1"),
        (11, [1.5], "float, not an integer"),
        (12, 21, "Sampling.logprobs = 21"),
    ],
)
def test_sampling_is_checked_inside_a_submit(index: int, value: object, says: str) -> None:
    values = msgpack.unpackb(encode(SUBMIT))
    values[8][index] = value
    error = refusal(decode_to_engine, msgpack.packb(values))
    assert error.reason == "malformed"
    assert says in error.detail


def test_whole_numbers_are_good_floats() -> None:
    """A client's `temperature: 1` reaches the engine as a float."""
    message = replace(SUBMIT, sampling=replace(SAMPLING, temperature=1))
    decoded = decode_to_engine(encode(message))
    assert isinstance(decoded.sampling.temperature, float)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"streams": bytes(4)}, "Tokens.streams has 4 bytes, not 4 x 2"),
        ({"starts": bytes(12)}, "Tokens.starts has 12 bytes"),
        ({"counts": bytes([3, 0])}, "a row without tokens"),
        ({"counts": bytes([1, 1])}, "Tokens.token_ids has 12 bytes, not 4 x 2"),
        ({"token_ids": pack_int32([1, -2, 3])}, "the token id -2"),
        ({"logprobs": [[2, b"", 0, b"", b""]]}, "Logprobs.row = 2"),
        ({"logprobs": [[1, bytes(4), 0, b"", b""]]}, "Logprobs.chosen has 4 bytes, not 4 x 2"),
        ({"logprobs": [[0, bytes(4), 2, bytes(4), bytes(8)]]}, "Logprobs.top_ids has 4 bytes"),
        ({"logprobs": [[0, bytes(4), 2, bytes(8), bytes(9)]]}, "Logprobs.top has 9 bytes"),
        ({"logprobs": [[0, bytes(4), 0, b"", b""]] * 2}, "Logprobs.row = 0 after row 0"),
        ({"logprobs": [[0, bytes(4), 21, b"", b""]]}, "Logprobs.top_k = 21"),
        ({"finished": [[1, "tired", [3, 0, 2, 0.1, 0.2, 0.3, 0], ""]]}, "'tired' is none of"),
        ({"finished": [[1, "stop", [3, 0, 2, -0.1, 0.2, 0.3, 0, 1.5, 4, 3], ""]]}, "Usage.queue_s = -0.1"),
        ({"finished": [[1, "stop", [3, 0, 2], ""]]}, "Usage has 3 fields, not 10"),
        ({"step": -1}, "Tokens.step = -1"),
    ],
)
def test_tokens_whose_columns_disagree_are_refused(changes: dict[str, object], says: str) -> None:
    error = refusal(decode_to_gateway, frame_of(TOKENS, **changes))
    assert error.reason == "malformed"
    assert says in error.detail


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (SUBMIT, {"request_id": "\ud800"}),
        (SUBMIT, {"request_id": "x" * 300}),
        (SUBMIT, {"prompt": b"123"}),
        (SUBMIT, {"stream": -1}),
        (SUBMIT, {"sampling": replace(SAMPLING, max_tokens=0)}),
        (SUBMIT, {"sampling": replace(SAMPLING, logit_bias=((-1, 2.0),))}),
        (SUBMIT, {"sampling": USAGE}),
        (TOKENS, {"counts": bytes([1, 1])}),
        (TOKENS, {"finished": [FINISHED]}),
        (TOKENS, {"logprobs": (Logprobs(0, pack_float32([1, 2]), 0, b"", b""),)}),
        (LOAD, {"state": "confused"}),
    ],
)
def test_what_the_other_side_would_refuse_cannot_be_sent(message: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(MalformedFrame) as caught:
        encode(replace(message, **changes))
    assert caught.value.reason == "malformed"


def test_sentences_for_people_are_cut_not_refused() -> None:
    """An error message of any length and content must reach its reader; characters stay whole."""
    message = "é" * 5000 + "\ud800"
    decoded = decode_to_gateway(encode(replace(TOKENS, finished=(replace(FINISHED, message=message),))))
    text = decoded.finished[0].message  # type: ignore[union-attr]
    assert text == "é" * (limits.MAX_TEXT_BYTES // 2)
    assert decode_to_gateway(encode(Rejected(1, "bad_request", "\udcff"))) == Rejected(1, "bad_request", "?")


@pytest.mark.parametrize("tag", [0, 7, 16, 22, -1, 1 << 40, "Hello", None, 1.0, True])
def test_an_unknown_tag_is_refused_as_unknown(tag: object) -> None:
    frame = msgpack.packb([tag, 1, 2, 3])
    assert refusal(decode_to_engine, frame).reason == "unknown"
    assert refusal(decode_to_gateway, frame).reason == "unknown"


def test_messages_travel_in_one_direction_only() -> None:
    assert refusal(decode_to_engine, encode(WELCOME)).reason == "unknown"
    assert refusal(decode_to_gateway, encode(SUBMIT)).reason == "unknown"
    assert decode_to_engine(encode(Goodbye())) == decode_to_gateway(encode(Goodbye())) == Goodbye()


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: frame[:4].hex())
def test_a_frame_cut_short_or_with_a_tail_is_refused(frame: bytes) -> None:
    decode = decode_to_engine if frame in FRAMES[:6] else decode_to_gateway
    decode(frame)
    for size in range(len(frame)):
        refusal(decode, frame[:size])
    for tail in (b"\0", b"\xc1", frame):
        assert "after the message" in refusal(decode, frame + tail).detail


@pytest.mark.parametrize("change", [-1, 1])
def test_a_message_with_a_field_too_few_or_too_many_is_refused(change: int) -> None:
    values = msgpack.unpackb(encode(LOAD))
    values = values[:-1] if change < 0 else [*values, 0]
    assert (
        f"Load has {len(values)} fields, not 24" in refusal(decode_to_gateway, msgpack.packb(values)).detail
    )


def decode_both(frame: bytes) -> None:
    """Whatever the bytes are: a message that can be sent on unchanged, or MalformedFrame."""
    for decode in (decode_to_engine, decode_to_gateway):
        try:
            message = decode(frame)
        except MalformedFrame as error:
            assert error.reason in ("malformed", "unknown")
            assert error.detail
            assert len(error.detail) < 300
        else:
            assert decode(encode(message)) == message


@settings(max_examples=200)
@given(st.binary(max_size=64))
@example(b"")
@example(b"\xc1")
def test_random_bytes_never_escape_the_refusal(frame: bytes) -> None:
    decode_both(frame)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=100)
@given(st.integers(0, 24), st.lists(PLAIN, max_size=20))
def test_random_values_never_escape_the_refusal(tag: int, values: list[object]) -> None:
    decode_both(msgpack.packb([tag, *values], unicode_errors="surrogatepass"))


@settings(max_examples=100)
@given(st.sampled_from(FRAMES), st.integers(0, 1 << 32))
def test_mutated_frames_never_escape_the_refusal(frame: bytes, seed: int) -> None:
    """Twenty frames an example, each with a few bytes changed, added or taken out of a good one."""
    chance = random.Random(seed)
    for _ in range(20):
        data = bytearray(frame)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data) or 1)
            match chance.randrange(4):
                case 0:
                    data[at : at + 1] = chance.randbytes(1)
                case 1:
                    data[at:at] = chance.randbytes(chance.randint(1, 5))
                case 2:
                    del data[at : at + chance.randint(1, 5)]
                case _:
                    data[at : at + 1] = bytes([0xC0 + chance.randrange(0x20)])  # a MessagePack type
        decode_both(bytes(data))


@pytest.mark.parametrize(
    "frame",
    [
        b"\xdd\xff\xff\xff\xff",  # four thousand million fields
        b"\xdd\x00\x0f\xff\xff" * 1000,  # nested, a million each
        b"\x91" * 100_000,
        b"\x94\x01" + b"\xdd\x00\x0f\xff\xff" * 1000,
        b"\x94\x01\xdf\xff\xff\xff\xff",
        b"\x94\x01\x01\xdb\xff\xff\xff\xff",
        b"\x94\x01\x01\xc6\xff\xff\xff\xff",
        b"\x98\x14\x01\xc4\x00\xc4\x00\xc4\x00\xc4\x00\xdd\xff\xff\xff\xff",
        b"\x98\x14\x01\xc4\x00\xc4\x00\xc4\x00\xc4\x00\xdd\x00\x00\xff\xff" + b"\x95" * 60_000,
        b"\x94\x01" + b"\x80" * 100_000,
    ],
    ids=range(10),
)
def test_a_frame_cannot_claim_memory_that_it_does_not_fill(frame: bytes) -> None:
    """Headers that announce gigabytes are refused before anything of that size exists."""
    tracemalloc.start()
    try:
        for decode in (decode_to_engine, decode_to_gateway):
            refusal(decode, frame)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * len(frame) + 100_000


def test_finished_rows_travel_without_tokens() -> None:
    empty = replace(TOKENS, streams=b"", starts=b"", counts=b"", token_ids=b"", logprobs=())
    assert decode_to_gateway(encode(empty)) == empty
