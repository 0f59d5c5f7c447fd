"""SwiGLU's product: SiLU of the gate half times the up half. Called by the dense layers and shared experts."""

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2F], gate first -> [T, F]."""
    if gate_up.is_cuda:
        from headrace.kernels.silu_mul_triton import launch_silu_mul

        return launch_silu_mul(gate_up)
    size = gate_up.shape[1] // 2
    gate, up = gate_up.split_with_sizes((size, size), 1)
    return F.silu(gate).mul_(up)


def silu_mul_ref(gate_up: Tensor) -> Tensor:
    size = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :size].float(), gate_up[..., size:].float()
    return (gate / (1 + (-gate).exp()) * up).to(gate_up.dtype)
