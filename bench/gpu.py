"""Our backward on this GPU beside the peers that are installed, in one run: TFLOP/s, and ratios to the best of them.

Peers: cuDNN and FlashAttention-2 through torch's SDPA, flash-attn-4 where it can be imported. Every figure is the
median of CUDA event timings of torch.autograd.grad, all contenders in turns, round after round, so that clocks and heat
hit everyone alike. FLOPs are 2.5 x 4 B H D x the pairs of queries and keys that see each other. Only backwards
are compared: a backend of ours that has no forward kernel yet takes torch's.

    python bench/gpu.py [--rounds N] [--only TEXT] [--host] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import refluent as rf

WARM_UP = 3  # calls of each contender before anything counts


@dataclass(frozen=True)
class Case:
    """One problem. `window`: keys to the left that a query of a causal call sees; None: all."""

    batch: int
    heads: int
    heads_kv: int
    seqlen: int
    head_dim: int
    causal: bool
    window: int | None = None
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        heads = f"{self.heads}" if self.heads == self.heads_kv else f"{self.heads}/{self.heads_kv}"
        mask = " causal" if self.causal else ""
        mask += "" if self.window is None else f", window {self.window}"
        return f"{self.batch}, {heads}, {self.seqlen}, {self.head_dim}{mask}"

    @property
    def pairs(self) -> int:
        """Of queries and keys that see each other, in one head."""
        n = self.seqlen
        if self.window is not None:
            w = min(self.window, n - 1)
            return (w + 1) * n - w * (w + 1) // 2
        return n * n // 2 if self.causal else n * n

    @property
    def flops(self) -> float:
        return 2.5 * 4 * self.batch * self.heads * self.head_dim * self.pairs


CASES = (
    Case(8, 32, 32, 2048, 64, False),
    Case(2, 32, 32, 8192, 64, False),
    Case(8, 32, 32, 2048, 64, True),
    Case(2, 32, 32, 8192, 64, True),
    Case(8, 16, 16, 2048, 128, False),
    Case(2, 16, 16, 8192, 128, False),
    Case(8, 16, 16, 2048, 128, True),
    Case(2, 16, 16, 8192, 128, True),
    Case(2, 32, 8, 8192, 128, True),
    Case(2, 32, 4, 4096, 128, True),
    Case(4, 16, 16, 4096, 96, True),
    Case(32, 16, 16, 512, 128, True),
    Case(16, 16, 16, 1024, 128, True),
    Case(1, 16, 16, 16384, 128, True),
    Case(1, 16, 16, 16384, 128, False),
    Case(16, 32, 32, 1024, 64, True),
    Case(1, 32, 32, 16384, 64, True),
    Case(2, 16, 16, 8192, 192, True),
    Case(2, 8, 8, 8192, 256, True),
    Case(2, 16, 16, 8192, 128, True, window=1024),
    Case(2, 32, 32, 8192, 64, True, window=128),
)
SMALL = Case(1, 4, 4, 128, 128, False)  # for the time on the host

Backward = Callable[[], object]


@dataclass
class Row:
    """A case's figures. milliseconds and tflops: contender -> median; ratios: ours -> to the best peer."""

    case: str
    milliseconds: dict[str, float] = field(default_factory=dict)
    tflops: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, do (b, s, h, d)."""
    q, do = (torch.randn(case.batch, case.seqlen, case.heads, case.head_dim, device="cuda") for _ in range(2))
    k, v = (torch.randn(case.batch, case.seqlen, case.heads_kv, case.head_dim, device="cuda") for _ in range(2))
    q, k, v, do = (x.to(case.dtype) for x in (q, k, v, do))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


def ours(case: Case, q: Tensor, k: Tensor, v: Tensor, deterministic: bool) -> Tensor:
    window = (case.window, None)
    return rf.attention(q, k, v, causal=case.causal, window=window, deterministic=deterministic)


def sdpa(case: Case, q: Tensor, k: Tensor, v: Tensor, kind: SDPBackend) -> Tensor:
    if case.window is not None:
        raise NotImplementedError("SDPA has no windows")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(kind):
        grouped = case.heads != case.heads_kv
        return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=grouped).transpose(1, 2)


def flash_attn_4(case: Case, q: Tensor, k: Tensor, v: Tensor, deterministic: bool) -> Tensor:
    interface = importlib.import_module("flash_attn.cute.interface")
    window = (None, None) if case.window is None else (case.window, 0)
    made = interface.flash_attn_func(
        q, k, v, causal=case.causal and case.window is None, window_size=window, deterministic=deterministic
    )
    return made[0] if isinstance(made, tuple) else made


OURS, OURS_ORDERED = "refluent", "refluent, deterministic"
THEIRS_ORDERED = "flash-attn-4, deterministic"
CONTENDERS: dict[str, Callable[[Case, Tensor, Tensor, Tensor], Tensor]] = {
    OURS: lambda case, q, k, v: ours(case, q, k, v, False),
    OURS_ORDERED: lambda case, q, k, v: ours(case, q, k, v, True),
    "cuDNN": lambda case, q, k, v: sdpa(case, q, k, v, SDPBackend.CUDNN_ATTENTION),
    "FlashAttention-2": lambda case, q, k, v: sdpa(case, q, k, v, SDPBackend.FLASH_ATTENTION),
}
if importlib.util.find_spec("flash_attn") is not None:
    CONTENDERS["flash-attn-4"] = lambda case, q, k, v: flash_attn_4(case, q, k, v, False)
    CONTENDERS[THEIRS_ORDERED] = lambda case, q, k, v: flash_attn_4(case, q, k, v, True)


def backwards(case: Case, row: Row) -> dict[str, Backward]:
    """The contenders that take the case, each run once; why the others don't goes into the row."""
    leaves = inputs(case)
    q, k, v, do = leaves
    ready: dict[str, Backward] = {}
    for name, forward in CONTENDERS.items():
        try:
            o = forward(case, q, k, v)

            def backward(o: Tensor = o) -> object:
                return torch.autograd.grad(o, (q, k, v), do, retain_graph=True)

            for _ in range(WARM_UP):
                backward()
            torch.cuda.synchronize()
            ready[name] = backward
        except (NotImplementedError, RuntimeError, TypeError, ValueError, AssertionError) as error:
            row.refused[name] = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return ready


def measure(case: Case, rounds: int) -> Row:
    """Medians over rounds, in each of which every contender runs once."""
    row = Row(case.name)
    ready = backwards(case, row)
    spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in ready}
    for _ in range(rounds):
        for name, backward in ready.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            backward()
            end.record()
            spans[name].append((start, end))
    torch.cuda.synchronize()
    for name, pairs in spans.items():
        row.milliseconds[name] = statistics.median(start.elapsed_time(end) for start, end in pairs)
        row.tflops[name] = case.flops / row.milliseconds[name] / 1e9
    peers = [speed for name, speed in row.tflops.items() if name not in (OURS, OURS_ORDERED, THEIRS_ORDERED)]
    if peers and OURS in row.tflops:
        row.ratios[OURS] = row.tflops[OURS] / max(peers)
    if THEIRS_ORDERED in row.tflops and OURS_ORDERED in row.tflops:
        row.ratios[OURS_ORDERED] = row.tflops[OURS_ORDERED] / row.tflops[THEIRS_ORDERED]
    return row


def host_times(rounds: int) -> dict[str, float]:
    """Microseconds that a small backward keeps the host, by contender."""
    times = {}
    for name, backward in backwards(SMALL, Row(SMALL.name)).items():
        spent = []
        for _ in range(rounds):
            torch.cuda.synchronize()
            start = time.perf_counter()
            backward()
            spent.append(time.perf_counter() - start)
        times[name] = statistics.median(spent) * 1e6
    return times


def show(row: Row) -> None:
    speeds = "  ".join(f"{name} {speed:.0f}" for name, speed in row.tflops.items())
    ratios = ", ".join(f"{name} {ratio:.3f}" for name, ratio in row.ratios.items())
    print(f"{row.case:32} {speeds}  | {ratios}", flush=True)
    for name, why in row.refused.items():
        print(f"{'':32} {name}: {why}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--host", action="store_true", help="also the time that a small call keeps the host")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; TFLOP/s, backward: B, H, S, D")
    rows = []
    for case in CASES:
        if arguments.only in case.name:
            rows.append(measure(case, arguments.rounds))
            show(rows[-1])
            torch.cuda.empty_cache()
    host = host_times(10 * arguments.rounds) if arguments.host else {}
    for name, microseconds in host.items():
        print(f"host time of {SMALL.name}: {name} {microseconds:.0f} us")
    if arguments.json is not None:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        made = {**facts, "rows": [asdict(row) for row in rows], "host microseconds": host}
        arguments.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
