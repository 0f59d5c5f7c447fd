"""The playground at `/`: script and style put into one page, and a policy that allows nothing else.

Knows no API; the page itself talks to it. app.py adds the route.
"""

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable

from aiohttp import web


def add_page(app: web.Application) -> None:
    """Put the page together and serve it at `/`."""
    page = assemble(files("headrace.gateway") / "static")
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


def assemble(folder: Traversable) -> bytes:
    """index.html with the files that its comments name in their place."""

    def contents(comment: re.Match[bytes]) -> bytes:
        return b"".join((folder / name).read_bytes() for name in comment[1].decode().split())

    return re.sub(rb"/\* ((?:\w+\.(?:css|js) )+)\*/", contents, (folder / "index.html").read_bytes())


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
