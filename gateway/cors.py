"""Cross-origin requests: which web pages may call, by the browser's rules (WHATWG Fetch, CORS protocol).

Knows no API. The middleware answers preflights; `allow_origin` marks every other answer, streams included.
"""

from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from headrace.gateway.errors import ApiError

MAX_AGE_S = 600  # browsers cap it there or lower
METHODS = "GET, POST, OPTIONS"
DEFAULT_HEADERS = "Authorization, Content-Type, Last-Event-ID"
EXPOSED = "Retry-After, X-Request-Id"


def answer_preflight(origins: Sequence[str]) -> Middleware:
    """The middleware; before the key is asked for, since browsers send none with a preflight."""

    @web.middleware
    async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        asked = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or asked is None or not _allowed(request, origins):
            return await handler(request)
        headers = {
            "Access-Control-Allow-Methods": METHODS,
            "Access-Control-Allow-Headers": request.headers.get(
                "Access-Control-Request-Headers", DEFAULT_HEADERS
            ),
            "Access-Control-Max-Age": str(MAX_AGE_S),
        }
        return web.Response(status=204, headers=headers)

    return preflight


def refuse_foreign_pages(origins: Sequence[str]) -> Middleware:
    """The middleware: a page of another site must not make its visitor's browser generate.

    Such a page cannot read the answer, but a plain POST needs no preflight. Browsers say where a request comes
    from; other clients do not send the header.
    """

    @web.middleware
    async def refuse(request: web.Request, handler: Handler) -> web.StreamResponse:
        site = request.headers.get("Sec-Fetch-Site", "none")
        if (
            request.method == "POST"
            and site in ("cross-site", "same-site")
            and not _allowed(request, origins)
        ):
            origin = request.headers.get("Origin", "another site")
            message = f"pages of {origin} may not call this server; allow it with --cors-origin"
            raise ApiError(403, message, code="origin_not_allowed")
        return await handler(request)

    return refuse


def allow_origin(
    origins: Sequence[str],
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """A signal for `on_response_prepare`."""

    async def mark(request: web.Request, response: web.StreamResponse) -> None:
        if origins:
            response.headers.extend(origin_headers(request, origins))

    return mark


def origin_headers(request: web.Request, origins: Sequence[str]) -> dict[str, str]:
    """What tells a browser whether the page that asked may read the answer."""
    headers = {"Vary": "Origin"}
    if _allowed(request, origins):
        headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
        headers["Access-Control-Expose-Headers"] = EXPOSED
    return headers


def _allowed(request: web.Request, origins: Sequence[str]) -> bool:
    origin = request.headers.get("Origin")
    return origin is not None and ("*" in origins or origin in origins)
