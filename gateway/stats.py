"""What one gateway worker counts about the generations it runs on one engine. Plain numbers, no Prometheus.

The engine link counts; metrics.py exposes them under vLLM's names.
"""

from dataclasses import dataclass

from headrace.gateway.buckets import Buckets
from headrace.ipc.messages import Usage

# vLLM's bounds (vllm/v1/metrics/loggers.py) with finer ones below: a small model's step takes under 10 ms.
TTFT_BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BOUNDS = (
    0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip


@dataclass(slots=True)
class KeyUse:
    """What the generations of one API key took."""

    generations: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    gpu_s: float = 0.0

    def add(self, usage: Usage) -> None:
        self.generations += 1
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.output_tokens += usage.output_tokens
        self.gpu_s += usage.gpu_ms / 1e3


class EngineStats:
    """Counters only grow. Times in seconds."""

    __slots__ = (
        "cached_tokens",
        "decode",
        "e2e",
        "finished",
        "generation_tokens",
        "inter_token",
        "keys",
        "late_tokens",
        "listener_errors",
        "lost",
        "prefill",
        "prompt_tokens",
        "queue",
        "rejected",
        "time_to_first",
    )

    def __init__(self) -> None:
        self.time_to_first = Buckets(TTFT_BOUNDS)
        self.inter_token = Buckets(ITL_BOUNDS)
        self.e2e = Buckets(REQUEST_BOUNDS)
        self.queue = Buckets(REQUEST_BOUNDS)
        self.prefill = Buckets(REQUEST_BOUNDS)
        self.decode = Buckets(REQUEST_BOUNDS)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.finished: dict[str, int] = {}  # by reason: stop | length | abort | error
        self.rejected: dict[str, int] = {}  # by code
        self.lost = 0  # generations whose engine went away
        self.late_tokens = 0  # of streams already cancelled; dropped
        self.listener_errors = 0
        self.keys: dict[str, KeyUse] = {}  # by tenant, of which there are as many as keys; "" = none needed

    def on_finished(self, reason: str, tenant: str, usage: Usage, e2e_s: float) -> None:
        """Count the end of one generation."""
        use = self.keys.get(tenant)
        if use is None:
            use = self.keys[tenant] = KeyUse()
        use.add(usage)
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.e2e.observe(e2e_s)
        self.queue.observe(usage.queue_s)
        self.prefill.observe(usage.prefill_s)
        self.decode.observe(usage.decode_s)


class WorkerStats:
    """What a worker counts outside its engines. Counters only grow, except `open_websockets`."""

    __slots__ = ("http_requests", "open_websockets", "refused_frames", "slow_streams", "websockets")

    def __init__(self) -> None:
        self.http_requests: dict[tuple[str, str, str], int] = {}  # by method, route, status
        self.refused_frames: dict[str, int] = {}  # WebSocket frames answered with an error, by code
        self.slow_streams = 0  # streams that fell behind their socket's high-water mark
        self.websockets = 0
        self.open_websockets = 0

    def on_response(self, method: str, route: str, status: int) -> None:
        key = (method, route, str(status))
        self.http_requests[key] = self.http_requests.get(key, 0) + 1

    def on_refused_frame(self, code: str) -> None:
        self.refused_frames[code] = self.refused_frames.get(code, 0) + 1
