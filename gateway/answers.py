"""Every failure as a JSON answer in OpenAI's shape, whoever raised it.

The middleware wraps all handlers, the router's 404 and 405 included. Knows no API.
"""

import logging
from os import urandom

from aiohttp import web
from aiohttp.typedefs import Handler

from headrace.gateway.body import too_large
from headrace.gateway.dispatcher import NoEngine, TooManyStreams
from headrace.gateway.errors import ApiError, busy, unavailable

log = logging.getLogger(__name__)

REQUEST_ID = web.RequestKey("request_id", str)
SERVER = "headrace"
MUST_CLOSE = (408, 413)  # the body was not read to its end: the connection cannot be used again


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn exceptions into answers; a disconnect (CancelledError) passes through."""
    request[REQUEST_ID] = f"req_{urandom(12).hex()}"
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except NoEngine as error:
        return error_response(unavailable(str(error)))
    except TooManyStreams as error:
        return error_response(busy(str(error), "too_many_streams"))
    except web.HTTPException as error:
        return _from_http(request, error)
    except ConnectionError:
        raise  # the client is gone; aiohttp ends the connection quietly
    except Exception:
        log.exception("request %s: %s %s failed", request[REQUEST_ID], request.method, request.path)
        message = f"internal error; the server's log has more under {request[REQUEST_ID]}"
        return error_response(ApiError(500, message, code="internal_error"))


async def name_request(request: web.Request, response: web.StreamResponse) -> None:
    """A signal for `on_response_prepare`: the id to ask about, and no version numbers for scanners."""
    response.headers["Server"] = SERVER
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]


def error_response(error: ApiError) -> web.Response:
    """The JSON answer of an error."""
    response = web.Response(
        status=error.status, body=error.to_json(), content_type="application/json", headers=error.headers
    )
    if error.status in MUST_CLOSE:
        response.force_close()
    return response


def _from_http(request: web.Request, error: web.HTTPException) -> web.StreamResponse:
    """aiohttp's own refusals."""
    if error.status < 400:
        return error
    where = f"{request.method} {request.path[:200]}"
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        answer = error_response(
            ApiError(405, f"{where} is not allowed; use {allowed}", code="method_not_allowed")
        )
        answer.headers["Allow"] = allowed
        return answer
    if isinstance(error, web.HTTPNotFound):
        return error_response(ApiError(404, f"there is no {where} here", code="not_found"))
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return error_response(too_large(request.client_max_size))
    return error_response(ApiError(error.status, error.reason))
