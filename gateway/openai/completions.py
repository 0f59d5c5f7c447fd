"""`/v1/completions`: from a request body to a GenerationRequest.

Knows no model and no socket. The HTTP handlers and the WebSocket call `parse_completion`.
"""

from collections.abc import Mapping
from typing import Any

from headrace.gateway.errors import bad_request, not_built
from headrace.gateway.fields import Fields, is_integer, is_token_ids, kind
from headrace.gateway.openai.sampling import (
    parse_cache_salt,
    parse_choices,
    parse_priority,
    parse_sampling,
    parse_stream,
    parse_top_logprobs,
    refuse_not_built,
)
from headrace.gateway.schemas import (
    MAX_PROMPTS,
    MAX_TOP_LOGPROBS,
    GenerationRequest,
    TextPrompt,
    TokenPrompt,
)


def parse_completion(body: Mapping[str, Any]) -> GenerationRequest:
    """Read a completion request.

    Raises:
        ApiError: 400 with `param` for a wrong type or range, 501 for what is not built.
    """
    fields = Fields(body)
    prompts = parse_prompts(fields)
    refuse_not_built(fields)
    stream, include_usage = parse_stream(fields)
    top = parse_top_logprobs(fields, "logprobs", MAX_TOP_LOGPROBS)
    echo = fields.boolean("echo")
    if echo and top is not None:
        raise not_built("echo together with logprobs (scoring a prompt)", "echo")
    return GenerationRequest(
        model=fields.string("model", 256) or "",
        prompts=prompts,
        sampling=parse_sampling(fields, -1 if top is None else top),
        n=parse_choices(fields),
        stream=stream,
        include_usage=include_usage,
        echo=echo,
        priority=parse_priority(fields),
        cache_salt=parse_cache_salt(fields),
    )


def parse_prompts(fields: Fields) -> tuple[TextPrompt | TokenPrompt, ...]:
    """`prompt`: a string, token ids, or an array of either."""
    value = fields.get("prompt")
    special = fields.boolean("add_special_tokens", True)
    if isinstance(value, str):
        return (TextPrompt(text=value, add_special_tokens=special),)
    if not isinstance(value, list):
        raise fields.wrong_type("prompt", "a string, an array of strings or an array of token ids")
    if not value:
        raise bad_request("prompt is an empty array", "prompt")
    if is_integer(value[0]):
        return (_token_ids(value, "prompt"),)
    if len(value) > MAX_PROMPTS:
        raise bad_request(f"prompt has {len(value)} prompts, the limit is {MAX_PROMPTS}", "prompt")
    return tuple(_prompt(item, f"prompt[{i}]", special) for i, item in enumerate(value))


def _prompt(item: Any, path: str, special: bool) -> TextPrompt | TokenPrompt:
    if isinstance(item, str):
        return TextPrompt(text=item, add_special_tokens=special)
    if isinstance(item, list):
        return _token_ids(item, path)
    raise bad_request(f"{path} must be a string or an array of token ids, got {kind(item)}", "prompt")


def _token_ids(items: list[Any], path: str) -> TokenPrompt:
    if not items:
        raise bad_request(f"{path} is an empty array of token ids", "prompt")
    if not is_token_ids(items):
        raise bad_request(f"{path} must hold token ids only (integers from 0)", "prompt")
    return tuple(items)
