"""Hypothesis profiles and fixtures that all tests share.

The default profile draws the same examples on every run, so that a change alone can break it;
``pytest --hypothesis-profile=large`` draws fresh ones, and many more.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from poison import poisoned_memory
from refluent.accuracy import Errors

RATIOS: list[tuple[str, str, float]] = []  # type, tensor, error over eager's

COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=40, derandomize=True, **COMMON)
settings.register_profile("large", max_examples=1000, **COMMON)
settings.load_profile("ci")


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that the library allocates without clearing it holds NaN."""
    with poisoned_memory():
        yield


@pytest.fixture(scope="session")
def record_errors() -> Callable[[torch.dtype, list[Errors]], None]:
    """Keeps each tensor's error over eager's, for the summary at the end of the run."""

    def record(dtype: torch.dtype, errors: list[Errors]) -> None:
        for error in errors:
            if not math.isnan(error.eager_error) and error.eager_error > 0:
                name = error.name if error.name in ("o", "dq", "dk", "dv") else "captured"
                RATIOS.append((str(dtype).removeprefix("torch."), name, error.ratio))

    return record


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["ratios"] = RATIOS


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    RATIOS.extend(tuple(r) for r in getattr(node, "workeroutput", {}).get("ratios", []))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not RATIOS:
        return
    terminalreporter.section("largest error over that of plain eager attention")
    for key in sorted({r[:2] for r in RATIOS}):
        ratios = sorted(r[2] for r in RATIOS if r[:2] == key)
        middle, late = ratios[len(ratios) // 2], ratios[int(0.95 * (len(ratios) - 1))]
        terminalreporter.write_line(
            f"{key[0]:9} {key[1]:9} median {middle:.2f}, 95 % below {late:.2f}, largest {ratios[-1]:.2f} "
            f"({len(ratios)} tensors)"
        )
