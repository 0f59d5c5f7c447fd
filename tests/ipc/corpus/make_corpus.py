"""Writes to_engine.txt and to_gateway.txt beside it: nasty frames, a line each: reason, name, hex.

The frames are spelled in bytes and plain msgpack, not by the codec, so that the corpus stays what it is when the
codec changes. Run it after adding a frame; tests/ipc/test_corpus.py reads the files.
"""

from pathlib import Path

import msgpack

SAMPLING = [5, 1.0, 1.0, 0, 0.0, 0.0, 0.0, 1.0, [], 0, 0, [], -1, "auto", False]
IDS = b"\x01\0\0\0\x02\0\0\0"
SUBMIT = [2, 1, "r", "", "", 0, IDS, b"", SAMPLING, 256]
USAGE = [1, 0, 1, 0.0, 0.0, 0.0, 0, 0.0, 0, 0]
TOKENS = [20, 1, b"\1\0\0\0", b"\0\0\0\0", b"\2", IDS, [], []]
FLOAT_NAN = b"\xcb\x7f\xf8\0\0\0\0\0\0"

Frames = dict[str, bytes]


def pack(value: object) -> bytes:
    return bytes(msgpack.packb(value))


def changed(values: list[object], index: int, value: object) -> bytes:
    return pack([*values[:index], value, *values[index + 1 :]])


def shared() -> Frames:
    """Broken whatever the direction."""
    return {
        "malformed empty": b"",
        "malformed nil": b"\xc0",
        "malformed never-used-type": b"\xc1",
        "malformed number": b"\x01",
        "malformed map": b"\x81\x01\x02",
        "malformed empty-array": b"\x90",
        "malformed text": b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n",
        "malformed json": b'{"tag": 2, "stream": 1}',
        "malformed pickle": b"\x80\x04\x95\x15\0\0\0\0\0\0\0\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R.",
        "malformed zmtp-greeting": b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + bytes(16),
        "malformed array-claims-4g": b"\xdd\xff\xff\xff\xff",
        "malformed nested-claims": b"\xdd\x00\x0f\xff\xff" * 200,
        "malformed deep-nesting": b"\x91" * 1024,
        "malformed header-cut": b"\xdc\x00",
        "unknown tag-0": pack([0]),
        "unknown tag-negative": pack([-1, 1]),
        "unknown tag-huge": pack([(1 << 64) - 1, 1]),
        "unknown tag-string": pack(["Submit", 1]),
        "unknown tag-nil": pack([None, 1]),
        "unknown tag-bool": pack([True, 1, 1, 1]),
        "unknown tag-float": pack([2.0, 1]),
    }


def to_engine() -> Frames:
    return {
        **shared(),
        "malformed hello-deep-maps": b"\x94\x01" + b"\x81\xa1a" * 300,
        "malformed hello-str-claims-4g": b"\x94\x01\x01\xdb\xff\xff\xff\xff",
        "malformed ping-bin-claims-4g": b"\x92\x05\xc6\xff\xff\xff\xff",
        "malformed hello-utf8-surrogate": b"\x94\x01\x01\xa3\xed\xa0\x80\xa0",
        "malformed hello-utf8-overlong": b"\x94\x01\x01\xa2\xc0\xaf\xa0",
        "malformed hello-utf8-cut": b"\x94\x01\x01\xa1\xc3\xa0",
        "malformed hello-without-fingerprint": pack([1, 1, "g"]),
        "malformed hello-extra-field": pack([1, 1, "g", "", 0]),
        "malformed hello-long-name": pack([1, 1, "g" * 257, ""]),
        "malformed hello-trailing": pack([1, 1, "g", ""]) + b"\0",
        "malformed hello-twice-in-one": pack([1, 1, "g", ""]) * 2,
        "malformed ping-nan": b"\x92\x05" + FLOAT_NAN,
        "malformed ping-infinite": pack([5, float("inf")]),
        "malformed ping-text": pack([5, "now"]),
        "malformed ping-timestamp": b"\x92\x05\xd6\xff\0\0\0\0",
        "malformed cancel-negative": pack([4, -1]),
        "malformed cancel-bool": pack([4, True]),
        "malformed cancel-33-bits": pack([4, 1 << 32]),
        "malformed credit-64-bits": pack([3, 1, (1 << 64) - 1]),
        "malformed credit-ext-0": b"\x93\x03\x01\xc7\x00\x05",
        "malformed goodbye-with-field": pack([6, 1]),
        "malformed submit-prompt-odd": changed(SUBMIT, 6, b"\1\2\3"),
        "malformed submit-prompt-negative": changed(SUBMIT, 6, b"\xff\xff\xff\xff"),
        "malformed submit-prompt-list": changed(SUBMIT, 6, [1, 2, 3]),
        "malformed submit-prompt-string": changed(SUBMIT, 6, "abcd"),
        "malformed submit-sampling-map": changed(SUBMIT, 8, {"max_tokens": 5}),
        "malformed submit-sampling-empty": changed(SUBMIT, 8, []),
        "malformed submit-sampling-nil": changed(SUBMIT, 8, None),
        "malformed submit-no-tokens-wanted": changed(SUBMIT, 8, [0, *SAMPLING[1:]]),
        "malformed submit-stop-ids-claim": pack(SUBMIT)[:-11] + b"\xdd\x7f\xff\xff\xff",
        "malformed submit-cut": pack(SUBMIT)[:-1],
        "unknown tokens-from-a-gateway": pack(TOKENS),
    }


def to_gateway() -> Frames:
    finished = [1, "stop", USAGE, ""]
    return {
        **shared(),
        "malformed tokens-no-rows-but-ids": pack([20, 1, b"", b"", b"", IDS, [], []]),
        "malformed tokens-rows-but-no-ids": changed(TOKENS, 5, b""),
        "malformed tokens-count-0": changed(TOKENS, 4, b"\0"),
        "malformed tokens-count-too-large": changed(TOKENS, 4, b"\xff"),
        "malformed tokens-streams-odd": changed(TOKENS, 2, b"\1\0\0"),
        "malformed tokens-starts-longer": changed(TOKENS, 3, bytes(8)),
        "malformed tokens-negative-id": changed(TOKENS, 5, b"\x01\0\0\0\0\0\0\x80"),
        "malformed tokens-logprobs-nil": changed(TOKENS, 6, None),
        "malformed tokens-logprobs-row": changed(TOKENS, 6, [[1, bytes(8), 0, b"", b""]]),
        "malformed tokens-logprobs-top-k": changed(TOKENS, 6, [[0, bytes(8), 20, b"", b""]]),
        "malformed tokens-logprobs-huge-k": changed(TOKENS, 6, [[0, bytes(8), 1 << 40, b"", b""]]),
        "malformed tokens-finished-claims": pack(TOKENS)[:-1] + b"\xdd\x00\x00\xff\xff",
        "malformed tokens-finished-reason": changed(TOKENS, 7, [[1, "done", USAGE, ""]]),
        "malformed tokens-finished-usage": changed(TOKENS, 7, [[1, "stop", USAGE[:-1], ""]]),
        "malformed tokens-finished-nan": changed(
            TOKENS, 7, [[1, "stop", [*USAGE[:3], float("nan"), *USAGE[4:]], ""]]
        ),
        "malformed tokens-finished-flat": pack([20, 1, b"", b"", b"", b"", [], finished]),
        "malformed welcome-negative-context": pack([17, 1, "e", "", "m", 9, -1, 1, 1, 1]),
        "malformed welcome-long-model": pack([17, 1, "e", "", "m" * 300, 9, 9, 1, 1, 1]),
        "malformed refused-new-reason": pack([18, "mood", ""]),
        "malformed rejected-new-code": pack([19, 1, "mood", ""]),
        "malformed load-state": pack(
            [21, "e", "asleep", 0.0, *[0] * 6, 0.0, *[0] * 7, 0.0, 0.0, 0, 0, 0, []]
        ),
        "malformed load-short": pack([21, "e", "ready"]),
        "unknown submit-from-an-engine": pack(SUBMIT),
    }


def main() -> None:
    for name, frames in (("to_engine", to_engine()), ("to_gateway", to_gateway())):
        lines = [f"{title} {frame.hex() or '-'}\n" for title, frame in frames.items()]
        Path(__file__).with_name(f"{name}.txt").write_text("".join(lines))


if __name__ == "__main__":
    main()
