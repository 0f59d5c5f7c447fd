"""Which row a program works for, where rows of many query tokens are divided into tiles or copied as one.

A recorded step launches as many programs as its token count may need; which rows there are, the device finds out.
Used by the prefill kernels.
"""

import triton
import triton.language as tl


@triton.jit
def find_tile(query_starts_ptr, first_row, num_rows, i, BLOCK_M: tl.constexpr):
    """(row, tile) of the i-th of all tiles of BLOCK_M query tokens, counted from the last; row -1 = there is none.

    Rows are first_row..first_row + num_rows - 1, those without a token included. The last tiles of a row see most of
    its context, so they come first.
    """
    ROWS: tl.constexpr = 32
    total = 0
    for r in range(0, num_rows, ROWS):
        total += tl.sum(_tiles(query_starts_ptr + first_row, r + tl.arange(0, ROWS), num_rows, BLOCK_M), 0)
    target = total - 1 - i
    row = 0
    before = 0
    earlier = 0
    for r in range(0, num_rows, ROWS):
        tiles = _tiles(query_starts_ptr + first_row, r + tl.arange(0, ROWS), num_rows, BLOCK_M)
        ends = earlier + tl.cumsum(tiles, 0)
        row += tl.sum((ends <= target).to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(ends <= target, ends, 0), 0))
        earlier += tl.sum(tiles, 0)
    return tl.where(target < 0, -1, row), target - before


@triton.jit
def _tiles(p_starts, rows, num_rows, BLOCK_M: tl.constexpr):
    """Tiles of each row, 0 behind the last one."""
    here = rows < num_rows
    start = tl.load(p_starts + rows, mask=here, other=0)
    end = tl.load(p_starts + rows + 1, mask=here, other=0)
    return (end - start + BLOCK_M - 1) // BLOCK_M


@triton.jit
def find_row(starts_ptr, num_rows, places):
    """The row that owns each of the places, where row r begins at starts[r]: the last that begins there or before."""
    ROWS: tl.constexpr = 32
    row = tl.full(places.shape, -1, tl.int32)
    for r in range(0, num_rows, ROWS):
        rows = r + tl.arange(0, ROWS)
        starts = tl.load(starts_ptr + rows, mask=rows < num_rows, other=0x7FFFFFFF)
        row += tl.sum((starts[None, :] <= places[:, None]).to(tl.int32), 1)
    return row
