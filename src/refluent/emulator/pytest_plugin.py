"""Fixtures for tests of kernels. In a conftest.py: `from refluent.emulator.pytest_plugin import emulated`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from refluent.emulator.context import Gpu, gpu


@pytest.fixture
def emulated(request: pytest.FixtureRequest) -> Iterator[Callable[..., Gpu]]:
    """`with emulated("sm_100a", schedule="late") as chip:` is emulator.gpu(...) for a test.

    Whatever the checks find fails the test, at the end of the block by default, else (on_finding="record") at the end
    of the test unless it has taken the findings with `chip.report().findings.clear()`. The report of every context
    is shown with a failure.
    """
    chips: list[Gpu] = []

    def make(arch: str, **options: Any) -> Gpu:
        chip = gpu(arch, **options)
        chips.append(chip)
        return chip

    yield make
    for number, chip in enumerate(chips):
        request.node.add_report_section("teardown", f"emulated {chip.arch} ({number})", str(chip.report()))
    left = [finding for chip in chips for finding in chip.open_findings()]
    assert not left, "\n".join(map(str, left))
