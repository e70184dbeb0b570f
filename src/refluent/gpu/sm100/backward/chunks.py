"""Columns of an accumulator, of all its rows, from tensor memory by way of registers to a staging buffer.

A staging buffer holds a chunk as the float32 workspaces do, ordered (columns / 4, rows, 4): neighbouring threads write
side by side, and one bulk operation takes the chunk to global memory.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from refluent.gpu.device.copies import held, held_column, held_row, load_columns
from refluent.gpu.plans.sm100 import Accumulator

VECTOR = 4  # float32 values that one store moves


@cute.jit
def load_chunk(
    tmem: cute.Pointer,
    acc: cutlass.Constexpr[Accumulator],
    first,
    width: cutlass.Constexpr,
    thread,
    values: cute.Pointer,
):
    """Columns [first, first + width) of every block to a warpgroup's registers; the caller waits for them."""
    offset = 0
    for block in cutlass.const_expr(acc.blocks):
        load_columns(tmem, block.column + first, width, thread, values + offset, block.rows)
        offset += held(block.rows, width)


@cute.jit
def stage_chunk(
    buffer: cute.Pointer,
    acc: cutlass.Constexpr[Accumulator],
    width: cutlass.Constexpr,
    thread,
    values: cute.Pointer,
):
    """What load_chunk brought, from registers into the buffer."""
    offset = 0
    for block in cutlass.const_expr(acc.blocks):
        row = block.first + held_row(block.rows, thread)
        column = held_column(block.rows, width, thread)
        quads, stride = held(block.rows, width) // VECTOR, acc.rows * VECTOR
        target = cute.make_tensor(
            buffer + column // VECTOR * stride + row * VECTOR, cute.make_layout((VECTOR, quads), stride=(1, stride))
        )
        source = cute.make_tensor(values + offset, cute.make_layout((VECTOR, quads)))
        for quad in cutlass.range_constexpr(quads):
            target[None, quad].store(source[None, quad].load())
        offset += held(block.rows, width)
