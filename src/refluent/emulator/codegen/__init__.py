"""PTX -> LLVM IR -> native code."""

from refluent.emulator.codegen import (  # noqa: F401  registers the emitters
    approx,
    convert,
    floating,
    half,
    integer,
    lanes,
    logic,
    memory,
    moves,
    small,
)
