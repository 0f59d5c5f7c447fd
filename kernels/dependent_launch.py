"""Programmatic dependent launch: a kernel's programs start while the launch ahead still ends.

What they do before they wait overlaps with it, and so does their start. Every program must wait, also one that has
nothing to do: a launch that ended early would tell the next that all before it is done. Used by the Triton kernels
of a decode step. Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def wait_and_release(PDL: tl.constexpr):
    """Wait until the launch ahead is done; let the next one begin."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def dependent(x: Tensor) -> dict[str, Any]:
    """The launch's part: arguments of a kernel with the flag PDL, on x's device."""
    return {"PDL": True, "launch_pdl": True} if x.is_cuda else {"PDL": False}
