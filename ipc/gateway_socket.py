"""A gateway's end of the wire to one engine: a DEALER on the event loop that finds the engine again and again.

Owns the connection and its state. Does not know what a generation is. Called by the dispatcher; reads on the
descriptor of the socket itself, because `zmq.asyncio` costs a future and a task switch per message.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Literal

import zmq
from zmq.utils.monitor import parse_monitor_message

from headrace.config import WireConfig
from headrace.ipc.codec import MalformedFrame, decode_to_gateway, encode
from headrace.ipc.endpoint import Context, Dialer, dial, gateway_keys
from headrace.ipc.heartbeat import Backoff, Heartbeat
from headrace.ipc.limits import engine_frame_bytes
from headrace.ipc.messages import (
    PROTOCOL_VERSION,
    Goodbye,
    Hello,
    Load,
    Ping,
    Refused,
    ToEngine,
    ToGateway,
    Welcome,
)
from headrace.ipc.refusals import Refusals

State = Literal["connecting", "ready", "draining", "lost", "refused"]

MAX_FRAMES_PER_WAKE = 64  # then the loop gets its turn, and the rest follows
GOODBYE_LINGER_MS = 200


class GatewaySocket:
    """The connection to one engine.

    Every connection is a fresh socket that says Hello first, so nothing meant for a dead engine can reach the
    one that follows it. States: `connecting` until the first Welcome; then `ready` or `draining` as the engine says;
    `lost` when the connection breaks or the engine is silent for `dead_after_s`; `refused` with the engine's
    reason. Out of `lost` and `refused` it goes on trying, and a Welcome leads to `ready`.

    Args:
        address: ipc://PATH or tcp://HOST:PORT of the engine.
        gateway: our id, for the engine's logs.
        wire: keys, heartbeats and bounds.
        on_message: gets Welcome, Tokens, Rejected and Load, in order; Welcome comes before the state is `ready`.
        on_state: gets each new state and its reason, for people.
        fingerprint: of the model we serve; "" takes what the engine has.
        context: ZeroMQ context to share among engines; without one the socket makes and ends its own.
        clock: seconds, monotonic.

    Raises:
        ConfigError: the address or the keys cannot work.
    """

    def __init__(
        self,
        address: str,
        gateway: str,
        wire: WireConfig,
        on_message: Callable[[ToGateway], None],
        on_state: Callable[[str, str], None],
        *,
        fingerprint: str = "",
        context: Context | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = gateway_keys(address, wire)
        self.address = address
        self.state: State = "connecting"
        self.reason = ""
        self.welcome: Welcome | None = None
        self._hello = Hello(PROTOCOL_VERSION, gateway, fingerprint)
        self._wire = wire
        self._on_message = on_message
        self._on_state = on_state
        self._context: Context = context if context is not None else zmq.Context()
        self._owns_context = context is None
        self._clock = clock
        self._refusals = Refusals()
        self._heartbeat = Heartbeat(wire.heartbeat_s, wire.dead_after_s, clock())
        self._dialer: Dialer | None = None
        self._dialled_at = 0.0
        self._backoff = Backoff(low_s=0.05, high_s=1.0, steady_s=1.0)
        self._closed = False
        self._reading = False  # a read is scheduled
        self._timer: asyncio.TimerHandle | None = None
        self._redial: asyncio.TimerHandle | None = None

    @property
    def refused_frames(self) -> int:
        """Counter: frames of the engine that were malformed or unknown; each ends its connection."""
        return self._refusals.total

    def start(self) -> None:
        """Begin to connect, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._dial()
        self._tick()

    def close(self) -> None:
        """Say Goodbye and close. No callback comes afterwards."""
        if self._closed:
            return
        if self.state in ("ready", "draining"):
            self.send(Goodbye())
        self._closed = True
        for timer in (self._timer, self._redial):
            if timer is not None:
                timer.cancel()
        self._hang_up(GOODBYE_LINGER_MS)
        if self._owns_context:
            self._context.term()

    def send(self, message: ToEngine) -> bool:
        """Queue `message`; never blocks.

        False = there is no engine, or `high_water_mark` messages wait for it already; nothing was queued.

        Raises:
            MalformedFrame: the engine would refuse the message: `oversized` when it is larger than the engine's
                context allows, `malformed` when a field is out of bounds. Nothing was sent.
        """
        if self._dialer is None or self.welcome is None or self.state not in ("ready", "draining"):
            return False
        frame = encode(message)
        limit = engine_frame_bytes(self._wire.max_frame_bytes, self.welcome.max_model_len)
        if len(frame) > limit:
            raise MalformedFrame(
                "oversized", f"{type(message).__name__} of {len(frame)} bytes, at most {limit}"
            )
        return self._transmit(frame)

    def _dial(self) -> None:
        self._dialled_at = self._clock()
        try:
            self._dialer = dial(self._context, self.address, self._wire, self._keys)
        except zmq.ZMQError as error:
            self._drop("lost", f"cannot make a socket: {error.strerror}")
            return
        self._heartbeat = Heartbeat(self._wire.heartbeat_s, self._wire.dead_after_s, self._dialled_at)
        self._loop.add_reader(self._dialer.dealer.fileno(), self._read)
        self._loop.add_reader(self._dialer.monitor.fileno(), self._watch)
        self._loop.call_soon(self._watch)

    def _hang_up(self, linger_ms: int) -> None:
        if self._dialer is not None:
            self._loop.remove_reader(self._dialer.dealer.fileno())
            self._loop.remove_reader(self._dialer.monitor.fileno())
            self._dialer.close(linger_ms)
            self._dialer = None

    def _drop(self, state: State, reason: str) -> None:
        """The connection is over; try anew after the back-off."""
        if self._closed:
            return
        self._hang_up(0)
        self.welcome = None
        wait_s = self._backoff.after(self._clock() - self._dialled_at)
        self._redial = self._loop.call_later(wait_s, self._dial)
        self._become(state, reason)

    def _break_off(self, reason: str) -> None:
        """The connection broke; where there was none to lose, what was said of the engine still holds."""
        if self.state in ("ready", "draining"):
            self._drop("lost", reason)
        else:
            self._drop(self.state, self.reason)

    def _become(self, state: State, reason: str) -> None:
        if not self._closed and (state, reason) != (self.state, self.reason):
            self.state, self.reason = state, reason
            self._on_state(state, reason)

    def _tick(self) -> None:
        """Every half interval: beat, and judge the engine's silence."""
        self._timer = self._loop.call_later(self._wire.heartbeat_s / 2, self._tick)
        if self._dialer is None:
            return
        self._read()
        now = self._clock()
        if self.welcome is not None and self._heartbeat.due(now):
            self._heartbeat.sent(now)
            self.send(Ping(now))
        if self._heartbeat.is_dead(now):
            self._break_off(f"no word from the engine for {self._heartbeat.silence_s(now):.1f} s")

    def _watch(self) -> None:
        """Read what the monitor says about the connection; edge-triggered, so until there is no more."""
        while (dialer := self._dialer) is not None:
            try:
                parts = dialer.monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            match parse_monitor_message(parts)["event"]:
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._transmit(encode(self._hello))
                case zmq.EVENT_DISCONNECTED:
                    try:
                        while self._read_some():  # its last words first
                            pass
                    finally:
                        if self._dialer is dialer:
                            self._break_off("the connection to the engine broke")
                case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    self._drop("refused", "keys: the engine does not let this gateway in")
                case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                    self._drop("refused", "keys: only one side has them, or no engine listens there")
                case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL if self.state != "refused":
                    # Who finds the mismatch first hangs up; where that is the engine, libzmq tells us no more.
                    self._become(
                        "refused", "keys: hung up on in the handshake; another engine's, or one side has none"
                    )
                case _:
                    pass

    def _read(self) -> None:
        """Read a batch; libzmq's descriptor is edge-triggered, so come back until there is no more."""
        more = True
        try:
            more = self._read_some()
        finally:
            if more:
                self._read_soon()

    def _read_soon(self) -> None:
        if not self._reading:
            self._reading = True
            self._loop.call_soon(self._read_again)

    def _read_again(self) -> None:
        self._reading = False
        self._read()

    def _read_some(self) -> bool:
        """Handle up to MAX_FRAMES_PER_WAKE frames; True if there may be more."""
        for _ in range(MAX_FRAMES_PER_WAKE):
            if self._dialer is None:
                return False
            try:
                parts = self._dialer.dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            try:
                if len(parts) > 1:
                    raise MalformedFrame("malformed", f"a message of {len(parts)} parts")
                if len(parts[0]) > self._wire.max_frame_bytes:
                    raise MalformedFrame("oversized", f"{len(parts[0])} bytes")
                message = decode_to_gateway(parts[0])
                if self.welcome is None and not isinstance(message, Welcome | Refused | Goodbye):
                    raise MalformedFrame("unknown", f"{type(message).__name__} before Welcome")
            except MalformedFrame as error:
                self._refusals.count(error.reason)
                self._refusals.report(f"engine at {self.address}", error.reason, error.detail, self._clock())
                self._drop("lost", f"the engine sent a frame that is {error}")
                return False
            self._heartbeat.heard(self._clock())
            self._handle(message)
        return True

    def _handle(self, message: ToGateway) -> None:
        match message:
            case Welcome():
                self._welcome(message)
            case Refused():
                self._drop("refused", f"{message.reason}: {message.detail}")
            case Goodbye():
                self._drop("lost", "the engine said goodbye")
            case Load():
                self._become("draining" if message.state == "draining" else "ready", "")
                self._on_message(message)
            case _:
                self._on_message(message)

    def _welcome(self, welcome: Welcome) -> None:
        if welcome.version != PROTOCOL_VERSION:
            detail = f"the engine speaks version {welcome.version}, this gateway {PROTOCOL_VERSION}"
            self._drop("refused", f"version: {detail}")
            return
        self.welcome = welcome
        self._on_message(welcome)
        self._become("ready", "")

    def _transmit(self, frame: bytes) -> bool:
        assert self._dialer is not None
        try:
            self._dialer.dealer.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            # A send may swallow the edge that announced a frame.
            self._read_soon()
        return True
