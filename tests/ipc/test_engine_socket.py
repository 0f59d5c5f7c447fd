"""The engine's end: who is taken in, who is turned away, who is gone, and that none of them can hold it up."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import zmq

from headrace.config import ConfigError, WireConfig
from headrace.ipc import engine_socket
from headrace.ipc.codec import encode
from headrace.ipc.engine_socket import EngineSocket
from headrace.ipc.limits import engine_frame_bytes
from headrace.ipc.messages import Cancel, Credit, Goodbye, Hello, Load, Ping, Refused, Rejected, Tokens
from tests.ipc.peers import Peer, receive_some, turn
from tests.ipc.samples import HELLO, LOAD, SUBMIT, TOKENS, WELCOME, WIRE
from tests.ipc.test_corpus import corpus

MakeEngine = Callable[..., EngineSocket]
MakePeer = Callable[..., Peer]


class Clock:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def is_due(engine: EngineSocket) -> bool:
    return engine.load_due


def test_a_hello_is_answered_by_the_welcome(engine: EngineSocket, make_peer: MakePeer) -> None:
    peer = make_peer(engine)
    peer.say(HELLO)
    assert peer.hear() == WELCOME
    assert list(engine.gateways.values()) == ["gateway-0"]


def test_messages_arrive_in_order_with_their_gateway(engine: EngineSocket, make_peer: MakePeer) -> None:
    one, two = make_peer(engine), make_peer(engine)
    first, second = one.join(), two.join()
    one.say(SUBMIT, Credit(1, 5), Cancel(1))
    assert receive_some(engine, 3) == [(first, SUBMIT), (first, Credit(1, 5)), (first, Cancel(1))]
    two.say(Credit(1, 6))
    assert receive_some(engine) == [(second, Credit(1, 6))]


def test_send_reaches_the_gateway_it_names(engine: EngineSocket, make_peer: MakePeer) -> None:
    one, two = make_peer(engine), make_peer(engine)
    first, second = one.join(), two.join()
    assert engine.send(second, TOKENS)
    assert engine.send(first, Rejected(1, "queue_full", "4 wait, the limit is 4"))
    assert two.hear() == TOKENS
    assert one.hear() == Rejected(1, "queue_full", "4 wait, the limit is 4")


def test_another_version_is_refused_with_both_numbers(engine: EngineSocket, make_peer: MakePeer) -> None:
    peer = make_peer(engine)
    peer.say(Hello(99, "gateway-0", ""))
    refused = peer.hear()
    assert isinstance(refused, Refused)
    assert refused.reason == "version"
    assert "99" in refused.detail
    assert not engine.gateways
    assert engine.refused_by_reason == {"version": 1}


def test_another_model_is_refused_with_both_fingerprints(engine: EngineSocket, make_peer: MakePeer) -> None:
    peer = make_peer(engine)
    peer.say(replace(HELLO, fingerprint="other"))
    refused = peer.hear()
    assert isinstance(refused, Refused)
    assert refused.reason == "fingerprint"
    assert "'other'" in refused.detail
    assert "'print'" in refused.detail


def test_the_same_fingerprint_is_welcome(engine: EngineSocket, make_peer: MakePeer) -> None:
    peer = make_peer(engine)
    peer.say(replace(HELLO, fingerprint="print"))
    assert peer.hear() == WELCOME


def test_speaking_before_hello_is_refused(engine: EngineSocket, make_peer: MakePeer) -> None:
    """What was meant for an earlier engine at this address can not reach this one as if new."""
    peer = make_peer(engine)
    peer.say(SUBMIT)
    refused = peer.hear()
    assert refused == Refused("unknown", "Submit before Hello")
    assert engine.refused_frames == 1


def test_a_second_hello_ends_the_connection(engine: EngineSocket, make_peer: MakePeer) -> None:
    peer = make_peer(engine)
    own = peer.join()
    peer.say(HELLO)
    assert peer.hear() == Refused("malformed", "a second Hello")
    assert engine.lost() == [own]


def test_a_malformed_frame_ends_the_gateway_that_sent_it(engine: EngineSocket, make_peer: MakePeer) -> None:
    """It gets the reason once; later frames are dropped unread and counted, and nobody else notices."""
    bad, good = make_peer(engine), make_peer(engine)
    lost, kept = bad.join(), good.join()
    bad.send(encode(SUBMIT)[:-1])
    refused = bad.hear()
    assert isinstance(refused, Refused)
    assert refused.reason == "malformed"
    assert engine.lost() == [lost]
    assert engine.lost() == []
    assert not engine.send(lost, TOKENS)
    bad.say(HELLO, SUBMIT, Ping(1.0))
    assert turn(engine, lambda: engine.refused_frames == 4) == []
    assert engine.refused_by_reason == {"malformed": 1, "expelled": 3}
    good.say(SUBMIT)
    assert receive_some(engine) == [(kept, SUBMIT)]
    assert bad.dealer.poll(0) == 0


@pytest.mark.parametrize(
    "parts",
    [[b"", encode(SUBMIT)], [encode(SUBMIT), b""], [encode(Ping(1.0))] * 2, [b"x"] * 3000, [b"", b"", b""]],
    ids=["delimiter", "tail", "two", "three thousand", "empty"],
)
def test_a_message_of_several_parts_is_refused(
    engine: EngineSocket, make_peer: MakePeer, parts: list[bytes]
) -> None:
    bad, good = make_peer(engine), make_peer(engine)
    kept = good.join()
    bad.join()
    bad.send(*parts)
    good.say(SUBMIT)
    assert bad.hear() == Refused("malformed", "a message has more than one part")
    bad.say(Ping(1.0))
    turn(engine, lambda: engine.refused_by_reason.get("expelled"))
    good.say(Cancel(1))
    received = turn(engine, lambda: engine.gateways == {kept: "gateway-0"} and not good.engine.receive(0.0))
    assert all(gateway == kept for gateway, _ in received)
    assert engine.refused_by_reason == {"malformed": 1, "expelled": 1}


def test_a_frame_over_the_limit_is_refused_as_oversized(engine: EngineSocket, make_peer: MakePeer) -> None:
    peer = make_peer(engine)
    peer.join()
    limit = engine_frame_bytes(WIRE.max_frame_bytes, WELCOME.max_model_len)
    peer.send(bytes(limit + 1))
    assert peer.hear() == Refused("oversized", f"{limit + 1} bytes, at most {limit}")


def test_a_frame_far_over_the_limit_cuts_the_connection(engine: EngineSocket, make_peer: MakePeer) -> None:
    """libzmq refuses to store it; the gateway is noticed as gone when the next heartbeat finds nobody."""
    bad, good = make_peer(engine), make_peer(engine)
    lost, kept = bad.join(), good.join()
    monitor = bad.dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    bad.send(bytes(8 << 20))
    turn(engine, lambda: monitor.poll(0))
    bad.dealer.disable_monitor()
    monitor.close(0)
    turn(engine, lambda: not engine.send(lost, LOAD))
    assert engine.lost() == [lost]
    good.say(SUBMIT)
    assert receive_some(engine) == [(kept, SUBMIT)]


def test_a_hostile_peer_is_logged_once(
    engine: EngineSocket, make_peer: MakePeer, caplog: pytest.LogCaptureFixture
) -> None:
    peer = make_peer(engine)
    peer.join()
    with caplog.at_level(logging.WARNING, logger="headrace"):
        for _ in range(20):
            peer.send(b"junk")
        turn(engine, lambda: engine.refused_frames == 20)
    (record,) = caplog.records
    assert "gateway 'gateway-0'" in record.getMessage()
    assert "malformed" in record.getMessage()


def test_many_hostile_peers_do_not_flood_the_log(
    engine: EngineSocket, make_peer: MakePeer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="headrace"):
        for index in range(60):
            make_peer(engine).say(Hello(99, f"gateway-{index}", ""))
        turn(engine, lambda: engine.refused_frames == 60)
    assert len(caplog.records) <= 2 * 21  # a minute may turn in between


def test_a_silent_gateway_is_lost_and_one_that_pings_is_not(
    make_engine: MakeEngine, make_peer: MakePeer
) -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    silent, alive = make_peer(engine), make_peer(engine)
    gone, kept = silent.join(), alive.join()
    clock.now += WIRE.dead_after_s - 1
    alive.say(Ping(1.0), Cancel(1))
    receive_some(engine)
    clock.now += 2
    engine.receive(0)
    assert engine.lost() == [gone]
    assert list(engine.gateways) == [kept]


def test_a_long_step_of_the_engine_does_not_make_gateways_silent(
    make_engine: MakeEngine, make_peer: MakePeer
) -> None:
    """Their pings came while it was away; it hears them before it judges."""
    clock = Clock()
    engine = make_engine(clock=clock)
    peer = make_peer(engine)
    own = peer.join()
    peer.say(Ping(1.0))
    assert engine._router.poll(5000)
    clock.now += 10 * WIRE.dead_after_s
    engine.receive(0)
    assert engine.lost() == []
    assert own in engine.gateways


def test_load_goes_to_every_gateway_with_its_own_ping(engine: EngineSocket, make_peer: MakePeer) -> None:
    one, two = make_peer(engine), make_peer(engine)
    one.join()
    two.join()
    assert is_due(engine)
    one.say(Ping(12.5), Cancel(1))
    receive_some(engine)
    make_peer(engine).send(b"junk")
    turn(engine, lambda: engine.refused_frames)
    engine.send_load(LOAD)
    assert not is_due(engine)
    assert one.hear() == replace(LOAD, ping=12.5, refused_frames=1)
    assert two.hear() == replace(LOAD, refused_frames=1)


def test_load_is_due_again_after_an_interval(make_engine: MakeEngine, make_peer: MakePeer) -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    assert not is_due(engine)
    make_peer(engine).join()
    engine.send_load(LOAD)
    clock.now += WIRE.heartbeat_s / 2
    assert not is_due(engine)
    clock.now += WIRE.heartbeat_s
    assert is_due(engine)


def test_a_vanished_gateway_is_noticed_by_the_next_send(engine: EngineSocket, make_peer: MakePeer) -> None:
    peer = make_peer(engine)
    own = peer.join()
    peer.vanish()
    turn(engine, lambda: not engine.send(own, TOKENS))
    assert engine.lost() == [own]
    assert not engine.gateways


def test_a_gateway_that_does_not_read_is_dropped_and_blocks_nobody(
    make_engine: MakeEngine, make_peer: MakePeer
) -> None:
    """Full queue: `send` says False at once, the gateway is lost, the others get their tokens."""
    engine = make_engine(wire=replace(WIRE, high_water_mark=8))
    slow, good = make_peer(engine), make_peer(engine)
    stuck, kept = slow.join(), good.join()
    big = Tokens(1, bytes(4000), bytes(4000), b"\xff" * 1000, bytes(4 * 255_000), (), ())
    sent = 0
    while engine.send(stuck, big):
        sent += 1
        assert sent < 2000
    assert engine.lost() == [stuck]
    assert not engine.send(stuck, TOKENS)
    assert engine.send(kept, TOKENS)
    assert good.hear() == TOKENS


def test_a_gateway_that_leaves_in_good_order_is_not_lost(engine: EngineSocket, make_peer: MakePeer) -> None:
    peer = make_peer(engine)
    own = peer.join()
    peer.say(Goodbye())
    assert receive_some(engine) == [(own, Goodbye())]
    assert engine.lost() == []
    assert not engine.send(own, TOKENS)
    peer.say(HELLO)
    assert peer.hear() == WELCOME


def test_send_to_a_stranger_is_false(engine: EngineSocket) -> None:
    assert not engine.send(b"nobody", TOKENS)
    assert engine.lost() == []


def test_close_says_goodbye(engine: EngineSocket, make_peer: MakePeer) -> None:
    peer = make_peer(engine)
    peer.join()
    engine.close()
    assert peer.dealer.poll(5000)
    assert peer.dealer.recv() == encode(Goodbye())


def test_a_living_engine_keeps_its_address(engine: EngineSocket, make_engine: MakeEngine) -> None:
    """libzmq alone would let the second engine take the path over."""
    with pytest.raises(ConfigError, match="another engine serves at"):
        make_engine()


def test_the_socket_file_of_a_killed_engine_is_taken_over(make_engine: MakeEngine, address: str) -> None:
    path = Path(address.removeprefix("ipc://"))
    path.touch()
    engine = make_engine()
    assert engine.address == address


def test_an_address_in_use_is_a_config_error(make_engine: MakeEngine) -> None:
    first = make_engine("tcp://127.0.0.1:0")
    with pytest.raises(ConfigError, match="cannot bind"):
        make_engine(first.address)


def flood(address: str, frames: list[bytes], stop: threading.Event) -> None:
    """Send junk as fast as the wire takes it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.sndhwm = 100
    dealer.sndtimeo = 50
    dealer.connect(address)
    while not stop.is_set():
        for frame in frames:
            try:
                dealer.send(frame)
            except zmq.Again:
                break
    context.destroy(linger=0)


def test_a_flood_of_junk_starves_nobody_and_fills_nothing(
    make_engine: MakeEngine, make_peer: MakePeer
) -> None:
    """Two flooders, 64 KiB a frame; a gateway goes on being served, a call does bounded work, memory stays."""
    engine = make_engine()
    stop = threading.Event()
    frames = [b"\xc1" * (64 << 10)] * 10
    flooders = [threading.Thread(target=flood, args=(engine.address, frames, stop)) for _ in range(2)]
    good = make_peer(engine)
    own = good.join()
    before = psutil.Process().memory_info().rss
    for flooder in flooders:
        flooder.start()
    try:
        turn(engine, lambda: engine.refused_frames > 1000)
        for index in range(20):
            good.say(Credit(index, 1))
            assert receive_some(engine) == [(own, Credit(index, 1))]
            assert engine.send(own, Rejected(index, "draining", ""))
            assert good.hear() == Rejected(index, "draining", "")
        refused = engine.refused_frames
        engine.receive(0)
        assert engine.refused_frames - refused <= engine_socket.MAX_FRAMES_PER_CALL
        turn(engine, lambda: engine.refused_frames > 5000)
    finally:
        stop.set()
        for flooder in flooders:
            flooder.join()
    assert psutil.Process().memory_info().rss - before < 250 << 20  # 320 MB came in
    assert engine.lost() == []


def test_one_call_does_a_bounded_amount_of_work(
    engine: EngineSocket, make_peer: MakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_socket, "MAX_FRAMES_PER_CALL", 10)
    peer = make_peer(engine)
    own = peer.join()
    peer.say(*[Credit(index, 1) for index in range(35)])
    deadline = time.monotonic() + 10
    sizes: list[int] = []
    while sum(sizes) < 35:
        assert time.monotonic() < deadline
        sizes.append(len(engine.receive(0.05)))
    assert max(sizes) <= 20  # what was there, and what came while it waited
    assert own in engine.gateways


def test_the_corpus_over_a_real_socket_leaves_a_good_gateway_alone(
    engine: EngineSocket, make_peer: MakePeer
) -> None:
    """Each frame from a fresh peer and from a gateway that was taken in; all are refused, the good one is not."""
    good = make_peer(engine)
    own = good.join()
    frames = [frame for _, _, frame in corpus("to_engine")]
    for index, frame in enumerate(frames):
        fresh, joined = make_peer(engine), make_peer(engine)
        joined.join()
        fresh.send(frame)
        joined.send(frame)
        assert isinstance(fresh.hear(), Refused)
        assert isinstance(joined.hear(), Refused)
        good.say(Credit(index, 1))
        assert receive_some(engine) == [(own, Credit(index, 1))]
        fresh.vanish()
        joined.vanish()
    assert engine.refused_frames == 2 * len(frames)
    assert len(engine.lost()) == len(frames)
    engine.send_load(LOAD)
    assert isinstance(good.hear(), Load)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("tcp://0.0.0.0:5000", "open to others"),
        ("tcp://*:5000", "open to others"),
        ("tcp://10.0.0.1:5000", "open to others"),
        ("tcp://engine.example:5000", "open to others"),
        ("tcp://[::]:5000", "open to others"),
        ("tcp://127.0.0.1", "not tcp://HOST:PORT"),
        ("tcp://127.0.0.1:99999", "not tcp://HOST:PORT"),
        ("tcp://127.0.0.1:*", "not tcp://HOST:PORT"),
        ("ipc://", "needs a path"),
        (f"ipc:///{'x' * 120}", "needs a path"),
        ("inproc://engine", "neither ipc"),
        ("udp://127.0.0.1:1", "neither ipc"),
        ("engine-0", "neither ipc"),
    ],
)
def test_an_address_that_cannot_work_is_a_config_error(address: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineSocket(address, WELCOME, WireConfig())
