"""Matrix products with a weight stored as Hugging Face stores it, rows = outputs. Called by the model layers.

A weight is a tensor, or fp8 with a scale for each 128x128 block. On a card one token takes a kernel that streams
the weight (kernels/linear_one.py, linear_one_fp8.py); more take the vendor's product,
or kernels/linear_fp8.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.fp8_block import Fp8Weight
from headrace.kernels.rms_norm import NormWeight, rms_norm, rms_norm_ref


def linear(x: Tensor, weight: Tensor | Fp8Weight) -> Tensor:
    """[T, K] x [N, K] -> [T, N]."""
    if x.is_cuda:
        return _linear_cuda(x, weight, None)
    return F.linear(x, _tensor(weight, x.dtype))


def linear_ref(x: Tensor, weight: Tensor | Fp8Weight) -> Tensor:
    return F.linear(x, _tensor(weight, x.dtype))


def norm_linear(x: Tensor, norm: NormWeight, weight: Tensor | Fp8Weight) -> Tensor:
    """linear(rms_norm(x)): [T, K] x [N, K] -> [T, N]; one launch for one token."""
    if x.is_cuda and x.shape[0] == 1:
        return _one_token(x, weight, None, norm)
    return linear(rms_norm(x, norm), weight)


def norm_linear_ref(x: Tensor, norm: NormWeight, weight: Tensor | Fp8Weight) -> Tensor:
    return linear_ref(rms_norm_ref(x, norm), weight)


def linear_add(x: Tensor, weight: Tensor | Fp8Weight, residual: Tensor) -> Tensor:
    """residual += linear(x), in place: [T, K] x [N, K], [T, N] -> `residual`."""
    if x.is_cuda:
        return _linear_cuda(x, weight, residual)
    return residual.addmm_(x, _tensor(weight, x.dtype).t())


def linear_add_ref(x: Tensor, weight: Tensor | Fp8Weight, residual: Tensor) -> Tensor:
    return residual.copy_(residual + linear_ref(x, weight))


def _tensor(weight: Tensor | Fp8Weight, dtype: torch.dtype) -> Tensor:
    return weight.dequantize(dtype) if isinstance(weight, Fp8Weight) else weight


def _linear_cuda(x: Tensor, weight: Tensor | Fp8Weight, residual: Tensor | None) -> Tensor:
    if x.shape[0] == 1:
        return _one_token(x, weight, residual, None)
    if isinstance(weight, Fp8Weight):
        from headrace.kernels.linear_fp8 import beats_wide, linear_fp8

        if weight.wide is None or beats_wide(x.shape[0], *weight.shape):
            return linear_fp8(x, weight, residual)
        weight = weight.wide
    if residual is not None:
        return residual.addmm_(x, weight.t())
    return F.linear(x, weight)


def _one_token(
    x: Tensor, weight: Tensor | Fp8Weight, residual: Tensor | None, norm: NormWeight | None
) -> Tensor:
    if isinstance(weight, Fp8Weight):
        from headrace.kernels.linear_one_fp8 import launch_linear_one_fp8

        return launch_linear_one_fp8(x, weight, residual, norm=norm)
    from headrace.kernels.linear_one import launch_linear_one

    return launch_linear_one(x, weight, residual, norm=norm)
