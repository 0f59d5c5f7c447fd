"""The router on a card: logits with float32 sums, then scores, groups and the best experts, in two launches.

The gate is float32. For bfloat16 inputs it is split into three bfloat16 pieces, 24 bits in all, so that tensor
cores multiply exactly what float32 would. Called by route_softmax and route_sigmoid.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_FEW = 16  # tokens up to which plain multiplications beat the tensor cores' detour
_WEIGHT_EPS = 1e-20


@triton.jit
def _logits_few_kernel(
    x_ptr,  # [T, D]
    gate_ptr,  # [E, D]
    out_ptr,  # [T, E]
    T,
    E,
    D,
    x_stride,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    offs_t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    offs_d = tl.arange(0, BLOCK_D)
    t_mask = offs_t < T
    e_mask = offs_e < E
    p_gate = gate_ptr + offs_e[:, None] * D + offs_d[None, :]
    p_x = x_ptr + offs_t.to(tl.int64)[:, None] * x_stride + offs_d[None, :]
    b_gate = tl.load(p_gate, mask=e_mask[:, None] & (offs_d < D)[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for d in range(0, D, BLOCK_D):
        d_mask = (offs_d < D - d)[None, :]
        if d > 0:
            b_gate = tl.load(p_gate + d, mask=e_mask[:, None] & d_mask, other=0.0)
        b_x = tl.load(p_x + d, mask=t_mask[:, None] & d_mask, other=0.0).to(tl.float32)
        acc += tl.sum(b_x[:, None, :] * b_gate.to(tl.float32)[None, :, :], 2)
    p_out = out_ptr + offs_t.to(tl.int64)[:, None] * E + offs_e[None, :]
    tl.store(p_out, acc, mask=t_mask[:, None] & e_mask[None, :])


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
):
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
    ids_ptr,  # [T, TOP_K]
    weights_ptr,  # [T, TOP_K]
    T,
    E,
    weight_scale,
    weight_eps,
    SPLITS: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    E_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    G_BLOCK: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i_t = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, E_BLOCK)
    mask = offs < E
    logits = tl.load(logits_ptr + i_t * E + offs, mask=mask, other=float("-inf"))
    for i in tl.static_range(1, SPLITS):
        logits += tl.load(logits_ptr + (i * T + i_t) * E + offs, mask=mask, other=0.0)
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
    k_mask = offs_k < TOP_K
    tl.store(ids_ptr + i_t * TOP_K + offs_k, ids.to(tl.int64), mask=k_mask)
    tl.store(weights_ptr + i_t * TOP_K + offs_k, weights * weight_scale, mask=k_mask)


def launch_logits(x: Tensor, gate: Tensor) -> Tensor:
    """[T, D], [E, D] float32 -> [parts, T, E] float32: logits are sums over the parts."""
    (T, D), E = x.shape, gate.shape[0]
    if gate.dtype is not torch.float32 or gate.shape != (E, D) or not gate.is_contiguous():
        raise ValueError(f"gate: {tuple(gate.shape)} {gate.dtype}, expected contiguous [E, {D}] float32")
    if x.stride(1) != 1:
        raise ValueError(f"x: rows must be contiguous, strides are {x.stride()}")
    splits = 1 if T <= _FEW else 8 if T <= 512 else 2
    out = torch.empty(splits, T, E, dtype=torch.float32, device=x.device)
    shared = {"x_ptr": x, "gate_ptr": gate, "out_ptr": out, "T": T, "E": E, "D": D, "x_stride": x.stride(0)}
    if T <= _FEW:
        block_t = 1 if T < 4 else 4
        block_e = 1 if T == 1 else 4
        _logits_few_kernel[(triton.cdiv(E, block_e), triton.cdiv(T, block_t))](
            **shared,
            BLOCK_T=block_t,
            BLOCK_E=block_e,
            BLOCK_D=2048 if T == 1 else 512,
            PDL=x.is_cuda,
            num_warps=4,
            **({"launch_pdl": True} if x.is_cuda else {}),
        )
        return out
    # Parts of whole blocks; the sum over the parts, in order, is the next launch's.
    _logits_kernel[(triton.cdiv(T, 64), triton.cdiv(E, 64), splits)](
        **shared,
        SHARE=triton.cdiv(triton.cdiv(D, splits), 64) * 64,
        BLOCK_T=64,
        BLOCK_E=64,
        BLOCK_D=64,
        PIECES=x.dtype is torch.bfloat16,
        num_warps=4,
        num_stages=3,
    )
    return out


def launch_choose(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    normalize: bool,
    weight_scale: float,
) -> tuple[Tensor, Tensor]:
    """Parts of logits [parts, T, E] float32 -> ids [T, top_k] int64, best first, and weights [T, top_k] float32.

    Args:
        bias: [E] float32: scores are sigmoids, groups are judged by their two best; None: softmax, by the best.
    """
    SPLITS, T, E = logits.shape
    if not 0 < top_k <= E or E % num_groups or topk_groups > num_groups:
        raise ValueError(f"top_k: {top_k} of {E} experts in {topk_groups} of {num_groups} groups")
    ids = torch.empty(T, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(T, top_k, dtype=torch.float32, device=logits.device)
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
        GROUPS=num_groups,
        TOP_GROUPS=topk_groups,
        E_BLOCK=triton.next_power_of_2(E),
        K_BLOCK=triton.next_power_of_2(top_k),
        G_BLOCK=triton.next_power_of_2(num_groups),
        SIGMOID=bias is not None,
        NORMALIZE=normalize,
        PDL=logits.is_cuda,
        num_warps=1,
        **({"launch_pdl": True} if logits.is_cuda else {}),
    )
    return ids, weights
