"""Grouped-query attention with normed queries and keys (Qwen3).

Called by the decoder layer; built from `...self_attn.` tensors.
"""

from dataclasses import dataclass

from torch import Tensor

from headrace.core.model_spec import GqaSpec, RopeSpec
from headrace.core.models.step import Step
from headrace.core.tensor_source import TensorSource, take_norm, take_product, take_rows
from headrace.kernels.fp8_block import Fp8Weight
from headrace.kernels.gqa_attention import gqa_attention
from headrace.kernels.linear import linear_add, norm_linear
from headrace.kernels.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from headrace.kernels.rms_norm import NormWeight


@dataclass(frozen=True, slots=True)
class GqaAttention:
    """Weights of one layer. Hq query heads, Hkv key-value heads of D numbers each."""

    spec: GqaSpec
    interleaved: bool
    qkv: Tensor | Fp8Weight  # [(Hq + 2 Hkv) * D, hidden]
    q_norm: NormWeight  # [D]
    k_norm: NormWeight  # [D]
    out: Tensor | Fp8Weight  # [hidden, Hq * D]

    def __call__(self, residual: Tensor, norm: NormWeight, step: Step, cache: Tensor) -> None:
        """residual [T, hidden] += attention of its norm; writes a cache [2, blocks, block_size, Hkv, D]."""
        q = qk_norm_rope_kv_write(
            norm_linear(residual, norm, self.qkv),
            self.q_norm,
            self.k_norm,
            step.rotation,
            step.slots,
            cache,
            self.interleaved,
        )
        linear_add(gqa_attention(q, cache, step.plan, self.spec.scale), self.out, residual)


def build_gqa(
    source: TensorSource, prefix: str, hidden: int, gqa: GqaSpec, rope: RopeSpec, norm_eps: float
) -> GqaAttention:
    """Fill one layer's attention from the tensors below `prefix`."""
    q_rows, kv_rows = gqa.num_heads * gqa.head_dim, gqa.num_kv_heads * gqa.head_dim
    parts = (
        (f"{prefix}q_proj.weight", q_rows),
        (f"{prefix}k_proj.weight", kv_rows),
        (f"{prefix}v_proj.weight", kv_rows),
    )
    return GqaAttention(
        spec=gqa,
        interleaved=rope.interleaved,
        qkv=take_rows(source, parts, hidden),
        q_norm=take_norm(source, f"{prefix}q_norm.weight", gqa.head_dim, norm_eps),
        k_norm=take_norm(source, f"{prefix}k_norm.weight", gqa.head_dim, norm_eps),
        out=take_product(source, f"{prefix}o_proj.weight", hidden, q_rows),
    )
