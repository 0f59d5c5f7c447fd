"""Status line and headers of an event stream, as bytes: the same for every answer but for its id and the date.

What aiohttp would write for the same answer, made once instead of per request. sse.py writes it.
"""

import time
from collections.abc import Sequence
from email.utils import formatdate

from aiohttp import HttpVersion11, web

from headrace.gateway.answers import REQUEST_ID, SERVER
from headrace.gateway.cors import origin_headers

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the events otherwise
    "Server": SERVER,
}


class SseHead:
    """Makes heads.

    Args:
        origins: web pages that may read the answers.
    """

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = origins
        self._always = "HTTP/1.1 200 OK\r\n" + _lines(HEADERS)
        self._second = 0
        self._prefix = ""  # what is always there, and the date of that second

    def make(self, request: web.Request) -> bytes:
        """The head of the answer to `request`, up to and with the empty line."""
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._prefix = f"{self._always}Date: {formatdate(second, usegmt=True)}\r\nX-Request-Id: "
        framing = "Transfer-Encoding: chunked\r\n" if request.version >= HttpVersion11 else ""
        if not keeps_alive(request):
            framing += "Connection: close\r\n"
        cors = _lines(origin_headers(request, self._origins)) if self._origins else ""
        return f"{self._prefix}{request[REQUEST_ID]}\r\n{framing}{cors}\r\n".encode()


def keeps_alive(request: web.Request) -> bool:
    """Whether the connection can be used again; without chunks only its end ends the answer."""
    return request.keep_alive and request.version >= HttpVersion11


def _lines(headers: dict[str, str]) -> str:
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
