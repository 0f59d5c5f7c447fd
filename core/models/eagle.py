"""An EAGLE head (arXiv 2401.15077, 2406.16858): one Llama layer that guesses the model's next feature.

A feature is the hidden state behind the model's final norm, so the model's own output head reads the guess as it
is. Shares embedding, norm and head with the model. Implements core/models/base.py's MtpHead.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.core.batch import Batch
from headrace.core.model_spec import GqaSpec, ModelSpec, RopeSpec
from headrace.core.models.ffn import DenseFfn, build_dense
from headrace.core.models.step import Step, begin_step
from headrace.core.tensor_source import TensorSource, take, take_norm, take_product, take_rows
from headrace.kernels.fp8_block import Fp8Weight
from headrace.kernels.gqa_attention import gqa_attention
from headrace.kernels.linear import linear, linear_add
from headrace.kernels.rms_norm import NormWeight, rms_norm
from headrace.kernels.rope import rope


@dataclass(frozen=True, slots=True)
class EagleSpec:
    """What a head's config.json says."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    attention: GqaSpec
    rope: RopeSpec
    bias: bool  # of the layer that joins embedding and feature
    qkv_bias: bool


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """A Llama layer without its first norm, and what feeds it. Hq query heads, Hkv key-value heads of D numbers."""

    spec: EagleSpec
    join: Tensor  # [hidden, 2 hidden]: of [embedding of the next token; feature]
    join_bias: Tensor | None  # [hidden]
    qkv: Tensor | Fp8Weight  # [(Hq + 2 Hkv) * D, hidden]
    qkv_bias: Tensor | None
    out: Tensor | Fp8Weight  # [hidden, Hq * D]
    post_norm: NormWeight  # [hidden]
    ffn: DenseFfn

    def __call__(self, residual: Tensor, step: Step, cache: Tensor) -> None:
        """Update `residual` [T, hidden] in place, and the layer's cache [2, blocks, block_size, Hkv, D]."""
        attention, rotary = self.spec.attention, self.spec.rope
        qkv = linear(residual, self.qkv)
        if self.qkv_bias is not None:
            qkv = qkv + self.qkv_bias
        heads = qkv.view(len(qkv), -1, attention.head_dim)
        q, k, v = heads.split((attention.num_heads, attention.num_kv_heads, attention.num_kv_heads), 1)
        rows = cache.view(2, -1, attention.num_kv_heads, attention.head_dim)
        rows[0].index_copy_(0, step.slots, rope(k, step.rotation, rotary.interleaved))
        rows[1].index_copy_(0, step.slots, v)
        q = rope(q, step.rotation, rotary.interleaved)
        linear_add(gqa_attention(q, cache, step.plan, attention.scale), self.out, residual)
        self.ffn(residual, self.post_norm)


class Eagle:
    """The head of one model.

    Args:
        model: the model's own numbers; the pool's layer behind its last one is the head's.
        weights: of the head.
        embedding, norm, head: the model's.
        rope_table: of the head's rotary embedding, for every position of the model.
    """

    def __init__(
        self,
        model: ModelSpec,
        weights: EagleWeights,
        *,
        embedding: Tensor,
        norm: NormWeight,
        head: Tensor,
        rope_table: Tensor,
    ) -> None:
        self._model = model
        self._weights = weights
        self._embedding = embedding
        self._norm = norm
        self._head = head
        self._rope_table = rope_table

    @property
    def num_modules(self) -> int:
        return 1

    @torch.inference_mode()
    def features(self, hidden: Tensor) -> Tensor:
        """See MtpHead.features."""
        return rms_norm(hidden, self._norm)

    @torch.inference_mode()
    def forward(self, batch: Batch, hidden: Tensor, kv: Tensor, *, module: int = 0) -> Tensor:
        """See MtpHead.forward."""
        assert module == 0
        weights = self._weights
        step = begin_step(batch, kv, self._rope_table, self._model)
        embedded = self._embedding.index_select(0, batch.token_ids)
        residual = linear(torch.cat((embedded, hidden), -1), weights.join)
        if weights.join_bias is not None:
            residual = residual.add_(weights.join_bias)
        weights(residual, step, kv[self._model.num_layers])
        return residual

    @torch.inference_mode()
    def logits(self, hidden: Tensor, *, module: int = 0) -> Tensor:
        """See MtpHead.logits."""
        return linear(hidden, self._head).float()


def build_eagle(source: TensorSource, spec: EagleSpec) -> EagleWeights:
    """Ask `source` for a head's tensors, by the names of the published ones."""
    hidden, attention, layer = spec.hidden_size, spec.attention, "layers.0."
    q_rows, kv_rows = (n * attention.head_dim for n in (attention.num_heads, attention.num_kv_heads))
    parts = (("q", q_rows), ("k", kv_rows), ("v", kv_rows))
    qkv = tuple((f"{layer}self_attn.{name}_proj.weight", rows) for name, rows in parts)
    qkv_bias = None
    if spec.qkv_bias:
        qkv_bias = source.empty(q_rows + 2 * kv_rows)
        for (name, _), piece in zip(parts, qkv_bias.split([rows for _, rows in parts]), strict=True):
            source.fill(f"{layer}self_attn.{name}_proj.bias", piece)
    return EagleWeights(
        spec=spec,
        join=take(source, "fc.weight", hidden, 2 * hidden),
        join_bias=take(source, "fc.bias", hidden) if spec.bias else None,
        qkv=take_rows(source, qkv, hidden),
        qkv_bias=qkv_bias,
        out=take_product(source, f"{layer}self_attn.o_proj.weight", hidden, q_rows),
        post_norm=take_norm(source, f"{layer}post_attention_layernorm.weight", hidden, spec.norm_eps),
        ffn=build_dense(source, f"{layer}mlp.", hidden, spec.intermediate_size),
    )
