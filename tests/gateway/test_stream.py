"""One stream, driven by hand: text, stops, alignment of tokens, credit, and every way to end."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from headrace.config import embedded_model
from headrace.gateway.assembler import Assembler
from headrace.gateway.deadlines import Deadlines
from headrace.gateway.detokenizer import detokenizer
from headrace.gateway.stops import StopStrings
from headrace.gateway.stream import Outcome, Stream
from headrace.gateway.token_log import Event
from headrace.gateway.vocabulary import Vocabulary
from headrace.ipc.messages import Finished, Sampling, Usage
from tests.gateway.fake_engine import fake_logprobs
from tests.gateway.test_stops import plain_cut
from tests.gateway.tokenizers_for_tests import byte_level_tokenizer

TOKENIZER = Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))
VOCABULARY = Vocabulary(TOKENIZER)
EOS = 2


class FakeHandle:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def cancel(self) -> None:
        self.calls.append("cancel")

    def stop(self) -> None:
        self.calls.append("stop")

    def grant(self, limit: int) -> None:
        self.calls.append(limit)


class Reader:
    """A sink that takes everything at once, or nothing."""

    def __init__(self, stream: Stream, takes: bool = True) -> None:
        self.stream = stream
        self.takes = takes
        self.events: list[Event] = []
        self.outcome: Outcome | None = None

    def write(self, events: Sequence[Event]) -> None:
        assert self.outcome is None
        self.events += events
        if self.takes:
            self.stream.acknowledge(events[-1].seq)

    def finish(self, outcome: Outcome) -> None:
        assert self.outcome is None, "an end comes once"
        self.outcome = outcome

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)


class Bench:
    """A stream between a handle and a reader."""

    def __init__(
        self,
        stop: Sequence[str] = (),
        window: int = 1000,
        takes: bool = True,
        vocabulary: Vocabulary = VOCABULARY,
        **sampling: Any,
    ) -> None:
        settings = Sampling(**{"max_tokens": 1000, "stop_token_ids": (EOS,), **sampling})
        self.assembler = Assembler(settings, detokenizer(vocabulary), StopStrings(stop) if stop else None)
        self.stream = Stream(self.assembler, 7, settings.max_tokens, window)
        self.reader = Reader(self.stream, takes)
        self.handle = FakeHandle()
        self.top_k = settings.logprobs
        submit: Callable[[Any], Any] = lambda _listener: self.handle  # noqa: E731
        self.stream.start(self.reader, submit, Deadlines(100))
        self.sent = 0

    def push(self, *token_ids: int) -> None:
        logprobs = fake_logprobs(0, token_ids, self.top_k) if self.top_k >= 0 else None
        start, self.sent = self.sent, self.sent + len(token_ids)
        self.stream.on_tokens(start, list(token_ids), logprobs)

    def finish(self, reason: str = "stop", message: str = "") -> Outcome:
        usage = Usage(7, 3, self.sent, 0.0, 0.0, 0.0, 0)
        self.stream.on_finished(Finished(1, reason, usage, message))
        assert self.reader.outcome is not None
        return self.reader.outcome


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


async def test_every_piece_is_numbered_and_the_end_counts_too() -> None:
    bench = Bench()
    for token_id in encode("Once upon a time"):
        bench.push(token_id)
    bench.push(EOS)
    outcome = bench.finish()
    assert bench.reader.text == "Once upon a time"
    assert [event.seq for event in bench.reader.events] == list(range(1, len(bench.reader.events) + 1))
    assert outcome.seq == len(bench.reader.events) + 1
    assert (outcome.reason, outcome.stop_reason) == ("stop", EOS)
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.output_tokens) == (7, 3, bench.sent)


async def test_a_stop_token_shows_no_text_even_if_it_has_some() -> None:
    word = encode(" time")[0]
    bench = Bench(stop_token_ids=(word,))
    bench.push(*encode("Once upon a"), word)
    bench.finish()
    assert bench.reader.text == "Once upon a"


async def test_a_stop_token_below_min_tokens_is_text() -> None:
    word = encode(" time")[0]
    bench = Bench(stop_token_ids=(word,), min_tokens=2)
    bench.push(word)
    bench.push(*encode(" x"))
    bench.push(word)
    assert bench.finish().output_tokens == 3
    assert bench.reader.text == " time x"


@given(
    st.text(alphabet="ab c😀é\n", max_size=30),
    st.lists(st.text(alphabet="ab 😀\n", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 4),
)
@example(" aa", ["aa"], 1)  # the stop ends in a token whose text is out but for what the stop cuts
def test_stopped_text_equals_a_search_on_the_whole(text: str, stops: list[str], per_step: int) -> None:
    asyncio.run(check_stopped_text(text, stops, per_step))


async def check_stopped_text(text: str, stops: list[str], per_step: int) -> None:
    bench = Bench(stop=stops, logprobs=0)
    token_ids = encode(text)
    for at in range(0, len(token_ids), per_step):
        bench.push(*token_ids[at : at + per_step])
        if "stop" in bench.handle.calls:
            break
    outcome = bench.finish("stop" if "stop" in bench.handle.calls else "length")
    cut, found = plain_cut(text, stops)
    assert bench.reader.text == cut
    assert outcome.reason == ("stop" if found else "length")
    assert outcome.stop_reason == (found or None)
    delivered = [entry for event in bench.reader.events for entry in event.logprobs or ()]
    assert [entry.token_id for entry in delivered] == token_ids[: len(delivered)]
    shown = b"".join(VOCABULARY.token_bytes(entry.token_id) for entry in delivered)
    assert shown.startswith(cut.encode()), "the tokens that are out cover the text that is out"


async def test_tokens_of_a_split_character_go_out_with_it() -> None:
    token_ids = encode("a😀")
    bench = Bench(logprobs=1)
    for token_id in token_ids:
        bench.push(token_id)
    assert [event.text for event in bench.reader.events] == ["a", "😀"]
    assert bench.reader.events[1].token_ids == token_ids[1:]
    logprobs = bench.reader.events[1].logprobs
    assert logprobs is not None
    assert [entry.token_id for entry in logprobs] == token_ids[1:]
    assert {entry.offset for entry in logprobs} == {1}


@pytest.mark.parametrize("logprobs", [-1, 0])
async def test_a_token_of_text_and_half_a_character_goes_out_with_the_character(logprobs: int) -> None:
    """Its text does not wait for that."""
    vocabulary = Vocabulary(byte_level_tokenizer())
    text_and_half = [vocabulary.raw.index(b"a" + "😀".encode()[:3])]
    rest = [vocabulary.raw.index("😀".encode()[3:])]
    bench = Bench(vocabulary=vocabulary, logprobs=logprobs, stop_token_ids=())
    bench.push(*text_and_half)
    bench.push(*rest)
    assert [(event.text, event.token_ids) for event in bench.reader.events] == [
        ("a", []),
        ("😀", text_and_half + rest),
    ]


async def test_text_held_for_a_stop_string_is_flushed_at_the_end_with_its_tokens() -> None:
    bench = Bench(stop=["time and"], logprobs=0)
    token_ids = encode("Once upon a time")
    for token_id in token_ids:
        bench.push(token_id)
    assert bench.reader.text == "Once upon a "[:-1] + " "
    bench.finish("length")
    assert bench.reader.text == "Once upon a time"
    assert [t for event in bench.reader.events for t in event.token_ids] == token_ids


async def test_a_stop_string_ends_the_stream_once_the_engine_confirms() -> None:
    """The engine is told at once; its usage comes with the confirmation."""
    bench = Bench(stop=[" a"])
    bench.push(*encode("Once upon a time"))
    assert bench.handle.calls == ["stop"]
    assert bench.reader.outcome is None
    outcome = bench.finish()
    assert (outcome.reason, outcome.stop_reason, outcome.cached_tokens) == ("stop", " a", 3)
    assert outcome.output_tokens == len(encode("Once upon a"))


async def test_an_engine_lost_after_the_stop_string_harms_nothing() -> None:
    bench = Bench(stop=[" a"])
    bench.push(*encode("Once upon a time"))
    bench.stream.on_lost("gone")
    assert bench.reader.outcome is not None
    assert bench.reader.outcome.reason == "stop"


async def test_a_lost_engine_is_an_error_after_the_text_so_far() -> None:
    bench = Bench()
    bench.push(*encode("Once"))
    bench.stream.on_lost("engine 0 is lost")
    assert bench.reader.text == "Once"
    assert bench.reader.outcome is not None
    error = bench.reader.outcome.error
    assert error is not None
    assert (error.status, error.code, error.message) == (503, "engine_lost", "engine 0 is lost")


async def test_an_error_of_the_engine_names_its_reason() -> None:
    bench = Bench()
    error = bench.finish("error", "NaN logits").error
    assert error is not None
    assert error.status == 500
    assert "NaN logits" in error.message


@pytest.mark.parametrize(
    ("code", "status"), [("queue_full", 429), ("too_long", 400), ("draining", 503), ("bad_request", 400)]
)
async def test_rejections_become_http_statuses(code: str, status: int) -> None:
    bench = Bench()
    bench.stream.on_rejected(code, "no")
    assert bench.reader.outcome is not None
    error = bench.reader.outcome.error
    assert error is not None
    assert error.status == status
    assert ("Retry-After" in error.headers) == (status in (429, 503))


async def test_credit_is_granted_by_quarters_of_the_window_and_only_while_the_reader_takes() -> None:
    word = encode(" a")[0]
    bench = Bench(window=16)
    for _ in range(12):
        bench.push(word)
    assert bench.handle.calls == [20, 24, 28]
    bench.reader.takes = False
    for _ in range(8):
        bench.push(word)
    assert bench.handle.calls == [20, 24, 28], "nothing is granted ahead of the reader"
    bench.stream.acknowledge(16)
    assert bench.handle.calls == [20, 24, 28, 32]
    bench.stream.acknowledge(20)
    assert bench.handle.calls == [20, 24, 28, 32, 36]


@pytest.mark.parametrize(("max_tokens", "grants"), [(16, []), (24, [20, 24])])
async def test_no_credit_is_granted_beyond_the_last_token(max_tokens: int, grants: list[int]) -> None:
    bench = Bench(window=16, max_tokens=max_tokens)
    for _ in range(max_tokens):
        bench.push(encode(" a")[0])
    assert bench.handle.calls == grants


async def test_tokens_without_text_do_not_park_the_stream() -> None:
    """Special tokens make no events, so no reader can take them; credit goes on all the same."""
    bench = Bench(window=8, stop_token_ids=())
    for _ in range(30):
        bench.push(1)
    assert bench.handle.calls[-1] >= 36
    assert bench.reader.events == []


async def test_a_missing_token_is_refused() -> None:
    bench = Bench()
    bench.push(5)
    with pytest.raises(ValueError, match="token 3 where 1 was due"):
        bench.stream.on_tokens(3, [5], None)


async def test_a_cancelled_stream_says_nothing_more() -> None:
    bench = Bench()
    bench.push(*encode("Once"))
    bench.stream.cancel()
    bench.stream.cancel()
    bench.stream.on_lost("gone")
    assert bench.handle.calls == ["cancel"]
    assert bench.reader.outcome is None


async def test_the_time_limit_ends_a_stream_with_what_it_has() -> None:
    bench = Bench(stop=["zz"])
    bench.push(*encode("Once z"))
    bench.stream.overdue()
    assert bench.handle.calls == ["cancel"]
    assert bench.reader.text == "Once z"
    assert bench.reader.outcome is not None
    assert bench.reader.outcome.reason == "timeout"


async def test_the_time_limit_before_the_first_token_is_an_error() -> None:
    bench = Bench()
    bench.stream.overdue()
    assert bench.reader.outcome is not None
    assert bench.reader.outcome.error is not None
    assert bench.reader.outcome.error.status == 504
