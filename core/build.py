"""Assembles one engine from the configuration: device, model, KV pool, scheduler, executor.

The only place that knows all of the engine's parts. Called by core/main.py; tests build engines through it too.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headrace.config import Config, ConfigError, EngineConfig, SchedulerConfig
from headrace.core.charges import Charges
from headrace.core.context_cost import context_cost
from headrace.core.draft_graphs import DraftGraphs
from headrace.core.drafting import add_drafter, make_speculator, model_depth, num_draft_graphs, weigh
from headrace.core.eagle_checkpoint import attach_eagle
from headrace.core.engine import Engine
from headrace.core.execute import Executor
from headrace.core.graphs import DecodeGraphs, graph_sizes
from headrace.core.kv_cache import KVCache
from headrace.core.memory_profile import profile
from headrace.core.models.base import Model
from headrace.core.models.decoder import Decoder
from headrace.core.models.invariant import InvariantDecoder
from headrace.core.prepare import Preparer
from headrace.core.prompt_graphs import PromptGraphs, prompt_graph_sizes
from headrace.core.scheduler import Scheduler
from headrace.core.warm_up import warm_up_card
from headrace.core.weights import fingerprint, load_model

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WARM_UP_TOKENS = 32
GIB = 1 << 30
CPU_KV_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made of, for those who measure it."""

    engine: Engine
    preparer: Preparer
    executor: Executor
    graphs: DecodeGraphs | None  # None on a CPU
    draft_graphs: DraftGraphs | None  # None on a CPU, and where nothing is drafted


@dataclass(frozen=True, slots=True)
class Built:
    """An engine, ready to serve."""

    engine: Engine
    model: Model
    fingerprint: str
    max_model_len: int  # tokens of prompt + output that one request can have
    max_num_seqs: int  # requests in a batch
    parts: Parts


def build(config: Config, progress: Callable[[int, int], None] | None = None) -> Built:
    """Load the model and set the engine up around it.

    Args:
        config: resolved.
        progress: called with (bytes loaded, bytes in all).

    Raises:
        ConfigError: a setting does not fit this machine or checkpoint, or the checkpoint is broken.
    """
    device = _device(config.model.device)
    config = replace(config, speculation=config.speculation.for_device(card=device.type == "cuda"))
    torch.set_num_threads(config.engine.threads or _threads(config))
    dtype = _dtype(config.model.dtype, device)
    path = Path(config.model.path)
    began = time.perf_counter()
    model = load_model(
        path,
        dtype=dtype,
        device=device,
        load_format=config.model.load_format,
        seed=config.model.seed,
        quantization=config.model.quantization,
        progress=progress,
    )
    if config.speculation.model:
        assert isinstance(model, Decoder), "a model that takes no head"
        attach_eagle(Path(config.speculation.model), model)
    loaded = time.perf_counter()
    built = assemble(config, model, overlap=device.type == "cuda")
    assembled = time.perf_counter()
    built.engine.warm_up(min(WARM_UP_TOKENS, built.max_model_len - 2))
    if device.type == "cuda":
        limits = config.scheduler.for_device(card=True)
        warm_up_card(
            built.engine,
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            recorded=not config.engine.deterministic,
        )
    if built.engine.speculator is not None:
        weigh(
            config,
            built.engine.speculator,
            built.parts.executor,
            built.model,
            built.parts.draft_graphs,
            limits=config.scheduler.for_device(card=device.type == "cuda"),
            max_model_len=built.max_model_len,
        )
    log.info(
        "start: weights %.1f s, memory and graphs %.1f s, warm-up %.1f s",
        loaded - began,
        assembled - loaded,
        time.perf_counter() - assembled,
    )
    return built


def assemble(config: Config, model: Model, *, overlap: bool) -> Built:
    """The engine around a model that is loaded already. See Engine for `overlap`."""
    model = _in_form(config.engine, model)
    card = model.device.type == "cuda"
    limits = config.scheduler.for_device(card=card)
    config = replace(config, speculation=config.speculation.for_device(card=card))
    max_model_len = _max_model_len(config.model.max_model_len, model.spec.max_position)
    num_blocks = _num_blocks(config, model) or _blocks_left(config, model, limits, max_model_len)
    parts = _wire(config, model, limits, num_blocks, max_model_len, overlap=overlap)
    length = parts.engine.scheduler.max_model_len
    if length < max_model_len:
        log.warning(
            "the KV pool of %d blocks holds %d tokens, so no request can be longer than that (the model allows %d)",
            num_blocks,
            length,
            max_model_len,
        )
    return Built(
        engine=parts.engine,
        model=model,
        fingerprint=fingerprint(
            Path(config.model.path),
            dtype=model.dtype,
            load_format=config.model.load_format,
            seed=config.model.seed,
            quantization=config.model.quantization,
        ),
        max_model_len=length,
        max_num_seqs=limits.max_num_seqs,
        parts=parts,
    )


def _in_form(engine: EngineConfig, model: Model) -> Model:
    """The model as the configuration wants it computed."""
    if not (engine.deterministic or engine.compile):
        return model
    assert isinstance(model, Decoder), "a model that has no other form"
    if engine.deterministic:
        return InvariantDecoder(model)
    if model.device.type != "cuda":
        raise ConfigError("engine.compile = true is for a card; on a CPU the first step would take minutes")
    # Its operators wrap Triton's kernels, which only a card needs.
    from headrace.core.models.compiled import CompiledDecoder  # noqa: PLC0415

    return CompiledDecoder(model)


def _wire(
    config: Config,
    model: Model,
    limits: SchedulerConfig,
    num_blocks: int,
    max_model_len: int,
    *,
    overlap: bool,
    sizes: Sequence[int] | None = None,
) -> Parts:
    """Make the parts and join them. `sizes`: of the graphs; None = those of the batch limit."""
    block_size, max_num_seqs = config.cache.block_size, limits.max_num_seqs
    kv = KVCache(num_blocks, block_size, prefix_cache=config.cache.prefix_cache)
    scheduler = Scheduler(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_waiting=limits.max_waiting,
        max_model_len=max_model_len,
        kv=kv,
    )
    shape = model.kv_shape(num_blocks, block_size, mtp=model_depth(config, model) > 0)
    pool = torch.zeros(shape, dtype=model.dtype, device=model.device)
    executor = Executor(model, pool, max_num_seqs, exact=config.engine.deterministic)
    draft_graphs = add_drafter(
        config,
        executor,
        model,
        pool,
        limits=limits,
        max_model_len=max_model_len,
        largest_only=sizes is not None,
    )
    graphs = None
    if model.device.type == "cuda":
        graphs = DecodeGraphs(
            executor,
            model,
            pool,
            max_num_seqs=max_num_seqs,
            max_model_len=scheduler.max_model_len if sizes is None else max_model_len,
            block_size=block_size,
            sizes=sizes,
        )
        executor.use_graphs(graphs)
        if not config.engine.deterministic:
            prompt_sizes = prompt_graph_sizes(limits.max_num_batched_tokens)
            executor.use_prompt_graphs(
                PromptGraphs(
                    executor,
                    model,
                    pool,
                    max_num_seqs=max_num_seqs,
                    max_model_len=max_model_len,
                    block_size=block_size,
                    # Before the pool's size is known, the largest tells what all of them share.
                    sizes=prompt_sizes if sizes is None else prompt_sizes[-1:],
                )
            )
    preparer = Preparer(max_num_seqs, max_model_len, block_size)
    charges = Charges(context_cost(model.spec))
    speculator = make_speculator(config, model)
    engine = Engine(scheduler, kv, preparer, executor, charges, speculator=speculator, overlap=overlap)
    return Parts(engine, preparer, executor, graphs, draft_graphs)


def _blocks_left(config: Config, model: Model, limits: SchedulerConfig, max_model_len: int) -> int:
    """Blocks that the card has room for beside everything else."""
    block_size, rows = config.cache.block_size, limits.max_num_seqs
    tokens, longest = limits.max_num_batched_tokens, max_model_len - 1
    needed = -(-min(tokens, longest) // block_size) + rows * (2 + tokens // rows // block_size) + 2
    per_block = model.kv_bytes_per_block(block_size, model.dtype, mtp=model_depth(config, model) > 0)
    use = profile(
        lambda: _wire(config, model, limits, needed, max_model_len, overlap=True, sizes=(rows,)).engine,
        pool_bytes=needed * per_block,
        num_rows=rows,
        num_tokens=tokens,
        longest=longest,
        num_graphs=len(graph_sizes(rows)) + 2 * len(prompt_graph_sizes(tokens)) + num_draft_graphs(config),
    )
    left = use.left(config.cache.gpu_memory_utilization)
    num_blocks = left // per_block
    if num_blocks < 2:
        raise ConfigError(f"the card has {left} bytes left for the KV cache, not two blocks of {per_block}")
    log.info(
        "card memory %.2f GiB, of which %g may be used: %s, KV pool %.2f GiB (%d blocks, %d tokens)",
        use.total / GIB,
        config.cache.gpu_memory_utilization,
        use,
        num_blocks * per_block / GIB,
        num_blocks,
        num_blocks * block_size,
    )
    return num_blocks


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device = cuda, but no CUDA card is visible")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def _dtype(wanted: str, device: torch.device) -> torch.dtype:
    if wanted == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[wanted]


def _threads(config: Config) -> int:
    """Cores of one engine. The gateway's core is shared: beside it, the second of two was worth a third."""
    return max(1, len(os.sched_getaffinity(0)) // config.engine.count)


def _num_blocks(config: Config, model: Model) -> int:
    """As the configuration says; 0 = whatever the card has left."""
    cache = config.cache
    if cache.num_blocks:
        return cache.num_blocks
    if not cache.memory_bytes and model.device.type == "cuda":
        return 0
    per_block = model.kv_bytes_per_block(cache.block_size, model.dtype, mtp=model_depth(config, model) > 0)
    memory = cache.memory_bytes or CPU_KV_BYTES
    if memory // per_block < 2:
        raise ConfigError(f"cache.memory_bytes = {memory} holds no two blocks of {per_block} bytes")
    return memory // per_block


def _max_model_len(wanted: int, limit: int) -> int:
    if wanted > limit:
        raise ConfigError(f"model.max_model_len = {wanted} exceeds the checkpoint's {limit} positions")
    return wanted or limit
