"""The kernels of the expert half, and the dense products, at the shapes of Qwen3-30B-A3B and DeepSeek-V2-Lite.

Beside them the vendor's products (cuBLAS through F.linear, grouped_mm) on the same operands. Used by kernels.py.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.core.bench.kernel_case import Call, KernelCase
from headrace.kernels.expert_sort import ExpertOrder, launch_expert_sort
from headrace.kernels.experts import ExpertWeights, experts, experts_ref
from headrace.kernels.experts_cuda import experts_tuning
from headrace.kernels.experts_one import launch_experts_one
from headrace.kernels.experts_tiles import TileTuning, launch_combine, launch_down, launch_gate_up
from headrace.kernels.fp8_block import Fp8Weight
from headrace.kernels.fp8_tiles import Fp8Rows, Fp8Tuning, launch_fp8_tiles
from headrace.kernels.linear import linear, linear_add, norm_linear
from headrace.kernels.linear_one import OneTuning, launch_linear_one
from headrace.kernels.random_uniform import FRACTION_BITS
from headrace.kernels.rms_norm import NormWeight, add_rms_norm
from headrace.kernels.route_softmax import route_softmax
from headrace.kernels.sample import sample
from headrace.kernels.silu_mul import silu_mul

DTYPE = torch.bfloat16
DEVICE = "cuda"
VOCAB = 151936
TOKENS = (1, 8, 64, 256, 4096)


@dataclass(frozen=True, slots=True)
class Moe:
    """One model's sparse layer."""

    name: str
    experts: int
    top_k: int
    hidden: int
    size: int

    def hit(self, tokens: int) -> float:
        """Experts that random choices of so many tokens reach, on average."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** tokens)


QWEN = Moe("qwen3", 128, 8, 2048, 768)
LITE = Moe("v2-lite", 64, 6, 2048, 1408)


def check() -> None:
    """A few tokens through the sparse layer, against the reference's loop."""
    for fp8, tokens in product((False, True), (1, 9)):
        gate_up, down = _stacks(replace(QWEN, experts=16), fp8)
        weights = ExpertWeights(gate_up, down)
        x, (ids, scales) = _random(tokens, 2048), _choice(tokens, 16, 4)
        expected = experts_ref(x.float(), weights, ids, scales, None)
        error = (experts(x, weights, ids, scales, None).float() - expected).norm() / expected.norm()
        # With several tokens fp8 weights meet fp8 activations: 3 bits of mantissa.
        assert error < (5e-2 if fp8 and tokens > 1 else 1e-2), (
            f"experts, {tokens} tokens, fp8 {fp8}: error ratio {error:.1e}"
        )


def cases() -> list[KernelCase]:
    """The operations as they are called."""
    found: list[KernelCase] = []
    for tokens in TOKENS:
        found += _dense(tokens)
        found += [_norm(tokens), _swiglu(tokens), _router(tokens)]
        for moe, fp8 in product((QWEN, LITE), (False, True)):
            found += _sparse(moe, tokens, fp8)
    for rows, mode in product((1, 64, 256), ("greedy", "plain", "top_p", "top_k")):
        found.append(_sample(rows, mode))
    return found


def sweep() -> list[KernelCase]:
    """Other launch choices of the products."""
    found = []
    for n, k, stages in product((2, 4, 8), (512, 1024, 2048), (2, 4)):
        found.append(_one("qkv", 5120, 2048, OneTuning(n, k, 4, stages)))
        found.append(_one("o", 2048, 4096, OneTuning(n, k, 4, stages)))
    pairs = (
        ((4, 1), (4, 4)),
        ((4, 2), (4, 4)),
        ((4, 2), (4, 8)),
        ((4, 4), (4, 8)),
        ((2, 1), (4, 4)),
        ((8, 2), (8, 8)),
    )
    for moe, (blocks, threads) in product((QWEN, LITE), pairs):
        found.append(_experts_one(moe, blocks, threads))
    for tokens, n, stages in product((8, 64, 256, 4096), (64, 128), (4, 6)):
        found.append(_fp8_dense(tokens, 5120, 2048, Fp8Tuning(64, n, 4, stages)))
        found.append(_fp8_sorted(tokens, Fp8Tuning(64, n, 4, stages)))
    for tokens, m, n, k, stages in product((64, 256), (16, 32), (32, 64), (64, 128), (3, 4)):
        found += _parts(QWEN, tokens, m, TileTuning(n, k, 4, stages))
    for m, n, warps, stages in product((64, 128), (64, 128, 256), (4, 8), (3, 4)):
        found += _parts(QWEN, 4096, m, TileTuning(n, 64, warps, stages))
    return found


def _dense(tokens: int) -> list[KernelCase]:
    found = []
    for name, rows, cols in (("qkv", 5120, 2048), ("o", 2048, 4096), ("head", VOCAB, 2048)):
        if name == "head" and tokens > 256:
            continue
        calls: list[tuple[str, int, Callable[[Tensor, Tensor | Fp8Weight], Call]]] = [
            ("cublas", 2, _vendor),
            ("linear", 2, lambda x, w: partial(linear, x, w)),
            ("linear fp8", 1, lambda x, w: partial(linear, x, w)),
        ]
        if name == "qkv":
            calls.append(("norm_linear", 2, lambda x, w: partial(norm_linear, x, _gain(), w)))
        if name == "o":
            calls.append(("linear_add", 2, lambda x, w: partial(linear_add, x, w, _random(len(x), 2048))))
        for kind, size, make in calls:
            moved = rows * cols * size + tokens * (rows + cols) * 2
            build = partial(_dense_calls, make, tokens, rows, cols, size == 1)
            found.append(KernelCase(f"{kind} {name} T={tokens}", moved, 2 * tokens * rows * cols, build))
    return found


def _dense_calls(
    make: Callable[[Tensor, Tensor | Fp8Weight], Call],
    tokens: int,
    rows: int,
    cols: int,
    fp8: bool,
    count: int,
) -> Sequence[Call]:
    return [make(_random(tokens, cols), _weight(rows, cols, fp8)) for _ in range(count)]


def _vendor(x: Tensor, weight: Tensor | Fp8Weight) -> Call:
    assert isinstance(weight, Tensor)
    return partial(F.linear, x, weight)


def _one(label: str, rows: int, cols: int, t: OneTuning) -> KernelCase:
    """As the layer calls them: o added in place."""

    def calls(count: int) -> Sequence[Call]:
        return [
            partial(
                launch_linear_one,
                _random(1, cols),
                _random(rows, cols).mul_(cols**-0.5),
                _random(1, rows) if label == "o" else None,
                t,
            )
            for _ in range(count)
        ]

    name = f"sweep {label} bf16 T=1 n{t.block_n} k{t.block_k} w{t.num_warps} s{t.num_stages}"
    return KernelCase(name, rows * cols * 2, 2 * rows * cols, calls)


def _fp8_dense(tokens: int, rows: int, cols: int, t: Fp8Tuning) -> KernelCase:
    def calls(count: int) -> Sequence[Call]:
        found: list[Call] = []
        for _ in range(count):
            weight = _weight(rows, cols, True)
            assert isinstance(weight, Fp8Weight)
            found.append(partial(launch_fp8_tiles, _fp8_rows(tokens, cols), weight, DTYPE, tuning=t))
        return found

    name = f"sweep dense fp8 T={tokens} m{t.block_m} n{t.block_n} w{t.num_warps} s{t.num_stages}"
    return KernelCase(name, rows * cols, 2 * tokens * rows * cols, calls)


def _fp8_sorted(tokens: int, t: Fp8Tuning) -> KernelCase:
    """gate_up of Qwen3's experts."""

    def calls(count: int) -> Sequence[Call]:
        stack, _ = _stacks(QWEN, True)
        assert isinstance(stack, Fp8Weight)
        found: list[Call] = []
        for _ in range(count):
            ids, _ = _choice(tokens, QWEN.experts, QWEN.top_k)
            order = launch_expert_sort(ids, QWEN.experts, t.block_m)
            rows = _fp8_rows(tokens, QWEN.hidden)
            found.append(
                partial(launch_fp8_tiles, rows, stack, DTYPE, order=order, top_k=QWEN.top_k, tuning=t)
            )
        return found

    size = 2 * QWEN.size * QWEN.hidden
    name = f"sweep sorted fp8 T={tokens} m{t.block_m} n{t.block_n} w{t.num_warps} s{t.num_stages}"
    return KernelCase(name, QWEN.hit(tokens) * size, 2 * tokens * QWEN.top_k * size, calls)


def _fp8_rows(tokens: int, cols: int) -> Fp8Rows:
    scales = torch.rand(tokens, -(-cols // 128), device=DEVICE)
    return Fp8Rows(_random(tokens, cols).to(torch.float8_e4m3fn), scales)


def _norm(tokens: int) -> KernelCase:
    def calls(count: int) -> Sequence[Call]:
        return [
            partial(add_rms_norm, _random(tokens, 2048), _random(tokens, 2048), _gain()) for _ in range(count)
        ]

    return KernelCase(f"add_rms_norm T={tokens}", tokens * 2048 * 2 * 4, 0, calls)


def _swiglu(tokens: int) -> KernelCase:
    def calls(count: int) -> Sequence[Call]:
        return [partial(silu_mul, _random(tokens, 2 * 2816)) for _ in range(count)]

    return KernelCase(f"silu_mul T={tokens}", tokens * 2816 * 2 * 3, 0, calls)


def _router(tokens: int) -> KernelCase:
    def calls(count: int) -> Sequence[Call]:
        gates = [torch.randn(128, 2048, device=DEVICE) for _ in range(count)]
        return [partial(route_softmax, _random(tokens, 2048), gate, 8, 1, 1, True, 1.0) for gate in gates]

    return KernelCase(
        f"router T={tokens}", 128 * 2048 * 4 + tokens * 2048 * 2, 2 * tokens * 128 * 2048, calls
    )


def _sparse(moe: Moe, tokens: int, fp8: bool) -> list[KernelCase]:
    """The layer as called, and its parts where tiles are used."""
    kind = f"{moe.name} {'fp8' if fp8 else 'bf16'} T={tokens}"
    size = 1 if fp8 else 2
    weights = moe.hit(tokens) * 3 * moe.size * moe.hidden * size
    moved = weights + tokens * moe.hidden * 4
    flops = 6 * tokens * moe.top_k * moe.size * moe.hidden

    def calls(count: int) -> Sequence[Call]:
        stacks = ExpertWeights(*_stacks(moe, fp8))
        return [
            partial(
                experts, _random(tokens, moe.hidden), stacks, *_choice(tokens, moe.experts, moe.top_k), None
            )
            for _ in range(count)
        ]

    found = [KernelCase(f"experts {kind}", moved, flops, calls)]
    if moe is QWEN and not fp8:
        found.append(KernelCase(f"grouped_mm {kind}", weights * 2 / 3, flops * 2 / 3, _grouped(moe, tokens)))
    if tokens > 1 and not fp8:
        tuning = experts_tuning(tokens * moe.top_k // moe.experts)
        found += _parts(moe, tokens, tuning.block_m, tuning.gate_up, tuning.down)
        found += _sort_and_combine(moe, tokens, tuning.block_m)
    return found


def _parts(
    moe: Moe, tokens: int, block_m: int, gate_up: TileTuning, down: TileTuning | None = None
) -> list[KernelCase]:
    """The two products over ready-made tiles."""
    down = gate_up if down is None else down
    pairs = tokens * moe.top_k
    weights = moe.hit(tokens) * moe.size * moe.hidden * 2
    flops = 2 * pairs * moe.size * moe.hidden

    def orders(count: int) -> Iterable[tuple[ExpertOrder, Tensor]]:
        for _ in range(count):
            ids, scales = _choice(tokens, moe.experts, moe.top_k)
            yield launch_expert_sort(ids, moe.experts, block_m), scales

    def up_calls(count: int) -> Sequence[Call]:
        stack, _ = _stacks(moe, False)
        assert isinstance(stack, Tensor)
        return [
            partial(launch_gate_up, _random(tokens, moe.hidden), stack, order, moe.top_k, gate_up)
            for order, _ in orders(count)
        ]

    def down_calls(count: int) -> Sequence[Call]:
        _, stack = _stacks(moe, False)
        assert isinstance(stack, Tensor)
        dtype = torch.float32 if pairs // moe.experts < 32 else DTYPE
        return [
            partial(launch_down, _random(pairs, moe.size), stack, scales, order, dtype, down)
            for order, scales in orders(count)
        ]

    kind = f"{moe.name} bf16 T={tokens} m{block_m}"
    up_moved = 2 * weights + pairs * moe.size * 2
    down_moved = weights + pairs * (moe.size * 2 + moe.hidden * (4 if pairs // moe.experts < 32 else 2))
    return [
        KernelCase(f"gate_up {kind} {_short(gate_up)}", up_moved, 2 * flops, up_calls),
        KernelCase(f"down {kind} {_short(down)}", down_moved, flops, down_calls),
    ]


def _sort_and_combine(moe: Moe, tokens: int, block_m: int) -> list[KernelCase]:
    dtype = torch.float32 if tokens * moe.top_k // moe.experts < 32 else DTYPE

    def sorts(count: int) -> Sequence[Call]:
        ids = [_choice(tokens, moe.experts, moe.top_k)[0] for _ in range(count)]
        return [partial(launch_expert_sort, one, moe.experts, block_m) for one in ids]

    def sums(count: int) -> Sequence[Call]:
        parts = [_random(tokens * moe.top_k, moe.hidden).to(dtype) for _ in range(count)]
        return [partial(launch_combine, part, moe.top_k, DTYPE, None) for part in parts]

    moved = tokens * moe.hidden * (moe.top_k * dtype.itemsize + 2)
    return [
        KernelCase(f"sort {moe.name} T={tokens}", tokens * moe.top_k * 8, 0, sorts),
        KernelCase(f"combine {moe.name} T={tokens}", moved, 0, sums),
    ]


def _experts_one(moe: Moe, blocks: tuple[int, int], warps: tuple[int, int]) -> KernelCase:
    def calls(count: int) -> Sequence[Call]:
        gate_up, down = _stacks(moe, False)
        assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)
        return [
            partial(
                launch_experts_one,
                _random(1, moe.hidden),
                gate_up,
                down,
                *_choice(1, moe.experts, moe.top_k),
                _random(1, moe.hidden),
                blocks,
                warps,
            )
            for _ in range(count)
        ]

    name = f"sweep one {moe.name} bf16 n{blocks} w{warps}"
    return KernelCase(name, moe.top_k * 3 * moe.size * moe.hidden * 2, 0, calls)


def _grouped(moe: Moe, tokens: int) -> Callable[[int], Sequence[Call]]:
    def calls(count: int) -> Sequence[Call]:
        stack, _ = _stacks(moe, False)
        assert isinstance(stack, Tensor)
        found: list[Call] = []
        for _ in range(count):
            ids, _ = _choice(tokens, moe.experts, moe.top_k)
            ends = torch.bincount(ids.flatten(), minlength=moe.experts).cumsum(0).int()
            x = _random(tokens * moe.top_k, moe.hidden)
            found.append(partial(F.grouped_mm, x, stack.transpose(1, 2), offs=ends))
        return found

    return calls


def _sample(rows: int, mode: str) -> KernelCase:
    settings = {
        "greedy": (0.0, 0, 1.0),
        "plain": (1.0, 0, 1.0),
        "top_p": (0.7, 0, 0.9),
        "top_k": (0.7, 20, 0.9),
    }
    temperature, top_k, top_p = settings[mode]

    def calls(count: int) -> Sequence[Call]:
        columns = (
            torch.full((rows,), temperature, device=DEVICE),
            torch.full((rows,), top_k, device=DEVICE),
            torch.full((rows,), top_p, device=DEVICE),
            torch.zeros(rows, device=DEVICE),
        )
        uniform = torch.randint(0, 1 << FRACTION_BITS, (rows,), device=DEVICE)
        return [
            partial(sample, torch.randn(rows, VOCAB, device=DEVICE) * 2, *columns, uniform)
            for _ in range(min(count, 20))
        ]

    return KernelCase(f"sample {mode} S={rows}", rows * VOCAB * 4, 0, calls)


def _short(tuning: TileTuning) -> str:
    return f"n{tuning.block_n} k{tuning.block_k} w{tuning.num_warps} s{tuning.num_stages}"


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE)


@cache
def _gain() -> NormWeight:
    return NormWeight(_random(2048), 1e-6)


def _weight(rows: int, cols: int, fp8: bool) -> Tensor | Fp8Weight:
    if not fp8:
        return _random(rows, cols).mul_(cols**-0.5)
    scales = torch.rand(-(-rows // 128), -(-cols // 128), device=DEVICE) / cols
    return Fp8Weight(_random(rows, cols).to(torch.float8_e4m3fn), scales)


@cache
def _stacks(moe: Moe, fp8: bool) -> tuple[Tensor | Fp8Weight, Tensor | Fp8Weight]:
    """gate_up and down of one layer: larger than any cache once some experts are hit."""
    found: list[Tensor | Fp8Weight] = []
    for rows, cols in ((2 * moe.size, moe.hidden), (moe.hidden, moe.size)):
        values = _random(moe.experts, rows, cols)
        if fp8:
            scales = torch.rand(moe.experts, -(-rows // 128), -(-cols // 128), device=DEVICE) * cols**-0.5
            found.append(Fp8Weight(values.to(torch.float8_e4m3fn), scales))
        else:
            found.append(values.mul_(cols**-0.5))
    return found[0], found[1]


def _choice(tokens: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    scales, ids = torch.rand(tokens, num_experts, device=DEVICE).topk(top_k, -1)
    return ids, scales
