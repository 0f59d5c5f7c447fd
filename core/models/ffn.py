"""The second half of a decoder layer: a dense SwiGLU, or routed and shared experts.

Called by the decoder layer with the residual [T, D] and its norm; built from `...mlp.` tensors.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.core.model_spec import ModelSpec, MoeSpec, RouterSpec
from headrace.core.models.shared_experts import stack_shared
from headrace.core.tensor_source import TensorSource, in_blocks, rows_of, take, take_product, take_rows
from headrace.kernels.experts import ExpertWeights, experts
from headrace.kernels.fp8_block import Fp8Weight
from headrace.kernels.linear import linear, linear_add, norm_linear
from headrace.kernels.rms_norm import NormWeight
from headrace.kernels.route import norm_route
from headrace.kernels.silu_mul import silu_mul

# Up to which shared experts ride with the routed ones; then a product of their own is faster.
STACKED_TOKENS = 128


@dataclass(frozen=True, slots=True)
class DenseFfn:
    """residual += down(SiLU(gate(x)) * up(x)) of the normed residual x."""

    gate_up: Tensor | Fp8Weight  # [2F, D]
    down: Tensor | Fp8Weight  # [D, F]

    def __call__(self, residual: Tensor, norm: NormWeight) -> None:
        linear_add(silu_mul(norm_linear(residual, norm, self.gate_up)), self.down, residual)

    def add(self, x: Tensor, residual: Tensor) -> None:
        """The same for an x that is normed already."""
        linear_add(silu_mul(linear(x, self.gate_up)), self.down, residual)


@dataclass(frozen=True, slots=True)
class SparseFfn:
    """The router's experts, plus the shared ones that every token takes."""

    router: RouterSpec
    gate: Tensor  # [E, D] float32
    bias: Tensor | None  # [E] float32, of sigmoid routers
    routed: (
        ExpertWeights  # of E experts; on a card followed by the shared ones, if those are of the same kind
    )
    shared: tuple[DenseFfn, ...]  # views of the stack where it holds them

    def __call__(self, residual: Tensor, norm: NormWeight) -> None:
        r = self.router
        stacked = self.routed.gate_up.shape[0] - self.gate.shape[0]
        if residual.shape[0] > STACKED_TOKENS:
            stacked = 0
        x, ids, scales = norm_route(
            residual,
            norm,
            self.gate,
            self.bias,
            r.top_k,
            r.num_groups,
            r.topk_groups,
            r.normalize,
            r.weight_scale,
            stacked,
        )
        if not stacked:
            for expert in self.shared:
                expert.add(x, residual)
        experts(x, self.routed, ids, scales, residual)


def build_dense(source: TensorSource, prefix: str, hidden: int, size: int) -> DenseFfn:
    parts = ((f"{prefix}gate_proj.weight", size), (f"{prefix}up_proj.weight", size))
    down = take_product(source, f"{prefix}down_proj.weight", hidden, size)
    return DenseFfn(take_rows(source, parts, hidden), down)


def build_sparse(source: TensorSource, prefix: str, hidden: int, moe: MoeSpec) -> SparseFfn:
    gate = take(source, f"{prefix}gate.weight", moe.num_experts, hidden, dtype=torch.float32)
    bias = None
    if moe.router.scoring == "sigmoid":
        name = f"{prefix}gate.e_score_correction_bias"
        bias = take(source, name, moe.num_experts, dtype=torch.float32)
    shared: tuple[DenseFfn, ...] = ()
    if moe.shared_size:
        shared = (build_dense(source, f"{prefix}shared_experts.", hidden, moe.shared_size),)
    more = moe.shared_size // moe.intermediate_size
    if not gate.is_cuda or moe.shared_size % moe.intermediate_size:
        more = 0
    gate_up, down = _build_experts(source, prefix, hidden, moe, more)
    if more:
        shared = tuple(
            DenseFfn(*pair) for pair in stack_shared(gate_up, down, shared[0].gate_up, shared[0].down)
        )
    return SparseFfn(moe.router, gate, bias, ExpertWeights(gate_up, down), shared)


def build_ffn(source: TensorSource, prefix: str, spec: ModelSpec, *, sparse: bool) -> DenseFfn | SparseFfn:
    if not sparse:
        return build_dense(source, prefix, spec.hidden_size, spec.intermediate_size)
    assert spec.moe is not None, "a sparse layer in a model without experts"
    return build_sparse(source, prefix, spec.hidden_size, spec.moe)


def _build_experts(
    source: TensorSource, prefix: str, hidden: int, moe: MoeSpec, more: int
) -> tuple[Tensor | Fp8Weight, Tensor | Fp8Weight]:
    """gate_up and down of the routed experts, with room for `more` behind them."""
    size, count = moe.intermediate_size, moe.num_experts
    ups = tuple(f"{prefix}experts.{i}.{half}_proj.weight" for i in range(count) for half in ("gate", "up"))
    downs = tuple(f"{prefix}experts.{i}.down_proj.weight" for i in range(count))
    aligned = in_blocks(hidden, size)
    gate_up = source.product(ups, count + more, 2 * size, hidden, in_blocks=aligned)
    down = source.product(downs, count + more, hidden, size, in_blocks=aligned)
    for expert in range(count):
        source.fill(ups[2 * expert], rows_of(gate_up[expert], 0, size))
        source.fill(ups[2 * expert + 1], rows_of(gate_up[expert], size, 2 * size))
        source.fill(downs[expert], down[expert])
    return gate_up, down
