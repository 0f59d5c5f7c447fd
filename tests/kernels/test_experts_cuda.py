"""The device kernels of routed experts: the sort, and every path by tokens and weight format."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.experts import ExpertWeights, experts
from headrace.kernels.fp8_block import Fp8Weight, fp8_weight
from tests.kernels.close import assert_close
from tests.kernels.shapes import normal

Stack = Tensor | Fp8Weight


def widen(weight: Stack, expert: int) -> Tensor:
    return (
        weight[expert].dequantize(torch.float32) if isinstance(weight, Fp8Weight) else weight[expert].float()
    )


def by_expert(
    x: Tensor, gate_up: Stack, down: Stack, ids: Tensor, scales: Tensor, base: Tensor | None
) -> Tensor:
    """The sum in float32, one expert at a time: `experts_ref` for sizes where its loop over tokens takes long."""
    out = torch.zeros_like(x, dtype=torch.float32) if base is None else base.float().clone()
    for expert in range(gate_up.shape[0]):
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[rows].float() @ widen(gate_up, expert).T).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * up
        out.index_add_(0, rows, scales[rows, slots].unsqueeze(1) * (hidden @ widen(down, expert).T))
    return out


def make(
    T: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, *, fp8: bool
) -> tuple[Tensor, Stack, Stack, Tensor, Tensor, Tensor]:
    E, K, D, F = shape
    gate_up: Stack = normal(E, 2 * F, D, dtype=dtype, device=device, scale=D**-0.5)
    down: Stack = normal(E, D, F, dtype=dtype, device=device, scale=F**-0.5)
    if fp8:
        gate_up, down = fp8_weight(gate_up), fp8_weight(down)  # type: ignore[arg-type]
    scales, ids = torch.rand(T, E, device=device).topk(K, -1)
    base = normal(T, D, dtype=dtype, device=device)
    return normal(T, D, dtype=dtype, device=device), gate_up, down, ids, scales, base


@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "block"), [(1, 4, 2, 16), (50, 10, 3, 16), (200, 10, 3, 16)]
)
def test_sort_puts_each_pair_once_into_a_tile_of_its_expert(
    tokens: int, num_experts: int, top_k: int, block: int, device: torch.device
) -> None:
    check_sort(tokens, num_experts, top_k, block, device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "block"),
    [
        (1, 128, 8, 16),
        (7, 64, 6, 16),
        (129, 128, 8, 32),
        (1000, 256, 8, 64),
        (4096, 128, 8, 128),
        (16384, 128, 8, 64),
    ],
)
def test_sort_on_the_card(
    tokens: int, num_experts: int, top_k: int, block: int, device: torch.device
) -> None:
    check_sort(tokens, num_experts, top_k, block, device)


def check_sort(tokens: int, num_experts: int, top_k: int, block: int, device: torch.device) -> None:
    from headrace.kernels.expert_sort import launch_expert_sort

    ids = torch.rand(tokens, num_experts, device=device).topk(top_k, -1)[1]
    order = launch_expert_sort(ids, num_experts, block, one_launch=4096 if ids.is_cuda else 200)
    count, total = int(order.num_tiles), ids.numel()
    pairs = order.pairs.view(-1, block)[:count].cpu()
    flat = ids.flatten().cpu()
    assert count <= order.max_tiles
    assert sorted(pairs[pairs < total].tolist()) == list(range(total))
    for expert, tile in zip(order.tile_experts[:count].tolist(), pairs, strict=True):
        assert set(flat[tile[tile < total].long()].tolist()) == {expert}
        assert set(tile[tile >= total].tolist()) <= {total}


@pytest.mark.parametrize("shape", [(5, 3, 72, 40), (5, 3, 256, 128)], ids=str)
def test_one_token(shape: tuple[int, int, int, int], device: torch.device) -> None:
    from headrace.kernels.experts_one import launch_experts_one

    x, gate_up, down, ids, scales, base = make(1, shape, torch.float32, device, fp8=False)
    assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)
    expected = by_expert(x, gate_up, down, ids, scales, base)
    assert_close("sum", launch_experts_one(x, gate_up, down, ids, scales, base, blocks=(32, 64)), expected)


def test_tiles_of_few_tokens(device: torch.device) -> None:
    from headrace.kernels.experts_cuda import ExpertsTuning, experts_cuda
    from headrace.kernels.experts_tiles import TileTuning

    args = make(9, (5, 3, 256, 128), torch.float32, device, fp8=False)
    tile = TileTuning(block_n=64, block_k=128, num_warps=4, num_stages=2)
    expected = by_expert(*args)
    assert_close("sum", experts_cuda(*args, tuning=ExpertsTuning(16, tile, tile)), expected)


@pytest.mark.parametrize("shape", [(3, 2, 72, 40), (5, 3, 64, 96)], ids=str)
def test_full_tiles(shape: tuple[int, int, int, int], device: torch.device) -> None:
    """Also where neither inputs nor outputs fill their blocks."""
    from headrace.kernels.experts_cuda import ExpertsTuning, experts_cuda
    from headrace.kernels.experts_tiles import TileTuning

    args = make(70, shape, torch.float16, device, fp8=False)
    tile = TileTuning(block_n=32, block_k=32, num_warps=4, num_stages=2)
    expected = by_expert(*args)
    out = experts_cuda(*args, tuning=ExpertsTuning(128, tile, tile, copies=True))
    assert_close("sum", out.float(), expected, torch.float16)


def test_fp8_tiles_of_few_tokens(device: torch.device) -> None:
    from headrace.kernels.experts_cuda import experts_cuda

    args = make(9, (5, 3, 256, 128), torch.float32, device, fp8=True)
    expected = by_expert(*args)
    # Triton's interpreter cuts where a card rounds: twice the error.
    error = float((experts_cuda(*args) - expected).norm() / expected.norm())
    assert error < (0.05 if args[0].is_cuda else 0.1)


def test_fp8_rows_times_fp8_weights(device: torch.device) -> None:
    """The product is exact for the rounded rows; how rows are rounded is the card's affair."""
    from headrace.kernels.fp8_tiles import Fp8Tuning, launch_fp8_tiles, launch_quantize_rows

    x = normal(9, 136, dtype=torch.float32, device=device)
    weight = fp8_weight(normal(140, 136, dtype=torch.float32, device=device))
    rows = launch_quantize_rows(x)
    widened = rows.values.float() * rows.scales.repeat_interleave(128, 1)[:, :136]
    # Triton's interpreter cuts where a card rounds: twice the error.
    assert float((widened - x).norm() / x.norm()) < (0.03 if x.is_cuda else 0.06)
    found = launch_fp8_tiles(rows, weight, torch.float32, tuning=Fp8Tuning(64, 32, 4, 2))
    # A card's tensor cores keep some 14 bits of a sum of fp8 products.
    allowed = torch.float16 if x.is_cuda else torch.float32
    assert_close("product", found, widened @ weight.dequantize(torch.float32).T, allowed)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("shape", [(128, 8, 2048, 768), (64, 6, 2048, 1408)], ids=["qwen3", "v2-lite"])
def test_experts_on_the_card(shape: tuple[int, int, int, int], fp8: bool, device: torch.device) -> None:
    _, gate_up, down, *_ = make(1, shape, torch.bfloat16, device, fp8=fp8)
    weights = ExpertWeights(gate_up, down)
    E, K, D, _ = shape
    for tokens in (1, 7, 63, 129, 256, 1000, 4096):
        scales, ids = torch.rand(tokens, E, device=device).topk(K, -1)
        x = normal(tokens, D, dtype=torch.bfloat16, device=device)
        base = normal(tokens, D, dtype=torch.bfloat16, device=device) if tokens % 2 else None
        expected = by_expert(x, gate_up, down, ids, scales, base)
        dtype = torch.float8_e4m3fn if fp8 and tokens > 1 else torch.bfloat16
        assert_close(f"{tokens}", experts(x, weights, ids, scales, base), expected, dtype)
