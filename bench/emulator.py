"""Speed of the emulator's native code: nanoseconds a warp instruction, seconds to compile a kernel.

Instructions are timed in loops of 64 copies of one instruction on rotating registers, one warp, one core; beside each
stands how many of them fit into the time of one 32-wide NumPy multiply, measured in the same run. Compile times are
those of the PTX files given, with an empty object cache and then from it (CPU seconds).

    python bench/emulator.py [--rounds N] [PTX FILE ...]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from refluent.emulator import ptx, state
from refluent.emulator.codegen import jit

COPIES = 64
TRIPS = 2000
# {d} rotates over eight registers and {a} is what was written three copies before, so that no copy is idle; {b} and
# {c} are registers of ones.
INSTRUCTIONS = [
    "add.s32 %r{d}, %r{a}, %r{b}",
    "mad.lo.s32 %r{d}, %r{a}, %r{b}, %r{c}",
    "mul.hi.u32 %r{d}, %r{a}, %r{b}",
    "add.s64 %d{d}, %d{a}, %d{b}",
    "lop3.b32 %r{d}, %r{a}, %r{b}, %r{c}, 0x96",
    "prmt.b32 %r{d}, %r{a}, %r{b}, 0x5410",
    "setp.lt.s32 %p1, %r{a}, %r{b};\n  selp.b32 %r{d}, %r{a}, %r{b}, %p1",
    "@%p2 add.s32 %r{d}, %r{a}, %r{b}",
    "mul.f32 %r{d}, %r{a}, %r{b}",
    "fma.rn.f32 %r{d}, %r{a}, %r{b}, %r{c}",
    "fma.rn.ftz.f32 %r{d}, %r{a}, %r{b}, %r{c}",
    "max.f32 %r{d}, %r{a}, %r{b}",
    "fma.rn.f32x2 %d{d}, %d{a}, %d{b}, %d{c}",
    "add.rm.f32x2 %d{d}, %d{a}, %d{b}",
    "cvt.rn.bf16x2.f32 %r{d}, %r{a}, %r{b}",
    "fma.rn.bf16x2 %r{d}, %r{a}, %r{b}, %r{c}",
    "ex2.approx.ftz.f32 %r{d}, %r{a}",
    "lg2.approx.f32 %r{d}, %r{a}",
    "tanh.approx.f32 %r{d}, %r{a}",
    "rcp.approx.ftz.f32 %r{d}, %r{a}",
    "div.u32 %r{d}, %r{a}, %r{b}",
    "shfl.sync.bfly.b32 %r{d}, %r{a}, 1, 31, -1",
    "shfl.sync.idx.b32 %r{d}, %r{a}, %r{b}, 31, -1",
    "setp.ne.s32 %p1, %r{a}, %r{b};\n  vote.sync.ballot.b32 %r{d}, %p1, -1",
    "redux.sync.add.s32 %r{d}, %r{a}, -1",
]


def kernel(instruction: str) -> ptx.Kernel:
    body = []
    for i in range(COPIES):
        names = {"d": i % 8, "a": (i + 5) % 8, "b": 13 + i % 7, "c": 20 + i % 3}
        body.append("  " + instruction.format(**names) + ";")
    keep = "\n".join(f"  st.volatile.b32 [%d50], %r{i};\n  st.volatile.b64 [%d50], %d{i};" for i in range(8))
    text = "\n".join(body)
    return ptx.parse(
        f""".version 9.0
.target sm_100a
.address_size 64
.visible .entry k()
{{
  .reg .pred %p<3>;
  .reg .b32 %r<64>;
  .reg .b64 %d<64>;
  mov.u32 %r60, {TRIPS};
LOOP:
{text}
  sub.u32 %r60, %r60, 1;
  setp.ne.u32 %p0, %r60, 0;
  @%p0 bra LOOP;
{keep}
  ret;
}}
"""
    ).kernels["k"]


def time_instruction(instruction: str, rounds: int) -> float:
    """Nanoseconds an instruction; the loop around 64 of them counts as part of it."""
    code = jit.compile_kernel(kernel(instruction), use_cache=False)
    (warp,), _ = code.prepare(1)
    rng = np.random.default_rng(0)
    times = []
    for _ in range(rounds):
        state.reset([warp])
        warp.regs32[:32] = 0x3F800000
        warp.regs32[:8] = rng.uniform(1, 2, (8, 32)).astype(np.float32).view(np.uint32)
        warp.regs64[:32] = 0x3F8000003F800000
        warp.preds[2] = 0x0F0F0F0F
        warp.budget = 1 << 40
        start = time.perf_counter()
        code.run(warp.address)
        count = COPIES * (1 + instruction.count(";"))
        times.append((time.perf_counter() - start) / TRIPS / count * 1e9)
    return min(times)


def time_numpy(rounds: int) -> float:
    """Nanoseconds of one multiply of 32 numbers into a given array."""
    x, out = np.ones(32, np.float32), np.empty(32, np.float32)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(20_000):
            np.multiply(x, x, out=out)
        times.append((time.perf_counter() - start) / 20_000 * 1e9)
    return min(times)


def time_compilation(path: Path) -> None:
    for kernel in ptx.parse(path.read_text()).kernels.values():
        with tempfile.TemporaryDirectory() as folder:
            row = []
            for _ in range(2):
                start = time.process_time()
                code = jit.compile_kernel(kernel, cache_dir=Path(folder))
                row.append(time.process_time() - start)
        size = f"{len(kernel.instructions):6d} instructions {len(code.blocks):5d} blocks"
        print(f"{size}  compiled {row[0]:6.2f} s  from the cache {row[1]:6.3f} s  {kernel.name[:60]}")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="PTX FILE")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    numpy_ns = time_numpy(options.rounds)
    print(f"numpy.multiply of 32 float32: {numpy_ns:.0f} ns")
    print(f"{'instruction':62} {'ns':>7} {'a multiply':>11}")
    ratios = []
    for instruction in INSTRUCTIONS:
        ns = time_instruction(instruction, options.rounds)
        ratios.append(numpy_ns / ns)
        shown = instruction.replace("\n  ", " ").format(d="d", a="a", b="b", c="c").replace("%", "")
        print(f"{shown:62} {ns:7.1f} {numpy_ns / ns:11.1f}")
    print(f"{'median':62} {'':7} {statistics.median(ratios):11.1f}")
    for path in options.files:
        time_compilation(path)


if __name__ == "__main__":
    main(sys.argv[1:])
