"""Makes, binds, connects and closes every ZeroMQ socket of the wire; sets each option in one place.

Checks addresses and keys. Knows no message: ipc/engine_socket.py and ipc/gateway_socket.py speak through it.
"""

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

import zmq

from headrace.config import ConfigError, WireConfig
from headrace.ipc.gatekeeper import ZAP_DOMAIN, Gatekeeper
from headrace.ipc.keys import GatewayKeys, load_engine_keys, load_gateway_keys

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

# What a hostile peer can make libzmq hold for an engine; divided by the frame limit it bounds the queue.
INBOUND_BYTES_PER_PEER = 64 << 20
MIN_INBOUND_FRAMES = 64
# A frame slightly over our limit is refused with a reason; further out libzmq cuts the connection.
OVERSIZE_GRACE_BYTES = 1 << 16
RECONNECT_MS = 100
MAX_IPC_PATH_BYTES = 107

MONITORED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


def check_address(address: str, curve_dir: str) -> None:
    """Refuse an address that cannot work, or one that strangers could reach without keys.

    Raises:
        ConfigError: names the address and what is wrong with it.
    """
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        if not rest or len(rest.encode()) > MAX_IPC_PATH_BYTES:
            raise ConfigError(f"wire: {address} needs a path of 1 to {MAX_IPC_PATH_BYTES} bytes")
    elif scheme == "tcp":
        host, _, port = rest.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"wire: {address} is not tcp://HOST:PORT")
        if not curve_dir and not _is_loopback(host):
            raise ConfigError(f"wire: {address} is open to others; set wire.curve_dir (see `headrace keys`)")
    else:
        raise ConfigError(f"wire: {address} is neither ipc://PATH nor tcp://HOST:PORT")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Listener:
    """An engine's bound ROUTER, alone in its context, and the handler of its keys where there are any."""

    context: Context
    router: Socket
    gatekeeper: Gatekeeper | None
    address: str  # as bound: the port is known even where 0 was asked for

    def close(self, linger_ms: int) -> None:
        """Close at once; what is queued may leave for `linger_ms` more."""
        self.router.close(linger_ms)
        if self.gatekeeper is not None:
            self.gatekeeper.close()
        self.context.term()


def listen(address: str, wire: WireConfig, max_frame_bytes: int) -> Listener:
    """Bind an engine's socket.

    ROUTER_MANDATORY makes a full or vanished peer an error of `send` where ROUTER would drop the message.

    Whoever gets through the folder's mode (ipc) or the keys (tcp) can do no harm by what a frame holds, how large
    or how many they are. One thing libzmq does not bound: a multipart message that never ends stays in memory.

    Raises:
        ConfigError: the address or the keys cannot work, or the address is taken.
    """
    check_address(address, wire.curve_dir)
    keys = load_engine_keys(Path(wire.curve_dir)) if _is_curve(address, wire) else None
    _refuse_live_ipc(address)
    context: Context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    _set_common(router, address)
    router.router_mandatory = 1
    router.sndhwm = wire.high_water_mark
    inbound = max(MIN_INBOUND_FRAMES, INBOUND_BYTES_PER_PEER // max_frame_bytes)
    router.rcvhwm = min(wire.high_water_mark, inbound)
    router.maxmsgsize = max_frame_bytes + OVERSIZE_GRACE_BYTES
    gatekeeper = None
    if keys is not None:
        gatekeeper = Gatekeeper(context, keys.allowed)
        router.curve_server = 1
        router.curve_secretkey = keys.secret
        router.zap_domain = ZAP_DOMAIN.encode()
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    listener = Listener(context, router, gatekeeper, address)
    try:
        router.bind(address)
    except zmq.ZMQError as error:
        listener.close(0)
        raise ConfigError(f"wire: cannot bind {address}: {error.strerror}") from None
    bound = router.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return Listener(context, router, gatekeeper, bound.decode().rstrip("\0"))


@dataclass(frozen=True, slots=True)
class Dialer:
    """A gateway's DEALER and the monitor that tells what becomes of its connection."""

    dealer: Socket
    monitor: Socket

    def close(self, linger_ms: int) -> None:
        """Close at once; what is queued may leave for `linger_ms` more."""
        self.dealer.disable_monitor()
        self.monitor.close(0)
        self.dealer.close(linger_ms)


def gateway_keys(address: str, wire: WireConfig) -> GatewayKeys | None:
    """Check where a gateway is to connect, and read the keys for it.

    Raises:
        ConfigError: the address or the keys cannot work.
    """
    check_address(address, wire.curve_dir)
    return load_gateway_keys(Path(wire.curve_dir)) if _is_curve(address, wire) else None


def dial(context: Context, address: str, wire: WireConfig, keys: GatewayKeys | None) -> Dialer:
    """Start to connect to an engine; libzmq tries every RECONNECT_MS until it is there.

    Serves one connection: whoever sees DISCONNECTED reads the last frames, closes this and dials anew, so that
    what a dead engine did not get is never queued for its successor. (ZMQ_IMMEDIATE would bind the queue to the
    connection too, but libzmq 4.3.5 then loses frames that arrived just before the end.)

    Raises:
        zmq.ZMQError: the process has no descriptor left.
    """
    dealer = context.socket(zmq.DEALER)
    _set_common(dealer, address)
    dealer.reconnect_ivl = RECONNECT_MS
    dealer.sndhwm = wire.high_water_mark
    dealer.rcvhwm = wire.high_water_mark
    dealer.maxmsgsize = wire.max_frame_bytes + OVERSIZE_GRACE_BYTES
    if keys is not None:
        dealer.curve_secretkey = keys.secret
        dealer.curve_publickey = keys.public
        dealer.curve_serverkey = keys.engine
    monitor = dealer.get_monitor_socket(MONITORED)
    monitor.linger = 0
    dealer.connect(address)
    return Dialer(dealer, monitor)


def _set_common(sock: Socket, address: str) -> None:
    sock.linger = 0
    sock.tcp_keepalive = 1
    if address.startswith("tcp://["):
        sock.ipv6 = True


def _is_curve(address: str, wire: WireConfig) -> bool:
    return bool(wire.curve_dir) and address.startswith("tcp://")


def _refuse_live_ipc(address: str) -> None:
    """libzmq would take over the path of a living engine without a word, and starve it."""
    if not address.startswith("ipc://"):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(address.removeprefix("ipc://"))
        except OSError:
            return
    raise ConfigError(f"wire: another engine serves at {address}")
