"""What a checkpoint is: every number of its architecture, in our own terms and checked.

Built by core/hf_config.py from a config.json; read by the model builders, the loader and the runner.
Knows no file format and holds no tensors.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class YarnSpec:
    """YaRN context extension (arXiv 2309.00071), with DeepSeek's two mscale knobs."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    cos_sin_scale: float  # multiplies cos and sin
    truncate: bool  # round the correction range to whole dimensions


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of `dim` numbers per head."""

    dim: int
    theta: float
    interleaved: bool  # pairs are (0, 1), (2, 3), ...; else (0, dim / 2), (1, dim / 2 + 1), ...
    linear_factor: float = 1.0  # positions are divided by it
    yarn: YarnSpec | None = None


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Multi-head latent attention: one latent and one rotary key per token, shared by all heads."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float  # of the scores, YaRN's mscale included
    lora_norm_eps: float

    @property
    def latent_dim(self) -> int:
        """Numbers stored per token and layer."""
        return self.kv_lora_rank + self.rope_dim

    def kv_shape(self, num_layers: int, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return (num_layers, num_blocks, block_size, self.latent_dim)


@dataclass(frozen=True, slots=True)
class GqaSpec:
    """Grouped-query attention with RMS-normed queries and keys."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float

    def kv_shape(self, num_layers: int, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return (num_layers, 2, num_blocks, block_size, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How a token chooses its experts."""

    scoring: Literal["softmax", "sigmoid"]  # sigmoid adds a learned bias to the choice, not to the weights
    top_k: int
    num_groups: int  # 1 = no groups
    topk_groups: int  # groups a token may choose from
    normalize: bool  # weights of the chosen experts sum to 1
    weight_scale: float


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """The routed and the shared experts of a sparse layer."""

    num_experts: int
    intermediate_size: int  # of one expert
    shared_size: int  # of all shared experts together, 0 = none
    router: RouterSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder-only model."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the dense layers
    num_layers: int
    norm_eps: float
    max_position: int  # positions the rotary table covers: the longest context
    tied_embeddings: bool
    attention: MlaSpec | GqaSpec
    rope: RopeSpec
    moe: MoeSpec | None
    moe_layers: tuple[bool, ...]  # [num_layers]
    num_mtp: int  # multi-token-prediction modules behind the last layer
    dtype: torch.dtype  # the checkpoint's own
    fp8_block: tuple[int, int] | None  # rows, columns of one scale; None = not quantised
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def kv_shape(self, num_blocks: int, block_size: int, *, mtp: bool = False) -> tuple[int, ...]:
        """Shape of the pool: MLA [L, blocks, block_size, latent]; GQA [L, 2, blocks, block_size, Hkv, D].

        With `mtp` the L also counts the MTP modules' own layers, behind the others.
        """
        layers = self.num_layers + (self.num_mtp if mtp else 0)
        return self.attention.kv_shape(layers, num_blocks, block_size)

    def kv_bytes_per_block(self, block_size: int, dtype: torch.dtype, *, mtp: bool = False) -> int:
        """Bytes that one block takes in all layers together."""
        return math.prod(self.kv_shape(1, block_size, mtp=mtp)) * dtype.itemsize
