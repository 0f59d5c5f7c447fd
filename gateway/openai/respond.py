"""Runs one job for an HTTP request: as server-sent events or in one piece; a disconnect cancels it.

The handlers of chat and completions end here.
"""

import orjson
from aiohttp import web

from headrace.gateway.collect import Collection
from headrace.gateway.jobs import Job, Jobs
from headrace.gateway.openai.shape import Shape
from headrace.gateway.sse import SseAnswer, SseRules
from headrace.gateway.stats import WorkerStats


async def respond(
    request: web.Request, jobs: Jobs, job: Job, shape: Shape, rules: SseRules, stats: WorkerStats
) -> web.StreamResponse:
    """The whole answer. Every way out, the client's disconnect included, leaves no stream running.

    Raises:
        ApiError, NoEngine, TooManyStreams: nothing was sent yet.
    """
    streams = jobs.streams(job)
    try:
        if job.request.stream:
            answer = SseAnswer(request, job, streams, shape, rules)
            jobs.start(job, streams, answer.sinks)
            try:
                return await answer.run()
            finally:
                stats.slow_streams += bool(answer.num_slow)
        collection = Collection(streams)
        jobs.start(job, streams, collection.sinks)
        events, outcomes = await collection.wait()
        return web.Response(body=orjson.dumps(shape.whole(events, outcomes)), content_type="application/json")
    finally:
        for stream in streams:
            stream.cancel()
