"""Where a model builder gets its weights: a builder asks for memory, then for a named tensor to be put in it.

So stacked and fused weights are filled in place and nothing exists twice. Implemented by a checkpoint, by
dummy weights, and by the recorder, which makes a builder tell what it needs. Called by core/models.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.kernels.fp8_block import BLOCK, Fp8Weight, empty_fp8_weight
from headrace.kernels.rms_norm import NormWeight


@dataclass(frozen=True, slots=True)
class Fp8Storage:
    """How a source holds weights of products that are fp8 or rounded to it."""

    keep: bool  # in fp8; else widened to the model's dtype
    copies: bool  # dense ones in the model's dtype too

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Fp8Weight:
        return empty_fp8_weight(*shape, device=device, wide=dtype if self.copies else None)


WIDENED = Fp8Storage(keep=False, copies=False)


class TensorSource(Protocol):
    """Hands out weights in the model's dtype, or in fp8, on the model's device."""

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for a weight; the model's dtype unless one is given."""
        ...

    def product(self, names: tuple[str, ...], *shape: int, in_blocks: bool) -> Tensor | Fp8Weight:
        """Memory for a weight of matrix products [..., N, K], or a stack, which the named tensors fill together.

        In fp8 where the source keeps it so and they lie `in_blocks`.
        """
        ...

    def fill(self, name: str, target: Tensor | Fp8Weight) -> None:
        """Put the checkpoint's tensor `name`, which must have `target`'s shape, into `target`."""
        ...


class Recorder:
    """A source that only notes what is asked of it: name -> shape, and the numbers in dense products."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dense_numbers = 0

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def product(self, names: tuple[str, ...], *shape: int, in_blocks: bool) -> Tensor | Fp8Weight:
        if len(shape) == 2 and in_blocks:
            self.dense_numbers += math.prod(shape)
        return self.empty(*shape)

    def fill(self, name: str, target: Tensor | Fp8Weight) -> None:
        assert name not in self.shapes, f"{name} is asked for twice"
        self.shapes[name] = tuple(target.shape)


def take(source: TensorSource, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """One tensor as it stands in the checkpoint."""
    target = source.empty(*shape, dtype=dtype)
    source.fill(name, target)
    return target


def take_product(source: TensorSource, name: str, rows: int, columns: int) -> Tensor | Fp8Weight:
    """A weight of matrix products."""
    return take_rows(source, ((name, rows),), columns)


def take_rows(source: TensorSource, parts: tuple[tuple[str, int], ...], columns: int) -> Tensor | Fp8Weight:
    """Several [rows, columns] weights below each other, so that one product serves them all."""
    total = sum(rows for _, rows in parts)
    aligned = in_blocks(columns, *(rows for _, rows in parts[:-1]))
    target = source.product(tuple(name for name, _ in parts), total, columns, in_blocks=aligned)
    first = 0
    for name, rows in parts:
        source.fill(name, rows_of(target, first, first + rows))
        first += rows
    return target


def in_blocks(*sizes: int) -> bool:
    """Whether these columns, and these rows that others follow in the same memory, are whole 128x128 blocks."""
    return all(size % BLOCK == 0 for size in sizes)


def rows_of(weight: Tensor | Fp8Weight, first: int, last: int) -> Tensor | Fp8Weight:
    """A view of the rows first..last - 1."""
    return weight.rows(first, last) if isinstance(weight, Fp8Weight) else weight[first:last]


def take_norm(source: TensorSource, name: str, size: int, eps: float) -> NormWeight:
    """The gain of an RMS norm."""
    return NormWeight(take(source, name, size), eps)
