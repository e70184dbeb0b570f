"""Kernels that nobody here wrote: flash-attn-4's and quack's public functions on CPU tensors, unmodified.

They are known good on real chips, so this shows that the emulated chips are those chips. Each output has to satisfy the
accuracy rule, and each finding of the checks has to be one that EXPLAINED accounts for. Needs flash-attn-4 4.0.0b36,
quack and triton (the extra `peers`); run with `-m peers`.
"""

from __future__ import annotations

import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import pytest
import torch

from emulator import quack_runs
from refluent import accuracy, emulator

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
pytest.importorskip("quack", reason="quack is not installed")
interface = pytest.importorskip("flash_attn.cute.interface", reason="flash-attn-4 is not installed")

pytestmark = [pytest.mark.emulator, pytest.mark.peers]


@dataclass(frozen=True)
class Explanation:
    kind: str
    kernel: str
    text: str
    why: str

    def covers(self, finding) -> bool:
        return (
            re.fullmatch(self.kind, finding.kind) is not None
            and re.search(self.kernel, finding.kernel) is not None
            and re.search(self.text, finding.text) is not None
        )


EXPLAINED = [
    Explanation(
        "exit",
        r"flash_fwd_sm90|gemm_default_epi",
        r"bar\.arrive .* left un-arrived: named barrier",
        "Two consumer warpgroups take turns by named barriers. The last one to go wakes a next that does not come: "
        "half of the barrier's threads have arrived when the CTA exits. Nobody waits for it.",
    ),
    Explanation(
        "exit",
        r"flash_(fwd|bwd)_sm100|fmha",
        r"transaction bytes are outstanding at exit",
        "A TMA producer's tail acquires the stages that it filled once more, to see them released; acquiring announces "
        "the bytes of a load that is never issued.",
    ),
    Explanation(
        "exit",
        r"flash_(fwd|bwd)_sm100|fmha",
        r"mbarrier\.init.* \d+ of \d+ arrivals are missing at exit",
        "The last turn of a ring releases a stage that nobody fills again: some of its arrivals come, others do not.",
    ),
    Explanation(
        "exit",
        r"flash_bwd_sm100",
        r"cp\.(reduce\.)?async\.bulk.* leaves without waiting until .* has read shared memory",
        "The epilogue's last bulk stores are committed and not waited for. The manual does not say that shared memory "
        "outlives its CTA's last thread until such a copy has read it; the chips behave as if it did.",
    ),
    Explanation(
        "rewrite",
        r"flash_bwd_preprocess",
        r"st\.global\.b32 .* not ordered after the write by CTA",
        "With 256 threads and tiles of 64 or 128 rows, threads past the tile store the next tile's log2-sum-exp too "
        "(flash_bwd_preprocess.py bounds them by the sequence, not by the tile): two CTAs write equal values.",
    ),
    Explanation(
        "setmaxnreg",
        r"flash_bwd_sm100|fmha",
        r"",
        "The warps of one warpgroup (MMA, load, idle) ask for different register counts, or not all of them ask: the "
        "manual wants the same setmaxnreg in all four. The chips keep registers by warp.",
    ),
    Explanation(
        "uninitialised",
        r"quack",
        r"ld\.shared.* which nothing has written",
        "Rows past the end are not copied into the tile but are read from it; what is made of them is not stored.",
    ),
]


def unexplained(findings):
    return [str(f) for f in findings if not any(e.covers(f) for e in EXPLAINED)]


@pytest.fixture(autouse=True)
def fresh_caches():
    """flash-attn-4 keeps compiled kernels by keys that do not all name the architecture."""
    for value in list(vars(interface).values()):
        cache = getattr(value, "compile_cache", None)
        if cache is not None:
            cache.clear()


ATTENTION = {
    "d64": {"d": 64},
    "d96-window": {"d": 96, "s": (300, 400), "window": (60, 30)},
    "d128": {"d": 128},
    "d128-causal-grouped": {"d": 128, "h": (4, 2), "s": (200, 200), "causal": True},
    "d128-deterministic": {"d": 128, "h": (2, 1), "s": (300, 300), "causal": True, "deterministic": True},
    "d256": {"d": 256},
    "d256-causal": {"d": 256, "s": (200, 330), "causal": True},
    "two-batches": {"d": 64, "b": 2, "h": (2, 2), "s": (130, 200)},
    "half": {"d": 64, "dtype": torch.float16, "causal": True, "s": (250, 250)},
}


def attention_cases():
    for arch in ("sm_90a", "sm_100a"):
        for name, options in ATTENTION.items():
            yield pytest.param(arch, options, id=f"{arch}-{name}")


@pytest.mark.parametrize(("arch", "case"), attention_cases())
def test_flash_attention(arch, case):
    torch.manual_seed(0)
    b, d, dtype = case.get("b", 1), case["d"], case.get("dtype", torch.bfloat16)
    (h, hk), (sq, sk) = case.get("h", (1, 1)), case.get("s", (256, 256))
    options = {name: case[name] for name in ("causal", "window") if name in case}
    q, do = (torch.randn(b, sq, h, d).to(dtype) for _ in range(2))
    k, v = (torch.randn(b, sk, hk, d).to(dtype) for _ in range(2))
    expected = accuracy.expect(q, k, v, do, **options)
    window = {"window_size": case["window"]} if "window" in case else {}
    with emulator.gpu(arch, on_finding="record") as chip:
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        o, lse = interface.flash_attn_func(
            *inputs,
            causal=case.get("causal", False),
            deterministic=case.get("deterministic", False),
            return_lse=True,
            **window,
        )
        o.backward(do)
    expected.check_forward(o.detach(), lse.detach())
    expected.check_backward(*(t.grad for t in inputs))
    assert unexplained(chip.report().findings) == []


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("arch", "d"), [("sm_90a", 64), ("sm_90a", 128), ("sm_100a", 64), ("sm_100a", 128)])
def test_flash_attention_of_packed_sequences(arch, d, causal):
    torch.manual_seed(0)
    q_lengths, k_lengths = [70, 1, 200], [90, 40, 200]
    cu_q, cu_k = (
        torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for lengths in (q_lengths, k_lengths)
    )
    q, do = (torch.randn(int(cu_q[-1]), 2, d).bfloat16() for _ in range(2))
    k, v = (torch.randn(int(cu_k[-1]), 1, d).bfloat16() for _ in range(2))
    expected = accuracy.expect(q, k, v, do, causal=causal, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    with emulator.gpu(arch, on_finding="record") as chip:
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        o, lse = interface.flash_attn_varlen_func(
            *inputs,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            max_seqlen_q=max(q_lengths),
            max_seqlen_k=max(k_lengths),
            causal=causal,
            return_lse=True,
        )
        o.backward(do)
    expected.check_forward(o.detach(), lse.detach())
    expected.check_backward(*(t.grad for t in inputs))
    assert unexplained(chip.report().findings) == []


@pytest.mark.parametrize("schedule", ["early", "late", "random"])
@pytest.mark.parametrize(("arch", "d"), [("sm_90a", 64), ("sm_100a", 128)])
def test_schedules_change_nothing(arch, d, schedule):
    """Deterministic kernels give the same bits in any legal order, with their findings explained."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 256, 1, d).bfloat16() for _ in range(4))
    results = []
    for order in ("fair", schedule):
        with emulator.gpu(arch, schedule=order, seed=1, on_finding="record") as chip:
            inputs = [t.clone().requires_grad_() for t in (q, k, v)]
            o = interface.flash_attn_func(*inputs, deterministic=True)
            (o[0] if isinstance(o, tuple) else o).backward(do)
        assert unexplained(chip.report().findings) == []
        results.append([(o[0] if isinstance(o, tuple) else o).detach(), *(t.grad for t in inputs)])
    for first, second in zip(*results):
        assert torch.equal(first, second)


def test_both_architectures_in_one_process_twice():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 128, 1, 64).bfloat16() for _ in range(3))
    results = {}
    for arch in ("sm_90a", "sm_100a", "sm_90a", "sm_100a"):
        with emulator.gpu(arch, checks="none"):
            o = interface.flash_attn_func(q, k, v)
            o = o[0] if isinstance(o, tuple) else o
        assert torch.equal(results.setdefault(arch, o), o)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_quack(arch):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        findings = pool.submit(quack_runs.run, arch).result()
    assert unexplained(findings) == []
