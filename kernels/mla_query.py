"""Bring MLA's queries into the latent space of the cache. Called by the MLA layer."""

import torch
from torch import Tensor

from headrace.kernels.rope import rope_in_place, rope_ref


def mla_query(q: Tensor, key_up: Tensor, rotation: Tensor, interleaved: bool) -> Tensor:
    """Absorb the key up-projection (arXiv 2405.04434, 2.1.2) and rotate the positional part.

    Args:
        q: [T, H, N + R], without and with position; spent: on a CPU it is overwritten.
        key_up: [H, N, C], the key half of kv_b_proj.
        rotation: [T, 1, R / 2] complex64, see `rope`.

    Returns:
        [T, H, C + R]: its product with a cache row is the score.
    """
    if q.is_cuda:
        from headrace.kernels.mla_query_triton import launch_mla_query

        return launch_mla_query(q, key_up, rotation, interleaved)
    nope = key_up.shape[1]
    plain, turning = q.split_with_sizes((nope, q.shape[2] - nope), 2)
    latent = torch.bmm(plain.transpose(0, 1), key_up).transpose(0, 1)
    return torch.cat((latent, rope_in_place(turning, rotation, interleaved)), 2)


def mla_query_ref(q: Tensor, key_up: Tensor, rotation: Tensor, interleaved: bool) -> Tensor:
    nope = key_up.shape[1]
    latent = torch.einsum("thn,hnc->thc", q[..., :nope].float(), key_up.float()).to(q.dtype)
    return torch.cat((latent, rope_ref(q[..., nope:], rotation, interleaved)), -1)
