"""Compilation: the object cache, its keys and its bounds; what a compiled kernel tells."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ptx_lab import kernel, register, run_until_event
from refluent.emulator import state
from refluent.emulator.codegen import jit
from refluent.emulator.codegen.emitter import Options

BODY = "  mov.u32 %r1, {};\n  st.volatile.b32 [%d1], %r1;\n  ret;"


def value_of(code: jit.CompiledKernel) -> int:
    (warp,), _ = code.prepare(1)
    assert run_until_event(code, warp) == state.EVENT
    return int(warp.get(register(code, "%r1"))[0])


def test_the_second_time_comes_from_the_cache(tmp_path: Path) -> None:
    first = jit.compile_kernel(kernel(BODY.format(41)), cache_dir=tmp_path)
    second = jit.compile_kernel(kernel(BODY.format(41)), cache_dir=tmp_path)
    assert (first.cached, second.cached) == (False, True)
    assert second.seconds["compile"] == 0
    assert value_of(first) == value_of(second) == 41
    assert len(list(tmp_path.glob("*.o"))) == 1
    assert not list(tmp_path.glob("*.tmp"))


def test_other_text_and_other_options_are_other_objects(tmp_path: Path) -> None:
    jit.compile_kernel(kernel(BODY.format(41)), cache_dir=tmp_path)
    other = jit.compile_kernel(kernel(BODY.format(42)), cache_dir=tmp_path)
    perturbed = jit.compile_kernel(kernel(BODY.format(41)), Options("perturbed"), cache_dir=tmp_path)
    assert not other.cached
    assert not perturbed.cached
    assert value_of(other) == 42
    assert len(list(tmp_path.glob("*.o"))) == 3


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 4000])
def test_a_damaged_object_is_compiled_again(tmp_path: Path, damage: bytes) -> None:
    jit.compile_kernel(kernel(BODY.format(7)), cache_dir=tmp_path)
    (path,) = tmp_path.glob("*.o")
    path.write_bytes(damage)
    again = jit.compile_kernel(kernel(BODY.format(7)), cache_dir=tmp_path)
    assert not again.cached
    assert value_of(again) == 7


def test_the_cache_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jit.compile_kernel(kernel(BODY.format(1)), cache_dir=tmp_path)
    (path,) = tmp_path.glob("*.o")
    monkeypatch.setattr(jit, "CACHE_BYTES", 2 * path.stat().st_size + 100)
    for n in range(2, 6):
        jit.compile_kernel(kernel(BODY.format(n)), cache_dir=tmp_path)
    assert len(list(tmp_path.glob("*.o"))) == 2
    assert jit.compile_kernel(kernel(BODY.format(5)), cache_dir=tmp_path).cached


def test_an_unwritable_cache_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    assert value_of(jit.compile_kernel(kernel(BODY.format(9)), cache_dir=blocked)) == 9


def test_objects_serve_other_processes(tmp_path: Path) -> None:
    """Nothing of this process is in the object: another one loads and runs it."""
    jit.compile_kernel(kernel(BODY.format(123)), cache_dir=tmp_path)
    script = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
from ptx_lab import kernel, register
from refluent.emulator.codegen import jit
code = jit.compile_kernel(kernel({BODY.format(123)!r}), cache_dir=Path({str(tmp_path)!r}))
(warp,), _ = code.prepare(1)
warp.budget = 99
assert code.cached and code.run(warp.address) == 1
print(int(warp.get(register(code, "%r1"))[0]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "123", done.stderr


def test_old_hosts_are_refused_in_words() -> None:
    jit.check_host("x86_64-unknown-linux-gnu", {"avx2": True, "fma": True, "f16c": True})
    jit.check_host("aarch64-unknown-linux-gnu", {})
    with pytest.raises(RuntimeError, match="this one has no fma, f16c"):
        jit.check_host("x86_64-unknown-linux-gnu", {"avx2": True, "fma": False})


def test_warps_share_counters_and_not_registers(tmp_path: Path) -> None:
    code = jit.compile_kernel(kernel("  mov.u32 %r1, %warpid;\n  bar.sync 0;\n  ret;"), cache_dir=tmp_path)
    warps, counters = code.prepare(3)
    for i, warp in enumerate(warps):
        warp.warpid = i
        assert run_until_event(code, warp) == state.EVENT
    assert code.executed(counters).tolist() == [3, 3, 0]
    for warp in warps:
        assert run_until_event(code, warp) == state.EXIT
    assert code.executed(counters).tolist() == [3, 3, 3]


def test_the_record_is_laid_out_for_vectors() -> None:
    assert state.WARP_STATE.itemsize % 64 == 0
    for field in ("tid", "addresses", "data"):
        assert state.offset_of(field) % 64 == 0
    warp = state.Warp(kernel(BODY.format(0)))
    assert warp.address % 64 == 0
    assert warp.regs32.ctypes.data % 64 == 0
    assert warp.regs128.shape == (400, 2, 32)
    warp.set_predicate(warp.kernel.registers["%p3"], 0xF0, 0xFF)
    assert warp.predicate(warp.kernel.registers["%p3"]) == 0xF0
    np.testing.assert_array_equal(state.lanes(0x80000001), [True, *[False] * 30, True])
    assert state.mask_of(state.lanes(0x12345678)) == 0x12345678
