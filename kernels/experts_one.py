"""The routed experts of a single token: two launches that read each chosen weight once, at full bandwidth.

Products are plain multiplications and sums: one token leaves the tensor cores nothing to do. The sum over the
token's experts is inside the second launch, in their order. fp8: experts_one_fp8.py. Called by experts on a card.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dependent_launch import dependent, wait_and_release
from headrace.kernels.silu_mul_triton import swiglu


@triton.jit
def _gate_up_one_kernel(
    x_ptr,  # [D]
    w_ptr,  # [E, 2F, D]
    ids_ptr,  # [K] int64
    out_ptr,  # [K, F]
    D,
    F,
    w_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    i_n = tl.program_id(0)
    i_k = tl.program_id(1)
    # The ids come from the launch before, but what follows may start: it asks for its weights first.
    wait_and_release(PDL)
    i_e = tl.load(ids_ptr + i_k)
    offs_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    n_mask = offs_n < F
    p_gate = w_ptr + i_e * w_stride + offs_n.to(tl.int64)[:, None] * D + offs_k[None, :]
    up = F.to(tl.int64) * D
    b_gate = tl.zeros([BLOCK_N], tl.float32)
    b_up = tl.zeros([BLOCK_N], tl.float32)
    for k in range(0, D, BLOCK_K):
        k_mask = offs_k < D - k
        mask = n_mask[:, None] & k_mask[None, :]
        w_gate = tl.load(p_gate + k, mask=mask, other=0.0)
        w_up = tl.load(p_gate + up + k, mask=mask, other=0.0)
        w_gate = w_gate.to(tl.float32)
        w_up = w_up.to(tl.float32)
        b_x = tl.load(x_ptr + k + offs_k, mask=k_mask, other=0.0).to(tl.float32)
        b_gate += tl.sum(w_gate * b_x[None, :], 1)
        b_up += tl.sum(w_up * b_x[None, :], 1)
    out = swiglu(b_gate, b_up)
    tl.store(out_ptr + i_k * F + offs_n, out.to(out_ptr.dtype.element_ty), mask=n_mask)


@triton.jit
def _down_one_kernel(
    x_ptr,  # [K, F]
    w_ptr,  # [E, D, F]
    ids_ptr,  # [K] int64
    shares_ptr,  # [K] float32
    out_ptr,  # [D]; added to where ADD
    K,
    D,
    w_stride,
    F: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    i_n = tl.program_id(0)
    offs_k = tl.arange(0, K_BLOCK)
    offs_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_f = tl.arange(0, BLOCK_F)
    k_mask = offs_k < K
    n_mask = offs_n < D
    b_ids = tl.load(ids_ptr + offs_k, mask=k_mask, other=0)
    b_shares = tl.load(shares_ptr + offs_k, mask=k_mask, other=0.0)
    p_w = w_ptr + (b_ids * w_stride)[:, None, None] + (offs_n.to(tl.int64) * F)[None, :, None]
    p_w = p_w + offs_f[None, None, :]
    p_x = x_ptr + offs_k[:, None] * F + offs_f[None, :]
    # All of its weights are under way before anything is multiplied, most before the launch ahead has ended.
    weights = ()  # type: tuple[tl.tensor, ...]
    for f in tl.static_range(0, F, BLOCK_F):
        kf_mask = k_mask[:, None] & (offs_f < F - f)[None, :]
        weights = weights + (tl.load(p_w + f, mask=kf_mask[:, None, :] & n_mask[None, :, None], other=0.0),)
    # Ids and shares are older than the launch before: that one waited for them.
    wait_and_release(PDL)
    acc = tl.zeros([K_BLOCK, BLOCK_N], tl.float32)
    for i in tl.static_range(len(weights)):
        kf_mask = k_mask[:, None] & (offs_f < F - i * BLOCK_F)[None, :]
        b_x = tl.load(p_x + i * BLOCK_F, mask=kf_mask, other=0.0).to(tl.float32) * b_shares[:, None]
        acc += tl.sum(weights[i].to(tl.float32) * b_x[:, None, :], 2)
    out = tl.sum(acc, 0)
    if ADD:
        out += tl.load(out_ptr + offs_n, mask=n_mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs_n, out.to(out_ptr.dtype.element_ty), mask=n_mask)


def launch_experts_one(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    shares: Tensor,
    base: Tensor | None,
    blocks: tuple[int, int] = (4, 2),
    warps: tuple[int, int] = (4, 8),
) -> Tensor:
    """As kernels.experts.experts for T = 1: x [1, D], ids and shares [1, K].

    Args:
        blocks: outputs a program makes, of gate_up and of down.
        warps: of a program of each.
    """
    D, K = x.shape[1], ids.shape[1]
    F = down.shape[2]
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if not weight.is_contiguous():
            raise ValueError(f"{name}: must be contiguous, strides are {weight.stride()}")
    hidden = torch.empty(K, F, dtype=x.dtype, device=x.device)
    _gate_up_one_kernel[(triton.cdiv(F, blocks[0]), K)](
        x_ptr=x,
        w_ptr=gate_up,
        ids_ptr=ids,
        out_ptr=hidden,
        D=D,
        F=F,
        w_stride=gate_up.stride(0),
        BLOCK_N=blocks[0],
        BLOCK_K=min(max(triton.next_power_of_2(D), 128), 2048),
        num_warps=warps[0],
        **dependent(x),
    )
    out = torch.empty_like(x) if base is None else base
    _down_one_kernel[(triton.cdiv(D, blocks[1]),)](
        x_ptr=hidden,
        w_ptr=down,
        ids_ptr=ids,
        shares_ptr=shares,
        out_ptr=out,
        K=K,
        D=D,
        F=F,
        w_stride=down.stride(0),
        K_BLOCK=triton.next_power_of_2(K),
        BLOCK_N=blocks[1],
        BLOCK_F=min(triton.next_power_of_2(F), 256),
        ADD=base is not None,
        num_warps=warps[1],
        **dependent(x),
    )
    return out
