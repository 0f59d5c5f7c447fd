"""The decoder-only model of every supported family. Implements core/models/base.py's Model.

Knows no checkpoint format: `build_decoder` asks a TensorSource for Hugging Face's tensor names.
"""

import torch
from torch import Tensor

from headrace.core.batch import Batch
from headrace.core.model_spec import ModelSpec
from headrace.core.models.base import MtpHead
from headrace.core.models.layer import Layer, build_layer
from headrace.core.models.mtp import Mtp, build_mtp_module
from headrace.core.models.rope_table import rope_table
from headrace.core.models.step import begin_step
from headrace.core.tensor_source import TensorSource, take, take_norm
from headrace.kernels.linear import linear
from headrace.kernels.rms_norm import NormWeight, rms_norm


class Decoder:
    """Embedding, layers, final norm, output head."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        embedding: Tensor,
        layers: tuple[Layer, ...],
        norm: NormWeight,
        head: Tensor,
        rope_table: Tensor,
        mtp: Mtp | None,
    ) -> None:
        self.spec = spec
        self.layers = layers
        self.mtp: MtpHead | None = mtp
        self.embedding = embedding
        self.norm = norm
        self.head = head
        self.rope_table = rope_table

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def kv_shape(self, num_blocks: int, block_size: int, *, mtp: bool = False) -> tuple[int, ...]:
        return self.spec.kv_shape(num_blocks, block_size, mtp=mtp)

    def kv_bytes_per_block(self, block_size: int, dtype: torch.dtype, *, mtp: bool = False) -> int:
        return self.spec.kv_bytes_per_block(block_size, dtype, mtp=mtp)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: Tensor) -> Tensor:
        """See Model.forward."""
        step = begin_step(batch, kv, self.rope_table, self.spec)
        residual = self.embedding.index_select(0, batch.token_ids)
        # The pool may hold the MTP modules' layers behind the model's own.
        caches = kv[: len(self.layers)].unbind(0)
        for layer, cache in zip(self.layers, caches, strict=True):
            layer(residual, step, cache)
        return residual

    @torch.inference_mode()
    def forward_rows(self, batch: Batch, kv: Tensor, rows: Tensor) -> Tensor:
        """See Model.forward_rows."""
        step = begin_step(batch, kv, self.rope_table, self.spec)
        residual = self.embedding.index_select(0, batch.token_ids)
        caches = kv[: len(self.layers)].unbind(0)
        for layer, cache in zip(self.layers[:-1], caches[:-1], strict=True):
            layer(residual, step, cache)
        return self.layers[-1].on_rows(residual, step, caches[-1], rows)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See Model.logits."""
        return linear(rms_norm(hidden, self.norm), self.head).float()


def build_decoder(spec: ModelSpec, source: TensorSource, device: torch.device) -> Decoder:
    """Ask `source` for every weight of the model."""
    embedding = take(source, "model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    layers = tuple(
        build_layer(source, f"model.layers.{i}.", spec, sparse=sparse)
        for i, sparse in enumerate(spec.moe_layers)
    )
    norm = take_norm(source, "model.norm.weight", spec.hidden_size, spec.norm_eps)
    head = embedding
    if not spec.tied_embeddings:
        head = take(source, "lm_head.weight", spec.vocab_size, spec.hidden_size)
    modules = tuple(
        build_mtp_module(source, f"model.layers.{spec.num_layers + i}.", spec) for i in range(spec.num_mtp)
    )
    table = rope_table(spec.rope, spec.max_position, device)
    return Decoder(
        spec,
        embedding=embedding,
        layers=layers,
        norm=norm,
        head=head,
        rope_table=table,
        mtp=Mtp(spec, modules, embedding, head, table) if modules else None,
    )
