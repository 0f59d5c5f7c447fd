"""The `headrace` command: flags become a Config, errors become one sentence and an exit code.

Knows no work itself: serve.py, chat.py and describe.py do it.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from headrace import __version__
from headrace.config import (
    CacheConfig,
    Config,
    ConfigError,
    EngineConfig,
    GatewayConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
    WireConfig,
)
from headrace.environ import keep_compiled, read_environment
from headrace.gateway import flags
from headrace.gateway.chat import ChatSettings
from headrace.gateway.chat import chat as run_chat
from headrace.gateway.children import RestartPolicy, module_argv
from headrace.gateway.client import DEFAULT_URL, ClientError
from headrace.gateway.describe import describe_folder, list_served
from headrace.gateway.serve import ENGINE, SYNTHETIC, echo
from headrace.gateway.serve import serve as run_service
from headrace.gateway.serve import serve_engine as run_engine
from headrace.ipc.keys import create_keys

EXIT_FAILED = 1
EXIT_CONFIG = 2
DEFAULT = Config()
FORWARDED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
LOOPBACK = ("127.0.0.1", "localhost", "::1")

app = typer.Typer(
    help="A streaming inference service for Mixture-of-Experts language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point: what the user or the machine did wrong is said in one line, without a traceback."""
    try:
        app()
    except ConfigError as error:
        echo(f"headrace: {error}")
        sys.exit(EXIT_CONFIG)
    except ClientError as error:
        echo(f"headrace: {error}")
        sys.exit(EXIT_FAILED)


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"headrace {__version__}\n")
        raise typer.Exit


@app.callback()
def common(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """A streaming inference service for Mixture-of-Experts language models."""


@app.command()
def serve(
    *,
    model: flags.Model = "",
    served_name: flags.ServedName = "",
    dtype: flags.DType = "auto",
    quantization: flags.Quantization = "",
    device: flags.Device = "auto",
    max_model_len: flags.MaxModelLen = 0,
    load_format: flags.LoadFormat = "safetensors",
    kv_memory: flags.KvMemory = "",
    kv_blocks: flags.KvBlocks = 0,
    gpu_memory_utilization: flags.GpuMemoryUtilization = DEFAULT.cache.gpu_memory_utilization,
    block_size: flags.BlockSize = DEFAULT.cache.block_size,
    prefix_cache: flags.PrefixCache = True,
    max_num_seqs: flags.MaxNumSeqs = DEFAULT.scheduler.max_num_seqs,
    max_num_batched_tokens: flags.MaxBatchedTokens = DEFAULT.scheduler.max_num_batched_tokens,
    max_waiting: flags.MaxWaiting = DEFAULT.scheduler.max_waiting,
    compiled: flags.Compile = False,
    deterministic: flags.Deterministic = False,
    speculate: flags.Speculate = "default",
    draft_tokens: flags.DraftTokens = DEFAULT.speculation.draft_tokens,
    draft_model: flags.DraftModel = "",
    host: flags.Host = DEFAULT.gateway.host,
    port: flags.Port = DEFAULT.gateway.port,
    api_key: flags.ApiKeys = None,
    cors_origin: flags.CorsOrigins = None,
    max_streams: flags.MaxStreams = DEFAULT.gateway.max_streams,
    request_timeout: flags.RequestTimeout = DEFAULT.gateway.request_timeout_s,
    drain: flags.Drain = DEFAULT.gateway.drain_s,
    price_per_gpu_hour: flags.PricePerGpuHour = DEFAULT.gateway.price_per_gpu_hour,
    workers: flags.Workers = DEFAULT.gateway.workers,
    engines: flags.Engines = DEFAULT.engine.count,
    threads: flags.Threads = 0,
    engine_address: flags.EngineAddresses = None,
    curve_dir: flags.CurveDir = "",
    run_dir: flags.RunDir = "",
    engine: flags.EngineKind = "core",
    step_ms: flags.StepMs = None,
    log_level: flags.LogLevel = None,
) -> None:
    """Serve a model over HTTP and WebSocket."""
    environment = read_environment()
    if compiled:
        keep_compiled()
    config = Config(
        model=ModelConfig(
            path=model or environment.model,
            served_name=served_name,
            load_format=load_format,
            dtype=dtype,
            quantization=quantization,
            device=device,
            max_model_len=max_model_len,
        ),
        cache=_cache(kv_memory, kv_blocks, block_size, prefix_cache, gpu_memory_utilization),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_waiting=max_waiting
        ),
        engine=EngineConfig(count=engines, threads=threads, compile=compiled, deterministic=deterministic),
        speculation=SpeculationConfig(drafters=speculate, draft_tokens=draft_tokens, model=draft_model),
        wire=WireConfig(run_dir=run_dir, engines=tuple(engine_address or ()), curve_dir=curve_dir),
        gateway=GatewayConfig(
            host=host,
            port=port,
            workers=workers,
            api_keys=_api_keys(api_key or environment.api_keys),
            cors_origins=tuple(cors_origin or ()),
            max_streams=max_streams,
            request_timeout_s=request_timeout,
            drain_s=drain,
            price_per_gpu_hour=price_per_gpu_hour,
        ),
        log_level=log_level or environment.log_level or DEFAULT.log_level,
    ).resolve()
    if step_ms is not None and engine != "synthetic":
        raise ConfigError("--step-ms is for --engine synthetic")
    if host not in LOOPBACK and not config.gateway.api_keys:
        echo(f"warning: no API keys, so anyone who reaches {host}:{port} may use the model (--api-key)")
    arguments = () if step_ms is None else ("--step-ms", str(step_ms))
    module = SYNTHETIC if engine == "synthetic" else ENGINE
    sys.exit(run_service(config, engine_module=module, engine_args=arguments, policy=RestartPolicy()))


@app.command()
def engine(
    *,
    address: Annotated[str, typer.Option(help="Where gateways connect, such as tcp://0.0.0.0:5555.")],
    model: flags.Model = "",
    served_name: flags.ServedName = "",
    dtype: flags.DType = "auto",
    quantization: flags.Quantization = "",
    device: flags.Device = "auto",
    max_model_len: flags.MaxModelLen = 0,
    load_format: flags.LoadFormat = "safetensors",
    kv_memory: flags.KvMemory = "",
    kv_blocks: flags.KvBlocks = 0,
    gpu_memory_utilization: flags.GpuMemoryUtilization = DEFAULT.cache.gpu_memory_utilization,
    block_size: flags.BlockSize = DEFAULT.cache.block_size,
    prefix_cache: flags.PrefixCache = True,
    max_num_seqs: flags.MaxNumSeqs = DEFAULT.scheduler.max_num_seqs,
    max_num_batched_tokens: flags.MaxBatchedTokens = DEFAULT.scheduler.max_num_batched_tokens,
    max_waiting: flags.MaxWaiting = DEFAULT.scheduler.max_waiting,
    compiled: flags.Compile = False,
    deterministic: flags.Deterministic = False,
    speculate: flags.Speculate = "default",
    draft_tokens: flags.DraftTokens = DEFAULT.speculation.draft_tokens,
    draft_model: flags.DraftModel = "",
    threads: flags.Threads = 0,
    curve_dir: flags.CurveDir = "",
    run_dir: flags.RunDir = "",
    log_level: flags.LogLevel = None,
) -> None:
    """Run one engine alone, for gateways on other hosts (`serve --engine-address`)."""
    environment = read_environment()
    if compiled:
        keep_compiled()
    config = Config(
        model=ModelConfig(
            path=model or environment.model,
            served_name=served_name,
            load_format=load_format,
            dtype=dtype,
            quantization=quantization,
            device=device,
            max_model_len=max_model_len,
        ),
        cache=_cache(kv_memory, kv_blocks, block_size, prefix_cache, gpu_memory_utilization),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_waiting=max_waiting
        ),
        engine=EngineConfig(count=1, threads=threads, compile=compiled, deterministic=deterministic),
        speculation=SpeculationConfig(drafters=speculate, draft_tokens=draft_tokens, model=draft_model),
        wire=WireConfig(run_dir=run_dir, engines=(address,), curve_dir=curve_dir),
        log_level=log_level or environment.log_level or DEFAULT.log_level,
    ).resolve()
    sys.exit(run_engine(config, policy=RestartPolicy()))


@app.command()
def chat(
    *,
    url: flags.Url = "",
    api_key: flags.ClientKey = "",
    model: Annotated[str, typer.Option(help="Without it, the server's first.")] = "",
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 = always the likeliest token.")] = None,
) -> None:
    """Talk to a running server in the terminal."""
    environment = read_environment()
    settings = ChatSettings(
        url=url or environment.url or DEFAULT_URL,
        api_key=api_key or environment.api_key,
        model=model,
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
    )
    sys.exit(run_chat(settings))


@app.command()
def models(
    folder: Annotated[
        Path | None, typer.Argument(help="Describe this model folder instead of asking a server.")
    ] = None,
    *,
    url: flags.Url = "",
    api_key: flags.ClientKey = "",
) -> None:
    """List the models of a running server, or describe a folder."""
    environment = read_environment()
    if folder is not None:
        table = describe_folder(folder)
    else:
        table = list_served(url or environment.url or DEFAULT_URL, api_key or environment.api_key)
    Console(highlight=False).print(table)


@app.command()
def keys(directory: Annotated[Path, typer.Argument(help="New folder for the keys.")]) -> None:
    """Make CurveZMQ keys for engines that gateways reach over tcp://."""
    create_keys(directory)
    echo(f"made keys in {directory}: give engines and gateways a copy and --curve-dir; keep *.secret private")


@app.command(add_help_option=False, context_settings=FORWARDED)
def loadtest(context: typer.Context) -> None:
    """Load any OpenAI-compatible server and report what its users saw (-h for its flags)."""
    _become("headrace.loadtest.cli", context)


@app.command(add_help_option=False, context_settings=FORWARDED)
def economics(context: typer.Context) -> None:
    """What a token costs: from a record and a price sheet (-h for its flags)."""
    _become("headrace.loadtest.economics_cli", context)


bench = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command("engine", add_help_option=False, context_settings=FORWARDED)
def bench_engine(context: typer.Context) -> None:
    """Decode, prefill and a trace on an engine, beside their ceilings and a peer (-h for its flags)."""
    _become("headrace.core.bench.engine", context)


@bench.command("accuracy", add_help_option=False, context_settings=FORWARDED)
def bench_accuracy(context: typer.Context) -> None:
    """What a format of weights costs in logits and perplexity (-h for its flags)."""
    _become("headrace.core.bench.accuracy", context)


@bench.command("host-gap", add_help_option=False, context_settings=FORWARDED)
def bench_host_gap(context: typer.Context) -> None:
    """How long a card waits for the host between two steps (-h for its flags)."""
    _become("headrace.core.bench.host_gap", context)


@bench.command("tune", add_help_option=False, context_settings=FORWARDED)
def bench_tune(context: typer.Context) -> None:
    """Choose the launches of a model's kernels on this card by measuring them (-h for its flags)."""
    _become("headrace.core.bench.tune", context)


@bench.command("gateway", add_help_option=False, context_settings=FORWARDED)
def bench_gateway(context: typer.Context) -> None:
    """One gateway worker beside the usual FastAPI pattern, in one run (-h for its flags)."""
    _become("headrace.loadtest.bench_gateway", context)


def _become(module: str, context: typer.Context) -> NoReturn:
    """Go on as another module, with the flags behind the command: rooms that this one must not import."""
    argv = module_argv(module, *context.args)
    os.execv(argv[0], argv)  # noqa: S606 - our own interpreter and module


def _cache(
    kv_memory: str, kv_blocks: int, block_size: int, prefix_cache: bool, gpu_memory_utilization: float
) -> CacheConfig:
    if kv_memory and kv_blocks:
        raise ConfigError("--kv-memory and --kv-blocks both say how large the KV cache is; give one")
    memory = flags.parse_size("--kv-memory", kv_memory) if kv_memory else DEFAULT.cache.memory_bytes
    return CacheConfig(
        block_size=block_size,
        num_blocks=kv_blocks,
        memory_bytes=memory,
        gpu_memory_utilization=gpu_memory_utilization,
        prefix_cache=prefix_cache,
    )


def _api_keys(keys: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    if not all(keys):
        raise ConfigError("--api-key is empty")
    return tuple(keys)
