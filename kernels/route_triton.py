"""The router on a card: logits with float32 sums, then scores, groups and the best experts, in two launches.

The gate is float32. For bfloat16 inputs it is split into three bfloat16 pieces, 24 bits in all, so that tensor
cores multiply exactly what float32 would. Called by route, route_softmax and route_sigmoid.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dependent_launch import dependent, wait_and_release
from headrace.kernels.rms_norm import NormWeight

FEW_TOKENS = 16  # up to which plain multiplications beat the tensor cores' detour
_WEIGHT_EPS = 1e-20


@triton.jit
def _logits_few_kernel(
    x_ptr,  # [T, D]
    gain_ptr,  # [D] where NORM
    gate_ptr,  # [E, D]
    normed_ptr,  # [T, D], written where NORM
    out_ptr,  # [T, E]
    T,
    D,
    eps,
    x_stride,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    i_e = tl.program_id(0)
    E = tl.num_programs(0)
    offs_t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_d = tl.arange(0, BLOCK_D)
    t_mask = (offs_t < T)[:, None]
    d_mask = (offs_d < D)[None, :]
    b_gate = tl.load(gate_ptr + i_e * D + offs_d[None, :], mask=d_mask, other=0.0)
    if NORM:
        b_gain = tl.load(gain_ptr + offs_d[None, :], mask=d_mask, other=0.0).to(tl.float32)
    wait_and_release(PDL)
    rows = offs_t.to(tl.int64)[:, None]
    b_x = tl.load(x_ptr + rows * x_stride + offs_d[None, :], mask=t_mask & d_mask, other=0.0)
    wide = b_x.to(tl.float32)
    if NORM:
        inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) / D + eps)
        # Rounded before the gain, as the reference does.
        b_x = ((wide * inverse[:, None]).to(b_x.dtype).to(tl.float32) * b_gain).to(b_x.dtype)
        wide = b_x.to(tl.float32)
        if i_e == 0:
            tl.store(normed_ptr + rows * D + offs_d[None, :], b_x, mask=t_mask & d_mask)
    tl.store(out_ptr + offs_t * E + i_e, tl.sum(wide * b_gate, 1), mask=offs_t < T)


@triton.jit
def _logits_kernel(
    x_ptr,  # [T, D]
    gate_ptr,  # [E, D]
    out_ptr,  # [SPLITS, T, E]
    T,
    E,
    D,
    x_stride,
    SHARE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PIECES: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_and_release(PDL)
    i_split = tl.program_id(2)
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    offs_d = tl.arange(0, BLOCK_D)
    t_mask = offs_t < T
    e_mask = offs_e < E
    p_x = x_ptr + offs_t.to(tl.int64)[:, None] * x_stride + offs_d[None, :]
    p_gate = gate_ptr + offs_e[None, :] * D + offs_d[:, None]
    acc = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for d in range(i_split * SHARE, tl.minimum((i_split + 1) * SHARE, D), BLOCK_D):
        d_mask = offs_d < D - d
        b_x = tl.load(p_x + d, mask=t_mask[:, None] & d_mask[None, :], other=0.0)
        rest = tl.load(p_gate + d, mask=e_mask[None, :] & d_mask[:, None], other=0.0)
        if PIECES:
            for _ in tl.static_range(3):
                piece = rest.to(tl.bfloat16)
                acc = tl.dot(b_x, piece, acc)
                rest = rest - piece.to(tl.float32)
        else:
            acc = tl.dot(b_x.to(tl.float32), rest, acc, input_precision="ieee")
    p_out = out_ptr + i_split.to(tl.int64) * T * E + offs_t.to(tl.int64)[:, None] * E + offs_e[None, :]
    tl.store(p_out, acc, mask=t_mask[:, None] & e_mask[None, :])


@triton.jit
def _best(values, offs, END: tl.constexpr):
    """The largest value and the lowest place that holds it."""
    largest = tl.max(values, 0)
    return largest, tl.min(tl.where(values == largest, offs, END), 0)


@triton.jit
def _order_keys(values, offs, END: tl.constexpr):
    """int64 keys that order as float32 `values` do, the lower place first among equals; none is negative."""
    bits = values.to(tl.int32, bitcast=True).to(tl.int64)
    bits = tl.where(bits < 0, -1 - (bits & 0x7FFFFFFF), bits)
    return (bits + 0x80000000) * END + (END - 1 - offs)


@triton.jit
def _choose_kernel(
    logits_ptr,  # [SPLITS, T, E]
    bias_ptr,  # [E] where SIGMOID
    ids_ptr,  # [T, TOP_K + SHARED]
    weights_ptr,  # [T, TOP_K + SHARED]
    T,
    E,
    weight_scale,
    weight_eps,
    SPLITS: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    E_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    G_BLOCK: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_and_release(PDL)
    i_t = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, E_BLOCK)
    mask = offs < E
    if SPLITS == 1:
        logits = tl.load(logits_ptr + i_t * E + offs, mask=mask, other=float("-inf"))
    else:
        p_parts = logits_ptr + (tl.arange(0, SPLITS)[:, None] * T + i_t) * E + offs[None, :]
        logits = tl.sum(tl.load(p_parts, mask=mask[None, :], other=float("-inf")), 0)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
        choice = scores + tl.load(bias_ptr + offs, mask=mask, other=0.0)
    else:
        shares = tl.exp(logits - tl.maximum(tl.max(logits, 0), -1e30))
        scores = shares / tl.sum(shares, 0)
        choice = scores
    # A row of NaN must still name experts that exist: what is no number is chosen last, above padding only.
    choice = tl.where(choice == choice, choice, -1e30)
    choice = tl.where(mask, choice, float("-inf"))
    if GROUPS > 1:
        group_of = offs // (E // GROUPS)
        offs_g = tl.arange(0, G_BLOCK)
        merits = tl.full([G_BLOCK], float("-inf"), tl.float32)
        for g in tl.static_range(GROUPS):
            members = tl.where(mask & (group_of == g), choice, float("-inf"))
            merit, place = _best(members, offs, E_BLOCK)
            if SIGMOID:
                merit += tl.max(tl.where(offs == place, float("-inf"), members), 0)
            merits = tl.where(offs_g == g, merit, merits)
        open_ = tl.zeros([E_BLOCK], tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            _merit, group = _best(merits, offs_g, G_BLOCK)
            open_ = tl.where(group_of == group, 1, open_)
            merits = tl.where(offs_g == group, float("-inf"), merits)
        # Experts of closed groups stay above padding, in case the open ones are too few.
        choice = tl.where(mask & (open_ == 0), -2e30, choice)
    offs_k = tl.arange(0, K_BLOCK)
    ids = tl.zeros([K_BLOCK], tl.int32)
    # One reduction for each expert chosen: value and place in one number.
    keys = _order_keys(choice, offs, E_BLOCK)
    for k in tl.static_range(TOP_K):
        key = tl.max(keys, 0)
        ids = tl.where(offs_k == k, (E_BLOCK - 1 - key % E_BLOCK).to(tl.int32), ids)
        keys = tl.where(keys == key, -1, keys)
    chosen = tl.where(ids[:, None] == offs[None, :], scores[None, :], 0.0)
    weights = tl.where(offs_k < TOP_K, tl.sum(chosen, 1), 0.0)
    if NORMALIZE:
        weights = weights / tl.maximum(tl.sum(weights, 0), weight_eps)
    # Shared experts follow the routed ones, in number as in place, and count whole.
    ids = tl.where(offs_k < TOP_K, ids, E + offs_k - TOP_K)
    weights = tl.where(offs_k < TOP_K, weights * weight_scale, 1.0)
    K: tl.constexpr = TOP_K + SHARED
    tl.store(ids_ptr + i_t * K + offs_k, ids.to(tl.int64), mask=offs_k < K)
    tl.store(weights_ptr + i_t * K + offs_k, weights, mask=offs_k < K)


def launch_logits(x: Tensor, gate: Tensor, *, fixed: bool = False) -> Tensor:
    """[T, D], [E, D] float32 -> [parts, T, E] float32: logits are sums over the parts.

    Args:
        fixed: the same parts for every T, so that a token's logits do not depend on how many others there are.
    """
    _check(x, gate)
    if x.shape[0] <= FEW_TOKENS and not fixed:
        return _launch_few(x, None, gate)[1]
    (T, D), E = x.shape, gate.shape[0]
    # Parts of whole blocks; the sum over the parts, in order, is the next launch's.
    splits, block_e, block_d = (16, 32, 128) if T <= 512 or fixed else (2, 64, 64)
    out = torch.empty(splits, T, E, dtype=torch.float32, device=x.device)
    _logits_kernel[(triton.cdiv(T, 64), triton.cdiv(E, block_e), splits)](
        x_ptr=x,
        gate_ptr=gate,
        out_ptr=out,
        T=T,
        E=E,
        D=D,
        x_stride=x.stride(0),
        SHARE=triton.cdiv(triton.cdiv(D, splits), block_d) * block_d,
        BLOCK_T=64,
        BLOCK_E=block_e,
        BLOCK_D=block_d,
        PIECES=x.dtype is torch.bfloat16,
        num_warps=4,
        num_stages=3,
        **dependent(x),
    )
    return out


def launch_norm_logits(residual: Tensor, norm: NormWeight, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Norm and logits of at most FEW_TOKENS tokens in one launch.

    Args:
        residual: [T, D], rows of contiguous numbers.
        gate: [E, D] float32.

    Returns:
        The norm [T, D], and logits [1, T, E] float32.
    """
    _check(residual, gate)
    if residual.shape[0] > FEW_TOKENS:
        raise ValueError(f"residual: {residual.shape[0]} tokens, at most {FEW_TOKENS}")
    return _launch_few(residual, norm, gate)


def _launch_few(x: Tensor, norm: NormWeight | None, gate: Tensor) -> tuple[Tensor, Tensor]:
    """A program takes one expert and all of some tokens."""
    (T, D), E = x.shape, gate.shape[0]
    normed = x if norm is None else torch.empty(T, D, dtype=x.dtype, device=x.device)
    out = torch.empty(1, T, E, dtype=torch.float32, device=x.device)
    block_t, block_d = min(4, triton.next_power_of_2(T)), triton.next_power_of_2(D)
    _logits_few_kernel[(E, triton.cdiv(T, block_t))](
        x_ptr=x,
        gain_ptr=None if norm is None else norm.gain,
        gate_ptr=gate,
        normed_ptr=normed,
        out_ptr=out,
        T=T,
        D=D,
        eps=0.0 if norm is None else norm.eps,
        x_stride=x.stride(0),
        BLOCK_T=block_t,
        BLOCK_D=block_d,
        NORM=norm is not None,
        num_warps=min(max(block_d // 512, 4), 16),
        **dependent(x),
    )
    return normed, out


def _check(x: Tensor, gate: Tensor) -> None:
    E, D = gate.shape[0], x.shape[1]
    if gate.dtype is not torch.float32 or gate.shape != (E, D) or not gate.is_contiguous():
        raise ValueError(f"gate: {tuple(gate.shape)} {gate.dtype}, expected contiguous [E, {D}] float32")
    if x.stride(1) != 1:
        raise ValueError(f"x: rows must be contiguous, strides are {x.stride()}")


def launch_choose(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    normalize: bool,
    weight_scale: float,
    num_shared: int = 0,
) -> tuple[Tensor, Tensor]:
    """Parts of logits [parts, T, E] float32 -> ids [T, K] int64, best first, and weights [T, K] float32.

    K is top_k + num_shared.

    Args:
        bias: [E] float32: scores are sigmoids, groups are judged by their two best; None: softmax, by the best.
        num_shared: experts E, E + 1, ... that every token takes, with weight 1, behind the chosen ones.
    """
    SPLITS, T, E = logits.shape
    if not 0 < top_k <= E or E % num_groups or topk_groups > num_groups:
        raise ValueError(f"top_k: {top_k} of {E} experts in {topk_groups} of {num_groups} groups")
    ids = torch.empty(T, top_k + num_shared, dtype=torch.int64, device=logits.device)
    weights = torch.empty(T, top_k + num_shared, dtype=torch.float32, device=logits.device)
    _choose_kernel[(T,)](
        logits_ptr=logits,
        bias_ptr=bias,
        ids_ptr=ids,
        weights_ptr=weights,
        T=T,
        E=E,
        weight_scale=weight_scale,
        weight_eps=_WEIGHT_EPS,
        SPLITS=SPLITS,
        TOP_K=top_k,
        SHARED=num_shared,
        GROUPS=num_groups,
        TOP_GROUPS=topk_groups,
        E_BLOCK=triton.next_power_of_2(E),
        K_BLOCK=triton.next_power_of_2(top_k + num_shared),
        G_BLOCK=triton.next_power_of_2(num_groups),
        SIGMOID=bias is not None,
        NORMALIZE=normalize,
        num_warps=1,
        **dependent(logits),
    )
    return ids, weights
