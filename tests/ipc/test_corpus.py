"""Frames that once were, or could be, trouble: each is refused for the reason that the corpus names."""

from pathlib import Path

import pytest

from headrace.ipc.codec import MalformedFrame, decode_to_engine, decode_to_gateway
from tests.ipc.corpus import make_corpus

CORPUS = Path(__file__).parent / "corpus"
DECODERS = {"to_engine": decode_to_engine, "to_gateway": decode_to_gateway}


def corpus(direction: str) -> list[tuple[str, str, bytes]]:
    """(reason, name, frame) of every line."""
    lines = [line.split() for line in (CORPUS / f"{direction}.txt").read_text().splitlines()]
    return [(reason, name, bytes.fromhex(data.strip("-"))) for reason, name, data in lines]


@pytest.mark.parametrize(
    ("direction", "reason", "frame"),
    [
        pytest.param(direction, reason, frame, id=f"{direction}-{name}")
        for direction in DECODERS
        for reason, name, frame in corpus(direction)
    ],
)
def test_a_nasty_frame_is_refused_with_its_reason(direction: str, reason: str, frame: bytes) -> None:
    with pytest.raises(MalformedFrame) as caught:
        DECODERS[direction](frame)
    assert caught.value.reason == reason
    assert caught.value.detail


def test_the_files_are_what_the_generator_writes() -> None:
    for direction, made in (("to_engine", make_corpus.to_engine()), ("to_gateway", make_corpus.to_gateway())):
        committed = {f"{reason} {name}": frame for reason, name, frame in corpus(direction)}
        assert committed == made
