"""The one frozen configuration tree, shared by every process of a service.

The CLI builds it, `resolve` completes it, the supervisor hands it to its children as JSON; after that nobody
writes to it. This module knows no room: paths and numbers only.
"""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

DType = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["safetensors", "dummy"]
Quantization = Literal["", "fp8"]
Device = Literal["auto", "cpu", "cuda"]
Drafters = Literal["default", "auto", "mtp", "ngram", "off"]


class ConfigError(ValueError):
    """A setting that cannot work; the message names the setting, its value and what is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which checkpoint, and how it is held in memory."""

    path: str = ""  # folder with config.json; empty = the embedded model
    served_name: str = ""  # the `model` of API answers; empty = the folder's name
    load_format: LoadFormat = "safetensors"
    dtype: DType = "auto"  # auto = float32 on a CPU, bfloat16 on a GPU
    quantization: Quantization = ""  # of weights, while loading; "" = as the checkpoint has them
    device: Device = "auto"
    max_model_len: int = 0  # tokens of prompt + output; 0 = what the checkpoint allows
    seed: int = 0  # of dummy weights


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV pool of one engine."""

    block_size: int = 16  # tokens per block
    num_blocks: int = 0  # 0 = as many as memory_bytes hold
    memory_bytes: int = 0  # per engine, used when num_blocks is 0; 0 = 512 MiB on a CPU, what a card has left
    gpu_memory_utilization: float = 0.9  # share of a card's memory that may be in use, KV pool included
    prefix_cache: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one engine's batch and queue. A limit of 0 is the device's own, see `for_device`."""

    max_num_seqs: int = 0  # requests that hold a slot at once
    max_num_batched_tokens: int = 0  # query tokens in one step
    max_waiting: int = 1024  # queued requests; one more is rejected with `queue_full`

    def for_device(self, *, card: bool) -> "SchedulerConfig":
        """The limits with no 0 among them: 512 requests and 8192 tokens on a card, 64 and 512 on a CPU.

        Raises:
            ConfigError: a step could not give each running request a token.
        """
        num_seqs, num_tokens = (512, 8192) if card else (64, 512)
        found = replace(
            self,
            max_num_seqs=self.max_num_seqs or min(num_seqs, self.max_num_batched_tokens or num_seqs),
            max_num_batched_tokens=self.max_num_batched_tokens or max(num_tokens, self.max_num_seqs),
        )
        if found.max_num_batched_tokens < found.max_num_seqs:
            raise ConfigError(
                f"scheduler.max_num_batched_tokens = {found.max_num_batched_tokens} must be at least "
                f"scheduler.max_num_seqs = {found.max_num_seqs}: each running request needs a token per step"
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine processes of one service."""

    count: int = 1
    threads: int = 0  # CPU threads of each engine; 0 = cores / engines
    compile: bool = False  # torch.compile of the model's layers, on a card; see docs/performance.md
    deterministic: bool = False  # kernels whose results do not depend on batch-mates; see docs/operations.md


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Speculative decoding. Which drafters a request may use of these is its own choice."""

    drafters: Drafters = "default"  # auto = whatever the checkpoint allows; default: see for_device
    draft_tokens: int = 3  # that the model's own drafter looks ahead
    model: str = ""  # folder of an EAGLE head, to be the model's own drafter; empty = the checkpoint's MTP

    def for_device(self, *, card: bool) -> "SpeculationConfig":
        """With the default named: `auto` on a CPU, where it was measured to pay, `off` on a card."""
        if self.drafters != "default":
            return self
        return replace(self, drafters="off" if card else "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class WireConfig:
    """ZeroMQ between gateways and engines."""

    run_dir: str = ""  # holds the ipc:// sockets and the children's config, mode 0700; empty = a fresh one
    engines: tuple[str, ...] = ()  # addresses of engines started elsewhere (tcp://host:port); empty = our own
    curve_dir: str = ""  # CurveZMQ keys; needed for tcp:// addresses that are not loopback
    heartbeat_s: float = 0.5
    dead_after_s: float = 10.0  # no heartbeat for so long = the other side is gone
    high_water_mark: int = 4096  # messages queued per peer; beyond it the sender sees `full`
    max_frame_bytes: int = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """The HTTP side."""

    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    api_keys: tuple[str, ...] = ()  # empty = open
    cors_origins: tuple[str, ...] = ()  # "*" = any
    max_body_bytes: int = 4 << 20
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    request_timeout_s: float = 600.0  # a generation that takes longer ends with reason "timeout"
    keepalive_s: float = 15.0  # SSE comment lines while no token comes
    credit_window: int = 256  # tokens a stream may run ahead of its reader
    drain_s: float = 30.0  # SIGTERM: running streams may finish this long
    max_streams: int = 16384  # open generations per worker; one more gets 429
    price_per_gpu_hour: float = 0.0  # dollars; usage blocks then name a cost. 0 = no price


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything, by composition."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    wire: WireConfig = field(default_factory=WireConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    log_level: str = "info"

    def engine_addresses(self) -> tuple[str, ...]:
        """One ZeroMQ address per engine: those given, else sockets in `run_dir`."""
        if self.wire.engines:
            return self.wire.engines
        return tuple(f"ipc://{self.wire.run_dir}/engine-{i}.sock" for i in range(self.engine.count))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "Config":
        """Rebuild what `to_dict` wrote (through JSON, so tuples arrive as lists)."""
        sections = {
            "model": ModelConfig,
            "cache": CacheConfig,
            "scheduler": SchedulerConfig,
            "engine": EngineConfig,
            "speculation": SpeculationConfig,
            "wire": WireConfig,
            "gateway": GatewayConfig,
        }
        values: dict[str, Any] = {}
        for name, value in data.items():
            section = sections.get(name)
            values[name] = section(**_tuples(value)) if section else value
        return Config(**values)

    def resolve(self) -> "Config":
        """Complete and check: the returned tree has no value left to derive except what the engine measures.

        Raises:
            ConfigError: a value is out of its range.
        """
        path = Path(self.model.path) if self.model.path else embedded_model()
        if not (path / "config.json").is_file():
            raise ConfigError(f"model: {path} has no config.json; give a Hugging Face folder")
        model = replace(
            self.model, path=str(path.resolve()), served_name=self.model.served_name or path.resolve().name
        )
        speculation = self.speculation
        if speculation.model:
            head = Path(speculation.model)
            if not (head / "config.json").is_file():
                raise ConfigError(f"speculation.model: {head} has no config.json; give the folder of a head")
            speculation = replace(speculation, model=str(head.resolve()))
        resolved = replace(self, model=model, speculation=speculation)
        resolved.check()
        return resolved

    def check(self) -> None:
        """Raise ConfigError on the first value that is out of range."""
        limits: tuple[tuple[str, float, float, float], ...] = (
            ("gateway.port", self.gateway.port, 0, 65535),
            ("gateway.workers", self.gateway.workers, 1, 256),
            ("gateway.credit_window", self.gateway.credit_window, 1, 1 << 20),
            ("gateway.price_per_gpu_hour", self.gateway.price_per_gpu_hour, 0, 10_000),
            ("gateway.max_body_bytes", self.gateway.max_body_bytes, 1024, 1 << 30),
            ("engine.count", self.engine.count, 1, 1024),
            ("cache.block_size", self.cache.block_size, 1, 1024),
            ("cache.gpu_memory_utilization", self.cache.gpu_memory_utilization, 0.05, 1.0),
            ("scheduler.max_num_seqs", self.scheduler.max_num_seqs, 0, 65536),
            ("scheduler.max_num_batched_tokens", self.scheduler.max_num_batched_tokens, 0, 1 << 20),
            ("scheduler.max_waiting", self.scheduler.max_waiting, 1, 1 << 20),
            ("speculation.draft_tokens", self.speculation.draft_tokens, 1, 8),
            ("wire.heartbeat_s", self.wire.heartbeat_s, 0.01, 60),
            ("wire.dead_after_s", self.wire.dead_after_s, 2 * self.wire.heartbeat_s, 3600),
            ("wire.max_frame_bytes", self.wire.max_frame_bytes, 1 << 16, 1 << 30),
        )
        for name, value, low, high in limits:
            if not low <= value <= high:
                raise ConfigError(f"{name} = {value} is outside {low}..{high}")
        if self.engine.compile and self.engine.deterministic:
            raise ConfigError("engine.compile and engine.deterministic are two ways of computing; choose one")
        self.scheduler.for_device(card=False)


def embedded_model() -> Path:
    """Folder of the model that comes with the package."""
    return Path(__file__).parent / "embedded"


def _tuples(section: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in section.items()}
