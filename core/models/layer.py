"""One decoder layer: norm, attention, norm, feed-forward, with the residual carried beside.

Called by the decoder and the MTP head.
"""

from dataclasses import dataclass

from torch import Tensor

from headrace.core.model_spec import MlaSpec, ModelSpec
from headrace.core.models.ffn import DenseFfn, SparseFfn, build_ffn
from headrace.core.models.gqa import GqaAttention, build_gqa
from headrace.core.models.mla import MlaAttention, build_mla
from headrace.core.models.step import Step
from headrace.core.tensor_source import TensorSource, take
from headrace.kernels.rms_norm import add_rms_norm, rms_norm


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer. A sublayer's output is added where the next norm reads: one operation for both."""

    norm_eps: float
    input_norm: Tensor  # [D]
    attention: MlaAttention | GqaAttention
    post_norm: Tensor  # [D]
    ffn: DenseFfn | SparseFfn

    def __call__(self, residual: Tensor, pending: Tensor | None, step: Step, cache: Tensor) -> Tensor:
        """Run the layer.

        Args:
            residual: [T, D], updated in place.
            pending: [T, D] not yet added to the residual, from the layer before.
            cache: this layer's part of the KV pool, written.

        Returns:
            [T, D] pending: the residual still lacks it.
        """
        if pending is None:
            x = rms_norm(residual, self.input_norm, self.norm_eps)
        else:
            x = add_rms_norm(pending, residual, self.input_norm, self.norm_eps)
        x = add_rms_norm(self.attention(x, step, cache), residual, self.post_norm, self.norm_eps)
        return self.ffn(x)


def build_layer(source: TensorSource, prefix: str, spec: ModelSpec, *, sparse: bool) -> Layer:
    """Fill one layer from the tensors below `prefix`."""
    hidden, attention = spec.hidden_size, f"{prefix}self_attn."
    return Layer(
        norm_eps=spec.norm_eps,
        input_norm=take(source, f"{prefix}input_layernorm.weight", hidden),
        attention=(
            build_mla(source, attention, hidden, spec.attention, spec.rope)
            if isinstance(spec.attention, MlaSpec)
            else build_gqa(source, attention, hidden, spec.attention, spec.rope, spec.norm_eps)
        ),
        post_norm=take(source, f"{prefix}post_attention_layernorm.weight", hidden),
        ffn=build_ffn(source, f"{prefix}mlp.", spec, sparse=sparse),
    )
