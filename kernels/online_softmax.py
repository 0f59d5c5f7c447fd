"""The running softmax of attention kernels (FlashAttention-2, arXiv 2307.08691): maximum, sum, decay."""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def add_scores(scores, scale, m, total, AXIS: tl.constexpr):
    """Take scores (-inf = hidden) into the running maximum and sum over AXIS, in base 2.

    `scale` is positive and includes log2(e). Returns weights, decay of what was summed before, maximum, sum.
    """
    m_new = tl.maximum(m, tl.max(scores, AXIS) * scale)
    # A query that has seen nothing yet would subtract infinities.
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    weights = tl.exp2(scores * scale - tl.expand_dims(m_safe, AXIS))
    decay = tl.exp2(m - m_safe)
    return weights, decay, m_new, total * decay + tl.sum(weights, AXIS)
