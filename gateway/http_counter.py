"""A middleware that counts answered requests by method, route and status, and logs them at level debug.

Outermost of the application's middlewares, so that what the others refuse is counted too.
"""

import asyncio
import logging
from time import monotonic

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from headrace.gateway.stats import WorkerStats

log = logging.getLogger(__name__)

METHODS = frozenset(("GET", "POST", "OPTIONS", "HEAD", "DELETE", "PUT", "PATCH"))
CLIENT_GONE = 499  # nginx's number for a client that left before the answer


def count_requests(stats: WorkerStats) -> Middleware:
    """The middleware; it writes to `stats`."""

    @web.middleware
    async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
        status, started = 500, monotonic()
        try:
            response = await handler(request)
            status = response.status
        except web.HTTPException as error:
            status = error.status
            raise
        except (asyncio.CancelledError, ConnectionResetError):
            status = CLIENT_GONE
            raise
        finally:
            stats.on_response(_method(request), _route(request), status)
            if log.isEnabledFor(logging.DEBUG):
                took_ms = 1000 * (monotonic() - started)
                log.debug("%s %r %d %.1f ms", _method(request), request.path, status, took_ms)
        return response

    return counted


def _method(request: web.Request) -> str:
    return request.method if request.method in METHODS else "other"


def _route(request: web.Request) -> str:
    """The route's pattern, never the path: a scanner must not be able to invent label values."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unmatched"
