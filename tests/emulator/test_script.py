"""`refluent emulate`: a script runs as it is, its findings are the exit code; and the fixture for kernel tests."""

from __future__ import annotations

import sys

import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from cutlass.cute.runtime import from_dlpack

from emulator.kernels import elementwise, scheduling
from refluent import cli
from refluent.emulator import FindingsError

pytestmark = pytest.mark.emulator

SCRIPT = """
import sys
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack


@cute.kernel
def kernel(x: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    x[{index}] = x[{index}] + 1.0


@cute.jit
def host(x: cute.Tensor):
    kernel(x).launch(grid=[1, 1, 1], block=[64, 1, 1])


if __name__ == "__main__":
    x = torch.zeros(64, device="cuda")
    host(from_dlpack(x))
    print("arguments", sys.argv[1:], "sum", x.sum().item(), torch.cuda.get_device_capability())
    {end}
"""


def run(tmp_path, *arguments, index="thread", end="", options=()):
    script = tmp_path / "kernel_script.py"
    script.write_text(SCRIPT.format(index=index, end=end))
    return cli.main(["emulate", *options, str(script), *arguments])


@pytest.mark.parametrize("arch", ["sm_90a", "sm90"])
def test_a_script_runs_on_the_chip_asked_for(arch, tmp_path, capsys):
    argv, path = list(sys.argv), list(sys.path)
    assert run(tmp_path, "one", "--two", options=("--arch", arch)) == 0
    out = capsys.readouterr().out
    assert "arguments ['one', '--two'] sum 64.0 (9, 0)" in out
    assert "emulated sm_90a" in out
    assert "no findings" in out
    assert (sys.argv, sys.path) == (argv, path)
    assert not torch.zeros(1).is_cuda


def test_findings_are_the_exit_code(tmp_path, capsys):
    assert run(tmp_path, index="0") == 1
    assert "[race]" in capsys.readouterr().out
    assert run(tmp_path, index="0", options=("--checks", "none")) == 0
    assert run(tmp_path, index="0", options=("--checks", "uninitialised,object")) == 0


def test_faults_and_failures_of_the_script_are_the_exit_code(tmp_path, capsys):
    assert run(tmp_path, index="thread + 1000") == 1
    assert "FaultError" in capsys.readouterr().err
    assert run(tmp_path, end="raise ValueError('of its own')") == 1
    assert "of its own" in capsys.readouterr().err
    assert run(tmp_path, end="sys.exit(3)") == 1
    assert run(tmp_path, end="sys.exit()") == 0


def test_report_folder(tmp_path):
    assert run(tmp_path, options=("--report", str(tmp_path / "out"))) == 0
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"report.txt", "timeline.json", "timeline.svg"} <= written


def test_wrong_usage(tmp_path, capsys):
    assert cli.main(["emulate", str(tmp_path / "missing.py")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert run(tmp_path, options=("--checks", "everything")) == 2
    assert run(tmp_path, options=("--num-sms", "0")) == 2
    assert run(tmp_path, options=("--processes", "0")) == 2
    with pytest.raises(SystemExit):
        run(tmp_path, options=("--arch", "sm_80"))


def test_fixture_runs_kernels(emulated):
    x, y = torch.ones(300), torch.ones(300)
    with emulated("sm_100a", schedule="random", seed=3) as chip:
        elementwise.axpy(from_dlpack(x), from_dlpack(y), 2.0, 300)
    assert (y == 3).all()
    assert len(chip.report().launches) == 1


def test_fixture_fails_on_findings(emulated):
    x, y, z = torch.ones(4, 100), torch.zeros(4, 100), torch.zeros(4, 100)
    arguments = [from_dlpack(t) for t in (x, y, z)]
    with pytest.raises(FindingsError, match=r"\[race\]"), emulated("sm_90a") as chip:
        scheduling.dependent(*arguments, False)
    assert chip.report().findings.pop(0).kind == "race"
    chip.report().findings.clear()
