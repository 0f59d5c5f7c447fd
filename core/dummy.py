"""Random weights in a checkpoint's place: the same numbers for the same seed on every machine and device.

Each number is a function of (seed, tensor name, index) in exact integer arithmetic, looked up in a table of
normal quantiles. Called by core/weights.py for `--load-format dummy`.
"""

import hashlib
from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor

from headrace.config import Quantization
from headrace.core.tensor_source import WIDENED, Fp8Storage
from headrace.kernels.fp8_block import Fp8Weight, fp8_weight

STDDEV = 0.02
TABLE_BITS = 16
CHUNK = 1 << 24  # numbers made at a time: bounds the int64 scratch memory to a few hundred MB
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)  # the odd constants of SplitMix64
_MULTIPLY = 0xBF58476D1CE4E5B9 - (1 << 64)


class DummySource:
    """A TensorSource of N(0, 0.02) numbers; norms are 1, biases 0."""

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        quantization: Quantization = "",
        storage: Fp8Storage = WIDENED,
    ) -> None:
        """`quantization` rounds the weights of products, which are held as `storage` says."""
        self._seed = seed
        self._dtype = dtype
        self._device = device
        self._quantize = quantization == "fp8"
        self._storage = storage
        self._rounded: set[str] = set()
        self._table = torch.tensor(_quantiles(), device=device) * STDDEV

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)

    def product(self, names: tuple[str, ...], *shape: int, in_blocks: bool) -> Tensor | Fp8Weight:
        if self._quantize and in_blocks:
            if self._storage.keep:
                return self._storage.empty(*shape, dtype=self._dtype, device=self._device)
            self._rounded.update(names)
        return self.empty(*shape)

    def fill(self, name: str, target: Tensor | Fp8Weight) -> None:
        if isinstance(target, Fp8Weight):
            wide = self.empty(*target.shape)
            self.fill(name, wide)
            target.quantize_(wide)
            return
        if target.dim() == 1:
            target.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            return
        assert target.is_contiguous(), f"{name} is filled through a strided view"
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest()
        key = int.from_bytes(digest, "little", signed=True)
        flat = target.view(-1)
        for start in range(0, flat.numel(), CHUNK):
            piece = flat[start : start + CHUNK]
            index = torch.arange(start, start + piece.numel(), device=self._device)
            piece.copy_(self._table[_hash(index, key)])
        if name in self._rounded:
            target.copy_(fp8_weight(target).dequantize(target.dtype))


def _hash(index: Tensor, key: int) -> Tensor:
    """[n] int64 -> [n] int64 in 0..2**TABLE_BITS - 1. int64 products wrap alike everywhere."""
    x = index.mul_(_GAMMA).add_(key)
    x ^= (x >> 32) & 0xFFFFFFFF
    x.mul_(_MULTIPLY)
    return (x >> (64 - TABLE_BITS)) & ((1 << TABLE_BITS) - 1)


@cache
def _quantiles() -> tuple[float, ...]:
    """The normal distribution at the middles of 2**TABLE_BITS equal shares."""
    size, normal = 1 << TABLE_BITS, NormalDist()
    return tuple(normal.inv_cdf((i + 0.5) / size) for i in range(size))
