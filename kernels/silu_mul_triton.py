"""SwiGLU's product on a card. Called by silu_mul; the expert kernels have it in their epilogue."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dependent_launch import dependent, wait_and_release

_BLOCK = 1024


@triton.jit
def swiglu(gate, up):
    """SiLU(gate) * up, of float32 blocks."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _silu_mul_kernel(x_ptr, out_ptr, x_stride, F, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_and_release(PDL)
    i_t = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < F
    b_gate = tl.load(x_ptr + i_t * x_stride + offs, mask=mask, other=0.0)
    b_up = tl.load(x_ptr + i_t * x_stride + F + offs, mask=mask, other=0.0)
    out = swiglu(b_gate.to(tl.float32), b_up.to(tl.float32))
    tl.store(out_ptr + i_t * F + offs, out.to(b_gate.dtype), mask=mask)


def launch_silu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2F] in contiguous rows, gate first -> [T, F]."""
    T, width = gate_up.shape
    if gate_up.stride(1) != 1:
        raise ValueError(f"gate_up: rows must be contiguous, strides are {gate_up.stride()}")
    F = width // 2
    out = torch.empty(T, F, dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul_kernel[(T, triton.cdiv(F, _BLOCK))](
        x_ptr=gate_up,
        out_ptr=out,
        x_stride=gate_up.stride(0),
        F=F,
        BLOCK=_BLOCK,
        num_warps=4,
        **dependent(gate_up),
    )
    return out
