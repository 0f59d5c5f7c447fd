"""Bounds of what a frame may hold; both ends of the wire apply the same ones.

The gateway's schemas turn those that a person can exceed into a 400. Knows no message code: numbers only.
"""

import math

UINT32 = (0, (1 << 32) - 1)
COUNT = (0, (1 << 31) - 1)  # tokens, ids
NATURAL = (0, (1 << 63) - 1)  # every integer without an entry in INT_RANGES

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024  # entries
MAX_STOP_TOKEN_IDS = 1024
MAX_ROWS = 1 << 16  # rows of one Tokens message
MAX_DRAFTS = 8  # draft tokens of a row

MAX_NAME_BYTES = 256  # request ids, tenants, fingerprints
MAX_SALT_BYTES = 1024
MAX_TEXT_BYTES = 2048  # sentences for people; longer ones are cut by the sender

# A frame to an engine holds at most twice the tokens of its context, and this much of everything else.
FRAME_SLACK_BYTES = 1 << 16

INT_RANGES: dict[str, tuple[int, int]] = {
    "Submit.stream": UINT32,
    "Submit.priority": (-(1 << 31), (1 << 31) - 1),
    "Credit.stream": UINT32,
    "Cancel.stream": UINT32,
    "Rejected.stream": UINT32,
    "Finished.stream": UINT32,
    "Sampling.max_tokens": (1, COUNT[1]),
    "Sampling.min_tokens": COUNT,
    "Sampling.top_k": COUNT,
    "Sampling.logit_bias": COUNT,
    "Sampling.stop_token_ids": COUNT,
    "Sampling.logprobs": (-1, MAX_LOGPROBS),
    "Logprobs.row": (0, MAX_ROWS - 1),
    "Logprobs.top_k": (0, MAX_LOGPROBS),
}

# Floats are finite everywhere; these have a range as well.
FLOAT_RANGES: dict[str, tuple[float, float]] = {
    "Sampling.temperature": (0.0, 100.0),
    "Sampling.top_p": (0.0, 1.0),
    "Sampling.min_p": (0.0, 1.0),
    "Sampling.repetition_penalty": (0.0, 100.0),
    "Usage.queue_s": (0.0, math.inf),
    "Usage.prefill_s": (0.0, math.inf),
    "Usage.decode_s": (0.0, math.inf),
    "Usage.gpu_ms": (0.0, math.inf),
}

STRING_BYTES: dict[str, int] = {
    "Submit.cache_salt": MAX_SALT_BYTES,
    "Refused.detail": MAX_TEXT_BYTES,
    "Rejected.message": MAX_TEXT_BYTES,
    "Finished.message": MAX_TEXT_BYTES,
}

TEXTS = frozenset({"Refused.detail", "Rejected.message", "Finished.message"})

CHOICES: dict[str, frozenset[str]] = {
    "Refused.reason": frozenset({"version", "fingerprint", "malformed", "oversized", "unknown"}),
    "Rejected.code": frozenset({"queue_full", "too_long", "draining", "bad_request"}),
    "Finished.reason": frozenset({"stop", "length", "cancelled", "error"}),
    "Load.state": frozenset({"ready", "draining"}),
    "Sampling.speculation": frozenset({"auto", "mtp", "ngram", "off"}),
}

TUPLE_LENGTHS: dict[str, int] = {
    "Sampling.logit_bias": MAX_LOGIT_BIAS,
    "Sampling.stop_token_ids": MAX_STOP_TOKEN_IDS,
    "Load.accepted": MAX_DRAFTS,
    "Tokens.logprobs": MAX_ROWS,
    "Tokens.finished": MAX_ROWS,
}


def engine_frame_bytes(max_frame_bytes: int, max_model_len: int) -> int:
    """The largest frame an engine takes: what its context can use, so that hostile queues stay small."""
    return min(max_frame_bytes, FRAME_SLACK_BYTES + 8 * max_model_len)
