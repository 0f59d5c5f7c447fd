"""Which weight a step asks for ahead of its use; see kernels/ahead.py. Called by the model layers."""

from torch import Tensor

from headrace.kernels.fp8_block import Fp8Weight

MAX_TOKENS = 0  # of a step that asks; with more, attention itself keeps the memory busy


def following(weight: Tensor | Fp8Weight, tokens: int) -> Tensor | None:
    """What there is to ask for of a product's weight, in a step of so many tokens."""
    if tokens > MAX_TOKENS:
        return None
    return weight.values if isinstance(weight, Fp8Weight) else weight
