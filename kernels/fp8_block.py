"""DeepSeek's fp8 weight format: e4m3 values with one float32 scale per 128x128 block.

Called by the loader, and by the operations that take such weights. Source: arXiv 2412.19437, 3.3.2, and the
released checkpoints.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight that stays in fp8, or a stack of them."""

    values: Tensor  # [..., N, K] float8_e4m3fn
    scale_inv: Tensor  # [..., ceil(N / 128), ceil(K / 128)] float32
    # The same in the model's dtype, where it is faster so for some numbers of tokens; of one weight only.
    wide: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    def __getitem__(self, index: int) -> "Fp8Weight":
        """One weight of a stack."""
        return Fp8Weight(self.values[index], self.scale_inv[index])

    def rows(self, first: int, last: int) -> "Fp8Weight":
        """A view of the rows first..last - 1 of one weight. `first` is a block's."""
        assert first % BLOCK == 0, f"row {first} lies inside a block of scales"
        scales = self.scale_inv[first // BLOCK : -(-last // BLOCK)]
        wide = None if self.wide is None else self.wide[first:last]
        return Fp8Weight(self.values[first:last], scales, wide)

    def fill_(self, values: Tensor, scale_inv: Tensor) -> None:
        """Take over [N, K] and its scales, from any device."""
        self.values.copy_(values)
        self.scale_inv.copy_(scale_inv)
        if self.wide is not None:
            self.wide.copy_(self.dequantize(self.wide.dtype))

    def quantize_(self, weight: Tensor) -> None:
        """Take over [N, K] of any float type, from any device."""
        self.fill_(*fp8_block_quantize(weight.to(self.device)))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[N, K]."""
        return fp8_block_dequantize(self.values, self.scale_inv, dtype)


def empty_fp8_weight(*shape: int, device: torch.device, wide: torch.dtype | None = None) -> Fp8Weight:
    """Memory for [..., N, K]; of one weight with a wide copy of that dtype, if given."""
    *stack, N, K = shape
    blocks = (*stack, -(-N // BLOCK), -(-K // BLOCK))
    return Fp8Weight(
        torch.empty(shape, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(blocks, dtype=torch.float32, device=device),
        None if wide is None or stack else torch.empty(shape, dtype=wide, device=device),
    )


def fp8_weight(weight: Tensor) -> Fp8Weight:
    """Quantise [N, K], or a stack [E, N, K] one by one."""
    if weight.dim() == 2:
        return Fp8Weight(*fp8_block_quantize(weight))
    stack = empty_fp8_weight(*weight.shape, device=weight.device)
    for index, part in enumerate(weight.unbind(0)):
        stack[index].quantize_(part)
    return stack


def fp8_block_dequantize(weight: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, K] e4m3 times its block's scale.

    Args:
        weight: [N, K] float8_e4m3fn.
        scale_inv: [ceil(N / 128), ceil(K / 128)] float32.
        dtype: of the result; the product is made in float32.

    Returns:
        [N, K].
    """
    N, K = weight.shape
    columns = scale_inv.repeat_interleave(BLOCK, 1)[:, :K]
    out = torch.empty(N, K, dtype=dtype, device=weight.device)
    # One block of rows at a time: the float32 copy stays small and in cache.
    for i, row_scale in enumerate(columns.unbind(0)):
        rows = slice(i * BLOCK, min((i + 1) * BLOCK, N))
        out[rows] = weight[rows].float().mul_(row_scale)
    return out


def fp8_block_dequantize_ref(weight: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for i in range(scale_inv.shape[0]):
        for j in range(scale_inv.shape[1]):
            block = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            out[block] = (weight[block].float() * scale_inv[i, j]).to(dtype)
    return out


def fp8_block_quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse: the largest value of each block maps to e4m3's largest.

    Args:
        weight: [N, K] of any float type.

    Returns:
        [N, K] float8_e4m3fn, and the scales [ceil(N / 128), ceil(K / 128)] float32 (1 for a block of zeros).
    """
    N, K = weight.shape
    rows, columns = -(-N // BLOCK), -(-K // BLOCK)
    padded = F.pad(weight.float(), (0, columns * BLOCK - K, 0, rows * BLOCK - N))
    blocks = padded.view(rows, BLOCK, columns, BLOCK)
    largest = blocks.abs().amax((1, 3))
    scale_inv = torch.where(largest > 0, largest / E4M3_MAX, torch.ones_like(largest))
    scaled = (blocks / scale_inv[:, None, :, None]).view(rows * BLOCK, columns * BLOCK)
    return scaled[:N, :K].to(torch.float8_e4m3fn), scale_inv


def fp8_block_quantize_ref(weight: Tensor) -> tuple[Tensor, Tensor]:
    shape = (-(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK))
    out = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale_inv = torch.ones(shape, device=weight.device)
    for i in range(shape[0]):
        for j in range(shape[1]):
            block = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            largest = weight[block].float().abs().max()
            if largest > 0:
                scale_inv[i, j] = largest / E4M3_MAX
            out[block] = (weight[block].float() / scale_inv[i, j]).to(torch.float8_e4m3fn)
    return out, scale_inv
