"""WebSocket frames as a client sees them (RFC 6455, section 5): parsing the server's, writing its own.

Knows no socket and no protocol above it. Fragmented messages are refused: the servers in question send none.
"""

from collections.abc import Callable

from headrace.loadtest.client_http import BadResponse

TEXT, CLOSE, PING, PONG = 0x1, 0x8, 0x9, 0xA
MAX_FRAME = 16 << 20


class FrameParser:
    """Cuts what the socket gives into frames.

    Args:
        on_frame: called with the opcode and the payload of each.
    """

    __slots__ = ("_on_frame", "_rest")

    def __init__(self, on_frame: Callable[[int, bytes], None]) -> None:
        self._on_frame = on_frame
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take the next piece.

        Raises:
            BadResponse: a frame that a server must not send, or one of an impossible size.
        """
        if self._rest:
            data = self._rest + data
        at, available = 0, len(data)
        while available - at >= 2:
            length, begin = data[at + 1], at + 2
            if length > 125:
                begin = at + (4 if length == 126 else 10)
                if length > 127:
                    raise BadResponse("a frame of the server is masked")
                if available < begin:
                    break
                length = int.from_bytes(data[at + 2 : begin])
                if length > MAX_FRAME:
                    raise BadResponse(f"a frame of {length} bytes is announced")
            end = begin + length
            if end > available:
                break
            first = data[at]
            if first & 0xF0 != 0x80 or not first & 0x0F:
                raise BadResponse("a frame is fragmented, or of an extension that was not asked for")
            self._on_frame(first & 0x0F, data[begin:end])
            at = end
        self._rest = data[at:]


def client_frame(opcode: int, payload: bytes) -> bytes:
    """A masked frame. The mask is zero: it guards browsers' proxies against web pages, which is no concern here."""
    size = len(payload)
    if size < 126:
        head = bytes((0x80 | opcode, 0x80 | size))
    elif size < 1 << 16:
        head = bytes((0x80 | opcode, 0x80 | 126)) + size.to_bytes(2)
    else:
        head = bytes((0x80 | opcode, 0x80 | 127)) + size.to_bytes(8)
    return b"%b\0\0\0\0%b" % (head, payload)
