"""Host functions that launch one kernel of the backward alone, compiled once for each set of static facts."""

from __future__ import annotations

from functools import cache

import cutlass
import cutlass.cute as cute

from refluent.gpu.convert import Convert
from refluent.gpu.delta import Delta, DeltaTensors
from refluent.gpu.device.seqlen import Side
from refluent.gpu.launch import fakes

I32, F32 = cutlass.Int32, cutlass.Float32


class DeltaEntry:
    def __init__(self, tile_m, head_dim_v):
        self.delta = Delta(tile_m, head_dim_v)

    @cute.jit
    def __call__(
        self,
        o: cute.Tensor,
        do: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor | None,
        sink: cute.Tensor | None,
        lse_log2: cute.Tensor,
        dpsum: cute.Tensor,
        clear: cute.Tensor,
        parts: cute.Tensor | None,
        dsink: cute.Tensor | None,
        cu_seqlens: cute.Tensor | None,
        seqused: cute.Tensor | None,
        seqlen: cutlass.Int32,
        tokens: cutlass.Int32,
        batch: cutlass.Int32,
        stream,
    ):
        heads, rows = lse_log2.shape
        quads = cute.make_tensor(clear.iterator, cute.make_layout((4, clear.shape[0] // 4)))
        tensors = DeltaTensors(o, do, lse, dlse, sink, lse_log2, dpsum, quads, parts, dsink)
        side = Side(cu_seqlens, seqused, seqlen, tokens)
        self.delta(tensors, side, heads, batch, rows // self.delta.tile_m, stream)


class ConvertEntry:
    def __init__(self, tile, head_dim, transposed):
        self.convert = Convert(tile, head_dim, transposed)

    @cute.jit
    def __call__(
        self,
        accumulator: cute.Tensor,
        out: cute.Tensor,
        cu_seqlens: cute.Tensor | None,
        seqused: cute.Tensor | None,
        factor: cutlass.Float32,
        seqlen: cutlass.Int32,
        tokens: cutlass.Int32,
        batch: cutlass.Int32,
        stream,
    ):
        self.convert(accumulator, out, Side(cu_seqlens, seqused, seqlen, tokens), factor, batch, stream)


def matrix(rows_align=16):
    """(heads, rows) float32 in a workspace."""
    shape = (cute.sym_int(), cute.sym_int())
    return fakes.make_fake_tensor(F32, shape, (cute.sym_int64(), 1), assumed_align=rows_align)


def maybe(wanted, fake):
    return fake if wanted else None


@cache
def delta(arch, dtype, tile_m, head_dim_v, packed=False, seqused=False, dlse=False, sink=None):
    """A compiled DeltaEntry; `arch` is that of the emulator's open context."""
    kind = fakes.TYPES[dtype]
    o, do = (fakes.operand(kind, packed) for _ in range(2))
    sink_type = fakes.TYPES[sink] if sink else None
    return cute.compile(
        DeltaEntry(tile_m, head_dim_v),
        o,
        do,
        fakes.statistic(packed),
        maybe(dlse, fakes.statistic(packed)),
        maybe(sink, fakes.vector(sink_type or F32)),
        matrix(),
        matrix(),
        fakes.vector(F32, 16),
        maybe(sink, matrix(4)),
        maybe(sink, fakes.vector(sink_type or F32)),
        maybe(packed, fakes.vector(I32)),
        maybe(seqused, fakes.vector(I32)),
        I32(0),
        I32(0),
        I32(0),
        fakes.stream(),
        options=fakes.TVM_FFI,
    )


@cache
def convert(arch, dtype, tile, head_dim, packed=False, seqused=False, transposed=False):
    """A compiled ConvertEntry; `arch` is that of the emulator's open context."""
    rows, columns = (head_dim, tile) if transposed else (tile, head_dim)
    accumulator = fakes.make_fake_tensor(
        F32,
        (cute.sym_int(), cute.sym_int(), columns // 4, rows, 4),
        (cute.sym_int64(divisibility=4), rows * columns, rows * 4, 4, 1),
        assumed_align=16,
    )
    return cute.compile(
        ConvertEntry(tile, head_dim, transposed),
        accumulator,
        fakes.operand(fakes.TYPES[dtype], packed),
        maybe(packed, fakes.vector(I32)),
        maybe(seqused, fakes.vector(I32)),
        F32(0),
        I32(0),
        I32(0),
        I32(0),
        fakes.stream(),
        options=fakes.TVM_FFI,
    )
