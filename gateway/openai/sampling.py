"""The request fields that chat and completions share: sampling, stops, stream options, and what is not built.

Knows no model: ranges that depend on one (context, vocabulary) are checked in jobs.py.
"""

from typing import Any

from headrace.gateway.errors import bad_request, not_built
from headrace.gateway.fields import Fields, is_integer, is_token_ids, kind
from headrace.gateway.schemas import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_STOP_IDS,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    SPECULATION,
    SamplingRequest,
)

MAX_TOKENS = 1 << 24  # no context is longer
SEED_LIMIT = 1 << 63
MIN_TOP_P = 1e-6  # 0 is allowed and means "the likeliest only"; the engine wants a positive number

# Present and meaning something = 501, so that nobody takes a plain answer for a constrained one.
NOT_BUILT = (
    "tools",
    "functions",
    "audio",
    "suffix",
    "chat_template",
    "documents",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "bad_words",
    "allowed_token_ids",
    "prompt_logprobs",
    "use_beam_search",
    "truncate_prompt_tokens",
    "include_stop_str_in_output",
    "continue_final_message",
)


def parse_sampling(fields: Fields, logprobs: int) -> SamplingRequest:
    """Read and check the sampling fields; `logprobs` is read by the API, whose shape differs.

    Raises:
        ApiError: 400, a wrong type or range.
    """
    legacy = fields.integer("max_tokens", 1, MAX_TOKENS)
    newer = fields.integer("max_completion_tokens", 1, MAX_TOKENS)
    max_tokens = legacy if newer is None else newer
    min_tokens = fields.integer("min_tokens", 0, MAX_TOKENS) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise bad_request(f"min_tokens = {min_tokens} is more than max_tokens = {max_tokens}", "min_tokens")
    top_p = fields.number("top_p", 0, 1)
    top_k = fields.integer("top_k", -1, MAX_TOKENS)
    seed = fields.integer("seed", -SEED_LIMIT, SEED_LIMIT - 1)
    return SamplingRequest(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=fields.number("temperature", 0, 2),
        top_p=None if top_p is None else max(top_p, MIN_TOP_P),
        top_k=None if top_k is None else max(top_k, 0),
        min_p=fields.number("min_p", 0, 1),
        presence_penalty=fields.number("presence_penalty", -2, 2) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", -2, 2) or 0.0,
        repetition_penalty=fields.number("repetition_penalty", 0.01, 100),
        logit_bias=_logit_bias(fields),
        seed=None if seed is None else seed % SEED_LIMIT,
        stop=_stop(fields),
        stop_token_ids=_stop_token_ids(fields),
        ignore_eos=fields.boolean("ignore_eos"),
        logprobs=logprobs,
        speculation=fields.choice("speculation", SPECULATION, "auto"),
    )


def parse_choices(fields: Fields) -> int:
    """`n`, with what `best_of` may still ask for."""
    n = fields.integer("n", 1, MAX_CHOICES) or 1
    best_of = fields.integer("best_of", 1, MAX_CHOICES)
    if best_of is not None and best_of < n:
        raise bad_request(f"best_of = {best_of} is less than n = {n}", "best_of")
    if best_of is not None and best_of > n:
        raise not_built(f"best_of = {best_of} greater than n = {n}", "best_of")
    return n


def parse_stream(fields: Fields) -> tuple[bool, bool]:
    """`stream` and `stream_options.include_usage`."""
    stream = fields.boolean("stream")
    options = fields.object("stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise bad_request("stream_options is only allowed when stream is true", "stream_options")
    inner = Fields(options, "stream_options")
    if inner.boolean("continuous_usage_stats"):
        raise not_built("stream_options.continuous_usage_stats", "stream_options.continuous_usage_stats")
    return stream, inner.boolean("include_usage")


def parse_cache_salt(fields: Fields) -> str:
    salt = fields.string("cache_salt", 256)
    if salt == "":
        raise bad_request(
            "cache_salt must not be empty; leave it out to share the prefix cache", "cache_salt"
        )
    return salt or ""


def parse_priority(fields: Fields) -> int:
    return fields.integer("priority", -(1 << 31), (1 << 31) - 1) or 0


def refuse_not_built(fields: Fields) -> None:
    """Raise 501 for the first field that asks for something this server does not do yet."""
    for name in fields.present(NOT_BUILT):
        if fields.get(name) not in (None, False, "", [], {}):
            raise not_built(f"{fields.param(name)}", name)
    if fields.get("skip_special_tokens") is False:
        raise not_built("skip_special_tokens = false", "skip_special_tokens")
    if "audio" in (fields.array("modalities", 16) or []):
        raise not_built("audio output", "modalities")
    response_format = fields.object("response_format")
    if response_format is not None and response_format.get("type") != "text":
        asked = kind(response_format.get("type"))
        raise not_built(f"response_format with type other than text ({asked})", "response_format")


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    items = [value] if isinstance(value, str) else fields.array("stop", MAX_STOPS) or []
    for item in items:
        if not isinstance(item, str):
            raise bad_request(f"stop must be a string or an array of strings, got {kind(item)} in it", "stop")
        if not 1 <= len(item) <= MAX_STOP_LENGTH:
            raise bad_request(
                f"a stop string has {len(item)} characters, allowed are 1..{MAX_STOP_LENGTH}", "stop"
            )
    return tuple(items)


def _stop_token_ids(fields: Fields) -> tuple[int, ...]:
    items = fields.array("stop_token_ids", MAX_STOP_IDS) or []
    if not is_token_ids(items):
        raise bad_request("stop_token_ids must be an array of token ids", "stop_token_ids")
    return tuple(items)


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    items: dict[str, Any] = fields.object("logit_bias") or {}
    if len(items) > MAX_LOGIT_BIAS:
        raise bad_request(f"logit_bias has {len(items)} tokens, the limit is {MAX_LOGIT_BIAS}", "logit_bias")
    biases: dict[int, float] = {}
    for key in items:
        if not (key.isascii() and key.isdigit() and len(key) <= 9):
            raise bad_request(f'logit_bias has the key "{key[:40]}", which is no token id', "logit_bias")
        biases[int(key)] = Fields(items, "logit_bias").number(key, -100, 100) or 0.0
    return tuple(biases.items())


def parse_top_logprobs(fields: Fields, name: str, limit: int) -> int | None:
    """A count of alternatives, 0..limit; a boolean here is a frequent mistake and named as such."""
    value = fields.get(name)
    if value is not None and not is_integer(value):
        raise fields.wrong_type(name, f"an integer 0..{limit}")
    return fields.integer(name, 0, limit)
