"""Rotary position embedding (arXiv 2104.09864) of some heads. Called by the operations that write the KV."""

import torch
from torch import Tensor


def rope(x: Tensor, rotation: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs of numbers, in float32 inside.

    Args:
        x: [T, N, R] of N heads; the last dimension is contiguous.
        rotation: [T, 1, R / 2] complex64: cosine + i * sine of each pair's angle.
        interleaved: pairs are neighbours (2i, 2i + 1); else (i, i + R / 2).

    Returns:
        [T, N, R] in x's dtype, a new tensor; the order of the numbers is x's.
    """
    T, N, R = x.shape
    wide = x.float()
    if interleaved:
        # One complex product instead of four real ones and a shuffle.
        turned = torch.view_as_complex(wide.view(T, N, R // 2, 2)) * rotation
        out = torch.view_as_real(turned).view(T, N, R)
    else:
        cos, sin = torch.view_as_real(rotation).unbind(-1)
        low, high = wide.chunk(2, -1)
        out = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    return out if x.dtype is torch.float32 else out.to(x.dtype)


def rope_in_place(x: Tensor, rotation: Tensor, interleaved: bool) -> Tensor:
    """The same on the CPU, over x's own memory, which the caller has no further use for; returns x."""
    if interleaved and x.dtype is torch.float32:
        T, N, R = x.shape
        torch.view_as_complex(x.view(T, N, R // 2, 2)).mul_(rotation)
        return x
    return x.copy_(rope(x, rotation, interleaved))


def rope_ref(x: Tensor, rotation: Tensor, interleaved: bool) -> Tensor:
    cos, sin = rotation.real, rotation.imag
    half = x.shape[-1] // 2
    first = slice(0, None, 2) if interleaved else slice(0, half)
    second = slice(1, None, 2) if interleaved else slice(half, None)
    a, b = x[..., first].float(), x[..., second].float()
    out = torch.empty_like(x)
    out[..., first] = (a * cos - b * sin).to(x.dtype)
    out[..., second] = (b * cos + a * sin).to(x.dtype)
    return out
