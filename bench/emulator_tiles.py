"""What a 128x128x128 tile step of flash-attn-4's backward costs in the emulator, checks off and on.

A tile step: one block of 128 queries against one block of 128 keys, D = 128, five matrix products. The same kernel runs
with 1 and with more blocks of queries for one block of keys; a step is what each further block adds, so that neither
compilation, nor delta and conversion kernels, nor prologue and epilogue count. Speed is given in warp instructions a
second and in NumPy multiplies of 32 numbers, measured in the same run. With --processes the same backward, of several
heads, is shared among so many processes, and wall-clock times of all its launches are compared with those in one
process. Needs flash-attn-4 4.0.0b36 (the extra `peers`).

    python bench/emulator_tiles.py [--arch sm_90a sm_100a] [--blocks N] [--rounds N] [--processes N] [--heads N]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable

import torch

from emulator import time_numpy
from refluent import emulator

TILE = 128
MULTIPLIES, SECONDS, CHECKS = 4.0, 0.02, 3.0  # what is aimed at: a warp instruction, a step, checks on over off


def backward(blocks: int, heads: int = 1) -> None:
    from flash_attn.cute import interface

    q, do = (torch.randn(1, TILE * blocks, heads, TILE).bfloat16() for _ in range(2))
    k, v = (torch.randn(1, TILE, heads, TILE).bfloat16() for _ in range(2))
    o, lse = q.clone(), torch.zeros(1, heads, TILE * blocks)
    interface._flash_attn_bwd(q, k, v, o, do, lse)


def timed(chip: emulator.Gpu, clock: Callable[[], float]) -> list[float]:
    """The time that each call of the chip will have taken for its launches."""
    run, spent = chip.machine.synchronize, []

    def synchronize() -> None:
        start = clock()
        run()
        spent.append(clock() - start)

    chip.machine.synchronize = synchronize  # type: ignore[method-assign]
    return spent


def measure(arch: str, checks: str, blocks: int, rounds: int) -> tuple[float, float, int]:
    """CPU seconds a tile step, CPU seconds and warp instructions of the backward kernel's longer run."""
    times: dict[int, float] = {}
    instructions = {}
    for count in (1, 1 + blocks):
        for _ in range(rounds):
            with emulator.gpu(arch, checks=checks, on_finding="record") as chip:
                spent = timed(chip, time.process_time)
                backward(count)
            times[count] = min(times.get(count, 1e9), sum(spent))
            instructions[count] = sum(launch.instructions for launch in chip.report().launches)
    step = (times[1 + blocks] - times[1]) / blocks
    return step, times[1 + blocks], (instructions[1 + blocks] - instructions[1]) // blocks


def compare(arch: str, checks: str, options: argparse.Namespace) -> None:
    """Print what each launch takes in one process and in several, run in turns: medians of wall-clock seconds, and of
    CPU seconds, for several processes those of this one and the mean of the others: what idle cores would take."""
    walls: dict[int, list[list[float]]] = {1: [], options.processes: []}
    busy: dict[int, list[list[float]]] = {1: [], options.processes: []}
    for _ in range(options.rounds):
        for processes in walls:
            with emulator.gpu(arch, checks=checks, on_finding="record", processes=processes) as chip:
                wall, own, forks = timed(chip, time.perf_counter), timed(chip, time.process_time), timed(chip, in_forks)
                backward(options.blocks, options.heads)
            walls[processes].append(wall)
            busy[processes].append([a + b / processes for a, b in zip(own, forks)])
    for number, launch in enumerate(chip.report().launches):
        print(f"{arch} {checks}: {launch.kernel[:60]}, {launch.grid} CTAs, in {launch.processes} {launch.obstacle}")
        for name, times in (("wall clock", walls), ("CPU", busy)):
            one, several = ([calls[number] for calls in row] for row in times.values())
            gain = statistics.median(a / b for a, b in zip(one, several))
            print(f"  {name:10} {statistics.median(one):6.2f} s, {statistics.median(several):6.2f} s: {gain:.2f} times")


def in_forks() -> float:
    """CPU seconds of the processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["sm_90a", "sm_100a"])
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1, help="compare with so many, instead of timing steps")
    parser.add_argument("--heads", type=int, default=16, help="of that comparison")
    options = parser.parse_args(arguments)
    if options.processes > 1:
        for arch in options.arch:
            for checks in ("none", "all"):
                compare(arch, checks, options)
        return
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
