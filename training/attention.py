"""Multi-head latent attention for training, and the latent cache that decode.py keeps.

Keys and values are expanded from the latent (no absorption): the straightforward form, equal to the served one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.shape import Shape

Rotary = tuple[Tensor, Tensor]  # cosines and sines, [T, rope_dim / 2]


def rotary_table(shape: Shape, length: int) -> Rotary:
    """Cosines and sines for positions 0 .. length-1, float32."""
    frequencies = shape.rope_theta ** (-torch.arange(0, shape.rope_dim, 2).float() / shape.rope_dim)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn neighbouring pairs of x [..., T, rope_dim] by their position (DeepSeek's interleaved form)."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    cos, sin = rotary
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).to(x.dtype)


class LatentCache:
    """Latents and rotated keys of the positions seen so far, of one layer and one sequence."""

    def __init__(self) -> None:
        """Begin empty."""
        self._latent: Tensor | None = None  # [1, S, latent_dim]
        self._key: Tensor | None = None  # [1, 1, S, rope_dim]

    def __len__(self) -> int:
        """Positions held."""
        return 0 if self._latent is None else self._latent.shape[1]

    def append(self, latent: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Add positions and return everything held."""
        if self._latent is not None and self._key is not None:
            latent, key = torch.cat([self._latent, latent], 1), torch.cat([self._key, key], 2)
        self._latent, self._key = latent, key
        return latent, key

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on."""
        if self._latent is not None and self._key is not None:
            self._latent, self._key = self._latent[:, :length], self._key[:, :, :length]


class Attention(nn.Module):
    """MLA: queries per head, keys and values from one latent of latent_dim, one rotary key for all heads."""

    def __init__(self, shape: Shape) -> None:
        """Allocate; values are set by Model."""
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.kv_a_proj = nn.Linear(shape.hidden, shape.latent_dim + shape.rope_dim, bias=False)
        self.kv_a_norm = nn.RMSNorm(shape.latent_dim, shape.eps)
        self.kv_b_proj = nn.Linear(
            shape.latent_dim, shape.heads * (shape.nope_dim + shape.value_dim), bias=False
        )
        self.o_proj = nn.Linear(shape.heads * shape.value_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, rotary: Rotary, cache: LatentCache | None = None) -> Tensor:
        """x [B, T, hidden] -> [B, T, hidden]; with a cache, x continues the positions that it holds."""
        shape = self.shape
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, shape.heads, shape.head_dim).transpose(1, 2)
        q_nope, q_rope = q.split([shape.nope_dim, shape.rope_dim], -1)
        latent, key = self.kv_a_proj(x).split([shape.latent_dim, shape.rope_dim], -1)
        latent, key = self.kv_a_norm(latent.float()), rotate(key[:, None], rotary)
        mask = None
        if cache is not None:
            past = len(cache)
            latent, key = cache.append(latent, key)
            mask = torch.ones(length, past + length, dtype=torch.bool, device=x.device).tril(past)
        expanded = self.kv_b_proj(latent).view(batch, latent.shape[1], shape.heads, -1).transpose(1, 2)
        k_nope, v = expanded.split([shape.nope_dim, shape.value_dim], -1)
        q = torch.cat([q_nope, rotate(q_rope, rotary)], -1)
        k = torch.cat([k_nope, key.expand(-1, shape.heads, -1, -1).to(k_nope.dtype)], -1)
        # the fused kernels want values as wide as keys
        v = F.pad(v, (0, shape.head_dim - shape.value_dim))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        y = y[..., : shape.value_dim].transpose(1, 2).reshape(batch, length, -1)
        out: Tensor = self.o_proj(y)
        return out
