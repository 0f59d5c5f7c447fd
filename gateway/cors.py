"""Cross-origin requests: which web pages may call, by the browser's rules (WHATWG Fetch, CORS protocol).

Knows no API. gate.py asks it about requests; `allow_origin` marks every answer but streams, whose head does so itself.
"""

from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from headrace.gateway.errors import ApiError

MAX_AGE_S = 600  # browsers cap it there or lower
METHODS = "GET, POST, OPTIONS"
DEFAULT_HEADERS = "Authorization, Content-Type, Last-Event-ID"
EXPOSED = "Retry-After, X-Request-Id"


def answer_preflight(request: web.Request, origins: Sequence[str]) -> web.Response | None:
    """The answer to a preflight; before the key is asked for, since browsers send none with it."""
    asked = request.headers.get("Access-Control-Request-Method")
    if request.method != "OPTIONS" or asked is None or not _allowed(request, origins):
        return None
    headers = {
        "Access-Control-Allow-Methods": METHODS,
        "Access-Control-Allow-Headers": request.headers.get(
            "Access-Control-Request-Headers", DEFAULT_HEADERS
        ),
        "Access-Control-Max-Age": str(MAX_AGE_S),
    }
    return web.Response(status=204, headers=headers)


def refuse_foreign_page(request: web.Request, origins: Sequence[str]) -> None:
    """A page of another site must not make its visitor's browser generate.

    Such a page cannot read the answer, but a plain POST needs no preflight. Browsers say where a request comes
    from; other clients do not send the header.

    Raises:
        ApiError: 403.
    """
    site = request.headers.get("Sec-Fetch-Site", "none")
    if request.method == "POST" and site in ("cross-site", "same-site") and not _allowed(request, origins):
        origin = request.headers.get("Origin", "another site")
        message = f"pages of {origin} may not call this server; allow it with --cors-origin"
        raise ApiError(403, message, code="origin_not_allowed")


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
