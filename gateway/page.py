"""The playground at `/`: one static file with its own script and style, and a policy that allows nothing else.

Knows no API; the page itself talks to it. app.py adds the route.
"""

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from aiohttp import web


def add_page(app: web.Application) -> None:
    """Read the page and serve it at `/`."""
    page = (files("headrace.gateway") / "static" / "index.html").read_bytes()
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": content_policy(page),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    async def playground(_request: web.Request) -> web.Response:
        return web.Response(body=page, headers=headers)

    app.router.add_get("/", playground)


def content_policy(page: bytes) -> str:
    """The page's own script and style by their digests, and requests to where it came from."""
    return (
        f"default-src 'none'; script-src {_digest(page, b'script')}; style-src {_digest(page, b'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _digest(page: bytes, tag: bytes) -> str:
    found = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
    assert len(found) == 1, f"the page has {len(found)} {tag.decode()} elements"
    return f"'sha256-{b64encode(sha256(found[0]).digest()).decode()}'"
