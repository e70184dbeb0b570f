"""Stand-ins for tensors at compile time: shapes and strides stay dynamic, so one compiled function serves all sizes.

Strides are 64-bit: a coordinate times a stride past 2^31 elements is right.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

VECTOR_BYTES = 16  # what TMA and vector loads need of addresses and strides

TYPES = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
    "float64": cutlass.Float64,
}
STORED = {
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.float32: cutlass.Float32,
    torch.float64: cutlass.Float64,
    torch.int64: cutlass.Int64,
    torch.int32: cutlass.Int32,
    torch.int16: cutlass.Int16,
    torch.int8: cutlass.Int8,
    torch.uint32: cutlass.Int32,
    torch.uint16: cutlass.Int16,
    torch.uint8: cutlass.Uint8,
    torch.bool: cutlass.Uint8,
}
"""What captured tensors of torch's types are passed as: see device/arithmetic.py, Source."""

TVM_FFI = "--enable-tvm-ffi"


def operand(dtype: Any, packed: bool) -> Any:
    """(b, s, h, d), or packed (t, h, d): last stride 1, the others whole 16 bytes."""
    rank, vector = 3 if packed else 4, VECTOR_BYTES * 8 // dtype.width
    shape = tuple(cute.sym_int() for _ in range(rank))
    strides = tuple(cute.sym_int64(divisibility=vector) for _ in range(rank - 1))
    return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=VECTOR_BYTES)


def statistic(packed: bool) -> Any:
    """(b, h, s), or packed (h, t), float32 of any strides."""
    rank = 2 if packed else 3
    shape, strides = (tuple(make() for _ in range(rank)) for make in (cute.sym_int, cute.sym_int64))
    return make_fake_tensor(cutlass.Float32, shape, strides, assumed_align=4)


def vector(dtype: Any, align: int | None = None) -> Any:
    """(n,), contiguous; aligned to `align` bytes, by default to its type's."""
    return make_fake_tensor(dtype, (cute.sym_int64(),), (1,), assumed_align=align or dtype.width // 8)


def captured(dtype: torch.dtype, ndim: int) -> Any:
    """A captured tensor of any shape and strides, one of 0 dimensions as (1,)."""
    kind, rank = STORED[dtype], max(ndim, 1)
    shape, strides = (tuple(make() for _ in range(rank)) for make in (cute.sym_int, cute.sym_int64))
    return make_fake_tensor(kind, shape, strides, assumed_align=kind.width // 8)


def stream() -> Any:
    """torch's current stream, which the caller does not pass."""
    return make_fake_stream(use_tvm_ffi_env_stream=True)
