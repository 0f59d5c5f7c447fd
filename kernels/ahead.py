"""Asks for what a program will read later, so that it lies in the L2 cache by then. Source: PTX ISA, `prefetch`.

Used by the products that stream a weight, before they wait for the launch ahead.
"""

import triton
import triton.language as tl


@triton.jit
def ask_for(pointers, here):
    """Ask for the lines of 128 bytes that some pointers lie in, where `here`. On a card only."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [pointers.to(tl.int64), here.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
