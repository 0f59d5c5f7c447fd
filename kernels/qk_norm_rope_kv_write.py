"""Split a fused QKV projection, norm and rotate queries and keys, store keys and values.

Called by the GQA layer.
"""

from torch import Tensor

from headrace.kernels.rms_norm import NormWeight, floored_length, rms_norm_ref
from headrace.kernels.rope import rope, rope_ref


def qk_norm_rope_kv_write(
    qkv: Tensor,
    q_norm: NormWeight,
    k_norm: NormWeight,
    rotation: Tensor,
    slots: Tensor,
    cache: Tensor,
    interleaved: bool,
) -> Tensor:
    """Write one row of one layer's keys and values per token.

    Args:
        qkv: [T, (Hq + 2 Hkv) * D].
        q_norm, k_norm: of the D numbers of a head, with one epsilon.
        rotation: [T, 1, D / 2] complex64, see `rope`.
        slots: [T] int64, block * block_size + offset; slots that repeat keep any one of the rows.
        cache: [2, blocks, block_size, Hkv, D] of one layer, written.

    Returns:
        [T, Hq, D], the queries.
    """
    if qkv.is_cuda:
        from headrace.kernels.qk_norm_rope_kv_write_triton import launch_qk_norm_rope_kv_write

        return launch_qk_norm_rope_kv_write(qkv, q_norm, k_norm, rotation, slots, cache, interleaved)
    heads, dim = cache.shape[3:]
    states = qkv.view(qkv.shape[0], -1, dim)
    num_q = states.shape[1] - 2 * heads
    wide = states[:, : num_q + heads].float()
    normed = wide / floored_length(wide, q_norm.floor)
    normed[:, :num_q].mul_(q_norm.scaled_gain)
    normed[:, num_q:].mul_(k_norm.scaled_gain)
    turned = rope(normed, rotation, interleaved).to(qkv.dtype)
    rows = cache.view(2, -1, heads, dim)
    rows[0].index_copy_(0, slots, turned[:, num_q:])
    rows[1].index_copy_(0, slots, states[:, num_q + heads :])
    return turned[:, :num_q]


def qk_norm_rope_kv_write_ref(
    qkv: Tensor,
    q_norm: NormWeight,
    k_norm: NormWeight,
    rotation: Tensor,
    slots: Tensor,
    cache: Tensor,
    interleaved: bool,
) -> Tensor:
    heads, dim = cache.shape[3:]
    q, k, v = qkv.view(qkv.shape[0], -1, dim).split((qkv.shape[1] // dim - 2 * heads, heads, heads), 1)
    k = rope_ref(rms_norm_ref(k, k_norm), rotation, interleaved)
    for token, slot in enumerate(slots.tolist()):
        place = (slot // cache.shape[2], slot % cache.shape[2])
        cache[0][place] = k[token]
        cache[1][place] = v[token]
    return rope_ref(rms_norm_ref(q, q_norm), rotation, interleaved)
