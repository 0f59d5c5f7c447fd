"""The HTTP/1.1 response that a load test reads: head, chunked or sized body, fed in whatever pieces the socket gives.

Knows no socket and no API. Whole chunks in one piece, the usual case, take a short way. RFC 9112, section 7.1.
"""

from collections.abc import Callable

MAX_HEAD = 64 << 10
MAX_LINE = 1 << 10
HEAD, SIZE, DATA, DATA_END, TRAILER, SIZED, UNTIL_CLOSE, COMPLETE = range(8)


class BadResponse(Exception):
    """What the server sent is not what it announced; the message says how."""


class ResponseParser:
    """One response at a time.

    Args:
        on_head: called with the status and the headers, names in lower case.
        on_body: called with each piece of the body.
    """

    __slots__ = ("_left", "_on_body", "_on_head", "_rest", "keep_alive", "state")

    def __init__(
        self, on_head: Callable[[int, dict[str, str]], None], on_body: Callable[[bytes], None]
    ) -> None:
        self._on_head = on_head
        self._on_body = on_body
        self._rest = b""
        self._left = 0
        self.keep_alive = True
        self.state = COMPLETE

    def begin(self) -> None:
        """Expect a response."""
        self.state, self._rest, self.keep_alive = HEAD, b"", True

    def close(self) -> None:
        """The server has closed the connection.

        Raises:
            BadResponse: in the middle of a response.
        """
        if self.state == UNTIL_CLOSE:
            self.state = COMPLETE
        elif self.state != COMPLETE:
            raise BadResponse("the connection was closed in the middle of the response")

    def feed(self, data: bytes) -> None:
        """Take the next piece; `state` is COMPLETE after the last.

        Raises:
            BadResponse: it is not HTTP, or more than the response.
        """
        if self._rest:
            data = self._rest + data
            self._rest = b""
        at = 0
        while at < len(data):
            if self.state == SIZE:
                line = data.find(b"\r\n", at)
                if line < 0:
                    self._hold(data, at, MAX_LINE)
                    return
                size = _chunk_size(data[at:line])
                at = line + 2
                end = at + size
                if size and data.startswith(b"\r\n", end):  # all of the chunk is here
                    self._on_body(data[at:end])
                    at = end + 2
                else:
                    self._left = size
                    self.state = DATA if size else TRAILER
            else:
                at = self._advance(data, at)
                if at < 0:
                    return

    def _advance(self, data: bytes, at: int) -> int:
        """A step in any state but SIZE: where it goes on, -1 = more is needed."""
        if self.state == HEAD:
            return self._head(data, at)
        if self.state in (DATA, SIZED):
            piece = data[at : at + self._left]
            self._left -= len(piece)
            if not self._left:
                self.state = DATA_END if self.state == DATA else COMPLETE
            self._on_body(piece)
            return at + len(piece)
        if self.state == UNTIL_CLOSE:
            self._on_body(data[at:])
            return len(data)
        if self.state == COMPLETE:
            raise BadResponse("the server sent more than the response")
        line = data.find(b"\r\n", at)
        if self.state == DATA_END and line != at and len(data) - at >= 2:
            raise BadResponse("a chunk is longer than announced")
        if line < 0:
            return self._hold(data, at, MAX_HEAD)
        if self.state == DATA_END:
            self.state = SIZE
        elif line == at:  # of the trailer, empty: its last
            self.state = COMPLETE
        return line + 2

    def _head(self, data: bytes, at: int) -> int:
        end = data.find(b"\r\n\r\n", at)
        if end < 0:
            return self._hold(data, at, MAX_HEAD)
        status, headers = parse_head(data[at:end])
        if 100 <= status < 200 and status != 101:
            return end + 4
        self.keep_alive = headers.get("connection", "").lower() != "close"
        if headers.get("transfer-encoding", "").lower() == "chunked":
            self.state = SIZE
        elif "content-length" in headers:
            length = headers["content-length"]
            if not length.isdecimal():
                raise BadResponse(f"Content-Length is {length[:40]!r}")
            self._left = int(length)
            self.state = SIZED if self._left else COMPLETE
        elif status in (204, 304):
            self.state = COMPLETE
        else:
            self.state, self.keep_alive = UNTIL_CLOSE, False
        self._on_head(status, headers)
        return end + 4

    def _hold(self, data: bytes, at: int, limit: int) -> int:
        self._rest = data[at:]
        if len(self._rest) > limit:
            raise BadResponse(f"a line or head is longer than {limit} bytes")
        return -1


def _chunk_size(line: bytes) -> int:
    try:
        if line.isalnum():  # int() would take a sign or an underscore
            return int(line, 16)
        digits = line.partition(b";")[0].strip()
        return int(digits if digits.isalnum() else b"", 16)
    except ValueError:
        raise BadResponse(f"a chunk's size is {line[:40]!r}") from None


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Status and headers, names in lower case, of a head without its empty line.

    Raises:
        BadResponse: it is none.
    """
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    code = rest[:3]
    if not version.startswith("HTTP/1.") or not code.isdecimal():
        raise BadResponse(f"not an HTTP/1.1 response: {first[:80]!r}")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(code), headers
