"""The emulator does what the chip does: same kernels, same inputs, on a Hopper GPU and in the emulator.

Runs where there is a Hopper GPU, or anywhere with `--chip-results FILE` (see agreement.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from gpu import agreement, approximations, attention

pytestmark = [pytest.mark.gpu, pytest.mark.emulator]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, Any] | None:
    """What a chip gave elsewhere; None: it is here."""
    path = request.config.getoption("--chip-results", default=None)
    if path is not None:
        return torch.load(path, weights_only=False)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU, or --chip-results FILE")
    return None


@pytest.mark.parametrize("case", agreement.kernels(), ids=lambda case: case.name)
def test_small_kernels(case, found):
    there = agreement.run_kernel(case, "cuda") if found is None else found["kernels"][case.name]
    row = agreement.compare_kernel(case.name, there, agreement.emulate_kernel(case))
    assert row.good, row
    if row.group == "matrix products":  # and bit for bit by the published model of the chip's accumulator
        row = agreement.compare_kernel(case.name, there, agreement.emulate_kernel(case, "truncate"))
        assert row.equal == row.values, row


def test_approximations(found):
    there = approximations.on_chip(agreement.chip.Chip()) if found is None else found["approximations"]
    rows = [agreement.compare_approximation(text, there[text], here, x) for text, x, here in approximations.emulated()]
    assert all(row.good for row in rows), "\n".join(map(str, rows))


@pytest.mark.peers
@pytest.mark.parametrize("name", attention.CASES)
def test_attention(name, found):
    if not attention.available():
        pytest.skip("flash-attn-4 is not installed")
    there = attention.run(name, "cuda") if found is None else found["attention"][name]
    rows = []
    for accumulator in ("truncate", "fp32"):
        here = agreement.emulate_attention(name, accumulator)
        rows += agreement.compare_attention(name, there, here, accumulator)
    assert all(row.good for row in rows), "\n".join(map(str, rows))
