"""Every case of the emulator's ALU tests on a real chip: bit for bit the same, but for what is listed here."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import chip
from ptx_lab import Case, Lab

pytestmark = pytest.mark.gpu
FOLDER = Path(__file__).parents[1] / "emulator"

# Where a chip may differ: approximations and timers by nature; bfe.u64, bfe.s64 and bfi.b64 because ptxas builds
# them from 32-bit pieces that use all bits of the position, where the manual takes eight.
FREE = (".approx", "div.full", "%clock", "%globaltimer", "bfe.u64", "bfe.s64", "bfi.b64")


@pytest.fixture(scope="module")
def device() -> chip.Chip:
    try:
        found = chip.Chip()
    except (OSError, RuntimeError) as error:
        pytest.skip(f"no CUDA device: {error}")
    if not found.target:
        pytest.skip("a device of another architecture")
    return found


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def calls(function) -> Iterator[dict[str, object]]:  # type: ignore[no-untyped-def]
    """The arguments of each parametrisation of a test function."""
    axes = []
    for mark in getattr(function, "pytestmark", []):
        names, rows = mark.args[0], mark.args[1]
        names = [names] if isinstance(names, str) else list(names)
        axes.append([dict(zip(names, row if len(names) > 1 else [row])) for row in rows])
    for row in itertools.product(*axes):
        yield {key: value for part in row for key, value in part.items()}


def collect(name: str, monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    seen: list[Case] = []
    monkeypatch.setattr(Lab, "seen", seen)
    for attribute, function in vars(load(name)).items():
        if attribute.startswith("test_"):
            for arguments in calls(function):
                function(**arguments)
    return [case for case in seen if not {8, 128} & set(case.out) and not any(word in case.text for word in FREE)]


def is_nan(values: np.ndarray) -> np.ndarray:
    return (values & np.uint64(2**63 - 1)) > np.uint64(0x7FF0000000000000)


@pytest.mark.parametrize("name", ["test_alu", "test_float", "test_convert", "test_lanes"])
def test_the_emulator_does_what_the_chip_does(name: str, device: chip.Chip, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = collect(name, monkeypatch)
    results = device.run(cases)
    differ = []
    for case, outputs in zip(cases, results):
        for got, bits, want in zip(outputs or [], case.out, case.results):
            same = got == want.astype(got.dtype)
            if ".f64" in case.text and bits == 64:
                same |= is_nan(got) & is_nan(want)
            elif ".f64" in case.text and bits == 16:
                # Conversions of NaN: any of the target's.
                same |= (got & 0x7FFF > 0x7C00) & (want & 0x7FFF == 0x7FFF)
            for i in np.flatnonzero(~same)[:1]:
                inputs = [hex(int(x[i])) for x in case.inputs]
                differ.append(f"{case.text}: {inputs} -> {int(got[i]):#x} on the chip, {int(want[i]):#x} here")
    ran = sum(result is not None for result in results)
    assert ran > len(cases) // 2
    assert not differ, f"{len(differ)} of {ran} cases differ:\n" + "\n".join(differ[:40])
