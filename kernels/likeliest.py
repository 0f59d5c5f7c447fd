"""The greedy choice alone: what kernels/sample.py gives at temperature 0, for a step in which nothing is drawn."""

import torch
from torch import Tensor

from headrace.kernels.sample import INVALID_TOKEN


def likeliest_ref(logits: Tensor) -> Tensor:
    """The likeliest token of each row, the lowest id among equals.

    Args:
        logits: [S, V] float32.

    Returns:
        [S] int64 token ids; INVALID_TOKEN where a row holds a NaN.
    """
    largest, ids = logits.max(dim=-1)
    return torch.where(torch.isnan(largest), INVALID_TOKEN, ids)


likeliest = likeliest_ref
