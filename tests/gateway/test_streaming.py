"""Server-sent events over real sockets: order, numbering, keep-alive, errors, credit and slow readers."""

import asyncio
import gc
import json
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.gateway.stream import Stream
from headrace.ipc.messages import Submit
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.raw import RawClient
from tests.gateway.service import CHAT, COMPLETION, Service, SseEvent, parse_events, say, serving, settle

URL = "/v1/chat/completions"


def chunks(events: list[SseEvent]) -> list[dict[str, Any]]:
    """The JSON of the data events before [DONE]."""
    datas = [event.data for event in events if event.data]
    assert datas[-1] == "[DONE]"
    return [json.loads(data) for data in datas[:-1]]


def text_of(events: list[SseEvent], index: int = 0) -> str:
    choices = [chunk["choices"][0] for chunk in chunks(events) if chunk["choices"]]
    return "".join(
        choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        for choice in choices
        if choice["index"] == index
    )


async def test_a_stream_has_role_pieces_reason_usage_and_done() -> None:
    async with serving(say("Once upon a time")) as service:
        events = await service.events(URL, {**CHAT, "stream_options": {"include_usage": True}})
    role, *pieces, closing, usage = chunks(events)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [piece["choices"][0]["delta"] for piece in pieces] == [
        {"content": word} for word in ("Once", " upon", " a", " time")
    ]
    assert all(piece["choices"][0]["finish_reason"] is None and piece["usage"] is None for piece in pieces)
    assert closing["choices"][0]["delta"] == {}
    assert closing["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5
    assert len({chunk["id"] for chunk in chunks(events)}) == 1
    assert [event.id for event in events if event.id] == ["1", "2", "3", "4", "5"]


async def test_usage_is_left_out_unless_asked_for() -> None:
    async with serving() as service:
        events = await service.events(URL, CHAT)
    assert all("usage" not in chunk for chunk in chunks(events))


async def test_streamed_and_whole_answers_are_equal() -> None:
    text = "A naïve 😀 fox said: stop here, friend. And went on"
    body = {**CHAT, "stop": ["went"], "logprobs": True}
    async with serving(say(text)) as service:
        events = await service.events(URL, body)
        _, whole, _ = await service.post(URL, body)
    choice = whole["choices"][0]
    assert text_of(events) == choice["message"]["content"] == text[: text.index("went")]
    streamed = [
        entry
        for chunk in chunks(events)
        if (logprobs := chunk["choices"][0]["logprobs"])
        for entry in logprobs["content"]
    ]
    assert streamed == choice["logprobs"]["content"]


async def test_no_event_ever_carries_half_a_character_or_a_piece_of_a_stop_string() -> None:
    async with serving(say("a😀b then STOP")) as service:
        events = await service.events(URL, {**CHAT, "stop": "STOP"})
    pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks(events)]
    assert "�" not in "".join(pieces)
    assert "".join(pieces) == "a😀b then "


async def test_choices_are_interleaved_under_their_own_index() -> None:
    async with serving(engine=FakeEngine(say("Once upon a time"), step_s=0.001)) as service:
        events = await service.events(URL, {**CHAT, "n": 3})
    assert [text_of(events, index) for index in range(3)] == ["Once upon a time"] * 3
    order = [chunk["choices"][0]["index"] for chunk in chunks(events)]
    assert order != sorted(order), "choices take turns"
    assert [event.id for event in events if event.id][-1] == "5,5,5", "one number per choice"


async def test_a_choice_that_ends_early_says_so_at_once() -> None:
    scripts = iter([say("Hi"), say("Once upon a time there was")])

    def answer(submit: Submit) -> Sequence[int]:
        return next(scripts)(submit)

    async with serving(answer) as service:
        events = await service.events(URL, {**CHAT, "n": 2})
    reasons = [(c["choices"][0]["index"], c["choices"][0]["finish_reason"]) for c in chunks(events)]
    assert reasons.index((0, "stop")) < len(reasons) - 3
    assert reasons[-1] == (1, "stop")


async def test_completions_stream_too_and_echo_first() -> None:
    async with serving(say(" there was")) as service:
        events = await service.events("/v1/completions", {**COMPLETION, "echo": True, "logprobs": None})
        plain = await service.events("/v1/completions", {**COMPLETION, "logprobs": 1})
    assert text_of(events) == "Once upon a time there was"
    assert text_of(plain) == " there was"
    first = chunks(plain)[0]["choices"][0]
    assert first["logprobs"]["tokens"] == [" there"]
    assert first["logprobs"]["text_offset"] == [0]


async def test_headers_are_those_of_an_event_stream() -> None:
    async with (
        serving() as service,
        service.session.post(service.url + URL, json={**CHAT, "stream": True}) as response,
    ):
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert response.headers["Transfer-Encoding"] == "chunked"
        assert response.headers["Server"] == "headrace"
        await response.read()


@pytest.mark.parametrize(("code", "status"), [("queue_full", 429), ("too_long", 400), ("draining", 503)])
async def test_a_refusal_before_the_first_token_is_a_status(code: str, status: int) -> None:
    async with serving() as service:
        service.engine.reject = (code, "the queue holds 8, the limit")
        found, answer, headers = await service.post(URL, {**CHAT, "stream": True})
    assert found == status
    assert answer["error"]["message"] == "the queue holds 8, the limit"
    assert ("Retry-After" in headers) == (status != 400)


async def test_an_error_after_the_first_token_is_an_event() -> None:
    engine = FakeEngine(say("Once upon a time"))
    engine.error_after = 2
    async with serving(engine=engine) as service:
        events = await service.events(URL, CHAT)
    assert text_of([*events[:-2], events[-1]]) == "Once upon"
    error = chunks(events)[-1]["error"]
    assert (error["type"], error["code"]) == ("server_error", "generation_failed")
    assert "NaN logits" in error["message"]


async def test_an_engine_that_dies_ends_the_stream_with_an_error_event() -> None:
    engine = FakeEngine(say("Once upon a time", stop=False), step_s=0.005)
    async with serving(engine=engine, credit_window=2, keepalive_s=0.05) as service:
        reading = asyncio.create_task(service.events(URL, CHAT))
        await settle(lambda: bool(engine.seen) and engine.seen[0].sent >= 2)
        engine.die()
        events = await reading
    assert chunks(events)[-1]["error"]["code"] == "engine_lost"


async def test_silence_is_filled_with_comments_and_headers_come_after_one_silence() -> None:
    """The engine says nothing for a while: proxies see a living connection, clients see nothing."""
    engine = FakeEngine(say("Hello"), step_s=0.3)
    async with serving(engine=engine, keepalive_s=0.05) as service:
        events = await service.events(URL, CHAT)
    assert [event.comment for event in events if not event.data].count("keep-alive") >= 2
    assert text_of(events) == "Hello"


async def test_http_1_0_gets_the_same_events_unframed() -> None:
    async with serving(say("Hello there.")) as service:
        client = await RawClient.connect(service.port)
        await client.post(URL, {**CHAT, "stream": True}, version="1.0")
        head, body = (await client.read_all()).split(b"\r\n\r\n", 1)
    assert b"chunked" not in head.lower()
    assert text_of(parse_events(body)) == "Hello there."


async def test_a_connection_serves_one_stream_after_another() -> None:
    async with serving(say("Hello there.")) as service:
        client = await RawClient.connect(service.port)
        for _ in range(3):
            await client.post(URL, {**CHAT, "stream": True})
            status, body = await client.read_response()
            assert status == 200
            assert text_of(parse_events(body)) == "Hello there."
        await client.close()


async def test_an_ended_answer_is_freed_without_the_garbage_collector() -> None:
    """Its pauses grow with what is alive; ended streams must not add to that."""

    def alive() -> int:
        return sum(type(thing) is Stream for thing in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = alive()
        async with serving(say("Hello there.")) as service:
            for stream in (True, False):
                for _ in range(5):
                    async with service.session.post(service.url + URL, json={**CHAT, "stream": stream}) as r:
                        await r.read()
            await settle(lambda: not service.dispatcher.num_streams)
            await asyncio.sleep(0.01)
            left = alive() - before
    finally:
        gc.enable()
    assert left <= 1, "the last one may still be in a frame"


async def test_tcp_nodelay_is_on_and_the_send_buffer_small() -> None:
    async with serving() as service:
        client = await RawClient.connect(service.port)
        await client.post(URL, CHAT)
        await client.read_response()
        (connection,) = service.connections()
        assert connection.transport is not None
        raw = connection.transport.get_extra_info("socket")
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 128 << 10, "the kernel doubles 64 KiB"
        await client.close()


async def test_steps_read_in_one_turn_go_out_in_one_piece() -> None:
    """The events stay apart, only the system calls are fewer."""
    engine = FakeEngine(say("Once upon a time there was a fox."))
    engine.burst = 4
    async with serving(engine=engine) as service:
        client = await RawClient.connect(service.port)
        await client.post(URL, {**CHAT, "stream": True})
        pieces = await client.read_chunks()
        await client.close()
    counts = [piece.count(b"\nid: ") + piece.startswith(b"id: ") for piece in pieces]
    assert counts == [4, 4, 2], "the first turn with the head, the second, the rest with the end"
    assert text_of(parse_events(b"".join(pieces))) == "Once upon a time there was a fox."


async def stalled(service: Service, body: dict[str, Any]) -> RawClient:
    """A client that has asked for a stream and does not read it."""
    client = await RawClient.connect(service.port, receive_buffer=32 << 10)
    await client.post(URL, body)
    await asyncio.wait_for(service.engine.parked.wait(), 30)
    return client


LONG = "fox " * 3_000


async def test_a_slow_reader_parks_its_own_stream_and_loses_nothing() -> None:
    engine = FakeEngine(say(LONG), max_model_len=1 << 20)
    async with serving(engine=engine, credit_window=64) as service:
        client = await stalled(service, {**CHAT, "stream": True})
        parked_at = engine.seen[0].sent
        assert parked_at < 2000, "back-pressure reached the engine"
        assert engine.seen[0].credit == parked_at
        quick = await service.events(URL, {**CHAT, "max_tokens": 50})
        assert len(text_of(quick)) > 100, "others are not held up"
        status, body = await client.read_response()
        await client.close()
        assert service.stats.slow_streams == 1
    events = parse_events(body)
    assert status == 200
    assert text_of(events) == LONG
    numbers = [int(event.id) for event in events if event.id]
    assert numbers == sorted(set(numbers)), "in order, none twice"
    assert numbers[-1] == engine.seen[0].sent, "the last number counts every token and the end"
    assert len(numbers) < numbers[-1], "what had waited went out merged"


async def test_a_slow_reader_of_logprobs_loses_none() -> None:
    engine = FakeEngine(say(LONG), max_model_len=1 << 20)
    async with serving(engine=engine, credit_window=64) as service:
        body = {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 5, "max_tokens": 2000}
        client = await stalled(service, body)
        _, stream = await client.read_response()
        await client.close()
    entries = [
        entry
        for chunk in chunks(parse_events(stream))
        if (logprobs := chunk["choices"][0]["logprobs"])
        for entry in logprobs["content"]
    ]
    assert len(entries) == 2000
    assert "".join(entry["token"] for entry in entries) == text_of(parse_events(stream))


async def test_a_reader_that_takes_nothing_for_the_time_limit_is_given_up() -> None:
    engine = FakeEngine(say(LONG), max_model_len=1 << 20)
    async with serving(engine=engine, credit_window=64, request_timeout_s=1.0) as service:
        client = await stalled(service, {**CHAT, "stream": True})
        await asyncio.wait_for(engine.cancelled.wait(), 10)
        await settle(lambda: not service.connections())
        await client.close()


async def test_a_reader_behind_an_engine_that_heeds_no_credit_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What waits for a reader is bounded, whatever the engine does; the end says why."""
    monkeypatch.setattr("headrace.gateway.stream.MAX_LOG_BYTES", 20_000)
    engine = FakeEngine(say(LONG), max_model_len=1 << 20)
    engine.heeds_credit = False
    async with serving(engine=engine) as service:
        client = await RawClient.connect(service.port, receive_buffer=32 << 10)
        await client.post(URL, {**CHAT, "stream": True})
        await asyncio.wait_for(engine.cancelled.wait(), 30)
        _, body = await client.read_response()
        await client.close()
    events = parse_events(body)
    assert chunks(events)[-1]["error"]["code"] == "reader_too_slow"
    written = text_of([event for event in events if "error" not in event.data])
    assert LONG.startswith(written), "nothing is left out in the middle"


async def test_the_time_limit_ends_a_stream_with_its_reason() -> None:
    engine = FakeEngine(say("fox " * 200), step_s=0.02)
    async with serving(engine=engine, request_timeout_s=0.3) as service:
        events = await service.events(URL, CHAT)
        await settle(lambda: not service.dispatcher.num_streams)
    assert chunks(events)[-1]["choices"][0]["finish_reason"] == "timeout"
    assert text_of(events).startswith("fox fox")
