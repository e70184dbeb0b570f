"""What score_mod and mask_mod add to the compiled kernel: instructions a score, registers, spills, compile time."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from unittest import mock

import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

import refluent as rf
from kernels.sm100.runs import ARCH
from kernels.sm100.test_static import cuobjdump, main_kernel, usage  # noqa: F401
from refluent import emulator
from refluent.emulator import objects
from refluent.gpu.launch import compiled
from refluent.gpu.launch.variant import Variant
from refluent.gpu.plans.sm100 import REGISTERS, THREADS
from refluent.mods import emit, library

pytestmark = pytest.mark.emulator
PLAIN = Variant(ARCH, "bfloat16", 128, 128)
SCORES = 64  # of a thread and step
EMISSION = 1.0  # seconds of one core

# Instructions of PTX a score that each adds to the plain kernel, at most, and bytes of stack that a thread spills.
LIMITS = {
    "alibi, fixed": (5, 64),
    "alibi, learned": (9, 64),
    "relative bias, learned": (25, 400),
    "t5, learned": (60, 416),
    "additive bias, fixed": (9, 104),
    "additive bias, learned": (19, 128),
    "softcap": (28, 256),
    "temperature, learned": (10, 256),
    "documents": (11, 64),
    "sink window": (9, 0),
}
SAMPLE = {"additive bias, fixed", "relative bias, learned", "t5, learned", "softcap", "documents"}


@cache
def variant(name: str) -> Variant:
    kind, _, learned = name.partition(", ")
    scores = {
        "alibi": library.alibi(torch.zeros(4)),
        "relative bias": library.relative_bias(torch.zeros(4, 65)),
        "t5": library.t5_bias(torch.zeros(32, 4)),
        "additive bias": library.additive_bias(torch.zeros(2, 4, 9, 9)),
        "softcap": library.softcap(30.0),
        "temperature": lambda s, b, h, i, j: s * temperature[h],
    }
    masks = {"documents": library.document_mask(torch.zeros(2, 9).int()), "sink window": library.sink_window(4, 512)}
    temperature = torch.zeros(4)
    if kind in scores:
        key = rf.score_mod(scores[kind]).mod.key
        return replace(PLAIN, score_mod=key, dcaptured=(True,) if learned == "learned" else ())
    return replace(PLAIN, mask_mod=rf.mask_mod(masks[kind]).mod.key)


@cache
def built(made: Variant):
    """Device code, PTX, and the seconds that emission took of the compilation."""
    spent = 0.0

    def timed(method):
        def run(self, *args, **kwargs):
            nonlocal spent
            start = time.process_time()
            try:
                return method(self, *args, **kwargs)
            finally:
                spent += time.process_time() - start

        return run

    with (
        emulator.gpu(ARCH),
        mock.patch.multiple(emit.Emission, shared=timed(emit.Emission.shared), column=timed(emit.Emission.column)),
    ):
        artifact = compiled._build(made, "emulated")
    (fatbin,) = objects._fatbins(artifact.code)
    return fatbin, artifact.ptx, spent


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.full) for n in LIMITS])
def test_figures(name, cuobjdump, tmp_path):  # noqa: F811
    fatbin, ptx, seconds = built(variant(name))
    kernel, plain = main_kernel(ptx), main_kernel(built(PLAIN)[1])
    more = (len(kernel.instructions) - len(plain.instructions)) / SCORES
    registers, stack, _ = usage(cuobjdump, fatbin, tmp_path)[kernel.name]
    print(f"{name}: {more:.1f} instructions a score, {registers} registers, {stack} bytes spilled, {seconds:.2f} s")
    instructions, spilled = LIMITS[name]
    assert more <= instructions
    assert stack <= spilled
    assert registers * THREADS <= REGISTERS
    assert seconds < EMISSION
