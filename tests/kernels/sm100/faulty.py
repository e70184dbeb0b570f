"""Kernels with a planted fault: the sources of refluent.gpu, a few words changed, loaded in place of the real ones.

Each fault is one that somebody could write. It names the words that it replaces, which have to stand in the file
exactly once, and what must report it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import refluent
from kernels.sm100.runs import Run
from refluent import gpu
from refluent.accuracy import AccuracyError
from refluent.emulator.errors import DeadlockError, FaultError

NAME = "refluent.gpu"
WRONG = "wrong gradient"
SCHEDULES = (("fair", 0), ("late", 0), ("random", 0), ("random", 1), ("early", 0))


@dataclass(frozen=True)
class Fault:
    """`found`: what may report it, kinds of findings ("race", "deadlock", ...) or WRONG; `on`: a call of CALLS."""

    name: str
    file: str
    old: str
    new: str
    found: tuple[str, ...]
    on: str = "plain"

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


@contextlib.contextmanager
def planted(fault: Fault, folder: Path) -> Iterator[None]:
    """refluent.gpu from a changed copy of its sources."""
    shutil.copytree(Path(gpu.__file__).parent, folder / "gpu", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "gpu" / fault.file
    text = path.read_text()
    assert text.count(fault.old) == 1, f"{fault.file} has {text.count(fault.old)} times {fault.old!r}"
    path.write_text(text.replace(fault.old, fault.new))
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name == NAME or name.startswith(NAME + ".")}
    try:
        spec = importlib.util.spec_from_file_location(NAME, folder / "gpu" / "__init__.py")
        sys.modules[NAME] = refluent.gpu = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(refluent.gpu)
        importlib.import_module(NAME + ".cache").use(None)
        yield
    finally:
        for name in [name for name in sys.modules if name == NAME or name.startswith(NAME + ".")]:
            del sys.modules[name]
        sys.modules.update(kept)
        refluent.gpu = kept[NAME]


def reports(run: Run, **chip) -> set[str]:
    """What one schedule after another has to say, until one says something."""
    for schedule, seed in SCHEDULES:
        said = set()
        try:
            run.check(run(schedule, seed, on_finding="record", **chip))
        except AccuracyError:
            said.add(WRONG)
        except (DeadlockError, FaultError):
            pass  # a finding too
        said |= {finding.kind for finding in run.report.findings}
        if said:
            return said
    return set()
