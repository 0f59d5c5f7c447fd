"""Small random models of every supported family, in sizes that a card's kernels take, saved by transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.config import (
    CacheConfig,
    Config,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from headrace.core.build import Built, assemble
from headrace.core.models.base import Model
from headrace.core.weights import load_model
from tests.core.hf_models import save_random

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
DEEPSEEK: dict[str, Any] = {
    **COMMON,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 128,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **COMMON,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 128,
            "norm_topk_prob": True,
        },
    ),
    "deepseek_v2": ("DeepseekV2", {**DEEPSEEK, "topk_method": "greedy"}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **DEEPSEEK,
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 96,
            "routed_scaling_factor": 2.5,
        },
    ),
}
CARD = torch.device("cuda")
OFF = SpeculationConfig(drafters="off")


def save(name: str, folder: Path) -> Any:
    """transformers' model of a family, float32 on the CPU; saved in `folder`."""
    family, settings = FAMILIES[name]
    return save_random(family, settings, folder)


def load(path: Path, dtype: torch.dtype) -> Model:
    return load_model(path, dtype=dtype, device=CARD, load_format="safetensors", seed=0, progress=None)


def make(
    model: Model,
    path: Path,
    *,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 256,
    num_blocks: int = 2000,
    prefix_cache: bool = False,
    overlap: bool = True,
    deterministic: bool = False,
    compiled: bool = False,
    speculation: SpeculationConfig = OFF,
) -> Built:
    """An engine on the card around a loaded model."""
    config = Config(
        model=ModelConfig(path=str(path)),
        cache=CacheConfig(num_blocks=num_blocks, prefix_cache=prefix_cache),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
        engine=EngineConfig(deterministic=deterministic, compile=compiled),
        speculation=speculation,
    ).resolve()
    return assemble(config, model, overlap=overlap)


def prompts(count: int, shortest: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Random tokens of the families' vocabulary; lengths drawn evenly."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, 512, (length,), generator=generator).tolist() for length in lengths]


def error(found: Tensor, expected: Tensor) -> float:
    """Length of the difference over the reference's; NaN compares as wrong."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """[N, V] on the host."""
    return torch.stack([row.cpu() for row in rows])
