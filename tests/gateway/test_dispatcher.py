"""The dispatcher and its links, driven through fake sockets: routing, the walk of Tokens rows, endings."""

import asyncio
from array import array
from collections.abc import Callable

import pytest

from headrace.gateway.dispatcher import Dispatcher, Generation, Handle, NoEngine, TooManyStreams
from headrace.ipc.messages import (
    Cancel,
    Credit,
    Finished,
    Load,
    Logprobs,
    Rejected,
    Sampling,
    Submit,
    ToEngine,
    ToGateway,
    Tokens,
    Usage,
    Welcome,
)

USAGE = Usage(3, 1, 2, 0.01, 0.02, 0.03, 0)


class FakeSocket:
    """Keeps what is sent; the test plays the engine."""

    def __init__(self, on_message: Callable[[ToGateway], None], on_state: Callable[[str, str], None]) -> None:
        self.on_message = on_message
        self.on_state = on_state
        self.sent: list[ToEngine] = []
        self.full = False

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def send(self, message: ToEngine) -> bool:
        if not self.full:
            self.sent.append(message)
        return not self.full

    def welcome(self, fingerprint: str = "model-a", max_model_len: int = 128) -> None:
        self.on_message(Welcome(1, "engine", fingerprint, "m", 1000, max_model_len, 8, 64, 16))
        self.on_state("ready", "")

    def load(self, running: int = 0, waiting: int = 0) -> None:
        self.on_message(
            Load("engine", "ready", 0.0, running, waiting, 0, 0, 64, 1, 1.0, 0, 0, 0, 0, 0, 0, 0, 0.0)
        )

    def submits(self) -> list[Submit]:
        return [message for message in self.sent if isinstance(message, Submit)]


class Ear:
    """A listener that writes down what it hears."""

    def __init__(self, on_first: Callable[[], None] = lambda: None) -> None:
        self.heard: list[object] = []
        self.tokens: list[int] = []
        self._on_first = on_first

    def on_tokens(self, start: int, token_ids: list[int], logprobs: Logprobs | None) -> None:
        self.tokens += token_ids
        self.heard.append((start, token_ids, logprobs))
        self._on_first()

    def on_finished(self, finished: Finished) -> None:
        self.heard.append(finished.reason)

    def on_rejected(self, code: str, message: str) -> None:
        self.heard.append((code, message))

    def on_lost(self, message: str) -> None:
        self.heard.append(("lost", message))


class Fleet:
    """A dispatcher over fake sockets, all ready."""

    def __init__(self, engines: int, max_streams: int = 100, ready: bool = True) -> None:
        self.sockets: list[FakeSocket] = []
        self.dispatcher = Dispatcher(
            [f"ipc://{i}" for i in range(engines)], self._connect, max_streams=max_streams
        )
        self.dispatcher.start()
        if ready:
            for socket in self.sockets:
                socket.welcome()

    def _connect(
        self, _address: str, on_message: Callable[[ToGateway], None], on_state: Callable[[str, str], None]
    ) -> FakeSocket:
        self.sockets.append(FakeSocket(on_message, on_state))
        return self.sockets[-1]

    def submit(self, ear: Ear | None = None) -> Handle:
        return self.dispatcher.submit(generation(), ear or Ear())


def generation() -> Generation:
    return Generation(request_id="r", prompt=[1, 2, 3], sampling=Sampling(max_tokens=8), credit=16)


def step(
    rows: list[tuple[int, int, list[int]]],
    finished: tuple[Finished, ...] = (),
    logprobs: tuple[Logprobs, ...] = (),
) -> Tokens:
    """One Tokens message of (stream, start, token ids) rows."""
    return Tokens(
        step=1,
        streams=array("I", [row[0] for row in rows]).tobytes(),
        starts=array("I", [row[1] for row in rows]).tobytes(),
        counts=bytes(len(row[2]) for row in rows),
        token_ids=array("i", [token for row in rows for token in row[2]]).tobytes(),
        logprobs=logprobs,
        finished=finished,
    )


def test_rows_of_one_step_reach_their_own_listeners() -> None:
    fleet, ears = Fleet(1), [Ear(), Ear(), Ear()]
    streams = [fleet.submit(ear).stream for ear in ears]
    extra = Logprobs(1, b"\0" * 4, 0, b"", b"")
    fleet.sockets[0].on_message(
        step(
            [(streams[2], 0, [7, 8]), (streams[0], 4, [9]), (streams[1], 0, [-1])],
            (Finished(streams[0], "length", USAGE, ""),),
            (extra,),
        )
    )
    assert ears[0].heard == [(4, [9], extra), "length"]
    assert ears[1].heard == [(0, [-1], None)]
    assert ears[2].heard == [(0, [7, 8], None)]
    assert fleet.dispatcher.num_streams == 2


def test_submit_carries_the_generation_as_given() -> None:
    fleet = Fleet(1)
    handle = fleet.submit()
    sent = fleet.sockets[0].submits()[0]
    assert (sent.stream, sent.request_id, sent.credit) == (handle.stream, "r", 16)
    assert array("i", sent.prompt).tolist() == [1, 2, 3]
    assert sent.generated == b""


def test_new_work_goes_to_the_least_loaded_engine() -> None:
    fleet = Fleet(2)
    fleet.sockets[0].load(running=6)
    fleet.sockets[1].load(running=2)
    for _ in range(8):
        fleet.submit()
    assert [len(socket.submits()) for socket in fleet.sockets] == [2, 6]


def test_own_streams_are_counted_once_when_the_engine_reports_them() -> None:
    """Own open streams are in the engine's Load as well; only the rest of it is other gateways' work."""
    fleet = Fleet(2)
    for _ in range(8):
        fleet.submit()
    for socket in fleet.sockets:
        socket.load(running=4)
    assert [link.pressure for link in fleet.dispatcher.engines] == [0.5, 0.5]


def test_equal_engines_take_turns() -> None:
    fleet = Fleet(3)
    engines = []
    for _ in range(6):
        handle = fleet.submit()
        engines.append(handle.engine)
        fleet.sockets[handle.engine].on_message(step([], (Finished(handle.stream, "stop", USAGE, ""),)))
    assert sorted(engines) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("state", ["connecting", "draining", "lost", "refused"])
def test_engines_that_are_not_ready_get_no_new_work(state: str) -> None:
    fleet = Fleet(2)
    fleet.sockets[0].on_state(state, "because")
    assert {fleet.submit().engine for _ in range(4)} == {1}
    fleet.sockets[1].on_state(state, "because")
    assert not fleet.dispatcher.ready
    with pytest.raises(NoEngine, match=rf"engine 0: {state} \(because\); engine 1: {state}"):
        fleet.submit()


def test_an_engine_with_another_model_gets_no_work() -> None:
    fleet = Fleet(2, ready=False)
    fleet.sockets[1].welcome("model-b")
    fleet.sockets[0].welcome("model-a")
    assert {fleet.submit().engine for _ in range(4)} == {0}


def test_a_draining_engine_finishes_its_streams() -> None:
    fleet, ear = Fleet(1), Ear()
    handle = fleet.submit(ear)
    fleet.sockets[0].on_state("draining", "")
    fleet.sockets[0].on_message(
        step([(handle.stream, 0, [5])], (Finished(handle.stream, "stop", USAGE, ""),))
    )
    assert ear.heard == [(0, [5], None), "stop"]


def test_streams_of_a_lost_engine_are_told_and_may_go_on_elsewhere() -> None:
    fleet, ear, other = Fleet(2), Ear(), Ear()
    handle = fleet.submit(ear)
    index = handle.engine
    assert fleet.submit(other).engine != index
    first, second = fleet.sockets[handle.engine], fleet.sockets[1 - handle.engine]
    first.on_message(step([(handle.stream, 0, [4, 5])]))
    handle.grant(40)
    first.on_state("lost", "no heartbeat for 10 s")
    assert len(ear.heard) == 2
    assert ear.heard[1] == ("lost", f"engine {index} is lost: no heartbeat for 10 s")
    assert other.heard == []

    handle.resubmit(array("i", ear.tokens).tobytes())
    sent = second.submits()[-1]
    assert (array("i", sent.generated).tolist(), sent.credit) == ([4, 5], 40)
    second.on_message(step([(handle.stream, 2, [6])]))
    assert ear.tokens == [4, 5, 6]


def test_resubmission_without_an_engine_raises() -> None:
    fleet, ear = Fleet(1), Ear()
    handle = fleet.submit(ear)
    fleet.sockets[0].on_state("lost", "gone")
    with pytest.raises(NoEngine):
        handle.resubmit(b"")


async def test_the_last_rows_of_a_large_step_wait_for_a_turn_of_the_loop() -> None:
    """What the first rows brought is on the wire by then."""
    fleet, ears = Fleet(1, max_streams=200), [Ear() for _ in range(150)]
    rows = [(fleet.submit(ear).stream, 0, [i]) for i, ear in enumerate(ears)]
    done = Finished(rows[-1][0], "length", USAGE, "")
    fleet.sockets[0].on_message(step(rows, (done,)))
    heard = [sum(bool(ear.heard) for ear in ears)]
    while heard[-1] < len(ears):
        await asyncio.sleep(0)
        heard.append(sum(bool(ear.heard) for ear in ears))
    assert heard == [64, 128, 150]
    assert [ear.tokens for ear in ears] == [[i] for i in range(150)]
    assert ears[-1].heard[-1] == "length"
    assert fleet.dispatcher.engines[0].stats.generation_tokens == 150


async def test_a_newer_message_never_overtakes_waiting_rows() -> None:
    fleet, ears = Fleet(1, max_streams=200), [Ear() for _ in range(150)]
    streams = [fleet.submit(ear).stream for ear in ears]
    for token in (7, 8):
        fleet.sockets[0].on_message(step([(stream, token - 7, [token]) for stream in streams]))
    fleet.sockets[0].on_message(step([], tuple(Finished(s, "length", USAGE, "") for s in streams)))
    assert all(ear.tokens == [7, 8] and ear.heard[-1] == "length" for ear in ears)
    await asyncio.sleep(0)
    assert all(ear.tokens == [7, 8] for ear in ears), "rows were walked twice"


async def test_rows_that_wait_are_heard_before_their_engine_is_lost() -> None:
    fleet, ears = Fleet(1, max_streams=200), [Ear() for _ in range(100)]
    fleet.sockets[0].on_message(step([(fleet.submit(ear).stream, 0, [5]) for ear in ears]))
    fleet.sockets[0].on_state("lost", "no heartbeat")
    assert all(ear.tokens == [5] for ear in ears)
    assert all(ear.heard[-1] == ("lost", "engine 0 is lost: no heartbeat") for ear in ears)


def test_cancelled_streams_hear_nothing_more() -> None:
    fleet, ear = Fleet(1), Ear()
    handle = fleet.submit(ear)
    handle.cancel()
    handle.cancel()
    fleet.sockets[0].on_message(step([(handle.stream, 0, [1])]))
    fleet.sockets[0].on_message(step([], (Finished(handle.stream, "cancelled", USAGE, ""),)))
    assert ear.heard == []
    assert fleet.sockets[0].sent.count(Cancel(handle.stream)) == 1
    assert fleet.dispatcher.num_streams == 0
    stats = fleet.dispatcher.engines[0].stats
    assert (stats.finished, stats.late_tokens, stats.generation_tokens) == ({"abort": 1}, 1, 0)


def test_a_stopped_stream_still_hears_its_usage() -> None:
    """A stop string found by the gateway: no more tokens, the engine's reason is rewritten."""
    fleet, ear = Fleet(1), Ear()
    handle = fleet.submit(ear)
    handle.stop()
    fleet.sockets[0].on_message(
        step([(handle.stream, 0, [1])], (Finished(handle.stream, "cancelled", USAGE, ""),))
    )
    assert ear.heard == ["stop"]
    assert fleet.dispatcher.engines[0].stats.finished == {"stop": 1}


def test_cancel_inside_a_callback_is_safe() -> None:
    fleet = Fleet(1)
    handles: list[Handle] = []
    ear, other = Ear(lambda: handles[0].cancel()), Ear()  # noqa: PLW0108 - handles is still empty here
    handles += [fleet.submit(ear), fleet.submit(other)]
    fleet.sockets[0].on_message(step([(handles[0].stream, 0, [1]), (handles[1].stream, 0, [2])]))
    fleet.sockets[0].on_message(step([(handles[0].stream, 1, [1]), (handles[1].stream, 1, [2])]))
    assert (ear.tokens, other.tokens) == ([1], [2, 2])


def test_a_failing_listener_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    fleet = Fleet(1)
    bad, good = Ear(fail), Ear()
    streams = [fleet.submit(bad).stream, fleet.submit(good).stream]
    fleet.sockets[0].on_message(step([(streams[0], 0, [1]), (streams[1], 0, [2])]))
    fleet.sockets[0].on_message(step([(streams[0], 1, [1]), (streams[1], 1, [2])]))
    assert good.tokens == [2, 2]
    assert bad.heard == [(0, [1], None), ("lost", "internal error in the gateway")]
    assert Cancel(streams[0]) in fleet.sockets[0].sent
    assert "a bug" in caplog.text


def test_credit_is_sent_only_when_it_grows() -> None:
    fleet = Fleet(1)
    handle = fleet.submit()
    handle.grant(16)
    handle.grant(32)
    handle.grant(20)
    assert [message for message in fleet.sockets[0].sent if isinstance(message, Credit)] == [
        Credit(handle.stream, 32)
    ]


def test_control_messages_that_found_the_socket_full_are_sent_later() -> None:
    fleet = Fleet(1)
    first, second = fleet.submit(), fleet.submit()
    socket = fleet.sockets[0]
    socket.full = True
    first.grant(20)
    first.grant(24)
    second.grant(32)
    second.cancel()
    socket.full = False
    socket.load()
    assert socket.sent[2:] == [Credit(first.stream, 24), Cancel(second.stream)]


def test_a_full_socket_sends_the_work_elsewhere() -> None:
    fleet = Fleet(2)
    fleet.sockets[0].full = True
    assert {fleet.submit().engine for _ in range(4)} == {1}
    fleet.sockets[1].full = True
    with pytest.raises(NoEngine):
        fleet.submit()


def test_open_streams_are_bounded() -> None:
    fleet = Fleet(1, max_streams=2)
    handle = fleet.submit()
    fleet.submit()
    with pytest.raises(TooManyStreams, match="2 generations are open"):
        fleet.submit()
    fleet.sockets[0].on_message(step([], (Finished(handle.stream, "stop", USAGE, ""),)))
    fleet.submit()


def test_a_full_engine_hands_the_request_to_another() -> None:
    fleet, ear = Fleet(2), Ear()
    handle = fleet.submit(ear)
    first, second = fleet.sockets[handle.engine], fleet.sockets[1 - handle.engine]
    first.on_message(Rejected(handle.stream, "queue_full", "1024 wait"))
    assert len(second.submits()) == 1
    assert ear.heard == []
    second.on_message(Rejected(handle.stream, "queue_full", "1024 wait"))
    assert ear.heard == [("queue_full", "1024 wait")]
    assert fleet.dispatcher.num_streams == 0


def test_a_request_no_engine_can_take_is_rejected_at_once() -> None:
    fleet, ear = Fleet(2), Ear()
    handle = fleet.submit(ear)
    fleet.sockets[handle.engine].on_message(Rejected(handle.stream, "too_long", "200 > 128"))
    assert ear.heard == [("too_long", "200 > 128")]
    assert sum(len(socket.submits()) for socket in fleet.sockets) == 1


def test_inter_token_latency_counts_every_token_after_the_first() -> None:
    fleet = Fleet(1)
    streams = [fleet.submit().stream for _ in range(3)]
    for index in range(5):
        fleet.sockets[0].on_message(step([(stream, index, [1]) for stream in streams]))
    fleet.sockets[0].on_message(step([(streams[0], 5, [1, 1, 1])]))
    stats = fleet.dispatcher.engines[0].stats
    assert sum(stats.inter_token.counts) == 3 * 4 + 3
    assert sum(stats.time_to_first.counts) == 3
    assert stats.generation_tokens == 18


def test_close_tells_every_listener() -> None:
    fleet, ear = Fleet(1), Ear()
    handle = fleet.submit(ear)
    fleet.dispatcher.close()
    assert ear.heard == [("lost", "the gateway is closing")]
    assert not handle.open


def test_limits_are_the_smallest_of_all_engines() -> None:
    fleet = Fleet(2, ready=False)
    assert (fleet.dispatcher.max_model_len, fleet.dispatcher.vocab_size) == (0, 0)
    fleet.sockets[0].welcome(max_model_len=256)
    fleet.sockets[1].welcome(max_model_len=128)
    assert (fleet.dispatcher.max_model_len, fleet.dispatcher.vocab_size) == (128, 1000)
