"""`/v1/chat/completions`: from a request body to a GenerationRequest.

Knows no model and no socket. The HTTP handlers and the WebSocket call `parse_chat`.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from headrace.gateway.errors import bad_request, not_built
from headrace.gateway.fields import Fields, kind
from headrace.gateway.openai.sampling import (
    parse_cache_salt,
    parse_choices,
    parse_priority,
    parse_sampling,
    parse_stream,
    parse_top_logprobs,
    refuse_not_built,
)
from headrace.gateway.schemas import MAX_TOP_LOGPROBS, ChatPrompt, GenerationRequest

MAX_MESSAGES = 4096
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
RESERVED_KWARGS = ("messages", "add_generation_prompt")


def parse_chat(body: Mapping[str, Any]) -> GenerationRequest:
    """Read a chat completion request.

    Raises:
        ApiError: 400 with `param` for a wrong type or range, 501 for what is not built.
    """
    fields = Fields(body)
    messages = _messages(fields)
    refuse_not_built(fields)
    stream, include_usage = parse_stream(fields)
    return GenerationRequest(
        model=fields.string("model", 256) or "",
        prompts=(
            ChatPrompt(
                messages=messages,
                add_generation_prompt=fields.boolean("add_generation_prompt", True),
                add_special_tokens=fields.boolean("add_special_tokens"),
                template_kwargs=_template_kwargs(fields),
            ),
        ),
        sampling=parse_sampling(fields, _logprobs(fields)),
        n=parse_choices(fields),
        stream=stream,
        include_usage=include_usage,
        echo=_echo(fields),
        priority=parse_priority(fields),
        cache_salt=parse_cache_salt(fields),
    )


def _messages(fields: Fields) -> tuple[dict[str, Any], ...]:
    items = fields.array("messages", MAX_MESSAGES)
    if not items:
        raise bad_request("messages must be an array of at least one message", "messages")
    return tuple(_message(item, f"messages[{i}]") for i, item in enumerate(items))


def _message(item: Any, path: str) -> dict[str, Any]:
    """One message as chat templates want it: absent instead of null, content a string, arguments parsed."""
    if not isinstance(item, dict):
        raise bad_request(f"{path} must be an object, got {kind(item)}", path)
    fields = Fields(item, path)
    role = fields.string("role", 64)
    if role not in ROLES:
        raise bad_request(f"{path}.role must be one of {', '.join(ROLES)}, got {kind(role)}", f"{path}.role")
    message = {key: value for key, value in item.items() if value is not None}
    if "content" in message:
        message["content"] = _content(fields)
    elif role != "assistant":
        raise bad_request(f"{path}.content is missing", f"{path}.content")
    calls = fields.array("tool_calls", 128)
    if calls:
        message["tool_calls"] = [_tool_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return message


def _content(fields: Fields) -> str:
    """A string, or text parts joined by line feeds."""
    content, param = fields.get("content"), fields.param("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{param} must be a string or an array of parts, got {kind(content)}", param)
    texts = []
    for i, part in enumerate(content):
        where = f"{param}[{i}]"
        if not isinstance(part, dict):
            raise bad_request(f"{where} must be an object, got {kind(part)}", where)
        if part.get("type") not in ("text", "refusal"):
            raise not_built(f"a content part of type other than text ({kind(part.get('type'))})", where)
        text = part.get(part["type"])
        if not isinstance(text, str):
            raise bad_request(f"{where}.{part['type']} must be a string, got {kind(text)}", where)
        texts.append(text)
    return "\n".join(texts)


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    """An earlier call by the assistant; templates expect the arguments as an object, the API has them as text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{path} must be an object with function.name", path)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError as error:
            raise bad_request(f"{path}.function.arguments is not JSON: {error}", path) from None
    return {**call, "function": {**function, "arguments": arguments}}


def _template_kwargs(fields: Fields) -> dict[str, Any]:
    kwargs = fields.object("chat_template_kwargs") or {}
    for name in RESERVED_KWARGS:
        if name in kwargs:
            raise bad_request(
                f"chat_template_kwargs must not contain {name}; it is a field of its own",
                "chat_template_kwargs",
            )
    return kwargs


def _logprobs(fields: Fields) -> int:
    """Chat asks with a boolean and a count."""
    top = parse_top_logprobs(fields, "top_logprobs", MAX_TOP_LOGPROBS)
    if fields.boolean("logprobs"):
        return top or 0
    if top:
        raise bad_request("top_logprobs needs logprobs = true", "top_logprobs")
    return -1


def _echo(fields: Fields) -> bool:
    if fields.boolean("echo"):
        raise not_built("echo of chat messages", "echo")
    return False
