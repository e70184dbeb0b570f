"""A training step's attention backward in the emulator: `refluent emulate backward`, and its part of the demo."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

import refluent as rf
from refluent import cli
from refluent.demo import emulated, emulated_page, run, text
from refluent.demo.model import Config
from refluent.demo.train import Settings
from refluent.emulator import FaultError
from refluent.emulator.report import Finding

pytestmark = pytest.mark.emulator
SMALL = emulated.Step(layers=(1,), settings=Settings(steps=4, batch=1, length=130, warmup=1))
CLOCKS = {
    "rows": [
        {"unit": "exp2", "what": "P", "clocks": 9.0, "design": 9, "counted": "", "extra": False, "why": ""},
        {"unit": "exp2", "what": "<b>", "clocks": 2.0, "design": 1, "counted": "", "extra": True, "why": "it <is>"},
    ],
    "sums": {"exp2": (9.0, 9)},
}


@pytest.fixture(scope="module")
def captured():
    return emulated.capture(SMALL)


@pytest.fixture
def quick(captured, monkeypatch):
    """The command with the small step, captured once, and without the counts of a step."""
    monkeypatch.setattr(emulated, "Step", functools.partial(emulated.Step, SMALL.layers, SMALL.settings))
    monkeypatch.setattr(emulated, "capture", lambda step: captured)
    monkeypatch.setattr(emulated, "step_clocks", lambda: CLOCKS)


def command(*arguments):
    return cli.main(["emulate", *arguments])


def test_operands_are_a_real_step_s(captured):
    (seen,) = captured
    assert seen.layer == 1
    assert seen.window is None
    assert seen.q.shape == (1, 130, 4, 32)
    assert seen.k.shape == (1, 130, 2, 32)
    assert {t.dtype for t in (seen.q, seen.k, seen.v, seen.o, seen.o.grad)} == {torch.bfloat16}
    assert seen.o.grad.abs().max() > 0
    o, lse = rf.attention(seen.q, seen.k, seen.v, causal=True, return_lse=True)
    assert torch.equal(o, seen.o)
    assert torch.equal(lse, seen.lse)
    assert torch.equal(emulated.capture(SMALL)[0].o.grad, seen.o.grad)


def test_the_report(quick, tmp_path, capsys):
    out = tmp_path / "out"
    assert command("--seed", "3", "backward", "--arch", "sm100", "--schedule", "random", "--report", f"{out}/") == 0
    printed = capsys.readouterr().out
    assert all(re.search(rf"^  {name}  max error \S+, allowed", printed, re.MULTILINE) for name in ("dq", "dk", "dv"))
    assert "ok    the emulator's checks find nothing in it: 0 findings" in printed
    assert sorted(path.name for path in out.iterdir()) == ["figures.json", "index.html", "layer-1.svg"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    figures = json.loads((out / "figures.json").read_text())
    assert figures["passed"] is True
    assert figures["chip"] | {"seed": 3, "schedule": "random", "checks": "all"} == figures["chip"]
    (layer,) = figures["layers"]
    assert [row["name"] for row in layer["gradients"]] == ["dq", "dk", "dv"]
    assert all(0 < row["max_error"] <= row["max_bound"] for row in layer["gradients"])
    roles = {role["role"]: role for role in layer["roles"]}
    assert list(roles) == ["reduce", "compute", "MMA", "load", "idle"]
    assert [roles[name]["warps"] for name in roles] == [[0, 3], [4, 11], [12, 12], [13, 13], [14, 15]]
    assert all(role["instructions"] > 0 for role in roles.values())
    # causal, 130 by 130: three steps a head; K and V of two key blocks a head
    steps, tile = 3 * 4, 128 * 32
    assert roles["load"]["operations"]["tma load"]["bytes"] == 2 * 2 * tile * (steps + 2 * 4)
    assert roles["reduce"]["operations"]["bulk reduce"]["bytes"] == 4 * tile * steps
    products = [row["flops"] for kind, row in roles["MMA"]["operations"].items() if kind.startswith("mma 128x")]
    assert sum(products) == 5 * 2 * 128 * tile * steps
    page = (out / "index.html").read_text()
    assert 'src="layer-1.svg"' in page
    assert "<li>&lt;b&gt;: it &lt;is&gt;</li>" in page


def test_the_picture_has_the_16_warps(quick, tmp_path):
    assert command("backward", "--report", str(tmp_path / "out")) == 0
    picture = ElementTree.parse(tmp_path / "out" / "layer-1.svg")
    texts = [t.text for t in picture.iter("{http://www.w3.org/2000/svg}text")]
    warps = [words for words in texts if words.startswith("warp ")]
    assert [words.split(", ")[1] for words in warps] == [
        *["reduce"] * 4, *["compute"] * 8, "MMA", "load", "idle", "idle",
    ]  # fmt: skip
    assert {"TMA", "tensor", "bulk"} <= set(texts)


def test_a_wrong_gradient_fails(quick, tmp_path, monkeypatch, capsys):
    right = rf.attention_backward

    def wrong(*arguments, **options):
        made = right(*arguments, **options)
        made.dk[0, 7] += made.dk.abs().max()
        return made

    monkeypatch.setattr(rf, "attention_backward", wrong)
    assert command("backward", "--report", str(tmp_path / "out")) == 1
    printed = capsys.readouterr().out
    assert (
        "FAIL  the Blackwell kernel's dq, dk, dv, emulated, agree with the float64 reference: dk: max error" in printed
    )
    assert "FAILED" in (tmp_path / "out" / "index.html").read_text()


def test_a_finding_fails(quick, tmp_path, monkeypatch, capsys):
    right, opened = rf.attention_backward, []
    from refluent.gpu.sm100 import emulated as backend

    make = backend.gpu
    monkeypatch.setattr(backend, "gpu", lambda **options: opened.append(make(**options)) or opened[-1])

    def seen(*arguments, **options):
        opened[-1].report().enter(Finding("race", "two warps <meet>"))
        return right(*arguments, **options)

    monkeypatch.setattr(rf, "attention_backward", seen)
    assert command("backward", "--report", str(tmp_path / "out")) == 1
    assert "FAIL  the emulator's checks find nothing in it: 1 findings" in capsys.readouterr().out
    assert "[race]: two warps &lt;meet&gt;" in (tmp_path / "out" / "index.html").read_text()

    def dies(*arguments, **options):
        opened[-1].report().enter(Finding("fault", "misaligned"))
        raise FaultError("misaligned")

    monkeypatch.setattr(rf, "attention_backward", dies)
    assert command("backward", "--report", str(tmp_path / "out")) == 1
    assert "it did not end" in capsys.readouterr().out
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert figures["clocks"] is None
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["figures.json", "index.html"]


def test_an_interrupt_keeps_the_earlier_report(quick, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "figures.json").write_text("earlier")

    def interrupt(figures):
        raise KeyboardInterrupt

    monkeypatch.setattr(emulated_page, "page", interrupt)
    assert command("backward", "--report", str(out)) == 130
    assert "interrupted" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "figures.json").read_text() == "earlier"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arch", "sm_90a"], "there is a backward kernel for sm_100a only"),
        (["--checks", "everything"], "everything"),
        (["--num-sms", "0"], "num_sms must be between 1 and 1024"),
        (["--report", "{folder}"], "is no earlier report: name another place with --report"),
    ],
)
def test_wrong_usage(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(emulated, "run", lambda *_: pytest.fail("it ran"))
    (tmp_path / "thesis.txt").write_text("years of work")
    assert command("backward", *(word.format(folder=tmp_path) for word in arguments)) == 2
    assert words in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").exists()


def test_what_argparse_refuses(capsys):
    for arguments in (["backward", "more"], ["backward", "--arch", "sm_80"]):
        with pytest.raises(SystemExit) as ended:
            command(*arguments)
        assert ended.value.code == 2
        assert "usage: refluent emulate backward" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        command("backward", "--help")
    assert ended.value.code == 0
    assert "index.html" in capsys.readouterr().out


def test_missing_packages_are_said(monkeypatch, capsys):
    monkeypatch.setattr(emulated, "missing", lambda: "it needs a compiler")
    assert command("backward") == 2
    assert "it needs a compiler" in capsys.readouterr().err


def test_the_demo_has_it(captured, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    whole = text.load()
    monkeypatch.setattr(text, "load", lambda: text.Text(whole.train, whole.held_out[:400]))
    monkeypatch.setattr(emulated, "capture", lambda step: captured)
    settings = Settings(steps=2, batch=2, length=33, warmup=1, evaluate_every=2)
    config = Config(layers=2, width=32, heads=4, heads_kv=2, window=8)
    request = run.Request(Path(tmp_path / "r"), torch.device("cpu"), settings, config, emulated=SMALL, quiet=True)
    assert run.run(request) == 1  # two steps are too few
    figures = json.loads((tmp_path / "r" / "figures.json").read_text())
    assert [check["passed"] for check in figures["checks"]] == [False, False, True, True, True]
    assert (tmp_path / "r" / "layer-1.svg").is_file()
    assert 'src="layer-1.svg"' in (tmp_path / "r" / "index.html").read_text()
