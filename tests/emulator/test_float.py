"""f32, f32x2, f64, f16 and bf16 arithmetic against exact rational numbers, in every rounding mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

import ieee
from ieee import BF16, F16, F32, F64, FORMATS, Format
from ptx_lab import OLD, Lab
from refluent.emulator.state import lanes

COUNT = 320
MODES = ("rn", "rz", "rm", "rp")
PARTIAL = 0x5F3C00F9


def same(form: Format, got: np.ndarray, wanted: list[int]) -> np.ndarray:
    """Where bits agree. f64 keeps NaN payloads, so there any NaN will do."""
    want = np.array(wanted, got.dtype)
    if form is F64:
        both = np.array([form.is_nan(int(g)) and form.is_nan(int(w)) for g, w in zip(got, want)])
        return (got == want) | both
    return got == want


def check(
    form: Format, text: str, reference: Callable[..., int], arity: int, lab: Lab, rng: np.random.Generator, **flags
):  # type: ignore[no-untyped-def]
    """Add a case; returns what compares it after the run."""
    inputs = [ieee.samples(form, rng, COUNT) for _ in range(arity)]
    case = lab.add(text, form.bits, *inputs)
    ftz, truncated = flags.get("ftz", False), flags.get("truncated")

    def compare(mask: int) -> None:
        on = np.resize(lanes(mask), COUNT)
        wanted = []
        for args in zip(*inputs):
            numbers = [form.flush(int(a)) if ftz else int(a) for a in args]
            result = reference(*numbers)
            if ftz and truncated is not None and form.split(truncated(*numbers))[1] < form.smallest_normal:
                # Subnormal before rounding: an H200 flushes it even if it rounds up to a normal number.
                result &= 1 << (form.bits - 1)
            wanted.append(form.flush(result) if ftz else result)
        good = same(form, case.results[0], wanted)
        for i in np.flatnonzero(on & ~good)[:3]:
            pytest.fail(f"{text}: {[hex(int(x[i])) for x in inputs]} -> {case.results[0][i]:#x}, not {wanted[i]:#x}")
        assert (case.results[0][~on] == (OLD & ((1 << form.bits) - 1))).all(), f"{text} wrote a lane that is off"

    return compare


def run(lab: Lab, comparisons: list[Callable[[int], None]]) -> None:
    for mask in (0xFFFFFFFF, PARTIAL):
        lab.run(mask)
        for compare in comparisons:
            compare(mask)


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_arithmetic_in_all_modes(kind: str) -> None:
    form, lab, rng, todo = FORMATS[kind], Lab(), np.random.default_rng(1), []
    for mode in MODES:
        for ftz in ("", ".ftz") if kind == "f32" else ("",):
            flags = {"ftz": bool(ftz)}
            for op in ("add", "sub", "mul"):
                name = f"{op}.{mode}{ftz}.{kind} {{d}}, {{a}}, {{b}}"
                exact = _binary(form, op, "rz") if op == "mul" else None
                todo.append(check(form, name, _binary(form, op, mode), 2, lab, rng, truncated=exact, **flags))
            name = f"fma.{mode}{ftz}.{kind} {{d}}, {{a}}, {{b}}, {{c}}"
            exact = partial(ieee.fma, form, mode="rz")
            todo.append(check(form, name, partial(ieee.fma, form, mode=mode), 3, lab, rng, truncated=exact, **flags))
            name = f"div.{mode}{ftz}.{kind} {{d}}, {{a}}, {{b}}"
            todo.append(check(form, name, lambda a, b, m=mode: ieee.div(form, a, b, m), 2, lab, rng, **flags))
            name = f"rcp.{mode}{ftz}.{kind} {{d}}, {{a}}"
            one = form.bias << form.mantissa
            todo.append(check(form, name, lambda a, m=mode, one=one: ieee.div(form, one, a, m), 1, lab, rng, **flags))
            name = f"sqrt.{mode}{ftz}.{kind} {{d}}, {{a}}"
            todo.append(check(form, name, lambda a, m=mode: ieee.sqrt(form, a, m), 1, lab, rng, **flags))
    run(lab, todo)


def _binary(form: Format, op: str, mode: str) -> Callable[[int, int], int]:
    top = 1 << (form.bits - 1)
    if op == "mul":
        return lambda a, b: ieee.mul(form, a, b, mode)
    return lambda a, b: ieee.add(form, a, b ^ top if op == "sub" else b, mode)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_arithmetic(kind: str) -> None:
    form, lab, rng, todo = FORMATS[kind], Lab(), np.random.default_rng(2), []
    for ftz in ("", ".ftz") if kind == "f16" else ("",):
        for op in ("add", "sub", "mul"):
            name = f"{op}.rn{ftz}.{kind} {{d}}, {{a}}, {{b}}"
            todo.append(check(form, name, _binary(form, op, "rn"), 2, lab, rng, ftz=bool(ftz)))
        name = f"fma.rn{ftz}.{kind} {{d}}, {{a}}, {{b}}, {{c}}"
        todo.append(check(form, name, lambda a, b, c: ieee.fma(form, a, b, c), 3, lab, rng, ftz=bool(ftz)))
    name = f"fma.rn.relu.{kind} {{d}}, {{a}}, {{b}}, {{c}}"
    todo.append(check(form, name, lambda a, b, c: _relu(form, ieee.fma(form, a, b, c)), 3, lab, rng))
    run(lab, todo)


def _relu(form: Format, bits: int) -> int:
    return bits if form.is_nan(bits) or not form.split(bits)[0] else 0


def _extreme(form: Format, op: str, nan: bool) -> Callable[..., int]:
    def pick(*args: int) -> int:
        numbers = [a for a in args if not form.is_nan(a)]
        if not numbers or (nan and len(numbers) < len(args)):
            return form.canonical_nan

        def order(a: int) -> int:
            minus, size = form.split(a)
            return -size - 1 if minus else size

        return min(numbers, key=order) if op == "min" else max(numbers, key=order)

    return pick


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
def test_min_max(kind: str) -> None:
    form, lab, rng, todo = FORMATS[kind], Lab(), np.random.default_rng(3), []
    for op in ("min", "max"):
        for nan in ("", ".NaN") if kind != "f64" else ("",):
            pick = _extreme(form, op, bool(nan))
            todo.append(check(form, f"{op}{nan}.{kind} {{d}}, {{a}}, {{b}}", pick, 2, lab, rng))
            if kind == "f32":
                name = f"{op}.ftz{nan}.f32 {{d}}, {{a}}, {{b}}"
                todo.append(check(form, name, pick, 2, lab, rng, ftz=True))
                todo.append(check(form, f"{op}{nan}.f32 {{d}}, {{a}}, {{b}}, {{c}}", pick, 3, lab, rng))
            if kind != "f64":
                name = f"{op}{nan}.xorsign.abs.{kind} {{d}}, {{a}}, {{b}}"
                todo.append(check(form, name, _xorsign(form, pick), 2, lab, rng))
    run(lab, todo)


def _xorsign(form: Format, pick: Callable[..., int]) -> Callable[[int, int], int]:
    top = 1 << (form.bits - 1)

    def both(a: int, b: int) -> int:
        result = pick(a & ~top, b & ~top)
        return result if form.is_nan(result) else result | (a ^ b) & top

    return both


def test_flushing_looks_before_rounding() -> None:
    """Seen on an H200: just below the smallest normal number is flushed, though it would round up to it."""
    lab = Lab()
    a, b = np.full(32, 0xBF7FFFFF, np.uint32), np.full(32, 0x80800000, np.uint32)
    flushed = lab.add("mul.rn.ftz.f32 {d}, {a}, {b}", 32, a, b)
    fused = lab.add("fma.rn.ftz.f32 {d}, {a}, {b}, 0f00000000", 32, a, b)
    kept = lab.add("mul.rn.f32 {d}, {a}, {b}", 32, a, b)
    lab.run()
    assert [int(c.results[0][0]) for c in (flushed, fused, kept)] == [0, 0, 0x00800000]


def test_saturation_clamps_and_drops_nan() -> None:
    lab, rng, todo = Lab(), np.random.default_rng(4), []

    def clamp(bits: int) -> int:
        x = F32.value(bits)
        if x == "nan" or x == "-inf" or (not isinstance(x, str) and x <= 0):
            return 0
        return F32.round("inf" if x == "inf" else x) if not isinstance(x, str) and x < 1 else 0x3F800000

    todo.append(check(F32, "add.sat.f32 {d}, {a}, {b}", lambda a, b: clamp(ieee.add(F32, a, b)), 2, lab, rng))
    name = "fma.rz.sat.f32 {d}, {a}, {b}, {c}"
    todo.append(check(F32, name, lambda a, b, c: clamp(ieee.fma(F32, a, b, c, "rz")), 3, lab, rng))
    run(lab, todo)


@pytest.mark.parametrize("mode", MODES)
def test_packed_f32(mode: str) -> None:
    lab, rng = Lab(), np.random.default_rng(5)
    halves = [[ieee.samples(F32, rng, COUNT) for _ in range(2)] for _ in range(3)]
    a, b, c = (low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32) for low, high in halves)
    cases = [
        (lab.add(f"add.{mode}.f32x2 {{d}}, {{a}}, {{b}}", 64, a, b), lambda x, y, z: ieee.add(F32, x, y, mode)),
        (lab.add(f"mul.{mode}.f32x2 {{d}}, {{a}}, {{b}}", 64, a, b), lambda x, y, z: ieee.mul(F32, x, y, mode)),
        (
            lab.add(f"fma.{mode}.f32x2 {{d}}, {{a}}, {{b}}, {{c}}", 64, a, b, c),
            lambda x, y, z: ieee.fma(F32, x, y, z, mode),
        ),
    ]
    lab.run()
    for case, reference in cases:
        for half in range(2):
            got = (case.results[0] >> np.uint64(32 * half)).astype(np.uint32)
            wanted = [reference(*(int(v[half][i]) for v in halves)) for i in range(COUNT)]
            np.testing.assert_array_equal(got, np.array(wanted, np.uint32), err_msg=case.text)


@pytest.mark.parametrize(("kind", "form"), [("bf16", BF16), ("f16", F16)])
def test_mixed_precision(kind: str, form: Format) -> None:
    """fma.rn.f32.bf16 and its kind: 16-bit factors, one rounding in f32."""
    lab, rng = Lab(), np.random.default_rng(6)
    a, b, c = ieee.samples(form, rng, COUNT), ieee.samples(form, rng, COUNT), ieee.samples(F32, rng, COUNT)
    fused = lab.add(f"fma.rn.f32.{kind} {{d}}, {{a}}, {{b}}, {{c}}", 32, a, b, c)
    summed = lab.add(f"add.f32.{kind} {{d}}, {{a}}, {{b}}", 32, a, c)
    lab.run()
    wanted = [ieee.fma(F32, int(x), int(y), int(z), narrow=form) for x, y, z in zip(a, b, c)]
    np.testing.assert_array_equal(fused.results[0], np.array(wanted, np.uint32))
    wide = [ieee.convert(form, F32, int(x)) for x in a]
    wanted = [ieee.add(F32, x, int(z)) for x, z in zip(wide, c)]
    np.testing.assert_array_equal(summed.results[0], np.array(wanted, np.uint32))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_packed_halves_are_the_scalar_twice(kind: str) -> None:
    form, lab, rng = FORMATS[kind], Lab(), np.random.default_rng(7)
    low, high = ([ieee.samples(form, rng, COUNT) for _ in range(3)] for _ in range(2))
    packed = [x.astype(np.uint32) | y.astype(np.uint32) << np.uint32(16) for x, y in zip(low, high)]
    triples = []
    for op, arity in (("add.rn", 2), ("mul.rn", 2), ("fma.rn", 3), ("max", 2), ("min.NaN", 2), ("neg", 1), ("abs", 1)):
        names = ", ".join("{" + n + "}" for n in "dabc"[: arity + 1])
        both = lab.add(f"{op}.{kind}x2 {names}", 32, *packed[:arity])
        parts = [lab.add(f"{op}.{kind} {names}", 16, *side[:arity]) for side in (low, high)]
        triples.append((both, *parts))
    lab.run()
    for both, first, second in triples:
        joined = first.results[0].astype(np.uint32) | second.results[0].astype(np.uint32) << np.uint32(16)
        np.testing.assert_array_equal(both.results[0], joined, err_msg=both.text)


COMPARISONS = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
def test_comparisons(kind: str) -> None:
    form, lab, rng = FORMATS[kind], Lab(), np.random.default_rng(8)
    a, b = ieee.samples(form, rng, COUNT), ieee.samples(form, rng, COUNT)
    b[::5] = a[::5]
    x, y = (np.array([float(_plain(form, int(v))) for v in side]) for side in (a, b))
    unordered = np.isnan(x) | np.isnan(y)
    cases = []
    for test, compare in COMPARISONS.items():
        cases.append((lab.add(f"setp.{test}.{kind} {{d}}, {{a}}, {{b}}", 1, a, b), compare(x, y) & ~unordered))
        cases.append((lab.add(f"setp.{test}u.{kind} {{d}}, {{a}}, {{b}}", 1, a, b), compare(x, y) | unordered))
    cases.append((lab.add(f"setp.num.{kind} {{d}}, {{a}}, {{b}}", 1, a, b), ~unordered))
    cases.append((lab.add(f"setp.nan.{kind} {{d}}, {{a}}, {{b}}", 1, a, b), unordered))
    lab.run()
    for case, wanted in cases:
        np.testing.assert_array_equal(case.results[0], wanted, err_msg=case.text)


def _plain(form: Format, bits: int) -> float:
    """The number as a double: exact for every format here."""
    value = form.value(bits)
    return float(value)


def test_signs_and_classes() -> None:
    lab, rng = Lab(), np.random.default_rng(9)
    for kind in ("f32", "f64"):
        form = FORMATS[kind]
        top = 1 << (form.bits - 1)
        a, b = ieee.samples(form, rng, 64), ieee.samples(form, rng, 64)
        nan = np.array([form.is_nan(int(v)) for v in a])
        size = a & a.dtype.type(top - 1)
        normal = (size >= form.smallest_normal) & (size < form.infinity) | (size == 0)
        cases = [
            (
                lab.add(f"copysign.{kind} {{d}}, {{a}}, {{b}}", form.bits, a, b),
                a & a.dtype.type(top) | b & a.dtype.type(top - 1),
            ),
            (lab.add(f"testp.finite.{kind} {{d}}, {{a}}", 1, a), size < form.infinity),
            (lab.add(f"testp.infinite.{kind} {{d}}, {{a}}", 1, a), size == form.infinity),
            (lab.add(f"testp.number.{kind} {{d}}, {{a}}", 1, a), ~nan),
            (lab.add(f"testp.notanumber.{kind} {{d}}, {{a}}", 1, a), nan),
            (lab.add(f"testp.normal.{kind} {{d}}, {{a}}", 1, a), normal),
            (lab.add(f"testp.subnormal.{kind} {{d}}, {{a}}", 1, a), (size < form.smallest_normal) & (size > 0)),
        ]
        signs = [lab.add(f"{op}.{kind} {{d}}, {{a}}", form.bits, a) for op in ("neg", "abs")]
        lab.run()
        for case, wanted in cases:
            np.testing.assert_array_equal(case.results[0], wanted, err_msg=case.text)
        for case, wanted in zip(signs, (a ^ a.dtype.type(top), size)):
            np.testing.assert_array_equal(case.results[0][~nan], wanted[~nan], err_msg=case.text)
        lab = Lab()
