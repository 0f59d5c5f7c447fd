"""The operators for torch.compile: what they say of themselves (shapes, what they write) is what they do."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from headrace.kernels.attention_plan import AttentionPlan
from headrace.kernels.fp8_block import Fp8Weight, fp8_weight
from tests.kernels.paged import ragged_plan
from tests.kernels.shapes import normal, rotations

T, D = 5, 64


@pytest.fixture
def ops() -> Any:
    from headrace.kernels.custom_ops import ops

    return ops


def numbers(*shape: int) -> Tensor:
    return normal(*shape, dtype=torch.float32, device=torch.device("cpu"))


def calls() -> dict[str, tuple[object, ...]]:
    """Arguments of each operator that runs on a CPU."""
    rotation = torch.view_as_real(rotations(T, 8, torch.device("cpu"))).clone()
    slots = torch.randperm(64)[:T]
    return {
        "norm_linear": (numbers(T, D), numbers(D), 1e-6, [numbers(40, D)]),
        "linear": (numbers(T, D), [numbers(40, D)]),
        "linear_add": (numbers(T, D), [numbers(40, D)], numbers(T, 40)),
        "silu_mul": (numbers(T, 2 * D),),
        "qk_norm_rope_kv_write": (
            numbers(T, 8 * 16),
            numbers(16),
            numbers(16),
            1e-6,
            rotation,
            slots,
            numbers(2, 4, 16, 2, 16),
            False,
        ),
        "norm_route": (numbers(T, D), numbers(D), 1e-6, numbers(8, D), None, 3, 1, 1, True, 1.0, 2),
    }


@pytest.mark.parametrize("name", calls())
def test_an_operator_is_what_it_says(name: str, ops: Any) -> None:
    """By torch's own check: what it writes, and shapes without computing."""
    checks = ("test_schema", "test_faketensor")
    opcheck(getattr(ops, name).default, calls()[name], test_utils=checks)


def test_a_plan_comes_back_as_it_went(ops: Any) -> None:
    """Its tensors are a little longer, so that no size is 0 or 1."""
    from headrace.kernels.custom_ops import _plan, plan_tensors

    plan, _ = ragged_plan([1, 1, 37, 17], [9, 270, 37, 50], torch.device("cpu"), num_decodes=2)
    parts = plan_tensors(plan)
    assert all(min(part.shape) > 1 for part in parts)
    back = _plan(parts)
    assert isinstance(back, AttentionPlan) and back.paged is not None and plan.paged is not None
    assert torch.equal(back.block_tables[:4, :-1], plan.block_tables)
    assert torch.equal(back.paged.long_starts[:2], plan.paged.long_starts)
    for name in ("num_short", "short_len", "num_long", "long_len", "capacity", "long_context", "split_size"):
        assert getattr(back.paged, name) == getattr(plan.paged, name), name


def test_an_fp8_weight_comes_back_as_it_went(ops: Any) -> None:
    from headrace.kernels.custom_ops import _weight, weight_tensors

    weight = fp8_weight(numbers(128, 128))
    back = _weight(weight_tensors(weight))
    assert isinstance(back, Fp8Weight)
    assert torch.equal(back.dequantize(torch.float32), weight.dequantize(torch.float32))
