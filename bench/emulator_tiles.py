"""What a 128x128x128 tile step of flash-attn-4's backward costs in the emulator, checks off and on.

A tile step: one block of 128 queries against one block of 128 keys, D = 128, five matrix products. The same kernel runs
with 1 and with more blocks of queries for one block of keys; a step is what each further block adds, so that neither
compilation, nor delta and conversion kernels, nor prologue and epilogue count. Speed is given in warp instructions a
second and in NumPy multiplies of 32 numbers, measured in the same run. Needs flash-attn-4 4.0.0b36 (the extra `peers`).

    python bench/emulator_tiles.py [--arch sm_90a sm_100a] [--blocks N] [--rounds N]
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from emulator import time_numpy
from refluent import emulator

TILE = 128
MULTIPLIES, SECONDS, CHECKS = 4.0, 0.02, 3.0  # what is aimed at: a warp instruction, a step, checks on over off


def backward(blocks: int) -> None:
    from flash_attn.cute import interface

    q, do = (torch.randn(1, TILE * blocks, 1, TILE).bfloat16() for _ in range(2))
    k, v = (torch.randn(1, TILE, 1, TILE).bfloat16() for _ in range(2))
    o, lse = q.clone(), torch.zeros(1, 1, TILE * blocks)
    interface._flash_attn_bwd(q, k, v, o, do, lse)


def measure(arch: str, checks: str, blocks: int, rounds: int) -> tuple[float, float, int]:
    """CPU seconds a tile step, CPU seconds and warp instructions of the backward kernel's longer run."""
    times: dict[int, float] = {}
    instructions = {}
    for count in (1, 1 + blocks):
        for _ in range(rounds):
            with emulator.gpu(arch, checks=checks, on_finding="record") as chip:
                run = chip.machine.synchronize
                spent = [0.0]

                def timed(run=run, spent=spent) -> None:
                    start = time.process_time()
                    run()
                    spent[0] += time.process_time() - start

                chip.machine.synchronize = timed  # type: ignore[method-assign]
                backward(count)
            times[count] = min(times.get(count, 1e9), spent[0])
            instructions[count] = sum(launch.instructions for launch in chip.report().launches)
    step = (times[1 + blocks] - times[1]) / blocks
    return step, times[1 + blocks], (instructions[1 + blocks] - instructions[1]) // blocks


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["sm_90a", "sm_100a"])
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    numpy_ns = time_numpy(5)
    print(f"numpy.multiply of 32 float32: {numpy_ns:.0f} ns")
    print(f"{'':10} {'checks':7} {'s a step':>9} {'instructions':>13} {'a second':>10} {'multiplies each':>16}")
    for arch in options.arch:
        steps = {}
        for checks in ("none", "all"):
            step, _, count = measure(arch, checks, options.blocks, options.rounds)
            steps[checks] = step
            each = step / count * 1e9 / numpy_ns
            print(f"{arch:10} {checks:7} {step:9.4f} {count:13,} {count / step:10,.0f} {each:16.2f}")
        ratio = steps["all"] / steps["none"]
        print(f"{arch:10} checks cost {ratio:.2f} times as much (at most {CHECKS:.0f} are aimed at)")
    print(f"aimed at, checks off: {SECONDS} s a step, {MULTIPLIES:.0f} multiplies a warp instruction")


if __name__ == "__main__":
    main(sys.argv[1:])
