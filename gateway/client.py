"""What the command line's clients need of HTTP: a session, errors in words, and the events of an SSE answer.

Knows nothing of this server but its public API. chat.py and describe.py call.
"""

import json
import os
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10)
MAX_LINE_BYTES = 4 << 20


class ClientError(Exception):
    """The server cannot be reached or says no; the message is for a person."""


class Client:
    """A connection to one server; made on a running event loop, to be closed."""

    def __init__(self, url: str, api_key: str) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp.ClientSession(headers=headers, timeout=TIMEOUT, read_bufsize=MAX_LINE_BYTES)

    async def close(self) -> None:
        await self._session.close()

    async def get_json(self, path: str) -> Any:
        """The answer to a GET.

        Raises:
            ClientError: no answer, or one with an error.
        """
        try:
            async with self._session.get(self.url + path) as response:
                await _check(response)
                return await response.json(content_type=None)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._unreachable(error) from error

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The JSON of each `data:` line of a streamed answer, up to [DONE].

        Raises:
            ClientError: no answer, an error in place of it or amid it, or an end without [DONE].
        """
        try:
            async with self._session.post(self.url + path, json=body) as response:
                await _check(response)
                async for line in response.content:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    event: dict[str, Any] = json.loads(data)
                    if "error" in event:
                        raise ClientError(_message(event) or "the server broke off")
                    yield event
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._unreachable(error) from error
        raise ClientError("the connection ended in the middle of an answer")

    def _unreachable(self, error: Exception) -> ClientError:
        if isinstance(error, aiohttp.ClientConnectorError):
            reason = os.strerror(error.errno) if error.errno else str(error.os_error)
            return ClientError(f"no server at {self.url} ({reason}); `headrace serve` starts one")
        return ClientError(f"no answer from {self.url}: {error or type(error).__name__}")


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    text = await response.text(errors="replace")
    try:
        message = _message(json.loads(text))
    except ValueError:
        message = ""
    raise ClientError(f"{response.status} {response.reason}: {message or text[:200] or 'no reason given'}")


def _message(body: Any) -> str:
    """Of an error in OpenAI's shape; "" where it is none."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", "")) if isinstance(error, dict) else ""
