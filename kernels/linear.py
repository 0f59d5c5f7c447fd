"""Matrix product with a weight stored as Hugging Face stores it, rows = outputs. Called by the model layers."""

import torch.nn.functional as F
from torch import Tensor

PAD = 16  # numbers between the columns of a packed weight: strides that are powers of two thrash the cache


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """[T, K] x [N, K] -> [T, N]."""
    return linear_ref(x, weight)


def linear_ref(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def pack_linear(weight: Tensor) -> Tensor:
    """The same numbers in the memory order that this device multiplies fastest.

    On a CPU one token's product is bound by memory, and columns as long as N stream up to twice as fast as rows
    of K when N >= K; for many tokens they are no slower. Other devices take the weight as it is.

    Args:
        weight: [..., N, K].

    Returns:
        [..., N, K], perhaps a strided view of new memory.
    """
    N, K = weight.shape[-2:]
    if weight.device.type != "cpu" or N < K:
        return weight
    packed = weight.new_empty(*weight.shape[:-2], K, N + PAD)[..., :N].transpose(-1, -2)
    return packed.copy_(weight)
