"""A report is a folder that appears whole: an interrupt leaves the earlier one or the new one, nothing between."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

MARKER = "figures.json"  # a folder that holds it is a report, and may be replaced by one


def check_target(target: Path, option: str) -> None:
    """Refuse a target that holds something else than a report, before any work is done. `option` names it."""
    if target.exists() and not (target / MARKER).is_file() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{target} exists and is no earlier report: name another place with {option}, or remove it")


def write(target: Path, option: str, fill: Callable[[Path], None]) -> None:
    """Let ``fill`` write the report, its MARKER among it, into a folder beside ``target``, then put it in place."""
    check_target(target, option)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        new = staging / "new"
        new.mkdir()
        fill(new)
        _swap(new, staging / "old", target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _swap(new: Path, old: Path, target: Path) -> None:
    if target.exists():
        os.rename(target, old)
    try:
        os.rename(new, target)
    except BaseException:
        if old.exists():
            os.rename(old, target)
        raise
