"""Multi-token prediction of DeepSeek-V3 (arXiv 2412.19437, 2.2): drafts the token after next.

Shares embedding and output head with its model. Implements core/models/base.py's MtpHead.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.core.batch import Batch
from headrace.core.model_spec import ModelSpec
from headrace.core.models.layer import Layer, build_layer
from headrace.core.models.step import begin_step
from headrace.core.tensor_source import TensorSource, take_norm, take_product
from headrace.kernels.fp8_block import Fp8Weight
from headrace.kernels.linear import linear
from headrace.kernels.rms_norm import NormWeight, rms_norm


@dataclass(frozen=True, slots=True)
class MtpModule:
    """Weights of one depth."""

    embedding_norm: NormWeight  # [D]
    hidden_norm: NormWeight  # [D]
    project: Tensor | Fp8Weight  # [D, 2D]: of [normed embedding; normed hidden state]
    layer: Layer
    norm: NormWeight  # [D], before the shared head


class Mtp:
    """The modules, and what they share with the model."""

    def __init__(
        self,
        spec: ModelSpec,
        modules: tuple[MtpModule, ...],
        embedding: Tensor,
        head: Tensor,
        rope_table: Tensor,
    ) -> None:
        self.modules = modules
        self._spec = spec
        self._embedding = embedding
        self._head = head
        self._rope_table = rope_table

    @property
    def num_modules(self) -> int:
        return len(self.modules)

    def features(self, hidden: Tensor) -> Tensor:
        """See MtpHead.features: a module norms its input itself."""
        return hidden

    @torch.inference_mode()
    def forward(self, batch: Batch, hidden: Tensor, kv: Tensor, *, module: int = 0) -> Tensor:
        """See MtpHead.forward."""
        weights = self.modules[module]
        step = begin_step(batch, kv, self._rope_table, self._spec)
        embedded = self._embedding.index_select(0, batch.token_ids)
        pair = (rms_norm(embedded, weights.embedding_norm), rms_norm(hidden, weights.hidden_norm))
        residual = linear(torch.cat(pair, -1), weights.project)
        weights.layer(residual, step, kv[self._spec.num_layers + module])
        return residual

    @torch.inference_mode()
    def logits(self, hidden: Tensor, *, module: int = 0) -> Tensor:
        """See MtpHead.logits."""
        normed = rms_norm(hidden, self.modules[module].norm)
        return linear(normed, self._head).float()


def build_mtp_module(source: TensorSource, prefix: str, spec: ModelSpec) -> MtpModule:
    """Fill one depth from the tensors below `prefix`."""
    hidden = spec.hidden_size
    return MtpModule(
        embedding_norm=take_norm(source, f"{prefix}enorm.weight", hidden, spec.norm_eps),
        hidden_norm=take_norm(source, f"{prefix}hnorm.weight", hidden, spec.norm_eps),
        project=take_product(source, f"{prefix}eh_proj.weight", hidden, 2 * hidden),
        layer=build_layer(source, prefix, spec, sparse=spec.moe is not None),
        norm=take_norm(source, f"{prefix}shared_head.norm.weight", hidden, spec.norm_eps),
    )
