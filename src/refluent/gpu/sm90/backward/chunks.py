"""Columns of a warpgroup's accumulator, 64 rows, from registers to a staging buffer.

A thread has two rows, r and r + 8, and of every 8 columns two neighbours. A staging buffer holds a chunk as the float32
workspaces do, ordered (columns / 4, rows, 4), but for r ^ 4 in place of r in every other quad of columns: half a warp
writes two quads at a time, whose rows would else fall into the same banks.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from refluent.gpu.plans.sm90 import QUAD, ROWS

EIGHT = 8  # columns, of which a thread has two, in two rows


def held(columns: int) -> int:
    """Registers that `columns` of an accumulator take in each thread."""
    return columns // EIGHT * 4


def first_row(thread):
    """The first of a thread's two rows; the other one is 8 further."""
    return thread // 32 * 16 + thread % 32 // 4


def first_column(thread):
    """The first of a thread's columns; its neighbour follows, and so on every 8 columns."""
    return thread % 4 * 2


@cute.jit
def stage_chunk(buffer: cute.Pointer, values: cute.Pointer, width: cutlass.Constexpr, thread):
    """`width` columns from registers at `values` into the buffer; `thread` of the warpgroup."""
    quad, pair = thread % 4 // 2, thread % 2
    row = first_row(thread) ^ (quad * 4)
    start = (buffer + quad * (ROWS * QUAD) + row * QUAD + pair * 2).align(8)
    shape = (2, 2, width // EIGHT)  # neighbours, rows, eights
    target = cute.make_tensor(start, cute.make_layout(shape, stride=(1, 8 * QUAD, 2 * ROWS * QUAD)))
    source = cute.make_tensor(values, cute.make_layout(shape))
    for eight in cutlass.range_constexpr(width // EIGHT):
        for r in cutlass.range_constexpr(2):
            cute.autovec_copy(source[None, r, eight], target[None, r, eight])
