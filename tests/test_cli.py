"""The command line: what each command prints, and its exit code."""

from __future__ import annotations

import importlib.metadata
import math
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import refluent as rf
from refluent import backends, check, cli, doctor


def usage(arguments: list[str]) -> int:
    """Exit code where argparse itself ends the program."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return int(ended.value.code or 0)


@pytest.mark.parametrize("command", ["demo", "doctor", "check", "bench"])
def test_every_command_is_listed_and_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert usage(["--help"]) == 0
    assert f"    {command} " in capsys.readouterr().out
    assert usage([command, "--help"]) == 0
    assert f"usage: refluent {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [[], ["nonsense"], ["demo", "--steps", "0"], ["demo", "--steps", "x"], ["check", "--dtype", "int8"]]
)
def test_wrong_usage_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert usage(arguments) == 2
    assert "usage: refluent" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert usage(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"refluent {rf.__version__}"
    assert rf.__version__ == importlib.metadata.version("refluent")


def test_help_loads_no_command() -> None:
    code = (
        "import sys, refluent.cli as cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('matplotlib', 'refluent.demo', 'refluent.doctor') if m in sys.modules])\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


def test_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(compiling: bool) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert cli.main(["doctor"]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_a_real_interrupt_leaves_no_report(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "refluent.cli", "demo", "--steps", "100000", "--out", str(tmp_path / "report")]
    process = subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore it
    )
    try:
        assert process.stdout is not None
        assert "bigram entropy" in process.stdout.readline()  # training is about to begin
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted" in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("device", ["nonsense", "cuda:77"])
def test_a_device_that_is_not_there(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--device", device]) == 2
    assert f"--device {device}" in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["demo"]) == 2
    assert "matplotlib and tqdm: pip install 'refluent[demo]'" in capsys.readouterr().err


class TestDoctor:
    @pytest.mark.parametrize("options", [[], ["--run"]])
    def test_lists_every_backend(
        self, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tried = []
        monkeypatch.setattr(doctor, "try_backend", lambda name, device: tried.append(name) or "")
        assert cli.main(["doctor", *options]) == 0
        out = capsys.readouterr().out
        there = [name for name in backends.names() if backends.missing(name) is None]
        assert tried == [name for name in there if options or name not in doctor.COMPILING]
        for name in backends.names():
            line = next(line for line in out.splitlines() if line.startswith(f"  {name} "))
            state = "works" if name in tried else "ready" if name in there else "not here"
            assert f" {state}: " in line
        assert torch.__version__ in out
        assert "cute dsl" in out

    def test_a_backend_that_fails(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        def broken(*args: Any, **options: Any) -> None:
            raise RuntimeError("no such instruction")

        monkeypatch.setattr(rf, "attention", broken)
        assert cli.main(["doctor"]) == 1
        assert "fails: on cpu, no such instruction" in capsys.readouterr().out

    def test_the_call_that_is_tried(self) -> None:
        assert doctor.finding("torch", compiling=False) == ("works", "forward and backward of a small call ran")

    def test_a_line_is_out_before_the_next_is_looked_for(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        seen = []
        monkeypatch.setattr(doctor, "gpu", lambda: seen.append(capsys.readouterr().out) or "none")
        cli.main(["doctor"])
        assert seen[0].splitlines()[-1].startswith("torch ")

    def test_a_backend_that_gives_nan(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rf, "attention", lambda q, k, v, **options: (q + k + v) * math.nan)
        assert "not finite" in doctor.try_backend("torch", torch.device("cpu"))

    @pytest.mark.parametrize(
        ("version", "words"),
        [
            ("4.8.1", "4.8.1"),
            ("4.6.1", "can hang"),
            ("4.9.0", "tested is 4.8.1: pip install nvidia-cutlass-dsl==4.8.1"),
            (None, "not installed"),
        ],
    )
    def test_cute_dsl(self, version: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def lookup(name: str) -> str:
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(doctor.metadata, "version", lookup)
        assert words in doctor.cute_dsl()

    @pytest.mark.skipif(os.name != "posix", reason="writes a shell script")
    @pytest.mark.parametrize(("script", "version"), [("echo 580.1", "580.1"), ("exit 9", ""), ("true", "")])
    def test_driver(self, script: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        assert doctor.driver() == version

    def test_a_driver_without_a_fitting_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(doctor, "driver", lambda: "580.1")
        monkeypatch.setattr(torch.version, "cuda", None)
        assert "pip install" in doctor.gpu()
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        assert "torch sees no GPU" in doctor.gpu()
        monkeypatch.setattr(doctor, "driver", lambda: "")
        assert doctor.gpu().startswith("none")


class TestCheck:
    SMALL = ("check", "--dtype", "fp32", "--head-dim", "40", "--device", "cpu", "--backend", "torch")

    def test_every_case_passes(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main([*self.SMALL]) == 0
        out = capsys.readouterr().out
        assert all(any(line.startswith(f"{case} ") for line in out.splitlines()) for case in check.CASES)
        assert f"{len(check.CASES)} passed, 0 failed, 0 not supported" in out

    def test_a_wrong_backend_fails(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        right = rf.attention

        def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
            o, lse = right(q, k, v * 1.0001, **options)
            return o, lse

        monkeypatch.setattr(rf, "attention", wrong)
        assert cli.main([*self.SMALL, "--case", "causal", "varlen"]) == 1
        out = capsys.readouterr().out
        assert "FAILED o: max error" in out
        assert "1 passed, 1 failed" in out

    def test_nothing_supported_is_no_success(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def refuse(*args: Any, **options: Any) -> None:
            raise rf.UnsupportedError("backend 'torch': not today")

        monkeypatch.setattr(rf, "attention", refuse)
        assert cli.main([*self.SMALL, "--case", "plain"]) == 1
        out = capsys.readouterr().out
        assert "not supported: backend 'torch': not today" in out
        assert "0 passed, 0 failed, 1 not supported" in out

    def test_an_unknown_backend(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["check", "--backend", "abacus"]) == 2
        assert "abacus" in capsys.readouterr().err


class TestBench:
    @pytest.fixture
    def checkout(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A checkout with one benchmark, and the command line inside it."""
        bench = tmp_path / "bench"
        bench.mkdir()
        (bench / "quick.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(len(sys.argv) - 1)\n")
        (bench / "_shared.py").write_text("")
        monkeypatch.setattr(cli, "__file__", str(tmp_path / "src" / "refluent" / "cli.py"))
        return bench

    def test_lists(self, checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["bench"]) == 0
        assert capsys.readouterr().out == "refluent bench quick\n"

    def test_runs_and_hands_on_arguments_and_exit_code(self, checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["bench", "quick", "--length", "1024", "x"]) == 3
        assert capfd.readouterr().out == "['--length', '1024', 'x']\n"

    def test_unknown(self, checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["bench", "slow"]) == 2
        assert "no benchmark 'slow'; there are: quick" in capsys.readouterr().err

    def test_outside_a_checkout(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(cli, "__file__", str(tmp_path / "site-packages" / "refluent" / "cli.py"))
        assert cli.main(["bench", "quick"]) == 2
        assert "source checkout" in capsys.readouterr().err
