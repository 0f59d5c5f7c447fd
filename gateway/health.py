"""/health (the process works), /ready (an engine takes work) and /metrics (Prometheus).

Knows the dispatcher's view of the engines and the workers' tallies; none of the three needs an API key.
"""

from collections.abc import Awaitable, Callable
from time import monotonic

from aiohttp import web

from headrace.gateway.dispatcher import Dispatcher
from headrace.gateway.link import EngineLink
from headrace.gateway.metrics import Metrics
from headrace.gateway.tally import Tally

PATHS = ("/health", "/ready", "/metrics")


def add_health(
    app: web.Application,
    dispatcher: Dispatcher,
    metrics: Metrics,
    ask_peers: Callable[[], Awaitable[list[Tally]]],
) -> None:
    """Add the three routes.

    Args:
        ask_peers: the tallies of the other workers on this port.
    """
    started = monotonic()

    async def health(_request: web.Request) -> web.Response:
        body = {
            "status": "ok" if all(link.state == "ready" for link in dispatcher.engines) else "degraded",
            "draining": dispatcher.draining,
            "uptime_s": round(monotonic() - started, 1),
            "streams": dispatcher.num_streams,
            "engines": [_describe(link) for link in dispatcher.engines],
        }
        return web.json_response(body, headers={"Cache-Control": "no-store"})

    async def ready(_request: web.Request) -> web.Response:
        if dispatcher.ready:
            return web.json_response({"status": "ready"}, headers={"Cache-Control": "no-store"})
        body = {"status": "not ready", "reason": dispatcher.why_not_ready()}
        return web.json_response(body, status=503, headers={"Cache-Control": "no-store", "Retry-After": "1"})

    async def page(request: web.Request) -> web.Response:
        text, content_type = metrics.page(await ask_peers(), request.headers.get("Accept", ""))
        return web.Response(body=text, headers={"Content-Type": content_type})

    app.router.add_get("/health", health)
    app.router.add_get("/ready", ready)
    app.router.add_get("/metrics", page)


def _describe(link: EngineLink) -> dict[str, object]:
    """Without the address: the page is open, the network's layout is not."""
    about: dict[str, object] = {"engine": link.index, "state": link.state, "streams": link.num_streams}
    if link.reason:
        about["reason"] = link.reason
    if link.welcome is not None:
        about["model"] = link.welcome.model
    if link.load is not None:
        about["running"] = link.load.running
        about["waiting"] = link.load.waiting
        about["kv_blocks_used"] = link.load.blocks_used
        about["kv_blocks"] = link.load.num_blocks
    return about
