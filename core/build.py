"""Assembles one engine from the configuration: device, model, KV pool, scheduler, executor.

The only place that knows all of the engine's parts. Called by core/main.py; tests build engines through it too.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.config import CacheConfig, Config, ConfigError
from headrace.core.charges import Charges
from headrace.core.context_cost import context_cost
from headrace.core.engine import Engine
from headrace.core.execute import Executor
from headrace.core.graphs import DecodeGraphs
from headrace.core.kv_cache import KVCache
from headrace.core.models.base import Model
from headrace.core.prepare import Preparer
from headrace.core.scheduler import Scheduler
from headrace.core.weights import fingerprint, load_model

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Built:
    """An engine, ready to serve."""

    engine: Engine
    model: Model
    fingerprint: str
    max_model_len: int  # tokens of prompt + output that one request can have


def build(config: Config, progress: Callable[[int, int], None] | None = None) -> Built:
    """Load the model and set the engine up around it.

    Args:
        config: resolved.
        progress: called with (bytes loaded, bytes in all).

    Raises:
        ConfigError: a setting does not fit this machine or checkpoint, or the checkpoint is broken.
    """
    device = _device(config.model.device)
    torch.set_num_threads(config.engine.threads or _threads(config))
    dtype = _dtype(config.model.dtype, device)
    path = Path(config.model.path)
    model = load_model(
        path,
        dtype=dtype,
        device=device,
        load_format=config.model.load_format,
        seed=config.model.seed,
        progress=progress,
    )
    built = assemble(config, model, overlap=device.type == "cuda")
    built.engine.warm_up(min(WARM_UP_TOKENS, built.max_model_len - 2))
    return built


def assemble(config: Config, model: Model, *, overlap: bool) -> Built:
    """The engine around a model that is loaded already. See Engine for `overlap`."""
    block_size = config.cache.block_size
    num_blocks = _num_blocks(config.cache, model)
    max_model_len = _max_model_len(config.model.max_model_len, model.spec.max_position)
    kv = KVCache(num_blocks, block_size, prefix_cache=config.cache.prefix_cache)
    scheduler = Scheduler(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_waiting=config.scheduler.max_waiting,
        max_model_len=max_model_len,
        kv=kv,
    )
    if scheduler.max_model_len < max_model_len:
        log.warning(
            "the KV pool of %d blocks holds %d tokens, so no request can be longer than that (the model allows %d)",
            num_blocks,
            scheduler.max_model_len,
            max_model_len,
        )
    pool = torch.zeros(model.kv_shape(num_blocks, block_size), dtype=model.dtype, device=model.device)
    max_num_seqs = config.scheduler.max_num_seqs
    executor = Executor(model, pool, max_num_seqs)
    if model.device.type == "cuda":
        graphs = DecodeGraphs(
            executor,
            model,
            pool,
            max_num_seqs=max_num_seqs,
            max_model_len=scheduler.max_model_len,
            block_size=block_size,
        )
        executor.use_graphs(graphs)
    preparer = Preparer(max_num_seqs, max_model_len, block_size)
    charges = Charges(context_cost(model.spec))
    engine = Engine(scheduler, kv, preparer, executor, charges, overlap=overlap)
    return Built(
        engine=engine,
        model=model,
        fingerprint=fingerprint(
            Path(config.model.path),
            dtype=model.dtype,
            load_format=config.model.load_format,
            seed=config.model.seed,
        ),
        max_model_len=scheduler.max_model_len,
    )


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


def _num_blocks(cache: CacheConfig, model: Model) -> int:
    if cache.num_blocks:
        return cache.num_blocks
    per_block = model.kv_bytes_per_block(cache.block_size, model.dtype)
    num_blocks = cache.memory_bytes // per_block
    if num_blocks < 2:
        raise ConfigError(
            f"cache.memory_bytes = {cache.memory_bytes} holds no two blocks of {per_block} bytes"
        )
    return num_blocks


def _max_model_len(wanted: int, limit: int) -> int:
    if wanted > limit:
        raise ConfigError(f"model.max_model_len = {wanted} exceeds the checkpoint's {limit} positions")
    return wanted or limit
