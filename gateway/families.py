"""The metric families of /metrics: names, help, labels and bounds, one line each.

Names are vLLM's with the prefix `headrace:`, so that a dashboard needs a search and replace at most.
Read by metrics.py.
"""

from dataclasses import dataclass
from typing import Literal

from headrace.gateway.stats import ITL_BOUNDS, REQUEST_BOUNDS, TTFT_BOUNDS

PREFIX = "headrace:"
ENGINE = ("model_name", "engine")
KEY = ("model_name", "api_key")


@dataclass(frozen=True, slots=True)
class Family:
    """One metric; `name` is without prefix and, for a counter, without `_total`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ENGINE
    bounds: tuple[float, ...] = ()


COUNTED = (
    Family(
        "time_to_first_token_seconds",
        "histogram",
        "From submission to the first token at the gateway.",
        bounds=TTFT_BOUNDS,
    ),
    Family(
        "inter_token_latency_seconds",
        "histogram",
        "Between tokens of one stream at the gateway.",
        bounds=ITL_BOUNDS,
    ),
    Family(
        "e2e_request_latency_seconds",
        "histogram",
        "From submission to the end of a generation.",
        bounds=REQUEST_BOUNDS,
    ),
    Family("request_queue_time_seconds", "histogram", "In the engine's queue.", bounds=REQUEST_BOUNDS),
    Family(
        "request_prefill_time_seconds",
        "histogram",
        "From first schedule to first token.",
        bounds=REQUEST_BOUNDS,
    ),
    Family("request_decode_time_seconds", "histogram", "From first to last token.", bounds=REQUEST_BOUNDS),
    Family("prompt_tokens", "counter", "Prompt tokens of finished generations."),
    Family("prompt_tokens_cached", "counter", "Of those, found in the prefix cache."),
    Family("generation_tokens", "counter", "Output tokens received from the engine."),
    Family("request_success", "counter", "Finished generations.", (*ENGINE, "finished_reason")),
    Family("key_generations", "counter", "Finished generations of an API key.", KEY),
    Family("key_prompt_tokens", "counter", "Their prompt tokens.", KEY),
    Family("key_cached_tokens", "counter", "Of those, found in the prefix cache.", KEY),
    Family("key_output_tokens", "counter", "Their output tokens.", KEY),
    Family("key_gpu_seconds", "counter", "What the engines charged for them.", KEY),
    Family("request_rejected", "counter", "Generations no engine took.", (*ENGINE, "code")),
    Family("requests_lost", "counter", "Generations whose engine went away."),
    Family("late_tokens", "counter", "Tokens of streams cancelled before they came; dropped."),
    Family("listener_errors", "counter", "Generations ended by a bug in the gateway."),
    Family("http_requests", "counter", "HTTP requests answered.", ("method", "route", "status")),
    Family("slow_streams", "counter", "Streams whose reader fell behind the socket's high-water mark.", ()),
    Family("websocket_connections", "counter", "WebSockets accepted.", ()),
    Family("websocket_refused_frames", "counter", "WebSocket frames answered with an error.", ("code",)),
    Family("open_streams", "gauge", "Open generations.", ()),
    Family("open_websockets", "gauge", "Open WebSockets.", ()),
    Family("workers_up", "gauge", "Gateway workers that answered this scrape.", ()),
)
"""Counted by the gateway workers; /metrics shows their sum."""

REPORTED = (
    Family("engine_up", "gauge", "1 when the engine takes new work."),
    Family("num_requests_running", "gauge", "Requests in the engine's batch."),
    Family("num_requests_waiting", "gauge", "Requests queued in the engine."),
    Family("num_requests_parked", "gauge", "Requests whose reader is out of credit."),
    Family("kv_cache_usage_perc", "gauge", "Share of KV blocks that requests hold; 1 = all."),
    Family("prefix_cache_queries", "counter", "Prompt tokens looked up in the prefix cache."),
    Family("prefix_cache_hits", "counter", "Of those, found."),
    Family("num_preemptions", "counter", "Requests that lost their blocks to others."),
    Family("engine_prompt_tokens", "counter", "Prompt tokens computed by the engine, for all gateways."),
    Family("engine_output_tokens", "counter", "Output tokens made by the engine, for all gateways."),
    Family("engine_steps", "counter", "Engine steps."),
    Family("spec_decode_steps", "counter", "Of those, steps that verified drafts."),
    Family("spec_decode_num_drafts", "counter", "Verifications: rows of such steps that had drafts."),
    Family("spec_decode_num_draft_tokens", "counter", "Draft tokens verified."),
    Family("spec_decode_num_accepted_tokens", "counter", "Of those, accepted."),
    Family(
        "spec_decode_num_accepted_tokens_per_pos",
        "counter",
        "Accepted, by their place behind the last known token; 0 = the next one.",
        (*ENGINE, "position"),
    ),
    Family("engine_busy_seconds", "counter", "Seconds in which a step was made or in flight."),
    Family("engine_overhead_seconds", "counter", "Of the busy seconds, those charged to no request."),
    Family("engine_step_time_ms", "gauge", "Milliseconds of the engine's newest step."),
    Family("engine_refused_frames", "counter", "Wire frames the engine refused."),
)
"""Said by the engines in their heartbeats; every worker hears the same."""
