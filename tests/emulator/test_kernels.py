"""The small kernels: right against NumPy and silent under all checks, whatever the schedule."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from emulator.cases import CASES
from refluent import emulator

pytestmark = pytest.mark.emulator
SCHEDULES = [("fair", 0), ("early", 0), ("late", 0), *(("random", seed) for seed in range(17))]
RUNS = [pytest.param(case, arch, id=f"{case.name}-{arch}") for case in CASES for arch in case.arches]


@pytest.mark.parametrize(("case", "arch"), RUNS)
def test_right_and_silent_under_20_schedules(case, arch):
    for schedule, seed in SCHEDULES:
        with emulator.gpu(arch, schedule=schedule, seed=seed, num_sms=case.num_sms):
            case.run()


@pytest.mark.parametrize(("case", "arch"), RUNS)
def test_right_without_checks(case, arch):
    with emulator.gpu(arch, checks="none", num_sms=case.num_sms):
        case.run()
