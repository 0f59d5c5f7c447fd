"""Shared experts that ride with the routed ones give what a SwiGLU of their own gives."""

import pytest
import torch
from torch import Tensor

from headrace.core.model_spec import RouterSpec
from headrace.core.models.ffn import STACKED_TOKENS, DenseFfn, SparseFfn
from headrace.core.models.shared_experts import stack_shared
from headrace.kernels.experts import ExpertWeights
from headrace.kernels.fp8_block import Fp8Weight, empty_fp8_weight, fp8_weight
from headrace.kernels.rms_norm import NormWeight

EXPERTS, SHARED, HIDDEN, SIZE = 5, 2, 256, 128
ROUTER = RouterSpec("softmax", top_k=3, num_groups=1, topk_groups=1, normalize=True, weight_scale=1.0)


def random(*shape: int) -> Tensor:
    scale: float = shape[-1] ** -0.5
    return torch.randn(*shape) * scale


@pytest.mark.parametrize("tokens", [1, 7, STACKED_TOKENS + 1])
def test_stacked_or_apart(tokens: int) -> None:
    torch.manual_seed(tokens)
    gate_up, down = random(EXPERTS + SHARED, 2 * SIZE, HIDDEN), random(EXPERTS + SHARED, HIDDEN, SIZE)
    wide = DenseFfn(random(2 * SHARED * SIZE, HIDDEN), random(HIDDEN, SHARED * SIZE))
    gate, norm = random(EXPERTS, HIDDEN), NormWeight(torch.rand(HIDDEN), 1e-6)
    routed = ExpertWeights(gate_up[:EXPERTS].clone(), down[:EXPERTS].clone())
    apart = SparseFfn(ROUTER, gate, None, routed, (wide,))
    pairs = stack_shared(gate_up, down, wide.gate_up, wide.down)
    views = tuple(DenseFfn(*pair) for pair in pairs)
    stacked = SparseFfn(ROUTER, gate, None, ExpertWeights(gate_up, down), views)
    residual = torch.randn(tokens, HIDDEN)
    expected = residual.clone()
    apart(expected, norm)
    stacked(residual, norm)
    assert torch.allclose(residual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stack_fp8", [True, False], ids=["fp8 stack", "plain stack"])
@pytest.mark.parametrize("shared_fp8", [True, False], ids=["fp8 shared", "plain shared"])
def test_any_format_into_any_other(stack_fp8: bool, shared_fp8: bool) -> None:
    def stack(*shape: int) -> Tensor | Fp8Weight:
        return empty_fp8_weight(*shape, device=torch.device("cpu")) if stack_fp8 else torch.empty(shape)

    wide, narrow = random(2 * SHARED * SIZE, HIDDEN), random(HIDDEN, SHARED * SIZE)
    given = (fp8_weight(wide), fp8_weight(narrow)) if shared_fp8 else (wide, narrow)
    pairs = stack_shared(
        stack(EXPERTS + SHARED, 2 * SIZE, HIDDEN), stack(EXPERTS + SHARED, HIDDEN, SIZE), *given
    )
    gates, ups = wide.view(2, SHARED, SIZE, HIDDEN)
    for i, (gate_up, down) in enumerate(pairs):
        expected = (torch.cat((gates[i], ups[i])), narrow[:, i * SIZE : (i + 1) * SIZE])
        for found, own in zip((gate_up, down), expected, strict=True):
            values = found if isinstance(found, Tensor) else found.dequantize(torch.float32)
            assert float((values - own).norm() / own.norm()) < (0.04 if stack_fp8 or shared_fp8 else 1e-6)
