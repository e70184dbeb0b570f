"""Gradients of the matrix of configurations: against float64, under several schedules, without a finding.

CI runs a sample; `pytest -m full` the rest too.
"""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from kernels.sm100.configs import EACH, matrix, uncovered
from kernels.sm100.runs import prepare

pytestmark = pytest.mark.emulator
SAMPLE = 6  # of the variants, one in so many is in CI: compiling them is most of the time and memory


def in_sample(config) -> bool:
    """Whole variants are left out, and of the others a different configuration each."""
    variant, which = divmod(config.number, EACH)
    step = variant // SAMPLE
    return variant % SAMPLE == 0 and which in (step % EACH, (step + 2) % EACH)


def cases():
    return [
        pytest.param(config, id=str(config), marks=() if in_sample(config) else pytest.mark.full) for config in matrix()
    ]


@pytest.mark.parametrize("config", cases())
def test_gradients(config, record_errors):
    run = prepare(config)
    for schedule, seed in (("fair", 0), ("random", 2 * config.number), ("random", 2 * config.number + 1)):
        errors = run.check(run(schedule, seed))
        record_errors(config["dtype"], errors)


def test_every_pair_of_levels_meets():
    assert not uncovered()


def test_counts():
    configs = matrix()
    assert len(configs) >= 200
    assert len({str(config) for config in configs}) == len(configs)
    assert 2 * sum(config.big for config in configs) >= len(configs)
    assert sum(len(config.features) >= 3 for config in configs) >= 40
    for config in configs:
        queries, keys = config.sides
        assert queries.batch >= 2
        assert config.heads >= 2
        if config.big:
            assert max(queries.lengths) > 2 * config.plan.tile_m
            assert max(keys.lengths) > 2 * config.plan.tile_n
