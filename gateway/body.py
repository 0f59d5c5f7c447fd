"""Request bodies: bounded in size and in time, JSON objects only.

Content-Type is not looked at, as OpenAI does not: `curl -d` sends forms' type. Knows no API; handlers call it.
"""

import asyncio
from typing import Any

import orjson
from aiohttp import web

from headrace.config import GatewayConfig
from headrace.gateway.errors import ApiError, bad_request


async def read_object(request: web.Request, limits: GatewayConfig) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        ApiError: 400 for what is no JSON object, 408 for a body that does not come, 413 for one too large.
    """
    raw = await _read(request, limits)
    if not raw.strip():
        raise bad_request("the body is empty; a JSON object is expected")
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not valid JSON: {_reason(raw, error)}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    return value


async def _read(request: web.Request, limits: GatewayConfig) -> bytes:
    length = request.content_length
    if length is not None and length > limits.max_body_bytes:
        raise too_large(limits.max_body_bytes, length)
    content = request.content
    if content.is_eof() and content.exception() is None:  # it came with the headers, as short bodies do
        raw = content.read_nowait()
        if len(raw) > limits.max_body_bytes:
            raise too_large(limits.max_body_bytes)
        return raw
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return await request.read()
    except TimeoutError:
        message = f"the body did not come within {limits.body_timeout_s:g} s"
        raise ApiError(408, message, code="body_timeout") from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large(limits.max_body_bytes) from None
    except web.RequestPayloadError as error:
        raise bad_request(f"the body cannot be read: {error}") from None


def too_large(limit: int, length: int | None = None) -> ApiError:
    """413."""
    found = f"the body has {length} bytes" if length is not None else "the body is too large"
    return ApiError(413, f"{found}, the limit is {limit}", code="body_too_large")


def _reason(raw: bytes, error: orjson.JSONDecodeError) -> str:
    """orjson reports bad UTF-8 as a surrogate problem; say where it is instead."""
    try:
        raw.decode()
    except UnicodeDecodeError as bad:
        return f"byte {raw[bad.start]:#04x} at position {bad.start} is not UTF-8"
    return str(error)
