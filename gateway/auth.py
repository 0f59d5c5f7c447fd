"""API keys: who may call, and under which tenant name. No keys = open.

Knows no route but the open ones. gate.py asks for HTTP; the WebSocket may ask `KeyRing` itself.
"""

import hmac
from collections.abc import Sequence
from hashlib import blake2b

from aiohttp import web

from headrace.gateway.errors import ApiError

OPEN_PATHS = frozenset(("/", "/health", "/ready", "/metrics", "/v1/ws"))  # the last asks for the key itself
TENANT = web.RequestKey("tenant", str)


class KeyRing:
    """The keys of the configuration, compared without leaking by time which one nearly fitted."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [(key.encode(), blake2b(key.encode(), digest_size=8).hexdigest()) for key in keys]

    @property
    def open(self) -> bool:
        """True when no key is needed."""
        return not self._keys

    def tenant(self, presented: str) -> str | None:
        """The tenant of a key: a digest, never the key; "" when open; None for a key that is not known."""
        if self.open:
            return ""
        given, found = presented.encode(), None
        for key, tenant in self._keys:
            if hmac.compare_digest(key, given):
                found = tenant
        return found


def bearer(request: web.Request) -> str:
    """The key in the Authorization header; "" = none."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def require_key(request: web.Request, ring: KeyRing) -> None:
    """Set the request's tenant.

    Raises:
        ApiError: 401, the key is missing or not known.
    """
    tenant = "" if ring.open else ring.tenant(bearer(request))
    if tenant is None:
        if request.path not in OPEN_PATHS:
            raise unauthorized(bearer(request))
        tenant = ""
    request[TENANT] = tenant


def unauthorized(presented: str) -> ApiError:
    """401; the key itself is not repeated."""
    if presented:
        return ApiError(401, "the API key is not known here", code="invalid_api_key")
    message = "an API key is needed: send it as `Authorization: Bearer KEY`"
    return ApiError(401, message, code="missing_api_key")
