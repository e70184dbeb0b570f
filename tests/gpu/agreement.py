"""The same kernels on the same inputs, on a Hopper GPU and in the emulator: how far apart the results are.

    python tests/gpu/agreement.py record FILE          on the GPU: run everything there, keep the results
    python tests/gpu/agreement.py compare FILE [TABLE]  anywhere: run everything in the emulator, print the table
    python tests/gpu/agreement.py both [TABLE]          on the GPU: both in one process

TABLE is a Markdown page. Needs src and tests on PYTHONPATH, the CuTe DSL and, for attention, flash-attn-4 4.0.0b36.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import chip
from emulator.cases import CASES
from emulator.cases import Case as KernelCase
from gpu import approximations, attention
from refluent import emulator

ARCH = "sm_90a"
MAGNITUDE_BOUND = 2.0**-11  # of the accumulated magnitude, for matrix products
BITS_EQUAL = 0.994  # of attention's 16-bit results
LSE_BOUND = 1e-6

Results = dict[str, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Row:
    """One comparison. `worst` is in units of what `bound` says; `good`: within it."""

    group: str
    name: str
    values: int
    equal: int
    worst: str
    bound: str
    good: bool

    @property
    def share(self) -> str:
        return "all" if self.equal == self.values else f"{100 * self.equal / self.values:.2f} %"


# Small kernels


def kernels() -> list[KernelCase]:
    return [case for case in CASES if ARCH in case.arches]


def run_kernel(case: KernelCase, device: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    placement = case.run(device)
    results = {f"left {i}": tensor for i, tensor in enumerate(placement.left)}
    return results | {f"magnitude {i}": tensor for i, tensor in placement.magnitudes.items()}


def emulate_kernel(case: KernelCase, accumulator: str = "fp32") -> dict[str, torch.Tensor]:
    with emulator.gpu(ARCH, checks="none", accumulator=accumulator):
        return run_kernel(case, "cpu")


def bits(tensor: torch.Tensor) -> np.ndarray:
    flat = tensor.detach().reshape(-1).contiguous()
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]).numpy()


def compare_kernel(name: str, there: dict[str, torch.Tensor], here: dict[str, torch.Tensor]) -> Row:
    values = equal = 0
    worst, products = 0.0, False
    for key, mine in here.items():
        if not key.startswith("left"):
            continue
        yours = there[key]
        same = bits(mine) == bits(yours)
        values, equal = values + same.size, equal + int(same.sum())
        magnitude = here.get("magnitude" + key[4:])
        if magnitude is not None:
            products = True
            apart = (mine.double() - yours.double()).abs().view(magnitude.shape)
            worst = max(worst, float((apart / magnitude.clamp(min=1e-30)).max()))
    if products:
        good = worst <= MAGNITUDE_BOUND
        return Row("matrix products", name, values, equal, power(worst), "2^-11 of the magnitude", good)
    return Row("no MMA, no approximation", name, values, equal, "0" if equal == values else "", "bits", equal == values)


def power(x: float) -> str:
    return "0" if x == 0 else f"2^{np.log2(x):.1f}"


# Attention and approximations


def emulate_attention(name: str, accumulator: str) -> dict[str, torch.Tensor]:
    with emulator.gpu(ARCH, checks="none", accumulator=accumulator):
        return attention.run(name, "cpu")


def compare_attention(
    name: str, there: dict[str, torch.Tensor], here: dict[str, torch.Tensor], accumulator: str
) -> list[Row]:
    """With the published accumulator model (`truncate`) the bits have to be the chip's; IEEE sums round differently."""
    group, exact = f"attention, accumulator {accumulator}", accumulator == "truncate"
    least, most = (BITS_EQUAL, 1) if exact else (0.0, 2)
    bound = f"{100 * BITS_EQUAL:.1f} % equal, 1 rounding" if exact else "2 roundings"
    rows = []
    lse = float(((there["lse"] - here["lse"]).abs() / here["lse"].abs().clamp(min=1)).max())
    equal = int((bits(there["lse"]) == bits(here["lse"])).sum())
    rows.append(Row(group, f"{name}: lse", here["lse"].numel(), equal, f"{lse:.1e}", "1e-6 relative", lse <= LSE_BOUND))
    for key in ("o", "dq", "dk", "dv"):
        mine, yours = here[key], there[key]
        same = bits(mine) == bits(yours)
        worst = roundings(mine, yours)
        good = bool(same.mean() >= least and worst <= most)
        rows.append(Row(group, f"{name}: {key}", same.size, int(same.sum()), f"{worst:.2f}", bound, good))
    return rows


def roundings(x: torch.Tensor, y: torch.Tensor) -> float:
    """The largest difference in roundings: units in the last place of the larger value, at least those of the
    tensor's root mean square (a sum that cancels keeps the roundings of its terms)."""
    unit = torch.finfo(x.dtype).eps
    x, y = x.double(), y.double()
    size = torch.maximum(torch.maximum(x.abs(), y.abs()), x.square().mean().sqrt())
    return float(((x - y).abs() / torch.exp2(torch.floor(torch.log2(size))) / unit).max())


def compare_approximation(text: str, there: np.ndarray, here: np.ndarray, x: np.ndarray) -> Row:
    error, bound = approximations.error(text, there, here, x)
    equal = int((there == here).sum())
    return Row("approximations", text.split(" ")[0], there.size, equal, power(error), bound.text, error <= bound.limit)


# All of it


def record(path: Path | None = None) -> dict[str, Any]:
    """Everything on the chip; kept in `path` after each part, so that a fault later loses nothing."""
    found: dict[str, Any] = {"chip": torch.cuda.get_device_name(), "attention": {}}

    def keep(key: str, value: Any) -> None:
        found[key] = value
        if path is not None:
            torch.save(found, path)

    keep("approximations", approximations.on_chip(chip.Chip()))
    keep("kernels", {case.name: run_kernel(case, "cuda") for case in kernels()})
    for name in attention.CASES if attention.available() else ():
        keep("attention", found["attention"] | {name: attention.run(name, "cuda")})
        print(f"{name}: recorded", flush=True)
    return found


def compare(found: dict[str, Any], said: Callable[[str], None] = lambda line: None) -> list[Row]:
    """Everything in the emulator, beside what the chip gave."""
    rows = []
    for case in kernels():
        rows.append(compare_kernel(case.name, found["kernels"][case.name], emulate_kernel(case)))
        said(str(rows[-1]))
        if rows[-1].group == "matrix products":
            there = found["kernels"][case.name]
            row = compare_kernel(f"{case.name}, accumulator=truncate", there, emulate_kernel(case, "truncate"))
            rows.append(row)
            said(str(row))
    for text, x, here in approximations.emulated():
        rows.append(compare_approximation(text, found["approximations"][text], here, x))
    for name, there in found["attention"].items():
        for accumulator in ("truncate", "fp32"):
            rows += compare_attention(name, there, emulate_attention(name, accumulator), accumulator)
            said("\n".join(map(str, rows[-5:])))
    return rows


HEADINGS = {
    "no MMA, no approximation": "every value is compared bit for bit, the inputs and what lies around the outputs too",
    "matrix products": "the distance is given in parts of the sum of the absolute products",
    "approximations": "the distance between the chip's result and the exact function, rounded",
    "attention, accumulator truncate": "flash-attn-4 4.0.0b36, unmodified, with the published model of the chip's "
    "accumulator; distances in units in the last place of the 16-bit type",
    "attention, accumulator fp32": "the same with sums in plain fp32, the default: what is summed otherwise is rounded "
    "otherwise, the more often the longer the sum (D 256) and the finer the type (float16)",
}


def table(rows: list[Row], found: dict[str, Any]) -> str:
    lines = [
        "# The emulator beside the chip",
        "",
        f"Written by `python tests/gpu/agreement.py` from a run on one {found['chip']}: the same kernels with the same",
        "inputs there and in the emulator (`sm_90a`). `equal`: results with the same bits. Beside these,",
        "`tests/gpu/test_ptx_on_chip.py` compares the cases of every ALU instruction, bit for bit.",
    ]
    for group, words in HEADINGS.items():
        part = [row for row in rows if row.group == group]
        if not part:
            continue
        lines += ["", f"## {group[0].upper()}{group[1:]}", "", f"{words[0].upper()}{words[1:]}.", ""]
        lines += ["| | values | equal | largest distance | allowed | |", "| --- | ---: | ---: | ---: | ---: | --- |"]
        for row in part:
            verdict = "within" if row.good else "**outside**"
            lines.append(f"| {row.name} | {row.values} | {row.share} | {row.worst} | {row.bound} | {verdict} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "compare", "both"])
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args(arguments)
    if options.what == "record":
        record(options.files[0])
        return 0
    found = record() if options.what == "both" else torch.load(options.files[0], weights_only=False)
    rows = compare(found, print)
    text = table(rows, found)
    print(text)
    target = options.files[1:] if options.what == "compare" else options.files
    for path in target:
        path.write_text(text)
    return int(not all(row.good for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
