"""`/v1/ws` over real sockets: many streams on one, cancel, flow, keys, origins, what is wrong and what is hostile."""

import asyncio
import json
import os
import socket as sockets
from typing import Any

import aiohttp
import msgpack
import pytest

from headrace.gateway.connection import HIGH_WATER
from headrace.gateway.ws_format import JSON_PROTOCOL, MSGPACK_PROTOCOL
from headrace.gateway.ws_session import MAX_BAD_FRAMES, MAX_STREAMS
from headrace.ipc.messages import Submit
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.service import say, settle
from tests.gateway.ws_service import Talk, talking, ws_serving

BOTH = pytest.mark.parametrize("protocol", [JSON_PROTOCOL, MSGPACK_PROTOCOL])


def counting(submit: Submit) -> list[int]:
    """A script that differs by request: its seed tells which."""
    return [1000 + (submit.sampling.seed + index) % 500 for index in range(submit.sampling.max_tokens)]


def texts(frames: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(frame["text"] for frame in frames if frame["type"] == "token" and frame["index"] == index)


def assert_numbered(frames: list[dict[str, Any]], index: int = 0) -> None:
    """The events of one choice are numbered without gaps, its end included."""
    seqs = [
        frame["seq"] for frame in frames if frame["type"] in ("token", "done") and frame["index"] == index
    ]
    assert seqs == list(range(1, len(seqs) + 1))


def break_connection(talk: Talk) -> None:
    """As a cable that is pulled: no close frame."""
    duplicate = sockets.socket(fileno=os.dup(talk.socket.get_extra_info("socket").fileno()))
    duplicate.shutdown(sockets.SHUT_RDWR)
    duplicate.close()


async def test_without_a_subprotocol_json_is_spoken() -> None:
    async with ws_serving() as service, talking(service) as talk:
        await talk.start("a")
        frames = (await talk.until_ended("a"))["a"]
        assert talk.socket.protocol is None
        assert texts(frames) == "Hello there."


async def test_other_subprotocols_are_refused() -> None:
    async with ws_serving() as service:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
            await service.session.ws_connect(service.url, protocols=("graphql-ws",))
        assert refusal.value.status == 400


@BOTH
async def test_many_streams_share_a_socket(protocol: str) -> None:
    async with ws_serving(FakeEngine(counting)) as service, talking(service, protocol) as talk:
        names = [f"stream-{i}" for i in range(50)]
        for seed, name in enumerate(names):
            body = {"max_tokens": 20, "seed": seed, "ignore_eos": True}
            await talk.start(name, body=body, token_ids=True)
        frames = await talk.until_ended(*names)
        for seed, name in enumerate(names):
            assert_numbered(frames[name])
            ids = [i for f in frames[name] if f["type"] == "token" for i in f["token_ids"]]
            assert ids == [1000 + seed + index for index in range(20)]
            assert frames[name][0]["type"] == "started"
            assert frames[name][-1]["finish_reason"] == "length"
        assert service.stats.websockets == 1


@BOTH
async def test_choices_are_told_apart(protocol: str) -> None:
    async with ws_serving(FakeEngine(counting)) as service, talking(service, protocol) as talk:
        await talk.start("n", body={"n": 3, "max_tokens": 5, "ignore_eos": True})
        frames = (await talk.until_ended("n"))["n"]
        assert {frame["index"] for frame in frames if frame["type"] == "token"} == {0, 1, 2}
        for index in range(3):
            assert_numbered(frames, index)
        assert frames[-1]["usage"]["completion_tokens"] == 15


@BOTH
async def test_chat_logprobs_have_the_http_shape(protocol: str) -> None:
    async with ws_serving() as service, talking(service, protocol) as talk:
        body = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2}
        await talk.send({"type": "start", "id": "a", "kind": "chat", "body": body})
        frames = (await talk.until_ended("a"))["a"]
        entry = frames[1]["logprobs"]["content"][0]
        assert entry["token"] == "Hello"
        assert len(entry["top_logprobs"]) == 2


async def test_an_id_is_free_again_after_its_end() -> None:
    async with ws_serving() as service, talking(service) as talk:
        for _ in range(3):
            await talk.start("same")
            assert texts((await talk.until_ended("same"))["same"]) == "Hello there."


async def test_cancel_ends_one_stream_and_frees_it_in_the_engine() -> None:
    engine = FakeEngine(counting, step_s=0.002)
    async with ws_serving(engine, credit_window=10_000) as service, talking(service) as talk:
        for name in ("gone", "stays"):
            await talk.start(name, body={"max_tokens": 100, "ignore_eos": True})
        while (await talk.receive())["type"] != "token":
            pass
        await talk.send({"type": "cancel", "id": "gone"})
        frames = await talk.until_ended("gone", "stays")
        assert frames["gone"][-1]["finish_reason"] == "cancelled"
        assert frames["stays"][-1]["finish_reason"] == "length"
        assert sum(len(stream.script) == stream.sent for stream in engine.seen) == 1


async def test_cancelling_what_is_not_there_is_no_error() -> None:
    async with ws_serving() as service, talking(service) as talk:
        await talk.send({"type": "cancel", "id": "never"})
        await talk.send({"type": "ping"})
        assert (await talk.receive())["type"] == "pong"


async def test_disconnect_cancels_every_stream() -> None:
    engine = FakeEngine(counting, step_s=0.002)
    async with ws_serving(engine, credit_window=10_000) as service:
        async with talking(service) as talk:
            for name in ("a", "b", "c"):
                await talk.start(name, body={"max_tokens": 150, "ignore_eos": True})
            while (await talk.receive())["type"] != "token":
                pass
            assert service.dispatcher.num_streams == 3
        await settle(lambda: service.dispatcher.num_streams == 0 and service.stats.open_websockets == 0)
        assert all(stream.sent < 150 for stream in engine.seen)


async def test_a_stream_waits_for_its_acks_and_others_do_not() -> None:
    engine = FakeEngine(counting)
    async with ws_serving(engine, credit_window=8) as service, talking(service) as talk:
        await talk.start("acked", body={"max_tokens": 40, "ignore_eos": True}, acks=True)
        await engine.parked.wait()
        assert [stream.sent for stream in engine.seen] == [8]
        await talk.start("free", body={"max_tokens": 40, "ignore_eos": True})
        acked = []
        while (frame := await talk.receive())["id"] != "free" or frame["type"] != "done":
            if frame["id"] == "acked":
                acked.append(frame)
        assert [stream.sent for stream in engine.seen] == [8, 40]
        while acked[-1]["type"] != "done":
            await talk.send({"type": "ack", "id": "acked", "seq": acked[-1]["seq"]})
            acked.append(await talk.receive())
        assert_numbered(acked)


async def test_a_reader_that_stalls_costs_bounded_memory_and_loses_nothing() -> None:
    """Slow for a while: events gather in the logs, bounded by the credit, and arrive merged."""
    engine = FakeEngine(counting, max_model_len=20_000)
    async with ws_serving(engine, credit_window=200) as service, talking(service) as talk:
        names = [f"s{i}" for i in range(30)]
        for name in names:
            await talk.start(name, body={"max_tokens": 4000, "ignore_eos": True}, token_ids=True)
        await settle(lambda: service.stats.slow_streams >= len(names))
        await engine.parked.wait()
        assert service.runner.server is not None
        connection = next(c for c in service.runner.server.connections if c.writing_paused)
        assert connection.transport is not None
        assert connection.transport.get_write_buffer_size() < HIGH_WATER + 30 * 400
        frames = await talk.until_ended(*names)
        for name in names:
            ids = [i for f in frames[name] if f["type"] == "token" for i in f["token_ids"]]
            assert len(ids) == 4000
            assert_numbered_loosely(frames[name])


def assert_numbered_loosely(frames: list[dict[str, Any]]) -> None:
    """Merged events skip numbers but never go back."""
    seqs = [frame["seq"] for frame in frames if frame["type"] in ("token", "done")]
    assert seqs == sorted(set(seqs))


MALFORMED: list[tuple[Any, str]] = [
    ([], "malformed"),
    ({"type": "dance"}, "unknown_type"),
    ({}, "unknown_type"),
    ({"type": ["start"]}, "unknown_type"),
    ({"type": "start"}, "malformed"),
    ({"type": "start", "id": 7}, "malformed"),
    ({"type": "start", "id": ""}, "malformed"),
    ({"type": "start", "id": "x" * 129}, "malformed"),
    ({"type": "start", "id": "a", "kind": "dance", "body": {}}, "malformed"),
    ({"type": "start", "id": "a", "kind": "chat", "body": []}, "malformed"),
    ({"type": "start", "id": "a", "kind": "chat", "body": {}, "acks": 1}, "malformed"),
    ({"type": "start", "id": "running", "kind": "chat", "body": {}}, "id_in_use"),
    ({"type": "cancel"}, "malformed"),
    ({"type": "ack", "id": "running"}, "malformed"),
    ({"type": "ack", "id": "running", "seq": True}, "malformed"),
    ({"type": "ack", "id": "running", "seq": 9999}, "malformed"),
    ({"type": "ack", "id": "running", "seq": 0, "index": 5}, "malformed"),
]


@BOTH
async def test_malformed_frames_are_answered_and_harm_no_stream(protocol: str) -> None:
    engine = FakeEngine(counting)
    async with ws_serving(engine, credit_window=8) as service, talking(service, protocol) as talk:
        await talk.start("running", body={"max_tokens": 20, "ignore_eos": True}, acks=True)
        await engine.parked.wait()
        for frame, code in MALFORMED:
            if talk.binary:
                await talk.socket.send_bytes(msgpack.packb(frame))
            else:
                await talk.socket.send_str(json.dumps(frame))
            while (answer := await talk.receive())["type"] != "error":
                pass
            assert "id" not in answer
            assert answer["error"]["code"] == code, frame
        assert sum(service.stats.refused_frames.values()) == len(MALFORMED)
        await talk.send({"type": "ack", "id": "running", "seq": 8})
        await talk.send({"type": "cancel", "id": "running"})
        assert (await talk.until_ended("running"))["running"][-1]["type"] == "done"


@pytest.mark.parametrize(
    ("protocol", "data"),
    [
        (JSON_PROTOCOL, b"\x80"),
        (JSON_PROTOCOL, "{nonsense"),
        (JSON_PROTOCOL, "[" * 100_000),
        (MSGPACK_PROTOCOL, "{}"),
        (MSGPACK_PROTOCOL, b"\xc1"),
        (MSGPACK_PROTOCOL, b""),
        (MSGPACK_PROTOCOL, b"\x81\xa4type"),
        (MSGPACK_PROTOCOL, b"\x91" * 100_000),
        (MSGPACK_PROTOCOL, b"\x81\xa1\xff\x01"),
    ],
)
async def test_what_is_no_frame_is_answered(protocol: str, data: str | bytes) -> None:
    async with ws_serving() as service, talking(service, protocol) as talk:
        if isinstance(data, str):
            await talk.socket.send_str(data)
        else:
            await talk.socket.send_bytes(data)
        assert (await talk.receive())["error"]["code"] in ("malformed", "wrong_kind")
        await talk.send({"type": "ping"})
        assert (await talk.receive())["type"] == "pong"


async def test_endless_nonsense_closes_the_socket() -> None:
    async with ws_serving() as service, talking(service) as talk:
        for _ in range(MAX_BAD_FRAMES + 1):
            await talk.socket.send_str("nonsense")
        assert await talk.closed() == aiohttp.WSCloseCode.POLICY_VIOLATION


async def test_an_oversized_frame_closes_the_socket() -> None:
    async with ws_serving(max_body_bytes=4096) as service, talking(service) as talk:
        await talk.socket.send_str("x" * 5000)
        assert await talk.closed() == aiohttp.WSCloseCode.MESSAGE_TOO_BIG


async def test_streams_of_a_socket_are_bounded() -> None:
    engine = FakeEngine(counting)
    async with ws_serving(engine, credit_window=1) as service, talking(service) as talk:
        for index in range(MAX_STREAMS + 1):
            await talk.start(f"s{index}", body={"max_tokens": 5, "ignore_eos": True}, acks=True)
        while (frame := await talk.receive())["type"] != "error":
            pass
        assert (frame["id"], frame["error"]["code"]) == (f"s{MAX_STREAMS}", "too_many_streams")
        assert service.dispatcher.num_streams <= MAX_STREAMS


async def test_errors_of_the_request_end_their_stream_only() -> None:
    async with ws_serving() as service, talking(service) as talk:
        await talk.start("long", body={"prompt": "word " * 1000})
        await talk.start("wrong", body={"temperature": "hot"})
        await talk.start("model", body={"model": "another"})
        await talk.start("echo", body={"echo": True})
        await talk.start("good")
        frames = await talk.until_ended("long", "wrong", "model", "echo", "good")
        assert frames["long"][-1]["error"]["code"] == "context_length_exceeded"
        assert frames["wrong"][-1]["error"]["param"] == "temperature"
        assert frames["model"][-1]["error"]["code"] == "model_not_found"
        assert frames["echo"][-1]["error"]["param"] == "echo"
        assert texts(frames["good"]) == "Hello there."


async def test_a_lost_engine_ends_its_streams_with_an_error() -> None:
    engine = FakeEngine(counting)
    async with ws_serving(engine, credit_window=4) as service, talking(service) as talk:
        await talk.start("a", body={"max_tokens": 40, "ignore_eos": True}, acks=True)
        await engine.parked.wait()
        engine.die()
        assert (await talk.until_ended("a"))["a"][-1]["error"]["code"] == "engine_lost"
        await talk.start("b")
        assert (await talk.until_ended("b"))["b"][-1]["error"]["code"] == "no_engine"


async def test_the_key_may_come_with_the_handshake() -> None:
    async with ws_serving(api_keys=("right",)) as service:
        async with talking(service, headers={"Authorization": "Bearer right"}) as talk:
            await talk.start("a")
            assert texts((await talk.until_ended("a"))["a"]) == "Hello there."
        with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
            await service.session.ws_connect(service.url, headers={"Authorization": "Bearer wrong"})
        assert refusal.value.status == 401


@pytest.mark.parametrize(
    "first",
    [{"type": "auth", "key": "wrong"}, {"type": "auth"}, {"type": "ping"}, {"type": "start", "id": "a"}],
)
async def test_without_a_known_key_the_socket_is_closed(first: dict[str, Any]) -> None:
    async with ws_serving(api_keys=("right",)) as service, talking(service) as talk:
        await talk.send(first)
        assert (await talk.receive())["error"]["type"] == "authentication_error"
        assert await talk.closed() == aiohttp.WSCloseCode.POLICY_VIOLATION
        assert not service.engine.seen


async def test_a_silent_socket_without_a_key_is_closed() -> None:
    async with ws_serving(api_keys=("right",), header_timeout_s=0.05) as service, talking(service) as talk:
        assert await talk.closed() == aiohttp.WSCloseCode.POLICY_VIOLATION


async def test_pages_of_other_sites_are_refused() -> None:
    async with ws_serving(cors_origins=("https://friend.example",)) as service:
        for origin in ("https://friend.example", f"http://127.0.0.1:{service.port}"):
            async with talking(service, headers={"Origin": origin}) as talk:
                await talk.send({"type": "ping"})
                assert (await talk.receive())["type"] == "pong"
        with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
            await service.session.ws_connect(service.url, headers={"Origin": "https://evil.example"})
        assert refusal.value.status == 403


async def test_shutdown_says_goodbye() -> None:
    async with ws_serving() as service, talking(service) as talk:
        await talk.send({"type": "ping"})
        await talk.receive()
        closing = asyncio.create_task(service.runner.cleanup())
        assert await talk.closed() == aiohttp.WSCloseCode.GOING_AWAY
        await closing


async def test_a_plain_get_is_told_what_is_wrong() -> None:
    async with ws_serving() as service, service.session.get(service.url) as response:
        assert response.status == 400


async def test_a_socket_that_breaks_in_the_midst_of_a_frame_leaves_nothing() -> None:
    async with ws_serving(FakeEngine(say("Hello there."), step_s=0.01)) as service, talking(service) as talk:
        await talk.start("a")
        assert (await talk.receive())["type"] == "started"
        break_connection(talk)
        await settle(lambda: service.stats.open_websockets == 0 and not service.dispatcher.num_streams)
