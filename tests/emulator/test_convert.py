"""cvt against exact numbers: integers, every float format, roundings, saturation, packed and 8-bit forms."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

import ieee
from ieee import BF16, F16, F32, FORMATS, Format
from ptx_lab import Case, Lab

COUNT = 256
INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
WORD = {8: np.uint16, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def number(x: int, kind: str) -> int:
    bits = int(kind[1:])
    x &= (1 << bits) - 1
    return x - (1 << bits) if kind[0] == "s" and x >> (bits - 1) else x


def bounds(kind: str) -> tuple[int, int]:
    bits = int(kind[1:])
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


def integers(bits: int, rng: np.random.Generator) -> np.ndarray:
    anything = rng.integers(0, 2**64 - 1, COUNT, np.uint64, endpoint=True) >> rng.integers(
        64 - bits, 64, COUNT, np.uint64
    )
    edges = [0, 1, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1, (1 << bits) - 2]
    return np.where(rng.random(COUNT) < 0.3, rng.choice(np.array(edges, np.uint64), COUNT), anything).astype(WORD[bits])


def width(kind: str) -> int:
    """Registers for 8-bit types are 16 bits wide."""
    return max(16, int(kind.lstrip("bfus")))


def expect(case: Case, wanted: list[int], bits: int) -> None:
    want = np.array([w & ((1 << bits) - 1) for w in wanted], WORD[bits])
    bad = np.flatnonzero(case.results[0] != want)
    if len(bad):
        i = bad[0]
        inputs = [hex(int(x[i])) for x in case.inputs]
        pytest.fail(f"{case.text}: {inputs} -> {int(case.results[0][i]):#x}, not {int(want[i]):#x} ({len(bad)} differ)")


@pytest.mark.parametrize("source", INTEGERS)
def test_integer_to_integer(source: str) -> None:
    lab, rng, todo = Lab(), np.random.default_rng(1), []
    a = integers(width(source), rng)
    for target in INTEGERS:
        low, high = bounds(target)
        exact = [number(int(x), source) for x in a]
        bits = width(target)
        plain = [number(x, target) for x in exact]
        todo.append((lab.add(f"cvt.{target}.{source} {{d}}, {{a}}", bits, a), plain, bits))
        clamped = [max(low, min(high, x)) for x in exact]
        todo.append((lab.add(f"cvt.sat.{target}.{source} {{d}}, {{a}}", bits, a), clamped, bits))
    lab.run()
    for case, wanted, bits in todo:
        expect(case, wanted, bits)


@pytest.mark.parametrize("source", INTEGERS)
def test_integer_to_float(source: str) -> None:
    lab, rng, todo = Lab(), np.random.default_rng(2), []
    a = integers(width(source), rng)
    for target, form in FORMATS.items():
        for mode in ("rn", "rz", "rm", "rp"):
            wanted = [form.round(Fraction(number(int(x), source)), mode) for x in a]
            todo.append((lab.add(f"cvt.{mode}.{target}.{source} {{d}}, {{a}}", form.bits, a), wanted, form.bits))
    lab.run()
    for case, wanted, bits in todo:
        expect(case, wanted, bits)


def _to_integer(form: Format, bits: int, mode: str, target: str, source: str) -> int:
    value = form.value(bits)
    low, high = bounds(target)
    size = int(target[1:])
    if value == "nan":
        return 1 << (size - 1) if size == 64 or source == "f64" else 0
    if isinstance(value, str):
        return high if value == "inf" else low
    whole = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode](value)
    return max(low, min(high, whole))


@pytest.mark.parametrize("source", ["f16", "bf16", "f32", "f64"])
def test_float_to_integer(source: str) -> None:
    form, rng = FORMATS[source], np.random.default_rng(3)
    lab, todo = Lab(), []
    a = ieee.samples(form, rng, COUNT)
    # Numbers of the integers' size.
    a[::2] = [
        form.round(Fraction(int(n), 4))
        for n in rng.integers(-(2**40), 2**40, len(a[::2])) >> rng.integers(0, 40, len(a[::2]))
    ]
    for target in INTEGERS:
        for mode in ("rni", "rzi", "rmi", "rpi"):
            wanted = [_to_integer(form, int(x), mode, target, source) for x in a]
            extended = [number(w, target) if width(target) > int(target[1:]) else w for w in wanted]
            todo.append(
                (lab.add(f"cvt.{mode}.{target}.{source} {{d}}, {{a}}", width(target), a), extended, width(target))
            )
            if source == "f32":
                flushed = [_to_integer(form, form.flush(int(x)), mode, target, source) for x in a]
                extended = [number(w, target) if width(target) > int(target[1:]) else w for w in flushed]
                text = f"cvt.{mode}.ftz.{target}.f32 {{d}}, {{a}}"
                todo.append((lab.add(text, width(target), a), extended, width(target)))
    lab.run()
    for case, wanted, bits in todo:
        expect(case, wanted, bits)


@pytest.mark.parametrize("source", ["f16", "bf16", "f32", "f64"])
def test_float_to_float(source: str) -> None:
    form, rng = FORMATS[source], np.random.default_rng(4)
    lab, todo = Lab(), []
    a = ieee.samples(form, rng, COUNT)
    for target, other in FORMATS.items():
        if source == target:
            continue
        # Numbers of the target's range, and ties between its neighbours.
        b = a.copy()
        if other.bits <= form.bits:
            near = [ieee.convert(other, form, int(x)) for x in ieee.samples(other, rng, COUNT // 2)]
            b[::2] = near
            b[::4] += b.dtype.type(1 << max(0, form.mantissa - other.mantissa - 1))
        narrowing = other.mantissa < form.mantissa or other.exponent < form.exponent
        for mode in ("rn", "rz", "rm", "rp") if narrowing else ("",):
            dot = f".{mode}" if mode else ""
            wanted = [ieee.convert(form, other, int(x), mode or "rn") for x in b]
            todo.append((lab.add(f"cvt{dot}.{target}.{source} {{d}}, {{a}}", other.bits, b), wanted, other, form, b))
    lab.run()
    for case, wanted, other, _, b in todo:
        if other is FORMATS["f64"] or (source, other) in (("f64", F32), ("bf16", F32)):
            numbers = [i for i, x in enumerate(b) if not form.is_nan(int(x))]
            assert [int(case.results[0][i]) for i in numbers] == [wanted[i] for i in numbers], case.text
        else:
            expect(case, wanted, other.bits)


def test_rounding_to_integral_numbers() -> None:
    lab, rng, todo = Lab(), np.random.default_rng(5), []
    rounders = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
    for kind in ("f16", "f32", "f64"):
        form = FORMATS[kind]
        a = ieee.samples(form, rng, COUNT)
        for mode, f in rounders.items():

            def whole(x: int, form: Format = form, f=f) -> int:  # type: ignore[no-untyped-def]
                value = form.value(x)
                return form.round(value if isinstance(value, str) else Fraction(f(value)), "rn", form.split(x)[0])

            todo.append(
                (lab.add(f"cvt.{mode}.{kind}.{kind} {{d}}, {{a}}", form.bits, a), [whole(int(x)) for x in a], form, a)
            )
    lab.run()
    for case, wanted, form, a in todo:
        keep = np.array([not form.is_nan(int(x)) for x in a])
        np.testing.assert_array_equal(
            case.results[0][keep], np.array(wanted, case.results[0].dtype)[keep], err_msg=case.text
        )


def _finite(form: Format, bits: int) -> int:
    minus, size = form.split(bits)
    return (int(minus) << (form.bits - 1)) | form.infinity - 1 if size == form.infinity else bits


def _relu(form: Format, bits: int) -> int:
    return bits if form.is_nan(bits) or not form.split(bits)[0] else 0


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_packing_two_f32(kind: str) -> None:
    form, lab, rng, todo = FORMATS[kind], Lab(), np.random.default_rng(6), []
    a, b = ieee.samples(F32, rng, COUNT), ieee.samples(F32, rng, COUNT)
    for mode in ("rn", "rz"):
        for extra in ("", ".relu", ".satfinite", ".relu.satfinite"):
            wanted = []
            for x, y in zip(a, b):
                parts = []
                for v in (y, x):
                    half = ieee.convert(F32, form, int(v), mode)
                    half = _finite(form, half) if "satfinite" in extra else half
                    parts.append(_relu(form, half) if "relu" in extra else half)
                wanted.append(parts[0] | parts[1] << 16)
            todo.append((lab.add(f"cvt.{mode}{extra}.{kind}x2.f32 {{d}}, {{a}}, {{b}}", 32, a, b), wanted))
            single = [w & 0xFFFF for w in wanted]
            todo.append((lab.add(f"cvt.{mode}{extra}.{kind}.f32 {{d}}, {{a}}", 16, b), single))
    lab.run()
    for case, wanted in todo:
        expect(case, wanted, case.out[0])


def test_tf32() -> None:
    """Ten bits of mantissa, the rest is zero."""
    form, lab, rng = Format(8, 10), Lab(), np.random.default_rng(7)
    a = ieee.samples(F32, rng, COUNT)
    a[::2] = (a[::2] & np.uint32(0xFFFFE000)) | np.uint32(0x1000)
    todo = []
    for mode in ("rna", "rn", "rz"):
        wanted = [ieee.convert(F32, form, int(x), mode) << 13 for x in a]
        todo.append((lab.add(f"cvt.{mode}.tf32.f32 {{d}}, {{a}}", 32, a), wanted))
    lab.run()
    for case, wanted in todo:
        nan = np.array([F32.is_nan(int(x)) for x in a])
        np.testing.assert_array_equal(case.results[0][~nan], np.array(wanted, np.uint32)[~nan], err_msg=case.text)
        cut = a[nan] & np.uint32(0xFFFFE000) if "rna" in case.text else np.uint32(0x7FFFE000)
        assert (case.results[0][nan] == cut).all(), case.text


# Formats of 8 bits and less: every code is decoded, every rounding is to the nearest of all codes.

SMALL = {"e4m3": (4, 3, 0x7E), "e5m2": (5, 2, 0x7B), "e2m3": (2, 3, 0x1F), "e3m2": (3, 2, 0x1F), "e2m1": (2, 1, 0x7)}


def decoded(kind: str) -> list[Fraction]:
    """Magnitudes of the finite codes, in order."""
    exponent, mantissa, largest = SMALL[kind]
    bias = (1 << (exponent - 1)) - 1
    found = []
    for code in range(largest + 1):
        field, fraction = code >> mantissa, code & ((1 << mantissa) - 1)
        whole = fraction | (1 << mantissa) if field else fraction
        found.append(Fraction(whole) * Fraction(2) ** (max(field, 1) - bias - mantissa))
    return found


def nearest(kind: str, value: ieee.Number, minus: bool) -> int:
    """Code of the nearest number, ties to even codes, the largest for what is beyond it."""
    exponent, mantissa, largest = SMALL[kind]
    sign = int(minus) << (exponent + mantissa)
    if value == "nan":
        return 0x7F if exponent >= 4 else largest
    if isinstance(value, str):
        return sign | largest
    magnitudes = decoded(kind)
    size = abs(value)
    best = min(range(len(magnitudes)), key=lambda c: (abs(magnitudes[c] - size), c & 1))
    return sign | best


@pytest.mark.parametrize("kind", list(SMALL))
def test_packing_to_small_formats(kind: str) -> None:
    lab, rng = Lab(), np.random.default_rng(8)
    a, b = ieee.samples(F32, rng, COUNT), ieee.samples(F32, rng, COUNT)
    magnitudes = decoded(kind)
    ties = [(x + y) / 2 for x, y in zip(magnitudes, magnitudes[1:])]
    a[: min(len(ties), 200)] = [F32.round(t) for t in ties[:200]]
    b[: min(len(ties), 200)] = [F32.round(-t) for t in ties[:200]]
    apart, bits = (4, 8) if kind == "e2m1" else (8, 16)
    text = f"cvt.rn.satfinite.{kind}x2.f32 {{d}}, {{a}}, {{b}}"
    plain = lab.add(text, bits, a, b)
    relu = lab.add(text.replace("satfinite", "satfinite.relu"), bits, a, b)
    lab.run()

    def code(x: int, with_relu: bool) -> int:
        minus, value = F32.split(x)[0], F32.value(x)
        return 0 if with_relu and minus and value != "nan" else nearest(kind, value, minus)

    for case, with_relu in ((plain, False), (relu, True)):
        wanted = [code(int(y), with_relu) | code(int(x), with_relu) << apart for x, y in zip(a, b)]
        expect(case, wanted, 16)


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_packing_halves_to_8_bits(kind: str) -> None:
    lab, rng = Lab(), np.random.default_rng(9)
    low, high = ieee.samples(F16, rng, COUNT), ieee.samples(F16, rng, COUNT)
    a = low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)
    case = lab.add(f"cvt.rn.satfinite.{kind}x2.f16x2 {{d}}, {{a}}", 16, a)
    lab.run()
    codes = [[nearest(kind, F16.value(int(x)), F16.split(int(x))[0]) for x in side] for side in (low, high)]
    expect(case, [x | y << 8 for x, y in zip(*codes)], 16)


@pytest.mark.parametrize("kind", list(SMALL))
def test_unpacking_small_formats(kind: str) -> None:
    exponent, mantissa, largest = SMALL[kind]
    bits = 1 + exponent + mantissa
    lab = Lab()
    apart, register = (4, 8) if kind == "e2m1" else (8, 16)
    codes = np.resize(np.arange(1 << bits, dtype=np.uint16), 256)
    a = codes | codes[::-1] << np.uint16(apart)
    # Registers of 8 bits can't be given by the lab's width: move the value there first.
    text = f"cvt.rn.f16x2.{kind}x2 {{d}}, {{a}}"
    if register == 8:
        text = f"cvt.u8.u16 %b1, {{a}};\n  cvt.rn.f16x2.{kind}x2 {{d}}, %b1"
    case = lab.add(text, 32, a)
    lab.run()
    magnitudes = decoded(kind)

    def half(code: int) -> int:
        minus, size = code >> (bits - 1), code & ((1 << (bits - 1)) - 1)
        if size > largest:
            return (F16.infinity | minus << 15) if kind == "e5m2" and size == 0x7C else 0x7FFF
        return F16.round(magnitudes[size]) | minus << 15

    expect(case, [half(int(x)) | half(int(y)) << 16 for x, y in zip(codes, codes[::-1])], 32)


def test_bf16_is_the_top_of_f32() -> None:
    lab, rng = Lab(), np.random.default_rng(10)
    a = ieee.samples(BF16, rng, COUNT)
    case = lab.add("cvt.f32.bf16 {d}, {a}", 32, a)
    lab.run()
    expect(case, [int(x) << 16 for x in a], 32)
