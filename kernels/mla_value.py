"""Bring MLA's attention output from the latent space to the heads' values. Called by the MLA layer."""

import torch
from torch import Tensor


def mla_value(latent: Tensor, value_up: Tensor) -> Tensor:
    """[T, H, C] x [H, C, V], the value half of kv_b_proj -> [T, H * V]."""
    if latent.is_cuda:
        from headrace.kernels.mla_value_triton import launch_mla_value

        return launch_mla_value(latent, value_up)
    return torch.bmm(latent.transpose(0, 1), value_up).transpose(0, 1).flatten(1)


def mla_value_ref(latent: Tensor, value_up: Tensor) -> Tensor:
    return torch.einsum("thc,hcv->thv", latent.float(), value_up.float()).to(latent.dtype).flatten(1)
