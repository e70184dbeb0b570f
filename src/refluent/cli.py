"""The command line: refluent demo | doctor | check | bench | emulate | plan | cache.

Each command imports what it needs when it runs, and returns its exit code: 0 done, 1 a check failed, 2 wrong usage,
130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

INTERRUPTED = 130  # what a shell reports for SIGINT: 128 + 2


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``refluent`` command."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.command(arguments))
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return INTERRUPTED
    except UsageError as error:
        print(f"refluent: {error}", file=sys.stderr)
        return 2


class UsageError(Exception):
    """What was asked for cannot be done as asked; the message says what can."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="refluent",
        description="Attention with any mask and any score function, and its gradient, for PyTorch.",
        epilog="Start with `refluent doctor`, which says what works on this machine.",
    )
    parser.add_argument("--version", action="version", version=f"refluent {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_doctor(commands)
    _add_check(commands)
    _add_bench(commands)
    _add_emulate(commands)
    _add_plan(commands)
    _add_cache(commands)
    return parser


def _version() -> str:
    from importlib.metadata import version

    return version("refluent")


if TYPE_CHECKING:  # argparse has no public name for it, and it takes its parameter only when types are checked
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def _add_demo(commands: Commands) -> None:
    parser = commands.add_parser(
        "demo",
        help="train a small language model, check its gradients, write a report",
        description="Trains a byte-level decoder (grouped heads, sliding windows, learned ALiBi slopes) on the text "
        "behind Python's help(), and the same model with its attention zeroed. Checks the losses and one step's "
        "attention gradients, takes one step's attention backward through the Blackwell kernel in the emulator (on "
        "Linux, with the extra `emulator`), and writes a report folder. Exit code 1 if a check failed.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("refluent-report"), help="report folder (default: %(default)s)"
    )
    parser.add_argument("--steps", type=positive_number, default=None, help="training steps of each model")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, batches and sampling (default: 0)")
    parser.add_argument("--device", default=None, help="cpu, cuda, cuda:1, ... (default: a GPU if torch sees one)")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(command=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    _require("matplotlib", "tqdm", extra="demo")
    import dataclasses

    from refluent.demo.run import Request, run
    from refluent.demo.train import Settings

    settings = Settings(seed=arguments.seed)
    if arguments.steps is not None:
        settings = dataclasses.replace(settings, steps=arguments.steps)
    try:
        request = Request(arguments.out, _device(arguments.device), settings, quiet=arguments.quiet)
        return run(request)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _add_doctor(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what works on this machine, and what to install for the rest",
        description="Prints Python, torch, the GPU and its driver, the CuTe DSL, and for each backend whether it works "
        "here or why not. Exit code 1 if no backend works.",
    )
    parser.add_argument(
        "--run", action="store_true", help="also compile a small call for the backends of GPU kernels and run it"
    )
    parser.set_defaults(command=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from refluent.doctor import run

    return run(compiling=arguments.run)


def _add_check(commands: Commands) -> None:
    parser = commands.add_parser(
        "check",
        help="compare a backend with the float64 reference and print the errors",
        description="Runs a grid of cases forward and backward and prints each tensor's error as a share of what the "
        "accuracy rule allows. Exit code 1 if one is over it.",
    )
    from refluent.check import CASES, DTYPES, HEAD_DIMS

    parser.add_argument("--backend", default=None, help="backend to check (default: the best for each case)")
    parser.add_argument("--device", default=None, help="cpu, cuda, ... (default: a GPU if torch sees one)")
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES), help="default: all four")
    parser.add_argument(
        "--head-dim",
        nargs="+",
        type=positive_number,
        default=list(HEAD_DIMS),
        metavar="D",
        help=f"default: {HEAD_DIMS}",
    )
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES), help="default: all of them")
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs (default: 0)")
    parser.set_defaults(command=_check)


def _check(arguments: argparse.Namespace) -> int:
    from refluent import backends, check

    _device(arguments.device)
    try:
        backends.check_name(arguments.backend)
    except (ValueError, NotImplementedError) as error:
        raise UsageError(f"--{error}") from error
    return check.run(
        arguments.backend, arguments.device, arguments.dtype, arguments.head_dim, arguments.case, arguments.seed
    )


def _add_emulate(commands: Commands) -> None:
    parser = commands.add_parser(
        "emulate",
        help="run a script of CuTe DSL kernels, or the Blackwell backward, on an emulated GPU",
        usage="%(prog)s [options] SCRIPT [ARGUMENT ...]\n       %(prog)s backward [options]",
        description="Runs a Python script with a chip emulated on this CPU: CuTe DSL kernels that it compiles run "
        "there, CPU tensors stand for GPU tensors. Prints every launch and what the checks found. Exit code 1 if a "
        "check found something or the script failed.",
        epilog="`refluent emulate backward` runs a training step's attention backward through refluent's own Blackwell "
        "kernel instead: `refluent emulate backward --help`. (A script of that name: ./backward.)",
    )
    from refluent.emulator import script

    script.add_arguments(parser)
    parser.set_defaults(command=_emulate)


def _emulate(arguments: argparse.Namespace) -> int:
    if str(arguments.script) == "backward":
        return _emulate_backward(arguments)
    _require("numba", "llvmlite", "cutlass", extra="emulator")
    from refluent.emulator import script

    return script.run(arguments)


def _emulate_backward(before: argparse.Namespace) -> int:
    """`before`: what stood before the word, whose rest is not taken apart yet."""
    from refluent.emulator import script

    parser = argparse.ArgumentParser(
        prog="refluent emulate backward",
        description="Trains the demo's decoder for a few steps, then takes the attention backward of one training step "
        "through the Blackwell kernel, compiled and run on an emulated chip. Prints the gradients' errors against the "
        "float64 reference, what each warp role did, what the checks found, and a step's clocks beside the design's. "
        "About a minute. Exit code 1 if an error is over its bound or a check found something.",
    )
    script.add_options(parser)
    parser.add_argument(
        "--report", type=Path, metavar="DIR", help="write index.html, figures.json and each layer's timeline into DIR"
    )
    arguments = parser.parse_args(before.arguments, before)
    _require("numba", "llvmlite", "cutlass", extra="emulator")
    if arguments.arch != "sm_100a":
        raise UsageError(f"--arch {arguments.arch}: there is a backward kernel for sm_100a only")
    from refluent import emulator
    from refluent.demo import emulated, folder

    reason, options = emulated.missing(), script.chip_options(arguments)
    if reason is not None:
        raise UsageError(f"emulate backward: {reason}")
    try:
        emulator.gpu(arguments.arch, **options)
        if arguments.report is not None:
            folder.check_target(arguments.report, emulated.OPTION)
    except (emulator.EmulatorError, ValueError) as error:
        raise UsageError(str(error)) from error
    return emulated.run(emulated.Step(chip=options), arguments.report)


def _add_bench(commands: Commands) -> None:
    parser = commands.add_parser(
        "bench",
        help="run a benchmark of the checkout",
        description="Runs one of the scripts in bench/ of the source checkout; what follows its name goes to it. "
        "Without a name, lists them.",
    )
    parser.add_argument("name", nargs="?", help="a script in bench/, without .py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(command=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    folder = Path(__file__).resolve().parents[2] / "bench"
    scripts = {path.stem: path for path in sorted(folder.glob("[!_]*.py"))}
    if not scripts:
        raise UsageError(
            "the benchmarks are not part of the installed package: run this from a source checkout that was installed "
            "with `pip install --editable .`"
        )
    if arguments.name is None:
        print("\n".join(f"refluent bench {name}" for name in scripts))
        return 0
    if arguments.name not in scripts:
        raise UsageError(f"no benchmark {arguments.name!r}; there are: {', '.join(scripts)}")
    return subprocess.run([sys.executable, scripts[arguments.name], *arguments.arguments]).returncode


def _add_plan(commands: Commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="show the tiles and memory maps of a kernel",
        description="Prints which plan serves a problem: tiles, stages, warps, and the maps of tensor memory and "
        "shared memory, drawn to scale.",
    )
    from refluent.emulator.chips import architecture

    parser.add_argument(
        "--arch",
        type=architecture,
        choices=["sm_100a"],
        default="sm_100a",
        help="architecture (default: %(default)s); sm100 will do",
    )
    parser.add_argument("--head-dim", type=positive_number, required=True, metavar="D", help="of q and k, in elements")
    parser.add_argument("--head-dim-v", type=positive_number, metavar="D", help="of v (default: that of q and k)")
    parser.add_argument("--causal", action="store_true", help="with a causal mask")
    parser.add_argument(
        "--window", nargs=2, type=int, metavar=("LEFT", "RIGHT"), default=(-1, -1), help="positions; -1: open"
    )
    parser.set_defaults(command=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    from refluent.gpu.plans.draw import draw
    from refluent.gpu.plans.sm100 import backward_plan
    from refluent.problem import MAX_HEAD_DIM, check_window

    head_dim, head_dim_v = arguments.head_dim, arguments.head_dim_v or arguments.head_dim
    for name, value in (("--head-dim", head_dim), ("--head-dim-v", head_dim_v)):
        if value % 8 or value > MAX_HEAD_DIM:
            raise UsageError(f"{name}: got {value}; allowed: a multiple of 8 up to {MAX_HEAD_DIM}")
    try:
        left, right = check_window(tuple(arguments.window))
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    plan = backward_plan(head_dim, head_dim_v)
    print(draw(plan, head_dim, head_dim_v, left is not None, arguments.causal or right is not None))
    return 0


def _add_cache(commands: Commands) -> None:
    parser = commands.add_parser(
        "cache",
        help="show or clear the compiled kernels on disk",
        description="Lists the compiled kernels that are kept on disk, the most recently used first, or deletes them. "
        "They are made again when they are needed.",
    )
    parser.add_argument("action", nargs="?", choices=["show", "clear"], default="show", help="default: show")
    parser.set_defaults(command=_cache)


def _cache(arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("fcntl") is None:
        raise UsageError("there are GPU kernels for Linux only, so nothing is kept here")
    import time

    from refluent.gpu import cache

    store = cache.Cache(cache.default_folder())
    if arguments.action == "clear":
        count = len(store.entries())
        print(f"{count} kernels deleted, {store.clear() / 1e6:.1f} MB, from {store.folder}")
        return 0
    entries = store.entries()
    total = sum(entry.size for entry in entries)
    print(f"{store.folder}: {len(entries)} kernels, {total / 1e6:.1f} of at most {store.limit / 1e6:.0f} MB")
    for entry in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        print(f"  {used}  {entry.size / 1e6:5.1f} MB  {entry.name}")
    return 0


def positive_number(value: str) -> int:
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive whole number")
    return number


def _device(name: str | None) -> torch.device | None:
    """A device that is there, or None where none was named."""
    if name is None:
        return None
    import torch

    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {name}: {str(error).splitlines()[0]}") from error
    return device


def _require(*modules: str, extra: str) -> None:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise UsageError(f"this needs {' and '.join(missing)}: pip install 'refluent[{extra}]'")


if __name__ == "__main__":
    sys.exit(main())
