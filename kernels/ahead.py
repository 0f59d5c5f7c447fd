"""Asks for a later product's weight while a kernel runs that leaves the memory idle, so that it lies in the L2 cache.

Some programs of that kernel do nothing else, and do not wait for what they ask for. Source: PTX ISA, `prefetch`.
Used by the small kernels of a decode step.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

_LINE = 128  # bytes of one request
_LINES = 1024  # of a program


@triton.jit
def ask_ahead(weight_ptr, lines, i_program):
    """Ask for the lines of one program: 1024 of 128 bytes."""
    offs = i_program * 1024 + tl.arange(0, 1024)
    address = weight_ptr.to(tl.int64) + offs.to(tl.int64) * 128
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [address, (offs < lines).to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def ahead(weight: Tensor | None, columns: int) -> tuple[int, dict[str, Any]]:
    """Rows of `columns` programs more, and the kernel's arguments. A rest below a line is not asked for."""
    if weight is None or not weight.is_cuda:
        return 0, {"ahead_ptr": None, "ahead_chunks": 0, "AHEAD": False}
    lines = weight.numel() * weight.element_size() // _LINE
    rows = -(-lines // (_LINES * columns))
    return rows, {"ahead_ptr": weight, "ahead_chunks": lines, "AHEAD": True}
