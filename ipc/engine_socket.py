"""The engine's end of the wire: a ROUTER that takes gateways in, refuses junk and notices who is gone.

Owns the table of gateways. Does not know what a generation is. For a plain synchronous loop, one thread: call
`receive` at least every `heartbeat_s`, and `send_load` when `load_due`.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import zmq

from headrace.config import WireConfig
from headrace.ipc.codec import MalformedFrame, decode_to_engine, encode
from headrace.ipc.endpoint import listen
from headrace.ipc.heartbeat import Heartbeat
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

# Work of one `receive`: beyond it frames wait for the next call, so that a flood cannot hold up a step.
MAX_FRAMES_PER_CALL = 1024
MAX_BYTES_PER_CALL = 32 << 20
MAX_EXPELLED = 4096  # peers whose frames are dropped unread; the oldest are forgotten
GOODBYE_LINGER_MS = 500


@dataclass(slots=True)
class _Gateway:
    name: str
    heartbeat: Heartbeat
    ping: float = 0.0  # of its newest Ping


class EngineSocket:
    """Gateways connect here.

    A gateway is known by its routing id, which libzmq draws anew for every connection. It must say Hello
    first. A peer that breaks the protocol gets one Refused, and what it sends afterwards is dropped unread.

    Args:
        address: ipc://PATH or tcp://HOST:PORT to bind.
        welcome: the answer to every Hello that fits; its version and fingerprint are what a Hello must match.
        wire: keys, heartbeats and bounds.
        clock: seconds, monotonic.

    Raises:
        ConfigError: the address or the keys cannot work, or the address is taken.
    """

    def __init__(
        self,
        address: str,
        welcome: Welcome,
        wire: WireConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._welcome = welcome
        self._wire = wire
        self._clock = clock
        self._max_frame_bytes = engine_frame_bytes(wire.max_frame_bytes, welcome.max_model_len)
        self._listener = listen(address, wire, self._max_frame_bytes)
        self._router = self._listener.router
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        if self._listener.gatekeeper is not None:
            self._poller.register(self._listener.gatekeeper.socket, zmq.POLLIN)
        self._gateways: dict[bytes, _Gateway] = {}
        self._expelled: OrderedDict[bytes, None] = OrderedDict()
        self._lost: list[bytes] = []
        self._refusals = Refusals()
        self._tail = False  # the rest of a multipart message is still to be dropped

    @property
    def address(self) -> str:
        """As bound."""
        return self._listener.address

    @property
    def gateways(self) -> Mapping[bytes, str]:
        """Names of the gateways that are taken in, by routing id."""
        return {peer: gateway.name for peer, gateway in self._gateways.items()}

    @property
    def refused_frames(self) -> int:
        """Counter: frames that were malformed, oversized, unknown, or came from a peer already refused."""
        return self._refusals.total

    @property
    def refused_by_reason(self) -> Mapping[str, int]:
        """The same by Refused.reason; `expelled` for what a refused peer sent later."""
        return MappingProxyType(self._refusals.by_reason)

    @property
    def refused_keys(self) -> int:
        """Counter: connections turned away for their CurveZMQ key."""
        return 0 if self._listener.gatekeeper is None else self._listener.gatekeeper.refused

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return bool(self._router.closed)

    def receive(self, timeout_s: float) -> list[tuple[bytes, ToEngine]]:
        """Submit, Credit, Cancel and Goodbye messages that have come, with the gateway's routing id.

        Waits at most `timeout_s` for the first frame; 0 only looks. Hello and Ping are answered here. Never
        raises for what a peer sends, and does a bounded amount of work: returns empty if there was only junk.
        """
        received: list[tuple[bytes, ToEngine]] = []
        if not self._drain(received) and timeout_s > 0:
            self._poller.poll(math.ceil(timeout_s * 1000))
            self._drain(received)
        self._drop_silent()
        return received

    def send(self, gateway: bytes, message: ToGateway) -> bool:
        """Queue `message`; never blocks.

        False = the gateway is gone, or reads so slowly that `high_water_mark` messages wait for it. A stream
        with a gap is worth nothing, so that gateway is dropped: `lost` names it, and it has to say Hello anew.

        Raises:
            MalformedFrame: the gateway would refuse the message.
        """
        if gateway not in self._gateways:
            return False
        if self._transmit(gateway, message):
            return True
        self._lose(gateway)
        return False

    def lost(self) -> list[bytes]:
        """Gateways that vanished, fell silent or were dropped since the last call: cancel their streams.

        A gateway that says Goodbye is not among them.
        """
        lost, self._lost = self._lost, []
        return lost

    @property
    def load_due(self) -> bool:
        """Whether a gateway waits for a Load."""
        now = self._clock()
        return any(gateway.heartbeat.due(now) for gateway in self._gateways.values())

    def send_load(self, load: Load) -> None:
        """Send `load` to every gateway; `ping` and `refused_frames` are filled in here."""
        now = self._clock()
        for peer, gateway in list(self._gateways.items()):
            gateway.heartbeat.sent(now)
            self.send(peer, replace(load, ping=gateway.ping, refused_frames=self.refused_frames))

    def close(self, *, goodbye: bool = True) -> None:
        """Say Goodbye to every gateway and close; without it, vanish as a killed process does."""
        if goodbye:
            for peer in self._gateways:
                self._transmit(peer, Goodbye())
        self._gateways.clear()
        self._listener.close(GOODBYE_LINGER_MS if goodbye else 0)

    def _drain(self, received: list[tuple[bytes, ToEngine]]) -> bool:
        """Read what is there, within bounds; True if a frame was read."""
        if self._listener.gatekeeper is not None:
            self._listener.gatekeeper.serve()
        num_bytes = 0
        for count in range(MAX_FRAMES_PER_CALL):
            try:
                frame = self._router.recv(zmq.NOBLOCK, copy=False)
                if self._tail:
                    self._tail = frame.more
                    continue
                peer = frame.bytes
                frame = self._router.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return count > 0
            self._tail = frame.more
            num_bytes += len(frame)
            self._accept(peer, frame, received)
            if num_bytes > MAX_BYTES_PER_CALL:
                break
        return True

    def _accept(self, peer: bytes, frame: zmq.Frame, received: list[tuple[bytes, ToEngine]]) -> None:
        if peer in self._expelled:
            self._refusals.count("expelled")
            return
        try:
            if frame.more:
                raise MalformedFrame("malformed", "a message has more than one part")
            if len(frame) > self._max_frame_bytes:
                raise MalformedFrame("oversized", f"{len(frame)} bytes, at most {self._max_frame_bytes}")
            message = decode_to_engine(frame.bytes)
            gateway = self._gateways.get(peer)
            if gateway is None:
                self._greet(peer, message)
                return
            if isinstance(message, Hello):
                raise MalformedFrame("malformed", "a second Hello")
        except MalformedFrame as error:
            self._refuse(peer, _address_of(frame), error.reason, error.detail)
            return
        gateway.heartbeat.heard(self._clock())
        if isinstance(message, Ping):
            gateway.ping = message.sent_at
            return
        if isinstance(message, Goodbye):
            del self._gateways[peer]
        received.append((peer, message))

    def _greet(self, peer: bytes, message: ToEngine) -> None:
        if not isinstance(message, Hello):
            raise MalformedFrame("unknown", f"{type(message).__name__} before Hello")
        name, wanted = f"gateway {message.gateway!r}", message.fingerprint
        if message.version != PROTOCOL_VERSION:
            detail = f"the gateway speaks version {message.version}, this engine {PROTOCOL_VERSION}"
            self._refuse(peer, name, "version", detail)
        elif wanted not in ("", self._welcome.fingerprint):
            detail = f"the gateway serves {wanted!r}, this engine has {self._welcome.fingerprint!r}"
            self._refuse(peer, name, "fingerprint", detail)
        elif self._transmit(peer, self._welcome):
            wire = self._wire
            heartbeat = Heartbeat(wire.heartbeat_s, wire.dead_after_s, self._clock())
            self._gateways[peer] = _Gateway(message.gateway, heartbeat)

    def _refuse(self, peer: bytes, name: str, reason: str, detail: str) -> None:
        """Count, log once, answer once, and listen no more."""
        gateway = self._gateways.get(peer)
        if gateway is not None:
            name = f"gateway {gateway.name!r}"
            self._lose(peer)
        self._refusals.count(reason)
        self._refusals.report(name, reason, detail, self._clock())
        self._expelled[peer] = None
        if len(self._expelled) > MAX_EXPELLED:
            self._expelled.popitem(last=False)
        self._transmit(peer, Refused(reason, detail))

    def _drop_silent(self) -> None:
        now = self._clock()
        for peer in [peer for peer, gateway in self._gateways.items() if gateway.heartbeat.is_dead(now)]:
            self._lose(peer)

    def _lose(self, peer: bytes) -> None:
        del self._gateways[peer]
        self._lost.append(peer)

    def _transmit(self, peer: bytes, message: ToGateway) -> bool:
        frame = encode(message)
        assert len(frame) <= self._wire.max_frame_bytes, f"{type(message).__name__} of {len(frame)} bytes"
        try:
            self._router.send_multipart([peer, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        return True


def _address_of(frame: zmq.Frame) -> str:
    try:
        return f"peer {frame.get('Peer-Address')}"
    except zmq.ZMQError:
        return "a local peer"
