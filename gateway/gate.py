"""Who may come in: preflights are answered here, pages of other sites and unknown keys refused. One middleware for all.

Knows no API. app.py puts it inside the one that answers errors.
"""

from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from headrace.gateway.auth import KeyRing, require_key
from headrace.gateway.cors import answer_preflight, refuse_foreign_page


def gate(origins: Sequence[str], ring: KeyRing) -> Middleware:
    """The middleware.

    Args:
        origins: web pages that may call.
        ring: the keys; an open one lets everybody in.
    """

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        answer = answer_preflight(request, origins)
        if answer is not None:
            return answer
        refuse_foreign_page(request, origins)
        require_key(request, ring)
        return await handler(request)

    return guarded
