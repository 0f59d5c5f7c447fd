"""The routed experts of a single token with fp8 weights: two launches that read each chosen weight once.

As kernels/experts_one.py, with all that a program reads asked for before anything is multiplied: a weight of
half the bytes needs as many in flight. Weights stay exact, activations too. Called by experts on a card.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dependent_launch import dependent, wait_and_release
from headrace.kernels.fp8_block import BLOCK, Fp8Weight
from headrace.kernels.silu_mul_triton import swiglu

_MOST_GROUPS = 16  # of 128 numbers, that a program of down reads of a row at a time


@dataclass(frozen=True, slots=True)
class OneFp8Tuning:
    """Launch choices: outputs a program makes and its warps, of gate_up and of down.

    Of gate_up a program makes its outputs `up_steps` times, asking for the weights of `up_stages` - 1 steps ahead.
    """

    up_rows: int = 4
    up_warps: int = 4
    up_steps: int = 4
    up_stages: int = 2
    down_rows: int = 4
    down_warps: int = 4


@triton.jit
def _dot_groups(b_w, b_x, p_scale, g_mask):
    """[N, G, 128] fp8 times [G, 128], each group with its scale: [N]."""
    sums = tl.sum(b_w.to(tl.float32) * b_x[None, :, :], 2)
    return tl.sum(sums * tl.load(p_scale, mask=g_mask, other=0.0)[None, :], 1)


@triton.jit
def _gate_up_one_fp8_kernel(
    x_ptr,  # [D]
    w_ptr,  # [E, 2F, D]
    scale_ptr,  # [E, 2F / 128, D / 128]
    ids_ptr,  # [K] int64
    out_ptr,  # [K, F]
    D,
    F,
    w_stride,
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """GROUPS blocks hold all D inputs. A program makes BLOCK_N outputs STEPS times, reading some steps ahead.

    BLOCK_N * STEPS divides F.
    """
    i_k = tl.program_id(1)
    offs_n = tl.arange(0, BLOCK_N)
    offs_g = tl.arange(0, GROUPS)
    offs_k = offs_g[:, None] * 128 + tl.arange(0, 128)[None, :]
    groups = tl.cdiv(D, 128)
    # The ids come from the launch before, but what follows may start: it asks for its weights first.
    wait_and_release(PDL)
    i_e = tl.load(ids_ptr + i_k)
    b_x = tl.load(x_ptr + offs_k, mask=offs_k < D, other=0.0).to(tl.float32)
    p_gate = w_ptr + i_e * w_stride + (offs_n[:, None, None] * D + offs_k[None, :, :])
    p_scale = scale_ptr + i_e * (2 * F // 128) * groups + offs_g
    mask = (offs_k < D)[None, :, :]
    g_mask = offs_g < groups
    first_row = tl.program_id(0) * STEPS * BLOCK_N
    for step in tl.range(0, STEPS, num_stages=STAGES):
        row = first_row + step * BLOCK_N
        w_gate = tl.load(p_gate + row * D, mask=mask, other=0.0)
        w_up = tl.load(p_gate + (row + F) * D, mask=mask, other=0.0)
        b_gate = _dot_groups(w_gate, b_x, p_scale + row // 128 * groups, g_mask)
        b_up = _dot_groups(w_up, b_x, p_scale + (row + F) // 128 * groups, g_mask)
        out = swiglu(b_gate, b_up).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + i_k * F + row + offs_n, out)


@triton.jit
def _down_one_fp8_kernel(
    x_ptr,  # [K, F]
    w_ptr,  # [E, D, F]
    scale_ptr,  # [E, D / 128, F / 128]
    ids_ptr,  # [K] int64
    shares_ptr,  # [K] float32
    out_ptr,  # [D]; added to where ADD
    K,
    D,
    w_stride,
    F: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    i_n = tl.program_id(0)
    offs_k = tl.arange(0, K_BLOCK)
    offs_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_g = tl.arange(0, GROUPS)
    offs_f = offs_g[:, None] * 128 + tl.arange(0, 128)[None, :]
    k_mask = offs_k < K
    n_mask = offs_n < D
    kn_mask = k_mask[:, None] & n_mask[None, :]
    b_ids = tl.load(ids_ptr + offs_k, mask=k_mask, other=0)
    b_shares = tl.load(shares_ptr + offs_k, mask=k_mask, other=0.0)
    p_w = w_ptr + (b_ids * w_stride)[:, None, None, None] + (offs_n.to(tl.int64) * F)[None, :, None, None]
    p_w += offs_f[None, None, :, :]
    weights = ()  # type: tuple[tl.tensor, ...]
    for f in tl.static_range(0, F, GROUPS * 128):
        f_mask = (offs_f < F - f)[None, None, :, :]
        weights = weights + (tl.load(p_w + f, mask=kn_mask[:, :, None, None] & f_mask, other=0.0),)
    groups: tl.constexpr = (F + 127) // 128
    p_scale = (
        scale_ptr + ((b_ids * tl.cdiv(D, 128) + i_n * BLOCK_N // 128) * groups)[:, None] + offs_g[None, :]
    )
    # Ids and shares are older than the launch before: that one waited for them.
    wait_and_release(PDL)
    acc = tl.zeros([K_BLOCK, BLOCK_N], tl.float32)
    p_x = x_ptr + offs_k[:, None, None] * F + offs_f[None, :, :]
    for i in tl.static_range(len(weights)):
        f_mask = k_mask[:, None, None] & (offs_f < F - i * GROUPS * 128)[None, :, :]
        b_x = tl.load(p_x + i * GROUPS * 128, mask=f_mask, other=0.0).to(tl.float32)
        sums = tl.sum(weights[i].to(tl.float32) * b_x[:, None, :, :], 3)
        kg_mask = k_mask[:, None] & (offs_g < groups - i * GROUPS)[None, :]
        scales = tl.load(p_scale + i * GROUPS, mask=kg_mask, other=0.0) * b_shares[:, None]
        acc += tl.sum(sums * scales[:, None, :], 2)
    out = tl.sum(acc, 0)
    if ADD:
        out += tl.load(out_ptr + offs_n, mask=n_mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs_n, out.to(out_ptr.dtype.element_ty), mask=n_mask)


def launch_experts_one_fp8(
    x: Tensor,
    gate_up: Fp8Weight,
    down: Fp8Weight,
    ids: Tensor,
    shares: Tensor,
    base: Tensor | None,
    tuning: OneFp8Tuning | None = None,
) -> Tensor:
    """As kernels.experts.experts for T = 1: x [1, D], ids and shares [1, K]."""
    tuning = OneFp8Tuning() if tuning is None else tuning
    D, K = x.shape[1], ids.shape[1]
    F = down.shape[2]
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if not weight.values.is_contiguous():
            raise ValueError(f"{name}: must be contiguous, strides are {weight.values.stride()}")
    if F % BLOCK or BLOCK % (tuning.up_rows * tuning.up_steps) or BLOCK % tuning.down_rows:
        raise ValueError(
            f"gate_up: halves of {F} rows or {tuning} do not fit {BLOCK}x{BLOCK} blocks of scales"
        )
    hidden = torch.empty(K, F, dtype=x.dtype, device=x.device)
    _gate_up_one_fp8_kernel[(F // (tuning.up_rows * tuning.up_steps), K)](
        x_ptr=x,
        w_ptr=gate_up.values,
        scale_ptr=gate_up.scale_inv,
        ids_ptr=ids,
        out_ptr=hidden,
        D=D,
        F=F,
        w_stride=gate_up.values.stride(0),
        BLOCK_N=tuning.up_rows,
        STEPS=tuning.up_steps,
        STAGES=tuning.up_stages,
        GROUPS=triton.next_power_of_2(triton.cdiv(D, BLOCK)),
        num_warps=tuning.up_warps,
        **dependent(x),
    )
    out = torch.empty_like(x) if base is None else base
    # The largest power of two that divides the groups: nothing is asked for in vain.
    groups = F // BLOCK & -(F // BLOCK)
    _down_one_fp8_kernel[(triton.cdiv(D, tuning.down_rows),)](
        x_ptr=hidden,
        w_ptr=down.values,
        scale_ptr=down.scale_inv,
        ids_ptr=ids,
        shares_ptr=shares,
        out_ptr=out,
        K=K,
        D=D,
        w_stride=down.values.stride(0),
        F=F,
        K_BLOCK=triton.next_power_of_2(K),
        BLOCK_N=tuning.down_rows,
        GROUPS=min(groups, _MOST_GROUPS),
        ADD=base is not None,
        num_warps=tuning.down_warps,
        **dependent(x),
    )
    return out
