"""The handlers of OpenAI's API and its neighbours, and their routes.

Each reads the body, parses, prepares a job and responds. app.py adds them.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from headrace.config import Config
from headrace.gateway.auth import TENANT
from headrace.gateway.body import read_object
from headrace.gateway.cork import Cork
from headrace.gateway.deadlines import Deadlines
from headrace.gateway.errors import not_built
from headrace.gateway.jobs import Jobs
from headrace.gateway.openai.chat import parse_chat
from headrace.gateway.openai.chat_shape import ChatShape
from headrace.gateway.openai.completion_shape import CompletionShape
from headrace.gateway.openai.completions import parse_completion
from headrace.gateway.openai.models import Models
from headrace.gateway.openai.respond import respond
from headrace.gateway.openai.tokenize import detokenize, tokenize
from headrace.gateway.sse import SseRules
from headrace.gateway.sse_head import SseHead
from headrace.gateway.stats import WorkerStats

NOT_BUILT = (
    ("POST", "/v1/responses", "the Responses API (/v1/responses)"),
    ("GET", "/v1/responses/{id}", "the Responses API (/v1/responses)"),
    ("POST", "/v1/messages", "the Messages API (/v1/messages)"),
    ("POST", "/v1/messages/count_tokens", "the Messages API (/v1/messages)"),
    ("GET", "/v1/streams/{id}", "resuming a stream (/v1/streams)"),
    ("POST", "/v1/embeddings", "the Embeddings API (/v1/embeddings)"),
)


class Routes:
    """The handlers, with what they need.

    Args:
        config: resolved.
        jobs: prepares and starts generations.
        stats: of this worker.
    """

    def __init__(self, config: Config, jobs: Jobs, stats: WorkerStats) -> None:
        self._settings = config.gateway
        self._jobs = jobs
        self._stats = stats
        self._rules = SseRules(
            cork=Cork(),
            head=SseHead(config.gateway.cors_origins),
            silence=Deadlines(config.gateway.keepalive_s / 2),
            stall_s=config.gateway.request_timeout_s,
        )
        self._models = Models(config.model.served_name, jobs)

    def add_to(self, app: web.Application) -> None:
        """Add every route."""
        router = app.router
        router.add_post("/v1/chat/completions", self.chat)
        router.add_post("/v1/completions", self.completion)
        router.add_get("/v1/models", self.models)
        router.add_get("/v1/models/{model:.+}", self.model)
        router.add_post("/tokenize", self.tokenize)
        router.add_post("/detokenize", self.detokenize)
        for method, path, what in NOT_BUILT:
            router.add_route(method, path, _refuse(what))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        asked = parse_chat(await read_object(request, self._settings))
        job = await self._jobs.prepare(asked, request[TENANT], "chatcmpl")
        text = self._jobs.text
        shape = ChatShape(job, text.vocabulary, text.defaults.eos_ids)
        return await respond(request, self._jobs, job, shape, self._rules, self._stats)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        asked = parse_completion(await read_object(request, self._settings))
        job = await self._jobs.prepare(asked, request[TENANT], "cmpl")
        text = self._jobs.text
        shape = CompletionShape(job, text.vocabulary, text.defaults.eos_ids)
        return await respond(request, self._jobs, job, shape, self._rules, self._stats)

    async def models(self, _request: web.Request) -> web.Response:
        return _json(self._models.all())

    async def model(self, request: web.Request) -> web.Response:
        return _json(self._models.one(request.match_info["model"]))

    async def tokenize(self, request: web.Request) -> web.Response:
        return _json(await tokenize(await read_object(request, self._settings), self._jobs))

    async def detokenize(self, request: web.Request) -> web.Response:
        return _json(detokenize(await read_object(request, self._settings), self._jobs))


def _refuse(what: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handler(_request: web.Request) -> web.StreamResponse:
        raise not_built(what)

    return handler


def _json(answer: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(answer), content_type="application/json")
