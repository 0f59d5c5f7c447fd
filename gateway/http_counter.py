"""A middleware that counts answered requests by method, route and status.

Outermost of the application's middlewares, so that what the others refuse is counted too.
"""

import asyncio

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from headrace.gateway.stats import WorkerStats

METHODS = frozenset(("GET", "POST", "OPTIONS", "HEAD", "DELETE", "PUT", "PATCH"))
CLIENT_GONE = 499  # nginx's number for a client that left before the answer


def count_requests(stats: WorkerStats) -> Middleware:
    """The middleware; it writes to `stats`."""

    @web.middleware
    async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
        status = 500
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
        return response

    return counted


def _method(request: web.Request) -> str:
    return request.method if request.method in METHODS else "other"


def _route(request: web.Request) -> str:
    """The route's pattern, never the path: a scanner must not be able to invent label values."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unmatched"
