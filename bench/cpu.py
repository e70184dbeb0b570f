"""The torch backend on the CPU beside torch's scaled_dot_product_attention, in one run.

One sequence, 8 heads of 64, causal. Every number is the median over rounds of the ratio of two calls made one right
after the other, in turns first, so that whatever else the machine does hits both; forward and backward run through
autograd. The memory row is the growth of a fresh process's peak resident size over one forward and backward (Linux).

    python bench/cpu.py [--rounds N] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import refluent as rf

HEADS, HEAD_DIM = 8, 64
LONG = 16384
SETTLE = 0.01
"""Seconds before each forward: OpenMP's threads keep spinning for some milliseconds after the call before."""

MEMORY_PROGRAM = f"""
import re, torch
import refluent as rf

def peak_mb():
    # Not getrusage's ru_maxrss: a child inherits its parent's.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024

def run(n):
    q, k, v = (torch.randn(1, n, {HEADS}, {HEAD_DIM}, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    before = peak_mb()
    rf.attention(q, k, v, causal=True).sum().backward()
    return before

run(256)
before = run({LONG})
print(peak_mb() - before)
"""


@dataclass(frozen=True)
class Row:
    """One comparison: its figure, the bar that it has to meet and the two medians behind it (milliseconds)."""

    what: str
    figure: float
    unit: str
    bar: str
    met: bool
    ours_ms: float | None = None
    other_ms: float | None = None


Call = Callable[[], Tensor]
Medians = tuple[float, float, float]
"""Of other's time over ours, of ours and of other's in milliseconds."""


def inputs(dtype: torch.dtype, seqlen: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, do (1, s, h, d)."""
    q, k, v, do = (torch.randn(1, seqlen, HEADS, HEAD_DIM).to(dtype) for _ in range(4))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


def timed(call: Call, leaves: tuple[Tensor, ...], do: Tensor) -> tuple[float, float]:
    """Seconds of a forward and of its backward."""
    time.sleep(SETTLE)
    start = time.perf_counter()
    o = call()
    middle = time.perf_counter()
    torch.autograd.grad(o, leaves, do)
    return middle - start, time.perf_counter() - middle


def compare(ours: Call, other: Call, leaves: tuple[Tensor, ...], do: Tensor, rounds: int) -> list[Medians]:
    """For the forward and the backward."""
    timed(ours, leaves, do), timed(other, leaves, do)
    both = []
    for number in range(rounds):
        # Every other round the other way round: a call may pay for what the one before it left behind.
        pair = [timed(call, leaves, do) for call in ((ours, other) if number % 2 else (other, ours))]
        both.append(tuple(pair if number % 2 else reversed(pair)))
    rows: list[Medians] = []
    for direction in (0, 1):
        mine, theirs = [a[direction] for a, _ in both], [b[direction] for _, b in both]
        ratio = statistics.median(b / a for a, b in zip(mine, theirs))
        rows.append((ratio, statistics.median(mine) * 1e3, statistics.median(theirs) * 1e3))
    return rows


def beside_sdpa(dtype: torch.dtype, seqlen: int, rounds: int) -> list[Row]:
    q, k, v, do = inputs(dtype, seqlen)

    def sdpa() -> Tensor:
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return o.transpose(1, 2)

    forward, backward = compare(lambda: rf.attention(q, k, v, causal=True), sdpa, (q, k, v), do, rounds)
    name = str(dtype).removeprefix("torch.")
    bar = 4.0 if dtype != torch.float32 else 0.95
    return [
        Row(f"forward {name}, S={seqlen}", forward[0], "x SDPA's speed", ">= 0.95", forward[0] >= 0.95, *forward[1:]),
        Row(
            f"backward {name}, S={seqlen}",
            backward[0],
            "x SDPA's speed",
            f">= {bar}",
            backward[0] >= bar,
            *backward[1:],
        ),
    ]


def with_score_mod(dtype: torch.dtype, seqlen: int, rounds: int) -> list[Row]:
    q, k, v, do = inputs(dtype, seqlen)
    slope = torch.rand(HEADS) * 0.1
    alibi = rf.score_mod(lambda s, b, h, i, j: s + slope[h] * (j - i))
    results = compare(
        lambda: rf.attention(q, k, v, causal=True),
        lambda: rf.attention(q, k, v, causal=True, score_mod=alibi),
        (q, k, v),
        do,
        rounds,
    )
    name = str(dtype).removeprefix("torch.")
    return [
        Row(f"{way} {name} with ALiBi, S={seqlen}", r[0], "x plain time", "<= 2", r[0] <= 2, r[2], r[1])
        for way, r in zip(("forward", "backward"), results)
    ]


def with_window(dtype: torch.dtype, rounds: int) -> list[Row]:
    q, k, v, do = inputs(dtype, LONG)
    results = compare(
        lambda: rf.attention(q, k, v, causal=True),
        lambda: rf.attention(q, k, v, causal=True, window=(256, None)),
        (q, k, v),
        do,
        rounds,
    )
    name = str(dtype).removeprefix("torch.")
    return [
        Row(f"{way} {name}, window 256, S={LONG}", r[0], "x full causal time", "<= 0.125", r[0] <= 0.125, r[2], r[1])
        for way, r in zip(("forward", "backward"), results)
    ]


def memory() -> Row:
    done = subprocess.run([sys.executable, "-c", MEMORY_PROGRAM], capture_output=True, text=True, check=True)
    peak = float(done.stdout)
    return Row(f"peak memory, forward + backward bfloat16, S={LONG}", peak, "MB", "< 600", peak < 600)


def show(row: Row) -> None:
    times = "" if row.ours_ms is None else f"{row.ours_ms:9.1f} {row.other_ms:9.1f}"
    verdict = "yes" if row.met else "NO"
    print(f"{row.what:52} {row.figure:8.3f} {row.unit:20} {row.bar:9} {verdict:4} {times}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.processor() or platform.machine()}")
    print(f"{'':52} {'figure':>8} {'':20} {'bar':9} {'met':4} {'ours ms':>9} {'other ms':>9}")
    rows: list[Row] = []

    def add(more: list[Row]) -> None:
        rows.extend(more)
        for row in more:
            show(row)

    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for seqlen in (1024, 4096):
            add(beside_sdpa(dtype, seqlen, arguments.rounds))
    for dtype in (torch.bfloat16, torch.float32):
        for seqlen in (1024, 4096):
            add(with_score_mod(dtype, seqlen, arguments.rounds))
        add(with_window(dtype, arguments.rounds))
    add([memory()])
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
