"""The events of one streamed answer: which of them brought text, and what the last ones say.

JSON is parsed until the shape of a token's event is known; from then on an event of that shape is recognised by its
beginning and end alone. Anything else is parsed. Knows no socket; client_connection.py feeds it.
"""

import re
from collections.abc import Mapping
from typing import Any

import orjson

from headrace.loadtest.client_http import BadResponse
from headrace.loadtest.exchange import Exchange

MAX_EVENT = 8 << 20
MAX_LEARNING = 16  # events whose shape is new each time: then it is not worth looking
TEXT_FIELDS = ("content", "reasoning_content", "reasoning")
_TEXT = re.compile(rb'"(?:content|text|reasoning_content|reasoning)":\s*"((?:[^"\\]|\\.)*)"')


class SseReader:
    """Reads the events of `exchange` into it."""

    __slots__ = ("_exchange", "_head", "_learnt", "_partial", "_tail", "done")

    def __init__(self, exchange: Exchange) -> None:
        self.done = False  # [DONE] was seen
        self._exchange = exchange
        self._partial = b""
        self._head = b"\n\n"  # no event begins so
        self._tail = b"\n\n"
        self._learnt = 0

    def feed(self, payload: bytes, now: float) -> None:
        """Take the next piece of the body, cut anywhere.

        Args:
            payload: bytes of the event stream.
            now: when it was read.

        Raises:
            BadResponse: an event is no JSON, or has no end.
        """
        if not self._partial and payload.endswith(self._tail):
            start = payload.find(b"data: ", 0, 40)  # an id may stand in front
            begin, end = start + len(self._head), len(payload) - len(self._tail)
            if (
                payload.startswith(self._head, start)
                and begin < end
                and payload.find(b"\n\n", begin) == len(payload) - 2
            ):
                self._exchange.arrivals.append(now)
                if self._exchange.keep_text:
                    self._exchange.pieces.append(payload[begin:end])
                return
        payload = self._partial + payload
        if b"\r" in payload:
            payload = payload.replace(b"\r\n", b"\n")
        *events, self._partial = payload.split(b"\n\n")
        if len(self._partial) > MAX_EVENT:
            raise BadResponse(f"an event is longer than {MAX_EVENT} bytes")
        for event in events:
            self._take(event, now)

    def _take(self, event: bytes, now: float) -> None:
        tail = self._tail[:-2]
        start = event.find(b"data: ", 0, 40)
        begin, end = start + len(self._head), len(event) - len(tail)
        if event.startswith(self._head, start) and begin < end and event.endswith(tail):
            self._text(event[begin:end], now)
            return
        data = b"\n".join(
            line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")
        )
        if data == b"[DONE]":
            self.done = True
        elif data:
            self._parse(event, data, now)

    def _parse(self, event: bytes, data: bytes, now: float) -> None:
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise BadResponse(f"an event is no JSON: {error}") from None
        try:
            self._take_chunk(chunk, event, data, now)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise BadResponse(
                f"an event is no chunk of an answer: {str(data[:200], errors='replace')}"
            ) from None

    def _take_chunk(self, chunk: Any, event: bytes, data: bytes, now: float) -> None:
        exchange = self._exchange
        if chunk.get("error") is not None:
            exchange.fail("stream_error", str(data, errors="replace"))
            return
        if chunk.get("usage"):
            exchange.take_usage(chunk["usage"])
        choices = chunk.get("choices")
        if not choices:
            return
        choice = choices[0]
        reason = choice.get("finish_reason")
        if reason:
            exchange.finish_reason = str(reason)
        text = _text_of(choice)
        if text:
            self._text(orjson.dumps(text)[1:-1], now)
            if not reason and self._learnt < MAX_LEARNING:
                self._learnt += 1
                self._learn(event, text)

    def _text(self, piece: bytes, now: float) -> None:
        self._exchange.arrivals.append(now)
        if self._exchange.keep_text:
            self._exchange.pieces.append(piece)

    def _learn(self, event: bytes, text: str) -> None:
        """Remember what stands before and after the text."""
        start = event.find(b"data: ", 0, 40)
        if start < 0 or b"\n" in event[start:]:
            return
        for match in _TEXT.finditer(event):
            if orjson.loads(b'"%b"' % match[1]) == text:
                self._head = event[start : match.start(1)]
                self._tail = event[match.end(1) :] + b"\n\n"
                return


def _text_of(choice: Mapping[str, Any]) -> str:
    if "text" in choice:
        return choice["text"] or ""
    delta = choice.get("delta") or {}
    return next((delta[name] for name in TEXT_FIELDS if delta.get(name)), "")
