"""The append-only log of one stream, in columns: event n has a text, the output index behind it, logprobs if asked.

Bounded in bytes: the oldest events are dropped, and a reader that needs them is told so. Knows no sink.
stream.py owns one per stream.
"""

from array import array
from typing import NamedTuple

EVENT_BYTES = 24  # of columns, besides text and logprobs
LOGPROB_BYTES = 200  # rough, of one token with some alternatives


class TokenLogprob(NamedTuple):
    """Log-probability of one token, and its likeliest alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), likeliest first
    offset: int  # characters of the answer before this token's text


class Event(NamedTuple):
    """One piece of an answer."""

    seq: int  # counts from 1 within its stream
    text: str
    token_ids: list[int]  # the tokens whose text ends in this piece
    end: int  # output index behind the last of them
    logprobs: list[TokenLogprob] | None  # one per token; None = not asked for


class LogCut(Exception):
    """Events that were asked for are no longer in the log; the message says from where it goes on."""


class TokenLog:
    """Events 1..last of one stream.

    Args:
        max_bytes: what the columns may hold, roughly; at least the newest event stays.
    """

    __slots__ = ("_bytes", "_cut", "_cut_end", "_ends", "_logprobs", "_max_bytes", "_texts", "_token_ids")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._cut = 0  # events dropped from the front
        self._cut_end = 0  # output index behind them
        self._texts: list[str] = []
        self._ends = array("i")
        self._token_ids = array("i")  # of all events, end to end
        self._logprobs: list[list[TokenLogprob]] = []  # empty when not asked for

    @property
    def last(self) -> int:
        """Sequence number of the newest event; 0 = none yet."""
        return self._cut + len(self._texts)

    @property
    def cut(self) -> int:
        """Events dropped: the oldest one left has the next number."""
        return self._cut

    def append(self, text: str, token_ids: list[int], end: int, logprobs: list[TokenLogprob] | None) -> Event:
        """Add an event; it gets the next sequence number."""
        texts = self._texts
        texts.append(text)
        self._ends.append(end)
        self._token_ids.extend(token_ids)
        self._bytes += EVENT_BYTES + len(text)
        if logprobs is not None:
            self._logprobs.append(logprobs)
            self._bytes += LOGPROB_BYTES * len(logprobs)
        if self._bytes > self._max_bytes:
            self._drop_oldest()
        # Event's own constructor takes three times as long, and this runs once per token.
        return tuple.__new__(Event, (self._cut + len(texts), text, token_ids, end, logprobs))

    def end_of(self, seq: int) -> int:
        """Output index behind event `seq`; 0 for seq 0 and for what was dropped."""
        at = seq - self._cut - 1
        return self._ends[at] if 0 <= at < len(self._ends) else 0

    def since(self, seq: int) -> list[Event]:
        """Every event after number `seq`.

        Raises:
            LogCut: the first of them has been dropped.
        """
        if seq < self._cut:
            raise LogCut(f"events up to {self._cut} were dropped from the log; {seq + 1} was asked for")
        return [self._event(at) for at in range(seq - self._cut, len(self._texts))]

    def _event(self, at: int) -> Event:
        start = self._ends[at - 1] if at else self._cut_end
        end = self._ends[at]
        token_ids = self._token_ids[start - self._cut_end : end - self._cut_end].tolist()
        logprobs = self._logprobs[at] if self._logprobs else None
        return Event(self._cut + at + 1, self._texts[at], token_ids, end, logprobs)

    def _drop_oldest(self) -> None:
        """Drop down to three quarters of the bound, so that this is rare; the newest event stays."""
        count = 0
        while count < len(self._texts) - 1 and self._bytes > self._max_bytes * 3 // 4:
            self._bytes -= EVENT_BYTES + len(self._texts[count])
            if self._logprobs:
                self._bytes -= LOGPROB_BYTES * len(self._logprobs[count])
            count += 1
        if count:
            end = self._ends[count - 1]
            del self._token_ids[: end - self._cut_end]
            del self._texts[:count], self._ends[:count], self._logprobs[:count]
            self._cut += count
            self._cut_end = end


def merge(events: list[Event]) -> Event:
    """Several consecutive events as one, under the last one's number. Nothing is lost but the borders."""
    if len(events) == 1:
        return events[0]
    last = events[-1]
    return Event(
        last.seq,
        "".join(event.text for event in events),
        [token_id for event in events for token_id in event.token_ids],
        last.end,
        None if last.logprobs is None else [entry for event in events for entry in event.logprobs or ()],
    )
