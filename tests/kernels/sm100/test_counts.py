"""A step of the 128/128 plan, counted: clocks of each unit beside the design's."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from refluent.gpu.sm100 import counts

pytestmark = pytest.mark.emulator


@pytest.fixture(scope="module")
def work():
    return counts.step()


def test_clocks_of_a_step(work):
    rows = counts.table(work)
    assert {row.what: (row.clocks, row.design) for row in rows} == {
        "five products": (2560, 2560),
        "operands of the products": (2048, 2048),
        "dS": (256, 256),
        "dQ staging": (1024, 1024),
        "fills of Q, dO, LSE, dPsum": (520, 512),
        "broadcasts of LSE, dPsum": (384, 256),
        "P": (1024, 1024),
    }
    assert counts.sums(rows) == {"tensor core": (2560, 2560), "shared memory": (3328, 3328), "exp2": (1024, 1024)}
    assert [bool(row.why) for row in rows] == [row.clocks != row.design for row in rows]


def test_what_a_step_does(work):
    assert work["MMA"].operations["mma 128x128x16"] == (40, 0, 5 * 2 * 128**3)
    assert work["reduce"].operations["bulk reduce"] == (4, 4 * 128 * 128, 0)
    assert work["load"].operations["tma load"][1] == 2 * 2 * 128 * 128
    assert work["compute"].shared_accesses("ld") == {"ld.shared.v2.b32": 8 * 32, "ld.shared.v2.b64": 8 * 16}
    assert work["idle"].instructions == 0


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("st.shared.v4.b32", 16),
        ("ld.shared.b64", 8),
        ("ld.shared.v2.b64", 16),
        ("st.shared.u16", 2),
        ("ld.shared.f32", 4),
    ],
)
def test_access_bytes(name, nbytes):
    assert counts.access_bytes(name) == nbytes


def test_an_access_without_a_type():
    with pytest.raises(ValueError, match="names no type"):
        counts.access_bytes("ld.shared")
