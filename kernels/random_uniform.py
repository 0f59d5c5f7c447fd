"""Counter-based uniform random numbers: a pure function of (seed, position, purpose), with no generator state.

So a resumed, preempted, migrated or replayed request draws the same numbers. The mixing function is the
finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
"""

from enum import IntEnum

from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLY_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLY_2 = 0x94D049BB133111EB - (1 << 64)

FRACTION_BITS = 40  # of the fixed-point numbers that sampling compares


class Purpose(IntEnum):
    """What a draw is for; equal (seed, position) with different purposes are independent."""

    SAMPLE = 0  # the token itself
    DRAFT = 1  # a drafter's guess of it
    ACCEPT = 2  # whether that guess stands
    RESIDUAL = 3  # the token in its place


def random_uniform_ref(seeds: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """Draw one number for each row.

    Args:
        seeds: [S] int64, any value.
        positions: [S] int64, index of the token to choose within its sequence.
        purpose: the stream of numbers to draw from.

    Returns:
        [S] int64, uniform in 0..2**FRACTION_BITS - 1.
    """
    hashed = _mix(seeds + _wrapped((int(purpose) + 1) * _GAMMA))
    hashed = _mix(hashed + (positions + 1) * _GAMMA)
    return (hashed >> (64 - FRACTION_BITS)) & ((1 << FRACTION_BITS) - 1)


def random_uniform(seeds: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """See random_uniform_ref; the same numbers on every device."""
    if seeds.is_cuda:
        from headrace.kernels.random_uniform_triton import launch_random_uniform

        return launch_random_uniform(seeds, positions, int(purpose), FRACTION_BITS)
    return random_uniform_ref(seeds, positions, purpose)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MULTIPLY_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLY_2
    return x ^ _shift_right(x, 31)


def _wrapped(value: int) -> int:
    """Into the signed 64 bits that a tensor holds."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # int64 shifts carry the sign along; the mask makes the shift a logical one.
    return (x >> bits) & ((1 << (64 - bits)) - 1)
