"""Puts a layer's shared experts behind the routed ones, so that one pair of launches serves both.

A checkpoint has them as one wide SwiGLU; cut along its inner size they are experts like the others. Called by ffn.
"""

from torch import Tensor

from headrace.kernels.fp8_block import BLOCK, Fp8Weight

Weight = Tensor | Fp8Weight


def stack_shared(
    gate_up: Weight, down: Weight, shared_gate_up: Weight, shared_down: Weight
) -> list[tuple[Weight, Weight]]:
    """Fill the last S places of two stacks.

    Args:
        gate_up: [E + S, 2F, D], the gate's rows first.
        down: [E + S, D, F].
        shared_gate_up: [2SF, D].
        shared_down: [D, SF].

    Returns:
        S pairs (gate_up, down), views of the stacks.
    """
    size, wide = down.shape[2], shared_down.shape[1]
    first = down.shape[0] - wide // size
    if isinstance(gate_up, Tensor) and isinstance(shared_gate_up, Fp8Weight):
        shared_gate_up = shared_gate_up.dequantize(gate_up.dtype)
    if isinstance(down, Tensor) and isinstance(shared_down, Fp8Weight):
        shared_down = shared_down.dequantize(down.dtype)
    pairs = []
    for i in range(wide // size):
        pair = gate_up[first + i], down[first + i]
        for half in range(2):
            at = half * wide + i * size
            _copy(_part(pair[0], 0, half * size, size), _part(shared_gate_up, 0, at, size))
        _copy(pair[1], _part(shared_down, 1, i * size, size))
        pairs.append(pair)
    return pairs


def _part(weight: Weight, axis: int, first: int, size: int) -> Weight:
    if isinstance(weight, Tensor):
        return weight.narrow(axis, first, size)
    assert first % BLOCK == 0 and size % BLOCK == 0, f"{first} and {size} are inside a block of scales"
    scales = weight.scale_inv.narrow(axis, first // BLOCK, size // BLOCK)
    return Fp8Weight(weight.values.narrow(axis, first, size), scales)


def _copy(target: Weight, source: Weight) -> None:
    if isinstance(target, Tensor):
        assert isinstance(source, Tensor), "made plain before"
        target.copy_(source)
    elif isinstance(source, Tensor):
        target.quantize_(source)
    else:
        target.values.copy_(source.values)
        target.scale_inv.copy_(source.scale_inv)
