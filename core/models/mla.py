"""Multi-head latent attention (arXiv 2405.04434, 2.1) over a cache of latents and rotary keys.

Called by the decoder layer; built from `...self_attn.` tensors of DeepSeek-V2 and -V3.
"""

from dataclasses import dataclass

from torch import Tensor

from headrace.core.model_spec import MlaSpec, RopeSpec
from headrace.core.models.step import Step
from headrace.core.tensor_source import TensorSource, take, take_norm, take_product, take_rows
from headrace.kernels.fp8_block import Fp8Weight
from headrace.kernels.linear import linear_add, norm_linear
from headrace.kernels.mla_attend import MlaUp, mla_attend
from headrace.kernels.mla_kv_write import mla_kv_write
from headrace.kernels.rms_norm import NormWeight


@dataclass(frozen=True, slots=True)
class MlaAttention:
    """Weights of one layer. H heads, N without and R with position, latent C, values V."""

    spec: MlaSpec
    interleaved: bool
    down: (
        Tensor | Fp8Weight
    )  # [Q + C + R, D]: queries (Q = H * (N + R)) or their latent (Q = q_lora_rank), then kv_a
    q_norm: NormWeight | None  # [Q] of the queries' latent
    q_up: Tensor | Fp8Weight | None  # [H * (N + R), Q]
    kv_norm: NormWeight  # [C]
    up: MlaUp
    out: Tensor | Fp8Weight  # [D, H * V]

    def __call__(self, residual: Tensor, norm: NormWeight, step: Step, cache: Tensor) -> None:
        """residual [T, D] += attention of its norm; writes one layer's cache [blocks, block_size, C + R]."""
        s = self.spec
        projected = norm_linear(residual, norm, self.down)
        q, kv_a = projected.split_with_sizes((projected.shape[1] - s.latent_dim, s.latent_dim), 1)
        mla_kv_write(kv_a, self.kv_norm, step.rotation, step.slots, cache, self.interleaved)
        if self.q_norm is not None and self.q_up is not None:
            q = norm_linear(q, self.q_norm, self.q_up)
        q = q.view(-1, s.num_heads, s.nope_dim + s.rope_dim)
        heads = mla_attend(q, cache, self.up, step.rotation, step.plan, s.scale, self.interleaved)
        linear_add(heads, self.out, residual)


def build_mla(source: TensorSource, prefix: str, hidden: int, mla: MlaSpec, rope: RopeSpec) -> MlaAttention:
    """Fill one layer's attention from the tensors below `prefix`."""
    head = mla.nope_dim + mla.rope_dim
    kv_part = (f"{prefix}kv_a_proj_with_mqa.weight", mla.latent_dim)
    q_norm = q_up = None
    if mla.q_lora_rank is None:
        q_part = (f"{prefix}q_proj.weight", mla.num_heads * head)
    else:
        q_part = (f"{prefix}q_a_proj.weight", mla.q_lora_rank)
        q_norm = take_norm(source, f"{prefix}q_a_layernorm.weight", mla.q_lora_rank, mla.lora_norm_eps)
        q_up = take_product(source, f"{prefix}q_b_proj.weight", mla.num_heads * head, mla.q_lora_rank)
    kv_up = take(
        source, f"{prefix}kv_b_proj.weight", mla.num_heads * (mla.nope_dim + mla.v_dim), mla.kv_lora_rank
    )
    by_head = kv_up.view(mla.num_heads, -1, mla.kv_lora_rank)
    return MlaAttention(
        spec=mla,
        interleaved=rope.interleaved,
        down=take_rows(source, (q_part, kv_part), hidden),
        q_norm=q_norm,
        q_up=q_up,
        kv_norm=take_norm(source, f"{prefix}kv_a_layernorm.weight", mla.kv_lora_rank, mla.lora_norm_eps),
        up=MlaUp(
            key=by_head[:, : mla.nope_dim].contiguous(),
            value=by_head[:, mla.nope_dim :].transpose(1, 2).contiguous(),
            both=kv_up,
        ),
        out=take_product(source, f"{prefix}o_proj.weight", hidden, mla.num_heads * mla.v_dim),
    )
