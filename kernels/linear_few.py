"""Products of a few tokens with a weight, on a card: the weight is streamed once, each program owns some rows.

The sum over K is never split between programs, so a result depends neither on timing nor on the other tokens.
The input's RMS norm may be folded in: the gain scales the input, the root divides the sum at the end.
Called by linear and norm_linear; weights may be fp8 with a scale for each 128x128 block (kernels/fp8_block.py).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.fp8_block import BLOCK, Fp8Weight
from headrace.kernels.rms_norm import NormWeight


@dataclass(frozen=True, slots=True)
class FewTuning:
    """Launch choices: a program takes `block_n` rows of the weight, `block_k` numbers of each at a time."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@triton.jit
def _linear_one_kernel(
    x_ptr,  # [K]
    w_ptr,  # [N, K]
    scale_ptr,  # [N / 128, K / 128] where FP8
    gain_ptr,  # [K] where NORM
    out_ptr,  # [N]; added to where ADD
    N,
    K,
    w_stride,
    eps,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    FP8: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    n_mask = offs_n < N
    p_w = w_ptr + offs_n.to(tl.int64)[:, None] * w_stride + offs_k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k_mask = offs_k < K - k
        b_w = tl.load(p_w + k, mask=n_mask[:, None] & k_mask[None, :], other=0.0).to(tl.float32)
        b_x = tl.load(x_ptr + k + offs_k, mask=k_mask, other=0.0).to(tl.float32)
        if NORM:
            squares += b_x * b_x
            b_x = b_x * tl.load(gain_ptr + k + offs_k, mask=k_mask, other=0.0).to(tl.float32)
        if FP8:
            # A program's rows share their block of rows; the columns may span several.
            offs_s = (tl.program_id(0) * BLOCK_N // 128) * tl.cdiv(K, 128) + (k + offs_k) // 128
            b_x = b_x * tl.load(scale_ptr + offs_s, mask=k_mask, other=0.0)
        acc += b_w * b_x[None, :]
    out = tl.sum(acc, 1)
    if NORM:
        out = out / tl.sqrt(tl.sum(squares, 0) / K + eps)
    if ADD:
        out += tl.load(out_ptr + offs_n, mask=n_mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs_n, out.to(out_ptr.dtype.element_ty), mask=n_mask)


@triton.jit
def _linear_few_kernel(
    x_ptr,  # [T, K]
    w_ptr,  # [N, K]
    scale_ptr,  # [N / 128, K / 128] where FP8
    gain_ptr,  # [K] where NORM
    out_ptr,  # [T, N]; added to where ADD
    T,
    N,
    K,
    x_stride,
    w_stride,
    out_stride,
    eps,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    FP8: tl.constexpr,
):
    i_n = tl.program_id(0)
    offs_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_k = tl.arange(0, BLOCK_K)
    n_mask = offs_n < N
    t_mask = offs_t < T
    p_x = x_ptr + offs_t.to(tl.int64)[:, None] * x_stride + offs_k[None, :]
    p_w = w_ptr + offs_n.to(tl.int64)[None, :] * w_stride + offs_k[:, None]
    i_scale = (i_n * BLOCK_N // 128) * tl.cdiv(K, 128)
    acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_T], tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k_mask = offs_k < K - k
        b_w = tl.load(p_w + k, mask=n_mask[None, :] & k_mask[:, None], other=0.0)
        b_x = tl.load(p_x + k, mask=t_mask[:, None] & k_mask[None, :], other=0.0)
        if NORM:
            wide = b_x.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            b_gain = tl.load(gain_ptr + k + offs_k, mask=k_mask, other=0.0).to(tl.float32)
            b_x = (wide * b_gain[None, :]).to(b_x.dtype)
        if FP8:
            part = tl.dot(b_x, b_w.to(b_x.dtype), input_precision="ieee")
            acc += part * tl.load(scale_ptr + i_scale + k // 128)
        else:
            acc = tl.dot(b_x, b_w, acc, input_precision="ieee")
    if NORM:
        acc = acc / tl.sqrt(squares / K + eps)[:, None]
    p_out = out_ptr + offs_t.to(tl.int64)[:, None] * out_stride + offs_n[None, :]
    mask = t_mask[:, None] & n_mask[None, :]
    if ADD:
        acc += tl.load(p_out, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_out, acc.to(out_ptr.dtype.element_ty), mask=mask)


def launch_linear_few(
    x: Tensor,
    weight: Tensor | Fp8Weight,
    norm: NormWeight | None,
    add_to: Tensor | None,
    tuning: FewTuning | None = None,
) -> Tensor:
    """linear(norm(x)) for few tokens; into `add_to`, added, where given.

    Args:
        x: [T, K], rows of contiguous numbers.
        weight: [N, K].
        norm: of K numbers; None = none.
        add_to: [T, N], updated and returned; None = a new tensor.
        tuning: None = the table's.

    Returns:
        [T, N] in x's dtype.
    """
    values = weight.values if isinstance(weight, Fp8Weight) else weight
    (T, K), N = x.shape, values.shape[0]
    if values.shape != (N, K) or values.stride(1) != 1 or x.stride(1) != 1:
        raise ValueError(f"weight: {tuple(values.shape)}, strides {values.stride()}; x is {tuple(x.shape)}")
    fp8 = isinstance(weight, Fp8Weight)
    tuning = few_tuning(T, N, K, fp8=fp8) if tuning is None else tuning
    if fp8 and (BLOCK % tuning.block_n or (T > 1 and BLOCK % tuning.block_k)):
        raise ValueError(f"tuning: {tuning} crosses the {BLOCK}x{BLOCK} blocks of scales")
    out = torch.empty(T, N, dtype=x.dtype, device=x.device) if add_to is None else add_to
    shared = {
        "x_ptr": x,
        "w_ptr": values,
        "scale_ptr": weight.scale_inv if isinstance(weight, Fp8Weight) else None,
        "gain_ptr": None if norm is None else norm.gain,
        "out_ptr": out,
        "N": N,
        "K": K,
        "w_stride": values.stride(0),
        "eps": 0.0 if norm is None else norm.eps,
        "BLOCK_N": tuning.block_n,
        "BLOCK_K": tuning.block_k,
        "STAGES": tuning.num_stages,
        "NORM": norm is not None,
        "ADD": add_to is not None,
        "FP8": fp8,
        "num_warps": tuning.num_warps,
    }
    if T == 1:
        _linear_one_kernel[(triton.cdiv(N, tuning.block_n),)](**shared)
        return out
    block_t = min(max(triton.next_power_of_2(T), 16), 64)
    _linear_few_kernel[(triton.cdiv(N, tuning.block_n), triton.cdiv(T, block_t))](
        T=T,
        x_stride=x.stride(0),
        out_stride=out.stride(0),
        BLOCK_T=block_t,
        **shared,
    )
    return out


def few_tuning(T: int, N: int, K: int, *, fp8: bool) -> FewTuning:
    """What fills the card: programs that are many, with much in flight in each."""
    if T == 1:
        return FewTuning(block_n=4, block_k=1024, num_warps=4, num_stages=2)
    rows = 16 if N <= 4096 else 32
    return FewTuning(block_n=rows, block_k=128 if fp8 or T > 16 else 256, num_warps=4, num_stages=4)
