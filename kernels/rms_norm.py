"""RMS norm (arXiv 1910.07467), alone and with the residual addition before it. Called by the model layers."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in float32 inside.

    Args:
        x: [..., D].
        weight: [D].

    Returns:
        [..., D] in x's dtype, a new tensor.
    """
    wide = x.float()
    return (wide * inverse_rms(wide, eps)).to(x.dtype).mul_(weight)


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return wide.to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place; then the norm of it.

    Args:
        x: [T, D], the output of a sublayer.
        residual: [T, D], updated.
        weight: [D].

    Returns:
        [T, D], a new tensor.
    """
    return rms_norm(residual.add_(x), weight, eps)


def add_rms_norm_ref(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual.copy_(residual + x)
    return rms_norm_ref(residual, weight, eps)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """[..., D] float32 -> [..., 1]: 1 / sqrt(mean(x^2) + eps)."""
    # vector_norm reduces in one pass without storing the squares; the rest runs on one number a row.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
