"""The application: routes and middlewares in their order. Knows no engine and no process.

The worker makes one and adds health, metrics and the WebSocket to it.
"""

from aiohttp import web

from headrace.config import Config
from headrace.gateway.answers import answer_errors, name_request
from headrace.gateway.auth import KeyRing
from headrace.gateway.connection import track_requests
from headrace.gateway.cors import allow_origin
from headrace.gateway.dispatcher import Dispatcher
from headrace.gateway.gate import gate
from headrace.gateway.jobs import Jobs
from headrace.gateway.openai.routes import Routes
from headrace.gateway.page import add_page
from headrace.gateway.stats import WorkerStats
from headrace.gateway.text import Text

JOBS = web.AppKey("jobs", Jobs)
KEYS = web.AppKey("keys", KeyRing)


def make_app(
    config: Config, dispatcher: Dispatcher, text: Text, stats: WorkerStats | None = None
) -> web.Application:
    """The application of one worker.

    Args:
        config: resolved.
        dispatcher: started by whoever made it.
        text: of the model served; closed by whoever loaded it.
        stats: where slow streams are counted.
    """
    gateway = config.gateway
    keys = KeyRing(gateway.api_keys)
    jobs = Jobs(config, dispatcher, text)
    app = web.Application(
        client_max_size=gateway.max_body_bytes,
        middlewares=(
            track_requests,
            answer_errors,
            gate(gateway.cors_origins, keys),
        ),
    )
    app[JOBS], app[KEYS] = jobs, keys
    app.on_response_prepare.append(allow_origin(gateway.cors_origins))
    app.on_response_prepare.append(name_request)
    Routes(config, jobs, stats or WorkerStats()).add_to(app)
    add_page(app)
    return app
