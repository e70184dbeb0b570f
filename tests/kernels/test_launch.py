"""The host side: what a variant depends on, the workspace, which tensors are copied, functions kept on disk."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import textwrap
import time

import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

import refluent as rf
from refluent import emulator, gpu
from refluent.gpu import cache
from refluent.gpu.launch import call, compiled
from refluent.gpu.launch.variant import Variant, variant_of
from refluent.gpu.launch.workspace import ALIGN, Extents, sections
from refluent.problem import Options, Problem

pytestmark = pytest.mark.emulator
BF16 = torch.bfloat16


def problem(**more):
    options = Options(**{name: more.pop(name) for name in list(more) if hasattr(Options(), name)})
    sizes = {"batch": 2, "seqlen_q": 9, "seqlen_k": 9, "heads_q": 4, "heads_kv": 2, "head_dim": 64, "head_dim_v": 64}
    return Problem(options, **{"dtype": BF16, "device": torch.device("cpu"), **sizes, **more})


def variant(**more):
    return variant_of(problem(**more), "sm_100a", dlse=False, sink=None)


@pytest.mark.parametrize(
    "more",
    [
        {"batch": 7},
        {"seqlen_q": 1000, "seqlen_k": 5},
        {"heads_q": 40, "heads_kv": 20},
        {"head_dim": 40, "head_dim_v": 56},
        {"scale": 3.0},
    ],
)
def test_sizes_are_not_compiled_in(more):
    assert variant(**more) == variant()


def test_values_are_not_compiled_in():
    assert variant(window=(5, 7), softcap=3.0, dropout_p=0.1) == variant(window=(90, 0), softcap=4.0, dropout_p=0.2)
    assert variant(causal=True) == variant(window=(None, 9))


def test_values_and_sizes_of_captured_tensors_are_not_compiled_in():
    def made(slope, dcaptured=(True,)):
        mod = rf.score_mod(lambda s, b, h, i, j: s + slope[h] * (j - i)).mod
        return variant_of(problem(score_mod=mod), "sm_100a", dlse=False, sink=None, dcaptured=dcaptured)

    plain = made(torch.ones(4))
    assert made(torch.zeros(4)) == made(torch.ones(9)[::2]) == plain
    others = [made(torch.ones(4).double()), made(torch.ones(4).half()), made(torch.ones(4), (False,))]
    table = torch.ones(2, 4)
    rank = rf.score_mod(lambda s, b, h, i, j: s + table[b, h]).mod
    other = variant_of(problem(score_mod=rank), "sm_100a", dlse=False, sink=None)
    masks = [variant(mask_mod=rf.mask_mod(fn).mod) for fn in (lambda b, h, i, j: i > j, lambda b, h, i, j: i > j + 1)]
    assert len({plain, *others, other, *masks}) == 7
    assert "gradients of captured 0" in plain.name


def test_accumulators_of_captured_gradients():
    bias, slope = torch.zeros(2, 4, 9, 9), torch.zeros(4)
    mod = rf.score_mod(lambda s, b, h, i, j: s + bias[b, h, i, j] * slope[h]).mod
    for deterministic, sums in ((False, (1, 1)), (True, (1, 20))):
        made = variant_of(
            problem(score_mod=mod, deterministic=deterministic),
            "sm_100a",
            dlse=False,
            sink=None,
            dcaptured=(True, True),
        )
        assert made.sums == sums
        at = sections(made, Extents(4, 2, 2, 2, (648, 4)))
        assert at.cleared - at.dcaptured == 656 + (80 if deterministic else 16)
        assert at.dcaptured >= at.dkv_turn


def test_static_facts_tell_variants_apart():
    facts = [
        {"dtype": torch.float16},
        {"head_dim": 72},
        {"head_dim_v": 72},
        {"heads_q": 2},
        {"heads_q": 8},
        {"causal": True},
        {"window": (3, None)},
        {"softcap": 1.0},
        {"dropout_p": 0.5},
        {"deterministic": True},
        {"varlen_q": True},
        {"varlen_k": True},
        {"has_seqused_q": True},
        {"has_seqused_k": True},
    ]
    variants = [variant(), *(variant(**fact) for fact in facts)]
    assert len(set(variants)) == len(variants)
    assert len({v.name for v in variants}) == len(variants)


def test_names():
    assert variant().name == "backward sm_100a bfloat16 64/64, group 2"
    assert dataclasses.replace(variant(causal=True, softcap=2.0), sink="float32").name == (
        "backward sm_100a bfloat16 64/64, group 2, window right, sink float32, softcap"
    )


def test_numbers():
    numbers = call._numbers(problem(causal=True, window=(5, 9), softcap=2.0, dropout_p=0.25, scale=0.5))
    assert numbers == (2, 9, 9, 5, 0, 0.5, 2.0, 1 << 30, 1 / 0.75)
    assert call._numbers(problem())[3:5] == (call.OPEN, call.OPEN)
    assert call._numbers(problem(window=(2**40, 2**40)))[3:5] == (call.OPEN, call.OPEN)
    assert call.dropout_numbers(1 - 1e-12)[0] == 2**32 - 1


@pytest.mark.parametrize(
    "facts", [{}, {"group": 4}, {"deterministic": True}, {"group": 2, "deterministic": True, "sink": "float32"}]
)
def test_sections_lie_side_by_side(facts):
    made = Variant("sm_100a", "bfloat16", 64, 96, **facts)
    at = sections(made, Extents(heads=3 * made.group, heads_kv=3, m_blocks=5, n_blocks=7))
    starts = dataclasses.astuple(at)
    assert list(starts) == sorted(starts)
    assert all(start % ALIGN == 0 for start in starts)
    rows, keys, grouped = 3 * made.group * 5, 3 * 7, made.group > 1
    assert at.dk - at.dq == rows * 128 * 64
    assert (at.dv - at.dk, at.dq_turn - at.dv) == (keys * 128 * 64 * grouped, keys * 128 * 96 * grouped)
    assert at.dkv_turn - at.dq_turn >= rows * made.deterministic
    assert at.cleared - at.dkv_turn >= 2 * keys * (made.deterministic and grouped)
    assert (at.dpsum - at.lse_log2, at.dsink - at.dpsum) == (rows * 128, rows * 128)
    assert at.total - at.dsink >= rows * bool(made.sink)
    assert at.total < 2**31 < sections(made, Extents(2**12, 2**12, 2**12, 2**12)).total


class TestFit:
    def test_what_tma_reads_is_not_copied(self):
        wide = torch.zeros(2, 9, 4, 3 * 64, dtype=BF16)
        for tensor in (wide, wide[..., 64:128], wide.transpose(1, 2), wide[:, ::2, 1:, 8:16]):
            assert call.fit(tensor) is tensor

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.randn(2, 9, 4, 64).to(BF16).expand(2, 9, 4, 64)[..., ::2],
            torch.randn(1).to(BF16).expand(2, 9, 4, 64),
            torch.randn(2, 9, 1, 64).to(BF16).expand(2, 9, 4, 64),
            torch.randn(2, 9, 4, 67).to(BF16)[..., :64],
            torch.randn(2, 9, 4, 68).to(BF16)[..., 4:],
            torch.randn(2 * 9 * 4 * 64 + 1).to(BF16)[1:].view(2, 9, 4, 64),
            torch.randn(2, 64, 9, 4).to(BF16).permute(0, 2, 3, 1),
        ],
        ids=["every second", "one value", "one head", "odd rows", "half vectors", "odd address", "columns outermost"],
    )
    def test_what_it_cannot_read_is_copied(self, tensor):
        copy = call.fit(tensor)
        assert torch.equal(copy, tensor)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0

    def test_dimensions_of_size_1_have_no_stride(self):
        tensor = torch.randn(64).to(BF16).as_strided((1, 1, 1, 64), (3, 0, 64, 1))
        fitted = call.fit(tensor)
        assert fitted.data_ptr() == tensor.data_ptr()
        assert fitted.stride() == (8, 8, 64, 1)
        assert torch.equal(fitted, tensor)


STEP = """
    import sys, time
    from pathlib import Path
    import torch
    import refluent as rf
    from refluent import emulator
    from refluent.gpu import cache
    from refluent.gpu.launch import compiled

    cache.use(cache.Cache(Path(sys.argv[1])))
    spent = []
    find = compiled._find

    def timed(variant, emulated):
        start = time.perf_counter()
        function = find(variant, emulated)
        spent.append(time.perf_counter() - start)
        return function

    compiled._find = timed
    q, k, v = (torch.full((1, 20, 1, 32), 0.25, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    o = rf.attention(q, k, v, backend="emulate:sm100")
    o.sum().backward()
    print(*spent, float(v.grad.float().sum()))
"""


def test_a_new_process_starts_from_the_cache(tmp_path):
    """The second process compiles nothing: it has its function within a second."""

    def step():
        code = textwrap.dedent(STEP)
        run = subprocess.run([sys.executable, "-c", code, str(tmp_path / "kernels")], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return [float(word) for word in run.stdout.split()]

    first, total = step()
    again, same = step()
    assert same == total
    assert again < 1 < first
    (entry,) = cache.Cache(tmp_path / "kernels").entries()
    assert entry.name == "backward sm_100a bfloat16 32/32, emulated"
    assert entry.size < 4 << 20


def test_a_device_function_is_compiled_and_loaded_without_a_device(tmp_path, monkeypatch):
    """For compute capability 10.3, as on a machine that has it: only the launch is missing."""
    monkeypatch.setattr(compiled, "_functions", {})
    before = cache.use(cache.Cache(tmp_path / "kernels"))
    try:
        made = Variant("sm_103a", "float16", 32, 32)
        function = compiled.compiled_backward(made)
        assert compiled.compiled_backward(made) is function
        (entry,) = cache.active().entries()
        assert entry.name == "backward sm_103a float16 32/32"
        assert b"sm_103a" in cache.active().path(entry.key).read_bytes()
        slope, labels = torch.ones(4), torch.zeros(9)
        score = rf.score_mod(lambda s, b, h, i, j: s + slope[h] * (j - i)).mod.key
        mask = rf.mask_mod(lambda b, h, i, j: labels[i] == labels[j]).mod.key
        more = {"score_mod": score, "mask_mod": mask, "dcaptured": (True,), "block_mask": True, "deterministic": True}
        compiled.compiled_backward(dataclasses.replace(made, **more))
    finally:
        cache.use(before)


def test_edited_sources_are_not_kept(tmp_path, monkeypatch):
    """What this process compiled may be neither the old nor the new code."""
    before = cache.use(cache.Cache(tmp_path / "kernels"))
    monkeypatch.setattr(compiled, "_build", lambda *_: cache.Artifact(b"object"))
    monkeypatch.setattr(compiled, "_load", lambda artifact, *_: artifact)
    made = Variant("sm_100a", "float16", 32, 32)
    try:
        monkeypatch.setattr(gpu, "IMPORTED", 0.0)
        assert compiled._find(made, "").code == b"object"
        assert not cache.active().entries()
        monkeypatch.setattr(gpu, "IMPORTED", time.time())
        assert compiled._find(made, "").code == b"object"
        assert len(cache.active().entries()) == 1
    finally:
        cache.use(before)


def test_without_a_disk_cache(monkeypatch):
    monkeypatch.setattr(compiled, "_functions", {})
    before = cache.use(None)
    try:
        q, k, v = (torch.randn(1, 20, 1, 32, dtype=BF16, requires_grad=True) for _ in range(3))
        with emulator.gpu("sm_100a"):
            rf.attention(q, k, v, backend="sm100").sum().backward()
        assert q.grad is not None
    finally:
        cache.use(before)
