"""`refluent emulate SCRIPT.py`: run any Python script with its CuTe DSL kernels on the emulated chip."""

from __future__ import annotations

import argparse
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

from refluent.emulator.chips import ARCHITECTURES, architecture
from refluent.emulator.context import Gpu, gpu
from refluent.emulator.errors import EmulatorError

SCHEDULES = ("fair", "random", "late", "early")
ACCUMULATORS = ("fp32", "truncate")
CTA_ORDERS = ("linear", "random", "reverse")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments; everything after SCRIPT belongs to the script."""
    add_options(parser)
    parser.add_argument("--report", type=Path, metavar="DIR", help="write report.txt and a timeline into DIR")
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="a Python file, run as __main__")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="passed on to the script")


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the chip is like."""
    parser.add_argument(
        "--arch",
        type=architecture,
        choices=ARCHITECTURES,
        default="sm_100a",
        help="emulated chip (default: %(default)s); sm90 and sm100 will do",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the schedule (default: 0)")
    parser.add_argument("--schedule", choices=SCHEDULES, default="fair", help="order of warps, CTAs and copies")
    parser.add_argument(
        "--checks", default="all", metavar="CHECKS", help="all, none, or names of checks with commas (default: all)"
    )
    parser.add_argument("--num-sms", type=int, default=8, help="multiprocessors of the chip (default: %(default)s)")
    parser.add_argument(
        "--accumulator", choices=ACCUMULATORS, default="fp32", help="how tensor cores add (default: %(default)s)"
    )
    parser.add_argument(
        "--approx", choices=("exact", "perturbed"), default="exact", help="approximated functions (default: exact)"
    )
    parser.add_argument("--cta-order", choices=CTA_ORDERS, default="linear", help="order in which CTAs start")
    parser.add_argument("--processes", type=int, default=1, help="that share the CTAs of a launch (default: 1)")
    parser.add_argument("--strict", action="store_true", help="hold kernels to the letter of the PTX manual")


def chip_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Arguments of gpu() beside the architecture."""
    return {
        "seed": arguments.seed,
        "schedule": arguments.schedule,
        "checks": arguments.checks.split(",") if "," in arguments.checks else arguments.checks,
        "num_sms": arguments.num_sms,
        "strict": arguments.strict,
        "accumulator": arguments.accumulator,
        "approx": arguments.approx,
        "cta_order": arguments.cta_order,
        "processes": arguments.processes,
        "on_finding": "record",
    }


def run(arguments: argparse.Namespace) -> int:
    """Exit code: 0 no findings, 1 findings, a fault or an error of the script, 2 it cannot be run."""
    if not arguments.script.is_file():
        print(f"refluent emulate: no such file: {arguments.script}", file=sys.stderr)
        return 2
    try:
        chip = gpu(arguments.arch, trace=arguments.report is not None, **chip_options(arguments))
    except (EmulatorError, ValueError) as error:
        print(f"refluent emulate: {error}", file=sys.stderr)
        return 2
    failed = _run_inside(chip, arguments.script, arguments.arguments)
    print(chip.report())
    if arguments.report is not None:
        _write(chip, arguments.report)
    return int(failed or bool(chip.report().findings))


def _run_inside(chip: Gpu, script: Path, arguments: list[str]) -> bool:
    """Whether the script failed: an exception that it let through, or a status other than 0."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent.resolve()))
    try:
        with chip:
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as leaving:
        return leaving.code not in (None, 0)
    except EmulatorError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return True
    except Exception:
        traceback.print_exc()
        return True
    finally:
        sys.argv, sys.path[:] = argv, path
    return False


def _write(chip: Gpu, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.txt").write_text(f"{chip.report()}\n")
    chip.timeline(folder)
    print(f"report.txt and the timeline are in {folder}")
