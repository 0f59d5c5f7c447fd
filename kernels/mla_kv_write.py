"""Norm, rotate and store what MLA keeps of a token: its latent and its rotary key. Called by the MLA layer."""

from torch import Tensor

from headrace.kernels.rms_norm import NormWeight, rms_norm_in_place, rms_norm_ref
from headrace.kernels.rope import rope_in_place, rope_ref


def mla_kv_write(
    kv_a: Tensor,
    norm: NormWeight,
    rotation: Tensor,
    slots: Tensor,
    cache: Tensor,
    interleaved: bool,
) -> None:
    """Write one row of one layer's cache per token.

    Args:
        kv_a: [T, C + R] latent and rotary key as projected; spent: on a CPU it is overwritten.
        norm: of the latent's C numbers.
        rotation: [T, 1, R / 2] complex64, see `rope`.
        slots: [T] int64, block * block_size + offset; slots that repeat keep any one of the rows.
        cache: [blocks, block_size, C + R] of one layer, written.
    """
    if kv_a.is_cuda:
        from headrace.kernels.mla_kv_write_triton import launch_mla_kv_write

        launch_mla_kv_write(kv_a, norm, rotation, slots, cache, interleaved)
        return
    rank, width = norm.gain.shape[0], kv_a.shape[1]
    latent, key = kv_a.split_with_sizes((rank, width - rank), 1)
    rope_in_place(key.unsqueeze(1), rotation, interleaved)
    rms_norm_in_place(latent, norm)
    cache.view(-1, width).index_copy_(0, slots, kv_a)


def mla_kv_write_ref(
    kv_a: Tensor,
    norm: NormWeight,
    rotation: Tensor,
    slots: Tensor,
    cache: Tensor,
    interleaved: bool,
) -> None:
    rank, block_size = norm.gain.shape[0], cache.shape[1]
    latent = rms_norm_ref(kv_a[:, :rank], norm)
    key = rope_ref(kv_a[:, None, rank:], rotation, interleaved)[:, 0]
    for token, slot in enumerate(slots.tolist()):
        cache[slot // block_size, slot % block_size, :rank] = latent[token]
        cache[slot // block_size, slot % block_size, rank:] = key[token]
