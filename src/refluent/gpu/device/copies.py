"""Copies that the CuTe DSL has no atom for: bulk reduce-add, pieces of tensor memory, ragged views for TMA."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import tcgen05

LANES = 128  # of tensor memory
REPETITIONS = {n: getattr(tcgen05.Repetition, f"x{n}") for n in (8, 16, 32)}  # registers that one instruction moves


@cute.jit
def bulk_reduce_add(target: cute.Pointer, source: cute.Pointer, nbytes: cutlass.Constexpr):
    """cp.reduce.async.bulk .add.f32 from shared to global memory, by the calling thread; joins its open bulk group."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target.toint(), source.toint(), cutlass.Int32(nbytes)],
    )


def held(rows: int, width: int) -> int:
    """Registers that `width` columns of a block of 64 or 128 rows take in each thread of a warpgroup."""
    return width * rows // LANES


def held_row(rows: int, thread):
    """The row of the block that a thread of the warpgroup holds: of 64 rows a warp has 16, two threads to each."""
    return thread if rows == LANES else thread // 32 * 16 + thread % 16


def held_column(rows: int, width: int, thread):
    """The first of its columns: of 64 rows the upper half of a warp has the second half."""
    return 0 if rows == LANES else thread % 32 // 16 * (width // 2)


@cute.jit
def load_columns(
    tmem: cute.Pointer,
    column,
    width: cutlass.Constexpr,
    thread,
    values: cute.Pointer,
    rows: cutlass.Constexpr = LANES,
):
    """Columns [column, column + width) of a block of 64 or 128 rows, float32, to registers at `values`, as `held`,
    `held_row` and `held_column` say; `thread` of the warpgroup.

    The caller waits (tcgen05.wait::ld) before it uses them.
    """
    count = held(rows, width)
    repeat = REPETITIONS[count]
    load = tcgen05.Ld32x32bOp if rows == LANES else tcgen05.Ld16x32bx2Op
    atom = cute.make_copy_atom(load(repeat), cutlass.Float32)
    lanes = (rows // 4, 4)  # of each warp's 32, from the first
    source = cute.make_tensor(tmem + column, cute.make_layout((lanes, width), stride=((1 << 16, 32 << 16), 1)))
    copy = tcgen05.make_tmem_copy(atom, source).get_slice(thread)
    shape = copy.partition_D(cute.make_identity_tensor((rows, width))).shape
    cute.copy(copy, copy.partition_S(source), cute.make_tensor(values, cute.make_layout(shape)))


@cute.jit
def store_columns(tmem: cute.Pointer, column, width: cutlass.Constexpr, row, values: cute.Pointer):
    """Registers at `values` (32-bit words) to columns [column, column + width) of the thread's lane; width 8 to 32."""
    atom = cute.make_copy_atom(tcgen05.St32x32bOp(REPETITIONS[width]), cutlass.Float32)
    target = cute.make_tensor(tmem + column, cute.make_layout((LANES, width), stride=(1 << 16, 1)))
    copy = tcgen05.make_tmem_copy(atom, target).get_slice(row)
    shape = copy.partition_S(cute.make_identity_tensor((LANES, width))).shape
    cute.copy(copy, cute.make_tensor(values, cute.make_layout(shape)), copy.partition_D(target))


@cute.jit
def sequence_view(tensor: cute.Tensor, seqlen: cutlass.Int32, ragged: cutlass.Constexpr, packed: cutlass.Constexpr):
    """A (b, s, h, d) or packed (t, h, d) tensor as TMA reads it: rows and columns first.

    Not ragged: (s, d, h, b). Ragged: (x, d, y, h, b), or (x, d, y, h) packed, where x and y both step by one row and x
    ends at `seqlen`: row i of a sequence of length n that starts at token t is x = seqlen - n + i, y = t + n, so that
    rows from n on lie outside the tensor for TMA, which fills them with zeros and does not store them.
    """
    if cutlass.const_expr(not ragged):
        return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [1, 3, 2, 0]))
    row = 0 if packed else 1
    step = tensor.stride[row]
    shape = [seqlen, tensor.shape[row + 2], tensor.shape[row] + 1, tensor.shape[row + 1]]
    stride = [step, tensor.stride[row + 2], step, tensor.stride[row + 1]]
    if cutlass.const_expr(not packed):
        shape.append(tensor.shape[0])
        stride.append(tensor.stride[0])
    base = tensor.iterator - cutlass.Int64(seqlen) * step
    return cute.make_tensor(base, cute.make_layout(tuple(shape), stride=tuple(stride)))


@cute.jit
def sequence_rows(view: cute.Tensor, side, batch, head, length):
    """(rows, d) of one sequence and head: row 0 is the sequence's first."""
    if cutlass.const_expr(not side.ragged):
        return view[None, None, head, batch]
    x, y = side.row_view(batch, length)
    if cutlass.const_expr(side.cu_seqlens is not None):
        rows = view[None, None, y, head]
    else:
        rows = view[None, None, y, head, batch]
    return cute.domain_offset((x, 0), rows)
