"""Tokens of one choice to pieces of its answer: decodes, cuts stop strings, keeps tokens with their text.

Tokens whose text is held back (a split character, the start of a stop string) go out in the piece that carries the
end of their text; tokens behind a stop string, and the stop token itself, go out in none. Knows no sequence
numbers, no credit and no sink. stream.py owns one.
"""

from typing import NamedTuple

from headrace.gateway.detokenizer import Detokenizer
from headrace.gateway.stops import StopCutter, StopStrings
from headrace.gateway.token_log import TokenLogprob
from headrace.ipc.messages import Logprobs, Sampling

Alternatives = tuple[tuple[int, float], ...]


Piece = tuple[str, list[int], int, list[TokenLogprob] | None]
"""What one engine step adds to an answer: text, its tokens, the output index behind them, their log-probabilities."""


class _Held(NamedTuple):
    """A token whose text is not out yet."""

    token_id: int
    start: int  # characters of decoded text before its own
    end: int  # up to its end; one more than known while its character is not whole
    logprob: float
    top: Alternatives


class Assembler:
    """Takes every output token once, in order.

    Attributes:
        num_received: output tokens that count: up to a stop, all.
        stop_reason: the stop string or stop token id found, which ends the answer.
    """

    __slots__ = (
        "_cutter",
        "_decoded",
        "_detokenizer",
        "_held",
        "_min_tokens",
        "_out",
        "_stop_ids",
        "_top",
        "_with_logprobs",
        "num_received",
        "stop_reason",
    )

    def __init__(self, sampling: Sampling, detokenizer: Detokenizer, stops: StopStrings | None) -> None:
        self.num_received = 0
        self.stop_reason: str | int | None = None
        self._detokenizer = detokenizer
        self._cutter = StopCutter(stops) if stops else None
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._min_tokens = sampling.min_tokens
        self._with_logprobs = sampling.logprobs >= 0
        self._top = sampling.logprobs  # alternatives asked for; the engine may send more
        self._held: list[_Held] = []
        self._decoded = 0  # characters
        self._out = 0  # characters in pieces

    @property
    def matched(self) -> bool:
        """True once a stop string was found; the engine does not know."""
        return isinstance(self.stop_reason, str)

    def push(self, token_ids: list[int], logprobs: Logprobs | None) -> Piece | None:
        """The tokens of one step; None when no text is certain yet."""
        if len(token_ids) > 1 or self._held or self._with_logprobs:
            return self._push_row(token_ids, logprobs)
        # One token, nothing held back: nearly every call. The general path below does the same, slower.
        token_id, index = token_ids[0], self.num_received
        self.num_received = index + 1
        if token_id in self._stop_ids and index >= self._min_tokens:
            self.stop_reason = token_id
            return None
        text = self._detokenizer.push(token_id)
        certain = text if self._cutter is None else self._cut(text, index)
        if certain and len(certain) == len(text) and not self._detokenizer.incomplete:
            self._out = self._decoded = self._decoded + len(text)
            return text, token_ids, index + 1, None
        self._hold(token_id, text, 0.0, ())
        return self._piece(certain)

    def flush(self) -> Piece | None:
        """The generation is over: what was held back, unless a stop string was found."""
        if self.matched:
            return None
        text = self._cut(self._detokenizer.flush(), self.num_received)
        if self._cutter is not None and not self.matched:
            text += self._cutter.flush()
        return self._piece(text, last=True)

    def _push_row(self, token_ids: list[int], logprobs: Logprobs | None) -> Piece | None:
        rows = (
            _unpack(logprobs, len(token_ids), self._top)
            if logprobs is not None
            else [(0.0, ())] * len(token_ids)
        )
        text = ""
        for token_id, row in zip(token_ids, rows, strict=True):
            index = self.num_received
            self.num_received = index + 1
            if token_id in self._stop_ids and index >= self._min_tokens:
                self.stop_reason = token_id
                break
            piece = self._detokenizer.push(token_id)
            self._hold(token_id, piece, *row)
            text += self._cut(piece, index)
            if self.stop_reason is not None:
                break
        return self._piece(text)

    def _hold(self, token_id: int, piece: str, logprob: float, top: Alternatives) -> None:
        start = self._decoded
        self._decoded = start + len(piece)
        end = self._decoded + (1 if self._detokenizer.incomplete else 0)
        self._held.append(_Held(token_id, start, end, logprob, top))

    def _cut(self, piece: str, index: int) -> str:
        """What of `piece` is certain; the text of tokens below min_tokens cannot stop a stream."""
        if self._cutter is None or index < self._min_tokens:
            return piece
        certain = self._cutter.push(piece)
        if self._cutter.match:
            self.stop_reason = self._cutter.match
        return certain

    def _piece(self, text: str, last: bool = False) -> Piece | None:
        """`text` with the tokens that are out with it; at the end also those whose text is none, or is out already."""
        self._out += len(text)
        count = self._num_out(last)
        if not text and not (count and self._with_logprobs and (last or self.matched)):
            return None
        out, self._held = self._held[:count], self._held[count:]
        terminators = 1 if isinstance(self.stop_reason, int) else 0
        end = self.num_received - len(self._held) - terminators
        logprobs = None
        if self._with_logprobs:
            logprobs = [TokenLogprob(held.token_id, held.logprob, held.top, held.start) for held in out]
        return text, [held.token_id for held in out], end, logprobs

    def _num_out(self, last: bool) -> int:
        """How many held tokens go out: those whose text is, and at a stop the one that is cut through."""
        if last and not self.matched:
            return len(self._held)
        count = 0
        for held in self._held:
            if held.end > self._out and not (self.matched and held.start < self._out):
                break
            count += 1
        return count


def _unpack(logprobs: Logprobs, count: int, limit: int) -> list[tuple[float, Alternatives]]:
    """Per token: its log-probability and the likeliest alternatives."""
    chosen = memoryview(logprobs.chosen).cast("f").tolist()
    top_ids = memoryview(logprobs.top_ids).cast("i").tolist()
    top = memoryview(logprobs.top).cast("f").tolist()
    k = logprobs.top_k
    shown = min(k, limit)
    if len(chosen) != count:
        raise ValueError(f"{len(chosen)} log-probabilities came with {count} tokens")
    return [
        (chosen[i], tuple(zip(top_ids[i * k : i * k + shown], top[i * k : i * k + shown], strict=True)))
        for i in range(count)
    ]
