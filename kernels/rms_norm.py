"""RMS norm (arXiv 1910.07467), alone and with the residual addition before it. Called by the model layers."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class NormWeight:
    """What a norm needs beside its input: the gain [D], and the epsilon below the root."""

    gain: Tensor
    eps: float
    eps_tensor: Tensor = field(init=False)  # [1] float32: adding a Python number costs three times as much

    def __post_init__(self) -> None:
        device = self.gain.device
        object.__setattr__(self, "eps_tensor", torch.full((1,), self.eps, dtype=torch.float32, device=device))


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
    wide = x if x.dtype is torch.float32 else x.float()
    normed = wide * inverse_rms(wide, norm.eps_tensor)
    if x.dtype is not torch.float32:
        normed = normed.to(x.dtype)
    return normed.mul_(norm.gain)


def rms_norm_in_place(x: Tensor, norm: NormWeight) -> Tensor:
    """The same on the CPU, over x's own memory, which the caller has no further use for; returns x."""
    if x.dtype is torch.float32:
        return x.mul_(inverse_rms(x, norm.eps_tensor)).mul_(norm.gain)
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


def inverse_rms(x: Tensor, eps_tensor: Tensor) -> Tensor:
    """[..., D] float32 -> [..., 1]: 1 / sqrt(mean(x^2) + eps)."""
    # vector_norm reduces in one pass without storing the squares; the rest works on one number a row.
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(eps_tensor, length, length, value=1 / x.shape[-1]).rsqrt_()
