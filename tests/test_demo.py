"""The demo: its text, model and training in small, its checks and its report."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from refluent.accuracy import Errors
from refluent.demo import emulated, folder, gradients, report, run, text
from refluent.demo.model import Config, Decoder
from refluent.demo.train import Settings, evaluate, sample, train

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

CONFIG = Config(layers=2, width=32, heads=4, heads_kv=2, window=8)
SETTINGS = Settings(steps=4, batch=2, length=33, warmup=2, evaluate_every=3, seed=3)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data() -> text.Text:
    """The real text, with little of it held out, so that evaluation is quick."""
    whole = text.load()
    return text.Text(whole.train, whole.held_out[:400])


def plain(steps: Any, title: str) -> Any:
    return steps


def as_bytes(words: str) -> torch.Tensor:
    return torch.tensor(list(words.encode()), dtype=torch.uint8)


class TestText:
    def test_topics_are_held_out_whole(self) -> None:
        whole = text.load()
        assert 0.03 * whole.size < len(whole.held_out) < 0.3 * whole.size
        assert whole.size > 300_000
        held_out, training = text.show(whole.held_out), text.show(whole.train)
        assert held_out[:500] not in training
        assert held_out[-500:] not in training

    def test_bigram_entropy(self) -> None:
        assert text.bigram_entropy(as_bytes("abababab")) == 0.0
        # after a: b and c equally often; after b and c: always a
        assert text.bigram_entropy(as_bytes("abacabaca")) == pytest.approx(0.5 * math.log(2))
        assert text.bigram_entropy(as_bytes("ab"), as_bytes("ac")) == pytest.approx(math.log(2))

    def test_batches_are_shifted_by_one_and_seeded(self) -> None:
        x, target = next(text.batches(torch.arange(50, dtype=torch.uint8), 3, 7, torch.Generator().manual_seed(1)))
        assert x.shape == target.shape == (3, 7)
        assert torch.equal(target, x + 1)
        again, _ = next(text.batches(torch.arange(50, dtype=torch.uint8), 3, 7, torch.Generator().manual_seed(1)))
        assert torch.equal(x, again)

    def test_windows_cover_the_text_once(self) -> None:
        pieces = list(text.windows(torch.arange(50, dtype=torch.uint8), 2, 8))
        assert torch.equal(torch.cat([x.flatten() for x, _ in pieces]), torch.arange(48))
        assert torch.equal(torch.cat([target.flatten() for _, target in pieces]), torch.arange(1, 49))

    def test_show_marks_what_is_no_text(self) -> None:
        assert text.show(torch.tensor([72, 105, 255])) == "Hi\ufffd"


class TestModel:
    def test_half_of_the_layers_have_a_window(self) -> None:
        windows = [block.attention.window for block in Decoder(replace(CONFIG, layers=4)).blocks]
        assert windows == [(7, 0), None, (7, 0), None]

    @pytest.mark.parametrize("attend", [True, False])
    def test_what_a_position_sees(self, attend: bool) -> None:
        """Earlier bytes matter if and only if the model attends; later ones never do."""
        torch.manual_seed(0)
        model = Decoder(replace(CONFIG, attend=attend))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        x = torch.randint(97, 122, (1, 20))
        changed = x.clone()
        changed[0, 10] = 65
        with torch.no_grad():
            moved = (model(x) - model(changed)).abs().amax(-1)[0]
        assert moved[:10].max() == 0
        assert moved[10] > 0
        assert (moved[11:].max() > 0) == attend

    def test_training_lowers_the_loss_and_moves_the_slopes(self, data: text.Text) -> None:
        settings = replace(SETTINGS, steps=25, evaluate_every=100)
        result = train(data, CONFIG, settings, CPU, plain)
        before = Decoder(CONFIG)
        assert len(result.losses) == 25
        assert result.final < 4.0 < evaluate(before, data.held_out, settings)
        for old, new in zip(before.blocks, result.model.blocks):
            assert not torch.equal(old.attention.slope, new.attention.slope)

    def test_training_is_repeatable(self, data: text.Text) -> None:
        first, second = (train(data, CONFIG, SETTINGS, CPU, plain) for _ in range(2))
        assert first.losses == second.losses

    def test_sampling_ends_with_the_line(self, data: text.Text) -> None:
        model = Decoder(CONFIG)
        torch.nn.init.zeros_(model.head.weight)
        made = sample(model, "The ", length=12, temperature=1.0, seed=3)
        assert "\n" not in made
        assert made == sample(model, "The ", length=12, temperature=1.0, seed=3)


class TestGradients:
    def test_every_layer_passes(self, data: text.Text) -> None:
        model = train(data, CONFIG, SETTINGS, CPU, plain).model
        layers = gradients.check_step(model, data, SETTINGS)
        assert [layer.window for layer in layers] == [(7, 0), None]
        for layer in layers:
            assert layer.failures == []
            assert [error.name for error in layer.errors] == ["dq", "dk", "dv", "slope"]
            assert all(error.max_bound > 0 for error in layer.errors)

    def test_a_wrong_gradient_is_seen(self, data: text.Text, monkeypatch: pytest.MonkeyPatch) -> None:
        right = gradients._grad
        monkeypatch.setattr(gradients, "_grad", lambda x: right(x) * (1.001 if x.dim() == 1 else 1.0))
        model = train(data, CONFIG, SETTINGS, CPU, plain).model
        layers = gradients.check_step(model, data, SETTINGS)
        assert all(len(layer.failures) == 1 and layer.failures[0].startswith("slope") for layer in layers)


def layer(*failures: str) -> gradients.LayerErrors:
    errors = [Errors(name, 1e-7, 4e-7, 1e-6, 1e-5, 2e-7) for name in ("dq", "dk", "dv", "slope")]
    return gradients.LayerErrors(0, (7, 0), errors, list(failures))


class TestChecks:
    @pytest.mark.parametrize(
        ("attention", "zeroed", "failures", "passed"),
        [
            (1.5, 2.6, (), [True, True, True]),
            (2.46, 2.6, (), [False, True, True]),
            (2.3, 2.39, (), [True, False, True]),
            (1.5, 2.6, ("dq: max error 1",), [True, True, False]),
            (math.nan, 2.6, (), [False, False, True]),
        ],
    )
    def test_verdicts(self, attention: float, zeroed: float, failures: tuple[str, ...], passed: list[bool]) -> None:
        assert [c["passed"] for c in run.checks(attention, zeroed, 2.45, [layer(*failures)])] == passed

    def test_no_layer_checked_is_no_success(self) -> None:
        assert not run.checks(1.5, 2.6, 2.45, [])[2]["passed"]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A whole demo in small; four steps are too few to pass."""
    out = tmp_path_factory.mktemp("demo") / "deep" / "report"
    with pytest.MonkeyPatch.context() as patch:
        whole = text.load()
        patch.setattr(text, "load", lambda: text.Text(whole.train, whole.held_out[:400]))
        patch.setattr(emulated, "missing", lambda: "no <emulator> today")
        code = run.run(run.Request(out, CPU, SETTINGS, CONFIG, quiet=True))
    return out, code


class TestReport:
    def test_a_missed_bar_exits_1_and_still_reports(self, done: tuple[Path, int]) -> None:
        out, code = done
        assert code == 1
        figures = json.loads((out / "figures.json").read_text())
        assert figures["passed"] is False
        assert [check["passed"] for check in figures["checks"]] == [False, False, True]
        assert len(figures["runs"]["attention"]["losses"]) == SETTINGS.steps
        assert [step for step, _ in figures["runs"]["zeroed"]["held_out"]] == [3, 4]

    def test_the_page_shows_the_plots(self, done: tuple[Path, int]) -> None:
        out, _ = done
        page = (out / "index.html").read_text()
        assert sorted(path.name for path in out.iterdir()) == [
            "figures.json",
            "gradients.png",
            "index.html",
            "loss.png",
        ]
        for plot in ("loss.png", "gradients.png"):
            assert f'src="{plot}"' in page
            assert (out / plot).read_bytes().startswith(b"\x89PNG")
        assert "FAILED" in page
        assert "Skipped: no &lt;emulator&gt; today." in page
        assert [path.name for path in out.parent.iterdir()] == ["report"]

    def test_the_page_escapes_what_was_sampled(self, done: tuple[Path, int]) -> None:
        figures = json.loads((done[0] / "figures.json").read_text())
        figures["sample"]["text"] = "<script>"
        assert "<script>" not in report.page(figures)

    def test_a_report_replaces_an_earlier_one(self, done: tuple[Path, int], tmp_path: Path) -> None:
        figures = json.loads((done[0] / "figures.json").read_text())
        report.write(tmp_path / "r", figures, {"timeline.svg": "<svg/>"})
        assert (tmp_path / "r" / "timeline.svg").read_text() == "<svg/>"
        report.write(tmp_path / "r", figures | {"passed": True}, {})
        assert not (tmp_path / "r" / "timeline.svg").exists()
        assert json.loads((tmp_path / "r" / "figures.json").read_text())["passed"] is True
        assert [path.name for path in tmp_path.iterdir()] == ["r"]

    @pytest.mark.parametrize("place", ["_draw_gradients", "page"])
    def test_an_interrupt_keeps_the_earlier_report(
        self, place: str, done: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(*args: Any) -> None:
            raise KeyboardInterrupt

        figures = json.loads((done[0] / "figures.json").read_text())
        report.write(tmp_path / "r", figures, {})
        earlier = {path.name: path.read_bytes() for path in (tmp_path / "r").iterdir()}
        monkeypatch.setattr(report, place, interrupt)
        with pytest.raises(KeyboardInterrupt):
            report.write(tmp_path / "r", figures | {"seconds": 0}, {})
        assert {path.name: path.read_bytes() for path in (tmp_path / "r").iterdir()} == earlier
        assert [path.name for path in tmp_path.iterdir()] == ["r"]

    def test_an_interrupt_of_the_last_step_keeps_the_earlier_report(
        self, done: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        figures = json.loads((done[0] / "figures.json").read_text())
        report.write(tmp_path / "r", figures | {"seconds": 1}, {})
        move = folder.os.rename

        def rename(source: Path, target: Path) -> None:
            if source.name == "new":
                raise KeyboardInterrupt
            move(source, target)

        monkeypatch.setattr(folder.os, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            report.write(tmp_path / "r", figures | {"seconds": 2}, {})
        assert json.loads((tmp_path / "r" / "figures.json").read_text())["seconds"] == 1
        assert [path.name for path in tmp_path.iterdir()] == ["r"]

    def test_something_else_is_never_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("years of work")
        with pytest.raises(ValueError, match="is no earlier report"):
            run.run(run.Request(tmp_path, CPU, SETTINGS, CONFIG, quiet=True))
        assert (tmp_path / "thesis.txt").exists()


def test_the_skipped_kernel_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(emulated.platform, "system", lambda: "Darwin")
    figures, pictures = run._emulated(emulated.SMALL, print)
    assert pictures == {}
    assert "exists for Linux only" in figures["skipped"]
    assert f"skipped: {figures['skipped']}" in capsys.readouterr().out
