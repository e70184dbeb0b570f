"""Integer, logical, bit-field and selection instructions against Python's integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ptx_lab import OLD, Case, Lab, refusal
from refluent.emulator.state import lanes

COUNT = 256
WORD = {16: np.uint16, 32: np.uint32, 64: np.uint64}
PARTIAL = 0x80F1337E
Reference = Callable[..., int]


def values(bits: int, rng: np.random.Generator) -> np.ndarray:
    """Borders and random bits."""
    edge = np.array([0, 1, 2, 3, (1 << bits) - 1, (1 << bits) - 2, 1 << (bits - 1), (1 << (bits - 1)) - 1], np.uint64)
    anything = rng.integers(0, (1 << bits) - 1, COUNT, np.uint64, endpoint=True)
    short = anything >> rng.integers(0, bits, COUNT, np.uint64)
    return np.where(rng.random(COUNT) < 0.3, rng.choice(edge, COUNT), short).astype(WORD[bits])


def amounts(rng: np.random.Generator) -> np.ndarray:
    """Shift amounts, positions and lengths: small ones, and some that are too large."""
    small = rng.integers(0, 70, COUNT, np.uint32)
    return np.where(rng.random(COUNT) < 0.9, small, rng.integers(0, 1 << 32, COUNT, np.uint32)).astype(np.uint32)


def signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


def number(x: int, kind: str) -> int:
    bits = int(kind[1:])
    return signed(x, bits) if kind[0] == "s" else x


class Table:
    """Cases with their reference functions, run under a full and a partial mask."""

    def __init__(self, seed: int) -> None:
        self.lab = Lab()
        self.rng = np.random.default_rng(seed)
        self.todo: list[tuple[Case, tuple[np.ndarray, ...], tuple[Reference, ...]]] = []

    def add(
        self, text: str, out: int | tuple[int, ...], inputs: tuple[np.ndarray, ...], *references: Reference
    ) -> None:
        self.todo.append((self.lab.add(text, out, *inputs), inputs, references))

    def run(self) -> None:
        for mask in (0xFFFFFFFF, PARTIAL):
            self.lab.run(mask)
            on = np.resize(lanes(mask), COUNT)
            for case, inputs, references in self.todo:
                for got, bits, reference in zip(case.results, case.out, references):
                    self._compare(case, got, bits, inputs, reference, on)

    def _compare(
        self,
        case: Case,
        got: np.ndarray,
        bits: int,
        inputs: tuple[np.ndarray, ...],
        reference: Reference,
        on: np.ndarray,
    ) -> None:
        for i in np.flatnonzero(on):
            arguments = [int(x[i]) for x in inputs]
            wanted = reference(*arguments) & ((1 << bits) - 1)
            if int(got[i]) != wanted:
                pytest.fail(f"{case.text}: {[hex(a) for a in arguments]} -> {int(got[i]):#x}, not {wanted:#x}")
        if bits > 1:
            assert (got[~on] == (OLD & ((1 << bits) - 1))).all(), f"{case.text} wrote a lane that is off"


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_arithmetic(kind: str) -> None:
    bits, t = int(kind[1:]), Table(1)
    a, b, c = (values(bits, t.rng) for _ in range(3))

    def n(x: int) -> int:
        return number(x, kind)

    t.add(f"add.{kind} {{d}}, {{a}}, {{b}}", bits, (a, b), lambda x, y: x + y)
    t.add(f"sub.{kind} {{d}}, {{a}}, {{b}}", bits, (a, b), lambda x, y: x - y)
    t.add(f"mul.lo.{kind} {{d}}, {{a}}, {{b}}", bits, (a, b), lambda x, y: x * y)
    t.add(f"mul.hi.{kind} {{d}}, {{a}}, {{b}}", bits, (a, b), lambda x, y: n(x) * n(y) >> bits)
    t.add(f"mad.lo.{kind} {{d}}, {{a}}, {{b}}, {{c}}", bits, (a, b, c), lambda x, y, z: x * y + z)
    t.add(f"mad.hi.{kind} {{d}}, {{a}}, {{b}}, {{c}}", bits, (a, b, c), lambda x, y, z: (n(x) * n(y) >> bits) + z)
    t.add(f"min.{kind} {{d}}, {{a}}, {{b}}", bits, (a, b), lambda x, y: min(n(x), n(y)))
    t.add(f"max.{kind} {{d}}, {{a}}, {{b}}", bits, (a, b), lambda x, y: max(n(x), n(y)))
    t.add(f"sad.{kind} {{d}}, {{a}}, {{b}}, {{c}}", bits, (a, b, c), lambda x, y, z: z + abs(n(x) - n(y)))
    t.add(f"div.{kind} {{d}}, {{a}}, {{b}}", bits, (a, b), lambda x, y: _quotient(n(x), n(y)) if y else -1)
    t.add(
        f"rem.{kind} {{d}}, {{a}}, {{b}}", bits, (a, b), lambda x, y: n(x) - _quotient(n(x), n(y)) * n(y) if y else -1
    )
    if bits < 64:
        wide = values(2 * bits, t.rng)
        t.add(f"mul.wide.{kind} {{d}}, {{a}}, {{b}}", 2 * bits, (a, b), lambda x, y: n(x) * n(y))
        text = f"mad.wide.{kind} {{d}}, {{a}}, {{b}}, {{c}}"
        t.add(text, 2 * bits, (a, b, wide), lambda x, y, z: n(x) * n(y) + z)
    if kind[0] == "s":
        t.add(f"abs.{kind} {{d}}, {{a}}", bits, (a,), lambda x: abs(n(x)))
        t.add(f"neg.{kind} {{d}}, {{a}}", bits, (a,), lambda x: -x)
    t.run()


def _quotient(x: int, y: int) -> int:
    """C's division, towards zero."""
    q = abs(x) // abs(y)
    return -q if (x < 0) != (y < 0) else q


def _rest(x: int, y: int) -> int:
    return x - _quotient(x, y) * y


def _clamp32(x: int) -> int:
    return max(-(1 << 31), min((1 << 31) - 1, x))


def test_saturating_and_special_arithmetic() -> None:
    t = Table(2)
    a, b, c = (values(32, t.rng) for _ in range(3))

    def s(x: int) -> int:
        return signed(x, 32)

    t.add("add.sat.s32 {d}, {a}, {b}", 32, (a, b), lambda x, y: _clamp32(s(x) + s(y)))
    t.add("sub.sat.s32 {d}, {a}, {b}", 32, (a, b), lambda x, y: _clamp32(s(x) - s(y)))
    t.add("mad.hi.sat.s32 {d}, {a}, {b}, {c}", 32, (a, b, c), lambda x, y, z: _clamp32((s(x) * s(y) >> 32) + s(z)))
    t.add("max.relu.s32 {d}, {a}, {b}", 32, (a, b), lambda x, y: max(s(x), s(y), 0))
    t.add("min.relu.s32 {d}, {a}, {b}", 32, (a, b), lambda x, y: max(min(s(x), s(y)), 0))
    for kind in ("u32", "s32"):

        def low24(x: int, kind: str = kind) -> int:
            return signed(x & 0xFFFFFF, 24) if kind == "s32" else x & 0xFFFFFF

        t.add(f"mul24.lo.{kind} {{d}}, {{a}}, {{b}}", 32, (a, b), lambda x, y, f=low24: f(x) * f(y))
        t.add(f"mul24.hi.{kind} {{d}}, {{a}}, {{b}}", 32, (a, b), lambda x, y, f=low24: f(x) * f(y) >> 16)
        t.add(f"mad24.lo.{kind} {{d}}, {{a}}, {{b}}, {{c}}", 32, (a, b, c), lambda x, y, z, f=low24: f(x) * f(y) + z)
    t.run()


@pytest.mark.parametrize("bits", [32, 64])
def test_carry_chains(bits: int) -> None:
    """Twice the width through add.cc / addc, sub.cc / subc, mad.lo.cc / madc.hi."""
    t = Table(3)
    low, high = [values(bits, t.rng) for _ in range(2)], [values(bits, t.rng) for _ in range(2)]
    top = (1 << bits) - 1
    u = f"u{bits}"
    case = t.lab.add(f"add.cc.{u} {{d}}, {{a}}, {{b}};\n  addc.{u} {{e}}, {{c}}, {{g}}", (bits, bits), *low, *high)
    less = t.lab.add(f"sub.cc.{u} {{d}}, {{a}}, {{b}};\n  subc.{u} {{e}}, {{c}}, {{g}}", (bits, bits), *low, *high)
    text = f"mad.lo.cc.{u} {{d}}, {{a}}, {{b}}, {{c}};\n  madc.hi.{u} {{e}}, {{a}}, {{b}}, {{g}}"
    product = t.lab.add(text, (bits, bits), *low, *high)
    text = f"add.cc.{u} {{d}}, {{a}}, {{b}};\n  addc.cc.{u} {{e}}, {{c}}, {{g}};\n  addc.{u} {{d}}, 0, 0"
    carried = t.lab.add(text, (bits, bits), *low, *high)
    t.lab.run()
    for i in range(COUNT):
        a, b, c, g = (int(x[i]) for x in (*low, *high))

        def pair(case: Case, i: int = i) -> int:
            return int(case.results[0][i]) | int(case.results[1][i]) << bits

        both = top | top << bits
        assert pair(case) == ((a | c << bits) + (b | g << bits)) & both
        assert pair(less) == ((a | c << bits) - (b | g << bits)) & both
        assert pair(product) == (a * b + (c | g << bits)) & both
        assert int(carried.results[0][i]) == ((a | c << bits) + (b | g << bits)) >> 2 * bits


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_logic_and_shifts(bits: int) -> None:
    t = Table(4)
    a, b, n = values(bits, t.rng), values(bits, t.rng), amounts(t.rng)
    kind = f"b{bits}"
    t.add(f"and.{kind} {{d}}, {{a}}, {{b}}", bits, (a, b), lambda x, y: x & y)
    t.add(f"or.{kind} {{d}}, {{a}}, {{b}}", bits, (a, b), lambda x, y: x | y)
    t.add(f"xor.{kind} {{d}}, {{a}}, {{b}}", bits, (a, b), lambda x, y: x ^ y)
    t.add(f"not.{kind} {{d}}, {{a}}", bits, (a,), lambda x: ~x)
    t.add(f"cnot.{kind} {{d}}, {{a}}", bits, (a,), lambda x: int(x == 0))
    t.add(f"shl.{kind} {{d}}, {{a}}, {{b}}", bits, (a, n), lambda x, k: x << min(k, bits))
    t.add(f"shr.u{bits} {{d}}, {{a}}, {{b}}", bits, (a, n), lambda x, k: x >> min(k, bits))
    t.add(f"shr.s{bits} {{d}}, {{a}}, {{b}}", bits, (a, n), lambda x, k: signed(x, bits) >> min(k, bits))
    for k in (0, 1, bits - 1, bits, bits + 5):
        t.add(f"shl.{kind} {{d}}, {{a}}, {k}", bits, (a,), lambda x, k=k: x << k)
        t.add(f"shr.u{bits} {{d}}, {{a}}, {k}", bits, (a,), lambda x, k=k: x >> k)
        t.add(f"shr.s{bits} {{d}}, {{a}}, {k}", bits, (a,), lambda x, k=k: signed(x, bits) >> k)
    t.run()


def test_funnel_shifts() -> None:
    t = Table(5)
    a, b, n = values(32, t.rng), values(32, t.rng), amounts(t.rng)
    for mode, limit in (("wrap", lambda k: k & 31), ("clamp", lambda k: min(k, 32))):
        t.add(
            f"shf.l.{mode}.b32 {{d}}, {{a}}, {{b}}, {{c}}",
            32,
            (a, b, n),
            lambda x, y, k, f=limit: (y << 32 | x) << f(k) >> 32,
        )
        t.add(
            f"shf.r.{mode}.b32 {{d}}, {{a}}, {{b}}, {{c}}",
            32,
            (a, b, n),
            lambda x, y, k, f=limit: (y << 32 | x) >> f(k),
        )
    t.run()


def test_every_truth_table_of_lop3() -> None:
    t = Table(6)
    a, b, c = (values(32, t.rng) for _ in range(3))

    def look_up(table: int) -> Reference:
        def f(x: int, y: int, z: int) -> int:
            total = 0
            for i in range(8):
                if table >> i & 1:
                    total |= (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
            return total

        return f

    for table in range(256):
        t.lab = Lab() if table % 64 == 0 else t.lab
        t.todo = [] if table % 64 == 0 else t.todo
        t.add(f"lop3.b32 {{d}}, {{a}}, {{b}}, {{c}}, {table}", 32, (a, b, c), look_up(table))
        if table % 64 == 63:
            t.run()


def test_lop3_with_a_predicate() -> None:
    t = Table(7)
    a, b, c = (values(32, t.rng) for _ in range(3))
    p = t.rng.random(COUNT) < 0.5
    for op, join in (("or", lambda x, y: x | y), ("and", lambda x, y: x & y)):
        text = f"lop3.{op}.b32 {{d}}|{{e}}, {{a}}, {{b}}, {{c}}, 0x80, {{g}}"
        t.add(
            text,
            (32, 1),
            (a, b, c, p),
            lambda x, y, z, q: x & y & z,
            lambda x, y, z, q, f=join: f(int(x & y & z != 0), q),
        )
    t.run()


def _prmt(mode: str, a: int, b: int, c: int) -> int:
    """PTX ISA, prmt: table of selections by mode."""
    source = [(b << 32 | a) >> 8 * i & 255 for i in range(8)]
    s = c & 3
    picks = {
        "f4e": [s, s + 1, s + 2, s + 3],
        "b4e": [s, (s + 7) & 7, (s + 6) & 7, (s + 5) & 7],
        "rc8": [s] * 4,
        "ecl": [max(s, i) for i in range(4)],
        "ecr": [min(s, i) for i in range(4)],
        "rc16": [0, 1, 0, 1] if s in (0, 2) else [2, 3, 2, 3],
    }
    if mode:
        chosen = [source[i] for i in picks[mode]]
    else:
        chosen = []
        for i in range(4):
            nibble = c >> 4 * i & 15
            byte = source[nibble & 7]
            chosen.append((255 if byte & 128 else 0) if nibble & 8 else byte)
    return sum(byte << 8 * i for i, byte in enumerate(chosen))


def test_prmt() -> None:
    t = Table(8)
    a, b, c = (values(32, t.rng) for _ in range(3))
    t.add("prmt.b32 {d}, {a}, {b}, {c}", 32, (a, b, c), lambda x, y, z: _prmt("", x, y, z))
    for selector in (0x3210, 0x7654, 0x5410, 0x7632, 0x1032, 0xBA98, 0x8888):
        t.add(f"prmt.b32 {{d}}, {{a}}, {{b}}, {selector}", 32, (a, b), lambda x, y, s=selector: _prmt("", x, y, s))
    for mode in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
        t.add(f"prmt.b32.{mode} {{d}}, {{a}}, {{b}}, {{c}}", 32, (a, b, c), lambda x, y, z, m=mode: _prmt(m, x, y, z))
    t.run()


def _bfe(kind: str, a: int, b: int, c: int) -> int:
    """PTX ISA, bfe: the manual's loop."""
    bits, position, length = int(kind[1:]), b & 255, c & 255
    sign = 0 if kind[0] == "u" or not length else a >> min(position + length - 1, bits - 1) & 1
    return sum((a >> (position + i) & 1 if i < length and position + i < bits else sign) << i for i in range(bits))


def _bfi(bits: int, a: int, b: int, c: int, d: int) -> int:
    """PTX ISA, bfi: the manual's loop."""
    position, length = c & 255, d & 255
    for i in range(min(length, bits)):
        if position + i < bits:
            b = b & ~(1 << (position + i)) | (a >> i & 1) << (position + i)
    return b


def test_bit_fields() -> None:
    t = Table(9)
    n, m = amounts(t.rng), amounts(t.rng)
    for bits in (32, 64):
        a, b = values(bits, t.rng), values(bits, t.rng)
        for kind in (f"u{bits}", f"s{bits}"):
            t.add(f"bfe.{kind} {{d}}, {{a}}, {{b}}, {{c}}", bits, (a, n, m), lambda x, y, z, k=kind: _bfe(k, x, y, z))
            t.add(f"bfind.{kind} {{d}}, {{a}}", 32, (a,), lambda x, k=kind: _bfind(k, x, False))
            t.add(f"bfind.shiftamt.{kind} {{d}}, {{a}}", 32, (a,), lambda x, k=kind: _bfind(k, x, True))
        text = f"bfi.b{bits} {{d}}, {{a}}, {{b}}, {{c}}, {{g}}"
        t.add(text, bits, (a, b, n, m), lambda x, y, z, w, k=bits: _bfi(k, x, y, z, w))
        t.add(f"clz.b{bits} {{d}}, {{a}}", 32, (a,), lambda x, k=bits: k - x.bit_length())
        t.add(f"popc.b{bits} {{d}}, {{a}}", 32, (a,), lambda x: x.bit_count())
        t.add(f"brev.b{bits} {{d}}, {{a}}", bits, (a,), lambda x, k=bits: int(f"{x:0{k}b}"[::-1], 2))
    t.run()


def _bfind(kind: str, a: int, amount: bool) -> int:
    """PTX ISA, bfind: the most significant bit that is no sign bit, or -1."""
    bits = int(kind[1:])
    if kind[0] == "s" and a >> (bits - 1):
        a = ~a & ((1 << bits) - 1)
    if not a:
        return -1
    found = a.bit_length() - 1
    return bits - 1 - found if amount else found


def _fns(mask: int, base: int, offset: int) -> int:
    """PTX ISA, fns: the manual's loop."""
    if offset == 0:
        return base if mask >> base & 1 else -1
    step, left, position = (1, offset - 1, base) if offset > 0 else (-1, -offset - 1, base)
    while 0 <= position < 32:
        if mask >> position & 1:
            if left == 0:
                return position
            left -= 1
        position += step
    return -1


def test_masks_and_counts() -> None:
    t = Table(10)
    a, n, m = values(32, t.rng), amounts(t.rng), amounts(t.rng)
    base = t.rng.integers(0, 32, COUNT, np.uint32)
    offset = t.rng.integers(-6, 7, COUNT).astype(np.int32).view(np.uint32)
    t.add("fns.b32 {d}, {a}, {b}, {c}", 32, (a, base, offset), lambda x, y, z: _fns(x, y, signed(z, 32)))
    full = 0xFFFFFFFF
    t.add("bmsk.clamp.b32 {d}, {a}, {b}", 32, (n, m), lambda x, y: ((1 << min(y, 32)) - 1 << min(x, 32)) & full)
    t.add("bmsk.wrap.b32 {d}, {a}, {b}", 32, (n, m), lambda x, y: ((1 << (y & 31)) - 1 << (x & 31)) & full)
    for kind in ("u32", "s32"):
        for mode, limit in (("clamp", lambda k: min(k, 32)), ("wrap", lambda k: k & 31)):
            text = f"szext.{mode}.{kind} {{d}}, {{a}}, {{b}}"
            t.add(text, 32, (a, n), lambda x, k, f=limit, kind=kind: _szext(kind, x, f(k)))
    t.run()


def _szext(kind: str, a: int, n: int) -> int:
    field = a & ((1 << n) - 1)
    return signed(field, n) if n and kind == "s32" else field


def test_dot_products() -> None:
    t = Table(11)
    a, b, c = (values(32, t.rng) for _ in range(3))

    def byte(x: int, i: int, kind: str) -> int:
        v = x >> 8 * i & 255
        return signed(v, 8) if kind == "s32" else v

    def half(x: int, i: int, kind: str) -> int:
        v = x >> 16 * i & 0xFFFF
        return signed(v, 16) if kind == "s32" else v

    for p in ("u32", "s32"):
        for q in ("u32", "s32"):
            t.add(
                f"dp4a.{p}.{q} {{d}}, {{a}}, {{b}}, {{c}}",
                32,
                (a, b, c),
                lambda x, y, z, p=p, q=q: z + sum(byte(x, i, p) * byte(y, i, q) for i in range(4)),
            )
            for part, first in (("lo", 0), ("hi", 2)):
                t.add(
                    f"dp2a.{part}.{p}.{q} {{d}}, {{a}}, {{b}}, {{c}}",
                    32,
                    (a, b, c),
                    lambda x, y, z, p=p, q=q, k=first: z + sum(half(x, i, p) * byte(y, k + i, q) for i in range(2)),
                )
    t.run()


def test_packed_integers() -> None:
    t = Table(12)
    a, b = values(32, t.rng), values(32, t.rng)
    for kind in ("u16x2", "s16x2"):
        one = kind[:3]
        for op, f in (("add", lambda x, y: x + y), ("min", min), ("max", max)):

            def both(x: int, y: int, f: Reference = f, one: str = one) -> int:
                parts = [f(number(x >> s & 0xFFFF, one), number(y >> s & 0xFFFF, one)) & 0xFFFF for s in (0, 16)]
                return parts[0] | parts[1] << 16

            t.add(f"{op}.{kind} {{d}}, {{a}}, {{b}}", 32, (a, b), both)
    t.run()


@pytest.mark.parametrize("kind", ["u16", "s16", "b16", "u32", "s32", "b32", "u64", "s64", "b64"])
def test_comparison_and_selection(kind: str) -> None:
    bits, t = int(kind[1:]), Table(13)
    a, b = values(bits, t.rng), values(bits, t.rng)
    b[::3] = a[::3]
    p = t.rng.random(COUNT) < 0.5
    tests: dict[str, Callable[[int, int], bool]] = {"eq": lambda x, y: x == y, "ne": lambda x, y: x != y}
    if kind[0] != "b":
        tests |= {
            "lt": lambda x, y: x < y,
            "le": lambda x, y: x <= y,
            "gt": lambda x, y: x > y,
            "ge": lambda x, y: x >= y,
        }
    if kind[0] == "u":
        tests |= {"lo": tests["lt"], "ls": tests["le"], "hi": tests["gt"], "hs": tests["ge"]}
    for name, f in tests.items():

        def holds(x: int, y: int, f: Callable[[int, int], bool] = f) -> int:
            return int(f(number(x, kind), number(y, kind)))

        t.add(f"setp.{name}.{kind} {{d}}, {{a}}, {{b}}", 1, (a, b), holds)
        text = f"setp.{name}.and.{kind} {{d}}|{{e}}, {{a}}, {{b}}, {{c}}"
        t.add(text, (1, 1), (a, b, p), lambda x, y, q, h=holds: h(x, y) & q, lambda x, y, q, h=holds: (1 - h(x, y)) & q)
        text = f"setp.{name}.xor.{kind} {{d}}, {{a}}, {{b}}, !{{c}}"
        t.add(text, 1, (a, b, p), lambda x, y, q, h=holds: h(x, y) ^ (1 - q))
        t.add(f"set.{name}.u32.{kind} {{d}}, {{a}}, {{b}}", 32, (a, b), lambda x, y, h=holds: -h(x, y))
        text = f"set.{name}.f32.{kind} {{d}}, {{a}}, {{b}}"
        t.add(text, 32, (a, b), lambda x, y, h=holds: 0x3F800000 * h(x, y))
    t.add(f"selp.{kind} {{d}}, {{a}}, {{b}}, {{c}}", bits, (a, b, p), lambda x, y, q: x if q else y)
    t.add(f"selp.{kind} {{d}}, {{a}}, 7, !{{c}}", bits, (a, b, p), lambda x, y, q: 7 if q else x)
    t.run()


def test_predicates_and_slct() -> None:
    t = Table(14)
    p, q = (t.rng.random(COUNT) < 0.5 for _ in range(2))
    a, b, c = (values(32, t.rng) for _ in range(3))
    for op, f in (("and", lambda x, y: x & y), ("or", lambda x, y: x | y), ("xor", lambda x, y: x ^ y)):
        t.add(f"{op}.pred {{d}}, {{a}}, {{b}}", 1, (p, q), f)
        t.add(f"{op}.pred {{d}}, {{a}}, !{{b}}", 1, (p, q), lambda x, y, f=f: f(x, 1 - y))
    t.add("not.pred {d}, {a}", 1, (p,), lambda x: 1 - x)
    t.add("mov.pred {d}, {a}", 1, (p,), lambda x: x)
    t.add("slct.u32.s32 {d}, {a}, {b}, {c}", 32, (a, b, c), lambda x, y, z: x if signed(z, 32) >= 0 else y)
    t.run()


def test_guards_keep_the_old_value() -> None:
    t = Table(15)
    a, b = values(32, t.rng), values(32, t.rng)
    p = t.rng.random(COUNT) < 0.5
    old = OLD & 0xFFFFFFFF
    t.add("@{c} add.u32 {d}, {a}, {b}", 32, (a, b, p), lambda x, y, q: x + y if q else old)
    t.add("@!{c} mul.lo.u32 {d}, {a}, {b}", 32, (a, b, p), lambda x, y, q: old if q else x * y)
    t.add("mov.b32 {d}, {a};\n  @{c} mov.b32 {d}, {b}", 32, (a, b, p), lambda x, y, q: y if q else x)
    old64 = OLD
    t.add("@{c} mov.b64 {d}, {{{a}, {b}}}", 64, (a, b, p), lambda x, y, q: x | y << 32 if q else old64)
    t.run()


def test_moves_pack_and_unpack() -> None:
    t = Table(16)
    a, b = values(32, t.rng), values(32, t.rng)
    w, h, g = values(64, t.rng), values(16, t.rng), values(16, t.rng)
    t.add("mov.b64 {d}, {{{a}, {b}}}", 64, (a, b), lambda x, y: x | y << 32)
    t.add("mov.b64 {{{d}, {e}}}, {a}", (32, 32), (w,), lambda x: x, lambda x: x >> 32)
    t.add("mov.b64 {{_, {d}}}, {a}", 32, (w,), lambda x: x >> 32)
    t.add("mov.b32 {d}, {{{a}, {b}}}", 32, (h, g), lambda x, y: x | y << 16)
    t.add("mov.b32 {{{d}, {e}}}, {a}", (16, 16), (a,), lambda x: x, lambda x: x >> 16)
    t.add("mov.b64 {d}, {{{a}, {b}, {a}, {b}}}", 64, (h, g), lambda x, y: (x | y << 16) * (1 | 1 << 32))
    text = "mov.b128 %q0, {{{a}, {b}}};\n  mov.b128 {{{d}, {e}}}, %q0"
    t.add(text, (64, 64), (w, w[::-1].copy()), lambda x, y: x, lambda x, y: y)
    t.add(
        "mov.b64 %d390, {{{a}, {b}}};\n  mov.b64 {{{d}, {e}}}, %d390", (32, 32), (a, b), lambda x, y: x, lambda x, y: y
    )
    t.run()


def test_bytes_pack_and_unpack() -> None:
    """8-bit registers, as inline assembly for 4-bit formats uses them."""
    t = Table(17)
    a, h = values(32, t.rng), values(16, t.rng)
    text = "mov.b32 {{%b1, %b2, %b3, %b4}}, {a};\n  mov.b32 {d}, {{%b4, %b3, %b2, %b1}}"
    t.add(text, 32, (a,), lambda x: int.from_bytes(x.to_bytes(4, "little"), "big"))
    text = "mov.b16 {{%b1, _}}, {a};\n  mov.b16 {d}, {{%b1, %b1}}"
    t.add(text, 16, (h,), lambda x: (x & 255) * 257)
    t.run()


def test_packing_with_saturation() -> None:
    t = Table(18)
    a, b, c = (values(32, t.rng) for _ in range(3))

    def clamp(x: int, kind: str) -> int:
        bits = int(kind[1:])
        low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)
        return max(low, min(high, signed(x, 32))) & ((1 << bits) - 1)

    for kind in ("u16", "s16"):
        text = f"cvt.pack.sat.{kind}.s32 {{d}}, {{a}}, {{b}}"
        t.add(text, 32, (a, b), lambda x, y, k=kind: clamp(x, k) << 16 | clamp(y, k))
    for kind in ("u8", "s8", "u4", "s4", "u2", "s2"):
        n = int(kind[1:])
        text = f"cvt.pack.sat.{kind}.s32.b32 {{d}}, {{a}}, {{b}}, {{c}}"
        t.add(text, 32, (a, b, c), lambda x, y, z, k=kind, n=n: z << 2 * n | clamp(x, k) << n | clamp(y, k))
    t.run()


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("frobnicate.b32 %r1, %r2;", "frobnicate.b32: the opcode (PTX line 13, kernel k): not known to the emulator"),
        ("add.rn.s32 %r1, %r2, %r3;", "add.rn.s32: modifier .rn (PTX line 13, kernel k): not known to the emulator"),
        ("shl.s32 %r1, %r2, 1;", "shl.s32: type .s32"),
        ("mul.s32 %r1, %r2, %r3;", "mul.s32: needs one of .lo .hi .wide"),
        ("fma.f32 %r1, %r2, %r3, %r4;", "fma.f32: needs one of .rn .rz .rm .rp"),
        ("add.s32 %r1, %r2;", "add.s32: 2 operands"),
        ("add.s32 %r1, %r2, %d3;", "64-bit register %d3 where 32 bits are wanted"),
        ("shfl.idx.b32 %r1, %r2, 0, 31;", "shfl.idx.b32: 4 operands"),
        ("cvt.rs.f16x2.f32 %r1, %r2, %r3, %r4;", "cvt.rs.f16x2.f32"),
        ("mov.u32 %r1, %pm0;", "special register %pm0"),
    ],
)
def test_refusals_name_what_and_where(line: str, text: str) -> None:
    assert text in refusal(f"  {line}\n  ret;")
