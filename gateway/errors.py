"""What can go wrong for a client, as one exception with its HTTP status, and the table from the engines' words.

Knows no route and no socket. Handlers and parse functions raise ApiError; the error middleware, the SSE writer
and the WebSocket put it into OpenAI's shape.
"""

from typing import Any

import orjson

RETRY_AFTER_S = 1  # a queue turns over in about a second; clients back off further by themselves

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
}

REJECTED = {
    "queue_full": (429, "queue_full"),
    "too_long": (400, "context_length_exceeded"),
    "bad_request": (400, "bad_request"),
    "draining": (503, "draining"),
}
"""Engine's code of a Rejected message -> HTTP status, `code` of the answer."""


class ApiError(Exception):
    """A request cannot be answered; `message` names the value and the limit.

    Args:
        status: HTTP status.
        message: one sentence for a person.
        param: the request's field at fault, if one is.
        code: a word for programs.
        retry_after_s: seconds, sent as `Retry-After`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """OpenAI's `type`: a family of errors, by status."""
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def to_json(self) -> bytes:
        return orjson.dumps(self.to_dict())

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that belong to the error."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is wrong."""
    return ApiError(400, message, param=param, code=code)


def not_built(what: str, param: str | None = None) -> ApiError:
    """501: understood, but this server does not do it yet."""
    return ApiError(501, f"{what} is not built yet in Headrace", param=param, code="not_implemented")


def busy(message: str, code: str) -> ApiError:
    """429: a bounded thing is full; try again shortly."""
    return ApiError(429, message, code=code, retry_after_s=RETRY_AFTER_S)


def unavailable(message: str, code: str = "no_engine") -> ApiError:
    """503: no engine can take or go on with this work now."""
    return ApiError(503, message, code=code, retry_after_s=RETRY_AFTER_S)


def rejected(code: str, message: str) -> ApiError:
    """The engines turned a generation away."""
    status, word = REJECTED.get(code, (500, code))
    return ApiError(status, message, code=word, retry_after_s=RETRY_AFTER_S if status in (429, 503) else None)
