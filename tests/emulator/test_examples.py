"""examples/: what docs/emulator.md says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from refluent import cli

pytestmark = pytest.mark.emulator
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "hanging_kernel.py")


def test_the_hanging_kernel_is_explained(capsys):
    assert cli.main(["emulate", "--arch", "sm_90a", EXAMPLE]) == 1
    out = capsys.readouterr().out
    assert "[deadlock]" in out
    assert "hanging_kernel.py:42" in out
    assert "missing 1 of 2 arrivals; arrived so far: PTX line" in out
    assert "hanging_kernel.py:50" in out


@pytest.mark.parametrize("schedule", ["fair", "late"])
def test_the_mended_one_is_silent(capsys, schedule):
    assert cli.main(["emulate", "--arch", "sm_90a", "--schedule", schedule, EXAMPLE, "--mended"]) == 0
    assert "no findings" in capsys.readouterr().out
