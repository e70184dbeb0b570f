"""Raw memory access for numba code: loads and stores at integer addresses.

Everything is int64, so that numba never falls into floating point by mixing signedness; narrower loads zero-extend.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.extending import intrinsic


def _load(bits: int, signed: bool = False) -> Any:
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = builder.load(builder.inttoptr(args[0], ir.IntType(bits).as_pointer()), align=1)
            if bits == 64:
                return value
            extend = builder.sext if signed else builder.zext
            return extend(value, ir.IntType(64))

        return types.int64(types.int64), codegen

    return intrinsic(load)


def _store(bits: int) -> Any:
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word = args[1] if bits == 64 else builder.trunc(args[1], ir.IntType(bits))
            builder.store(word, builder.inttoptr(args[0], ir.IntType(bits).as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return intrinsic(store)


load8, load16, load32, load64 = _load(8), _load(16), _load(32), _load(64)
load_i32 = _load(32, signed=True)
store8, store16, store32, store64 = _store(8), _store(16), _store(32), _store(64)
