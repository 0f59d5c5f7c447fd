"""One decoder layer: norm, attention, norm, feed-forward, each added to the residual.

Called by the decoder and the MTP head.
"""

from dataclasses import dataclass

from torch import Tensor

from headrace.core.model_spec import MlaSpec, ModelSpec
from headrace.core.models.ffn import DenseFfn, SparseFfn, build_ffn
from headrace.core.models.gqa import GqaAttention, build_gqa
from headrace.core.models.mla import MlaAttention, build_mla
from headrace.core.models.step import Step
from headrace.core.tensor_source import TensorSource, take_norm
from headrace.kernels.rms_norm import NormWeight


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer. Each sublayer norms the residual itself and adds its output: few launches."""

    input_norm: NormWeight  # [D]
    attention: MlaAttention | GqaAttention
    post_norm: NormWeight  # [D]
    ffn: DenseFfn | SparseFfn

    def __call__(self, residual: Tensor, step: Step, cache: Tensor) -> None:
        """Update `residual` [T, D] in place, and this layer's part of the KV pool."""
        self.attention(residual, self.input_norm, step, cache)
        self.ffn(residual, self.post_norm)

    def on_rows(self, residual: Tensor, step: Step, cache: Tensor, rows: Tensor) -> Tensor:
        """The same as the last layer, for [S] of the tokens: all write their keys, only these go on. Returns [S, D]."""
        self.attention(residual, self.input_norm, step, cache)
        chosen = residual.index_select(0, rows)
        self.ffn(chosen, self.post_norm)
        return chosen


def build_layer(source: TensorSource, prefix: str, spec: ModelSpec, *, sparse: bool) -> Layer:
    """Fill one layer from the tensors below `prefix`."""
    hidden, attention = spec.hidden_size, f"{prefix}self_attn."
    return Layer(
        input_norm=take_norm(source, f"{prefix}input_layernorm.weight", hidden, spec.norm_eps),
        attention=(
            build_mla(source, attention, hidden, spec.attention, spec.rope)
            if isinstance(spec.attention, MlaSpec)
            else build_gqa(source, attention, hidden, spec.attention, spec.rope, spec.norm_eps)
        ),
        post_norm=take_norm(source, f"{prefix}post_attention_layernorm.weight", hidden, spec.norm_eps),
        ffn=build_ffn(source, f"{prefix}mlp.", spec, sparse=sparse),
    )
