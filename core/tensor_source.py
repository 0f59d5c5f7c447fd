"""Where a model builder gets its weights: a builder asks for memory, then for a named tensor to be put in it.

So stacked and fused weights are filled in place and nothing exists twice. Implemented by a checkpoint, by
dummy weights, and by the recorder, which makes a builder tell what it needs. Called by core/models.
"""

from typing import Protocol

import torch
from torch import Tensor

from headrace.kernels.rms_norm import NormWeight


class TensorSource(Protocol):
    """Hands out weights in the model's dtype on the model's device."""

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for a weight; the model's dtype unless one is given."""
        ...

    def fill(self, name: str, target: Tensor) -> None:
        """Put the checkpoint's tensor `name`, which must have `target`'s shape, into `target`."""
        ...


class Recorder:
    """A source that only notes what is asked of it: name -> shape."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def fill(self, name: str, target: Tensor) -> None:
        assert name not in self.shapes, f"{name} is asked for twice"
        self.shapes[name] = tuple(target.shape)


def take(source: TensorSource, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """One tensor as it stands in the checkpoint."""
    target = source.empty(*shape, dtype=dtype)
    source.fill(name, target)
    return target


def take_rows(source: TensorSource, parts: tuple[tuple[str, int], ...], columns: int) -> Tensor:
    """Several [rows, columns] weights below each other, so that one product serves them all."""
    target = source.empty(sum(rows for _, rows in parts), columns)
    for (name, _), piece in zip(parts, target.split([rows for _, rows in parts]), strict=True):
        source.fill(name, piece)
    return target


def take_norm(source: TensorSource, name: str, size: int, eps: float) -> NormWeight:
    """The gain of an RMS norm."""
    return NormWeight(take(source, name, size), eps)
