"""`refluent plan` and `refluent cache`."""

from __future__ import annotations

import os

import pytest

from refluent import cli
from refluent.gpu.cache import Artifact, Cache
from refluent.gpu.plans.draw import WIDTH
from refluent.gpu.plans.sm100 import SHARED_BYTES, TENSOR_COLUMNS, backward_plan


def run(capsys, *arguments):
    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


class TestPlan:
    def test_the_map_of_128(self, capsys):
        code, out, _ = run(capsys, "plan", "--arch", "sm100", "--head-dim", "128", "--causal")
        assert code == 0
        assert "head dimensions 128 (q, k) and 128 (v)\n" in out
        assert "128 keys of one head, walks 128 queries a step; key blocks in order, the last first" in out
        assert "tensor memory: 512 of 512 columns" in out
        assert "shared memory: 230,912 of 232,448 bytes" in out
        assert "  dK            384-511   " + "·" * 48 + "█" * 16 in out
        assert "  K               32,768  " + "·" * 18 + "█" * 9 in out

    @pytest.mark.parametrize("head_dims", [(8, 8), (72, 40), (128, 64), (192, 128), (8, 200), (256, 256)])
    def test_every_plan_is_drawn_to_scale(self, capsys, head_dims):
        plan = backward_plan(*head_dims)
        code, out, _ = run(capsys, "plan", "--head-dim", str(head_dims[0]), "--head-dim-v", str(head_dims[1]))
        assert code == 0
        assert ("padded to" in out) == (head_dims != (plan.head_dim, plan.head_dim_v))
        bars = [line.split()[-1] for line in out.splitlines() if "█" in line]
        assert len(bars) == len(plan.tensor_map) + len(plan.shared_map) + 1
        assert {len(bar) for bar in bars} == {WIDTH}
        for bar, (first, end) in zip(bars, sorted(plan.tensor_map.values())):
            assert abs(bar.index("█") - first * WIDTH / TENSOR_COLUMNS) < 1
            assert abs(bar.count("█") - (end - first) * WIDTH / TENSOR_COLUMNS) <= 1
        assert bars[-1].endswith("█")
        assert f"{SHARED_BYTES - plan.shared_bytes:,}" in out.splitlines()[-1]

    def test_spellings_of_the_architecture(self, capsys):
        code, out, _ = run(capsys, "plan", "--head-dim", "64")
        assert code == 0
        assert all(run(capsys, "plan", "--head-dim", "64", "--arch", arch)[1] == out for arch in ("sm100", "sm_100a"))
        with pytest.raises(SystemExit) as ended:
            cli.main(["plan", "--head-dim", "64", "--arch", "sm90"])
        assert ended.value.code == 2
        assert "(choose from" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("window", "order"),
        [
            (("5", "3"), "last first: it has the fewest query blocks"),
            (("5", "-1"), "last first: it has the most query blocks"),
            (("-1", "-1"), "first first"),
        ],
    )
    def test_order_under_a_window(self, capsys, window, order):
        code, out, _ = run(capsys, "plan", "--head-dim", "64", "--window", *window)
        assert code == 0
        assert f"key blocks in order, the {order}\n" in out

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (("--head-dim", "12"), "--head-dim: got 12; allowed: a multiple of 8 up to 256"),
            (("--head-dim", "64", "--head-dim-v", "264"), "--head-dim-v: got 264; allowed"),
            (("--head-dim", "64", "--window", "-5", "3"), "window left must be >= 0"),
        ],
    )
    def test_what_has_no_plan(self, capsys, arguments, text):
        code, out, err = run(capsys, "plan", *arguments)
        assert (code, out) == (2, "")
        assert text in err


class TestCache:
    @pytest.fixture
    def store(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        return Cache(tmp_path / "refluent" / "kernels")

    def test_nothing_there(self, capsys, store):
        code, out, _ = run(capsys, "cache")
        assert code == 0
        assert out == f"{store.folder}: 0 kernels, 0.0 of at most 537 MB\n"
        assert run(capsys, "cache", "clear")[1].startswith("0 kernels deleted, 0.0 MB")
        assert not store.folder.exists()

    def test_show_and_clear(self, capsys, store):
        for age, name in enumerate("older newer".split()):
            store.save(name * 4, Artifact(bytes(2_000_000)), f"the {name} one")
            os.utime(store.folder / f"{name * 4}.json", (1e9 + age * 1e6,) * 2)
        code, out, _ = run(capsys, "cache", "show")
        assert code == 0
        first, *lines = out.splitlines()
        assert "2 kernels, 4.0 of at most 537 MB" in first
        assert [line.split("MB")[1].strip() for line in lines] == ["the newer one", "the older one"]
        assert all("2001-09" in line and " 2.0 MB" in line for line in lines)
        code, out, _ = run(capsys, "cache", "clear")
        assert code == 0
        assert out.startswith("2 kernels deleted, 4.0 MB, from ")
        assert not store.entries()
