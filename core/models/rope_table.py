"""Cosines and sines of every position a model may see. Called once, when a model is built."""

import math

import torch
from torch import Tensor

from headrace.core.model_spec import RopeSpec, YarnSpec


def rope_table(rope: RopeSpec, max_position: int, device: torch.device) -> Tensor:
    """[max_position, 1, dim / 2] complex64: cosine + i * sine. Float32 inside, as the models were trained."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    frequencies = 1.0 / (rope.theta**exponents) / rope.linear_factor
    scale = 1.0
    if rope.yarn is not None:
        frequencies = _yarn(rope, rope.yarn, frequencies)
        scale = rope.yarn.cos_sin_scale
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
    return torch.complex(angles.cos() * scale, angles.sin() * scale).unsqueeze(1).to(device)


def _yarn(rope: RopeSpec, yarn: YarnSpec, frequencies: Tensor) -> Tensor:
    """Interpolate the slow dimensions, keep the fast ones (arXiv 2309.00071, 3.2)."""

    def dimension(rotations: float) -> float:
        """The dimension that turns so many times over the original context."""
        turns = yarn.original_max_position / (rotations * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / yarn.factor * (1 - kept) + frequencies * kept
