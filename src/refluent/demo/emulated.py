"""One training step's attention backward through the Blackwell kernel in the emulator, on operands of a real model.

The demo's decoder without its ALiBi slopes, which the kernel does not take yet, is trained for a few steps; then one
step runs in bfloat16, and each layer's q, k, v, o, lse and the gradient that reaches o go through the kernel.
"""

from __future__ import annotations

import functools
import json
import platform
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import refluent as rf
from refluent import accuracy, backends

from . import emulated_page, folder, text
from .gradients import LayerErrors, judge, traced_step
from .model import Config, Traced
from .train import Settings, train

BACKEND = "emulate:sm100"
OPTION = "--report"
PIXELS = 680  # of the timeline, labels aside: a page's width with them
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Step:
    """The step to run. layers: of the model, which has no more than are needed; chip: options of emulator.gpu."""

    layers: tuple[int, ...] = (0, 1)
    settings: Settings = field(default_factory=lambda: Settings(steps=10, batch=2, length=512, warmup=2))
    chip: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        return Config(layers=max(self.layers) + 1, slopes=False)


SMALL = Step(layers=(1,), settings=Settings(steps=4, batch=1, length=384, warmup=2))  # the demo's


def missing() -> str | None:
    """Why the kernel cannot be emulated on this machine, in words; None if it can."""
    if platform.system() != "Linux":
        return "the CuTe DSL, which compiles it, exists for Linux only"
    return backends.missing(BACKEND)


def capture(step: Step) -> list[Traced]:
    """The attention of each of the step's layers: operands, and gradients in them, bfloat16."""
    data = text.load()
    data = text.Text(data.train, data.held_out[: step.settings.length + 1])
    model = train(data, step.config, step.settings, CPU, _quietly).model
    with torch.autocast("cpu", torch.bfloat16):
        traced = traced_step(model, data, step.settings, sequences=1)
    return [traced[layer] for layer in step.layers]


def _quietly(steps: Iterable[int], title: str) -> Iterable[int]:
    return steps


def run_layer(seen: Traced, chip_options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """One layer's backward in the emulator: figures, and the timeline of its longest CTA as an SVG ("" if it died)."""
    from refluent.gpu.sm100 import counts, emulated

    started = time.perf_counter()
    q, k, v, o, lse = (tensor.detach() for tensor in (seen.q, seen.k, seen.v, seen.o, seen.lse))
    do, made = seen.o.grad, None
    if do is None:
        raise RuntimeError("no gradient reached o")
    options: dict[str, Any] = {"causal": True, "window": seen.window}
    expected = accuracy.expect(q, k, v, do, **options)
    with emulated.gpu(trace=True, **{"on_finding": "record"} | chip_options) as chip:
        try:
            made = rf.attention_backward(do, q, k, v, o, lse, backend=BACKEND, **options)
        except RuntimeError:
            if not chip.report().findings:
                raise
    findings = [str(finding) for finding in chip.report().findings]
    figures: dict[str, Any] = {"findings": findings, "launches": [], "roles": [], "picture": None}
    if made is None:
        return LayerErrors(seen.layer, seen.window, [], ["it did not end"]).figures() | figures, ""
    errors = judge(seen, expected, {"dq": made.dq, "dk": made.dk, "dv": made.dv})
    main = counts.main_launch(chip.report())
    figures["launches"] = [
        {"kernel": launch.kernel, "grid": launch.grid, "block": launch.block, "instructions": launch.instructions}
        for launch in chip.report().launches
    ]
    figures["roles"] = [_role(name, work) for name, work in counts.by_role(main).items()]
    figures["picture"] = f"layer-{seen.layer}.svg"
    figures["seconds"] = time.perf_counter() - started
    labels = {f"warp {w:02d}": f"warp {w:02d}, {name}" for name, warps in counts.ROLES.items() for w in warps}
    return errors.figures() | figures, chip.picture(main.kernel, labels, PIXELS)


def _role(name: str, work: Any) -> dict[str, Any]:
    from refluent.gpu.sm100.counts import ROLES

    operations = dict(sorted(work.operations.items()))
    for opcode, what in (("ld", "ld.shared"), ("st", "st.shared")):
        if accesses := work.shared_accesses(opcode):
            operations[what] = (sum(accesses.values()), work.shared_bytes(opcode), 0)
    return {
        "role": name,
        "warps": [ROLES[name][0], ROLES[name][-1]],
        "registers": work.registers,
        "instructions": work.instructions,
        "operations": {kind: dict(zip(("count", "bytes", "flops"), row)) for kind, row in operations.items()},
    }


def run_step(step: Step) -> tuple[dict[str, Any], dict[str, str]]:
    """The whole step: figures, and pictures by file name."""
    started = time.perf_counter()
    captured = capture(step)
    layers, pictures = [], {}
    for seen in captured:
        figures, picture = run_layer(seen, step.chip)
        layers.append(figures)
        if figures["picture"]:
            pictures[figures["picture"]] = picture
    batch, rows, heads, head_dim = captured[0].q.shape
    figures = {
        "inputs": {
            "sequences": batch,
            "length": rows,
            "heads_q": heads,
            "heads_kv": captured[0].k.shape[2],
            "head_dim": head_dim,
            "dtype": str(captured[0].q.dtype).removeprefix("torch."),
            "steps": step.settings.steps,
        },
        "chip": step.chip,
        "layers": layers,
        "checks": checks(layers),
        "seconds": time.perf_counter() - started,
    }
    figures["passed"] = all(check["passed"] for check in figures["checks"])
    return figures, pictures


def checks(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What has to hold, each with its figure and whether it did."""
    failures = [failure for layer in layers for failure in layer["failures"]]
    shares = [row["max_error"] / row["max_bound"] for layer in layers for row in layer["gradients"] if row["max_bound"]]
    found = [finding for layer in layers for finding in layer["findings"]]
    return [
        {
            "what": "the Blackwell kernel's dq, dk, dv, emulated, agree with the float64 reference",
            "figure": failures[0] if failures else f"{max(shares, default=0.0):.2f} of the allowed error",
            "passed": not failures and bool(shares),
        },
        {
            "what": "the emulator's checks find nothing in it",
            "figure": f"{len(found)} findings",
            "passed": not found,
        },
    ]


def step_clocks() -> dict[str, Any]:
    """A step of 128 x 128 x 128 in clocks of the units that bound it, beside the design's."""
    from refluent.gpu.sm100 import counts

    rows = counts.table(counts.step())
    return {"rows": [asdict(row) for row in rows], "sums": counts.sums(rows)}


def run(step: Step, out: Path | None) -> int:
    """``refluent emulate backward``: 0 where every check passed, else 1. Nothing is written before the end, and `out`
    is an earlier report or nothing."""
    say = functools.partial(print, flush=True)
    say(f"training {step.settings.steps} steps, then one step's attention backward in the emulator ...")
    figures, pictures = run_step(step)
    for line in emulated_page.lines(figures):
        say(line)
    figures["clocks"] = step_clocks() if all(layer["roles"] for layer in figures["layers"]) else None
    for line in emulated_page.clock_lines(figures["clocks"]):
        say(line)
    for check in figures["checks"]:
        say(f"{'ok  ' if check['passed'] else 'FAIL'}  {check['what']}: {check['figure']}")
    if out is not None:
        folder.write(out, OPTION, functools.partial(_fill, figures, pictures))
        say(f"report: {out / 'index.html'}")
    return 0 if figures["passed"] else 1


def _fill(figures: dict[str, Any], pictures: dict[str, str], new: Path) -> None:
    for name, picture in pictures.items():
        (new / name).write_text(picture)
    (new / folder.MARKER).write_text(json.dumps(figures, indent=2) + "\n")
    (new / "index.html").write_text(emulated_page.page(figures))
