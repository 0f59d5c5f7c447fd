"""Norm, rotate and store what MLA keeps of a token: its latent and its rotary key. Called by the MLA layer."""

import torch
from torch import Tensor

from headrace.kernels.rms_norm import rms_norm, rms_norm_ref
from headrace.kernels.rope import rope, rope_ref


def mla_kv_write(
    kv_a: Tensor,
    weight: Tensor,
    rotation: Tensor,
    slots: Tensor,
    cache: Tensor,
    eps: float,
    interleaved: bool,
) -> None:
    """Write one row of one layer's cache per token.

    Args:
        kv_a: [T, C + R] latent and rotary key as projected.
        weight: [C] of the latent's norm.
        rotation: [T, R / 2, 2] float32, see `rope`.
        slots: [T] int64, block * block_size + offset; slots that repeat keep any one of the rows.
        cache: [blocks, block_size, C + R] of one layer, written.
    """
    rank = weight.shape[0]
    latent = rms_norm(kv_a[:, :rank], weight, eps)
    key = rope(kv_a[:, None, rank:], rotation, interleaved)
    row = torch.cat((latent, key.view(key.shape[0], -1)), -1)
    cache.view(-1, row.shape[-1]).index_copy_(0, slots, row)


def mla_kv_write_ref(
    kv_a: Tensor,
    weight: Tensor,
    rotation: Tensor,
    slots: Tensor,
    cache: Tensor,
    eps: float,
    interleaved: bool,
) -> None:
    rank, block_size = weight.shape[0], cache.shape[1]
    latent = rms_norm_ref(kv_a[:, :rank], weight, eps)
    key = rope_ref(kv_a[:, None, rank:], rotation, interleaved)[:, 0]
    for token, slot in enumerate(slots.tolist()):
        cache[slot // block_size, slot % block_size, :rank] = latent[token]
        cache[slot // block_size, slot % block_size, rank:] = key[token]
