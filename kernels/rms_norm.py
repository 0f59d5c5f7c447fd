"""RMS norm (arXiv 1910.07467), alone and with the residual addition before it. Called by the model layers."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class NormWeight:
    """What a norm needs beside its input: the gain [D], and the epsilon below the root."""

    gain: Tensor
    eps: float
    # For the CPU, where each small operation costs as much as its start: x / rms(x) * gain is
    # x / hypot(|x|, floor) * scaled_gain.
    floor: Tensor = field(init=False)  # [1] float32: sqrt(D * eps)
    scaled_gain: Tensor = field(init=False)  # [D] float32: gain * sqrt(D)

    def __post_init__(self) -> None:
        size, device = self.gain.shape[0], self.gain.device
        floor = torch.full((1,), math.sqrt(size * self.eps), dtype=torch.float32, device=device)
        object.__setattr__(self, "floor", floor)
        object.__setattr__(self, "scaled_gain", self.gain.float() * math.sqrt(size))


def rms_norm(x: Tensor, norm: NormWeight) -> Tensor:
    """x / rms(x) * gain over the last dimension, in float32 inside.

    Args:
        x: [..., D].
        norm: of D numbers.

    Returns:
        [..., D] in x's dtype, a new tensor.
    """
    if x.is_cuda:
        from headrace.kernels.rms_norm_triton import launch_rms_norm

        return launch_rms_norm(x, None, norm.gain, norm.eps)
    if x.dtype is torch.float32:
        return (x / floored_length(x, norm.floor)).mul_(norm.scaled_gain)
    return rms_norm_in_place(x.float(), norm).to(x.dtype)


def rms_norm_in_place(x: Tensor, norm: NormWeight) -> Tensor:
    """The same on the CPU, over x's own memory, which the caller has no further use for; returns x."""
    if x.dtype is torch.float32:
        return x.div_(floored_length(x, norm.floor)).mul_(norm.scaled_gain)
    return x.copy_(rms_norm(x, norm))


def rms_norm_ref(x: Tensor, norm: NormWeight) -> Tensor:
    wide = x.float()
    wide = wide / (wide.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
    return wide.to(x.dtype) * norm.gain


def add_rms_norm(x: Tensor, residual: Tensor, norm: NormWeight) -> Tensor:
    """residual += x in place; then the norm of it.

    Args:
        x: [T, D], the output of a sublayer.
        residual: [T, D], updated.
        norm: of D numbers.

    Returns:
        [T, D], a new tensor.
    """
    if x.is_cuda:
        from headrace.kernels.rms_norm_triton import launch_rms_norm

        return launch_rms_norm(x, residual, norm.gain, norm.eps)
    return rms_norm(residual.add_(x), norm)


def add_rms_norm_ref(x: Tensor, residual: Tensor, norm: NormWeight) -> Tensor:
    residual.copy_(residual + x)
    return rms_norm_ref(residual, norm)


def floored_length(x: Tensor, floor: Tensor) -> Tensor:
    """[..., D] float32 -> [..., 1]: sqrt(sum(x^2) + floor^2), reduced in one pass without storing the squares."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length.hypot_(floor)
