"""The demo from start to report."""

from __future__ import annotations

import functools
import platform
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import refluent

from . import emulated, gradients, report, text
from .model import Config
from .train import Run, Settings, sample, train

MARGIN = 0.1  # nats a byte that attention has to be worth
PROMPT = "The "


@dataclass(frozen=True)
class Request:
    """What ``refluent demo`` was asked for."""

    out: Path = Path("refluent-report")
    device: torch.device | None = None  # None: the GPU that torch sees, else the CPU
    settings: Settings = field(default_factory=Settings)
    config: Config = field(default_factory=Config)
    emulated: emulated.Step = emulated.SMALL
    quiet: bool = False


def run(request: Request) -> int:
    """Train, check, write the report; 0 where every check passed, else 1. Nothing is written before the end."""
    report.check_target(request.out)
    started = time.perf_counter()
    say = functools.partial(print, flush=True) if not request.quiet else _silent
    device = request.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = text.load()
    bigram = text.bigram_entropy(data.train, data.held_out)
    say(f"text: {data.size:,} bytes, {len(data.held_out):,} held out; bigram entropy {bigram:.3f} nats a byte")

    progress = functools.partial(_progress, quiet=request.quiet)
    attention = train(data, request.config, request.settings, device, progress)
    zeroed = train(data, _without_attention(request.config), request.settings, device, progress)
    line = sample(attention.model, PROMPT, length=100, temperature=0.5, seed=request.settings.seed)
    layers = gradients.check_step(attention.model, data, request.settings)
    seconds = time.perf_counter() - started
    step, pictures = _emulated(request.emulated, say)

    figures: dict[str, Any] = {
        "text_bytes": data.size,
        "bigram_entropy": bigram,
        "sample": {"prompt": PROMPT, "text": line},
        "machine": _machine(device),
        "model": asdict(request.config) | {"parameters": attention.model.parameters_count},
        "settings": asdict(request.settings),
        "seconds": seconds,
        "runs": {"attention": _figures(attention), "zeroed": _figures(zeroed)},
        "gradients": [layer.figures() for layer in layers],
        "emulated": step,
    }
    figures["checks"] = checks(attention.final, zeroed.final, bigram, layers) + step.get("checks", [])
    figures["passed"] = all(check["passed"] for check in figures["checks"])
    report.write(request.out, figures, pictures)
    _summary(figures, request.out, say)
    return 0 if figures["passed"] else 1


def _emulated(step: emulated.Step, say: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Figures and pictures of the step through the emulated kernel; where it cannot run, the reason as "skipped"."""
    reason = emulated.missing()
    if reason is not None:
        say(f"the Blackwell kernel in the emulator is skipped: {reason}")
        return {"skipped": reason}, {}
    say("a step's attention backward through the Blackwell kernel in the emulator ...")
    figures, pictures = emulated.run_step(step)
    say(f"emulated in {figures['seconds']:.0f} s")
    return figures, pictures


def checks(attention: float, zeroed: float, bigram: float, layers: list[gradients.LayerErrors]) -> list[dict[str, Any]]:
    """What the demo promises, each with its figure and whether it held. Losses are nats a byte, held out."""
    failures = [failure for layer in layers for failure in layer.failures]
    shares = [error.max_error / error.max_bound for layer in layers for error in layer.errors if error.max_bound]
    return [
        {
            "what": f"held-out loss below the text's bigram entropy ({bigram:.3f})",
            "figure": f"{attention:.3f}",
            "passed": attention < bigram,
        },
        {
            "what": f"at least {MARGIN} below the same model with its attention zeroed ({zeroed:.3f})",
            "figure": f"{zeroed - attention:.3f} below",
            "passed": zeroed - attention >= MARGIN,
        },
        {
            "what": "one step's attention gradients agree with the float64 reference",
            "figure": failures[0] if failures else f"{max(shares, default=0.0):.2f} of the allowed error",
            "passed": not failures and bool(shares),
        },
    ]


def _without_attention(config: Config) -> Config:
    return Config(**(asdict(config) | {"attend": False}))


def _figures(run: Run) -> dict[str, Any]:
    return {"losses": run.losses, "held_out": run.held_out, "final": run.final, "seconds": run.seconds}


def _machine(device: torch.device) -> dict[str, Any]:
    return {
        "refluent": refluent.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
    }


def _progress(steps: Iterable[int], title: str, quiet: bool) -> Any:
    from tqdm import tqdm

    interval = 0.1 if sys.stderr.isatty() else 10.0  # seconds; a log file needs few lines
    return tqdm(steps, desc=title, unit="step", file=sys.stderr, disable=quiet, mininterval=interval, miniters=1)


def _silent(*_: object) -> None:
    pass


def _summary(figures: dict[str, Any], out: Path, say: Any) -> None:
    say(f"a sampled line: {figures['sample']['prompt']}{figures['sample']['text']}")
    for check in figures["checks"]:
        say(f"{'ok  ' if check['passed'] else 'FAIL'}  {check['what']}: {check['figure']}")
    say(f"{'passed' if figures['passed'] else 'FAILED'} in {figures['seconds']:.0f} s; report: {out / 'index.html'}")
