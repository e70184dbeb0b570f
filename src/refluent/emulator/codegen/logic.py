"""Bits: and, or, xor, not, shifts, lop3, prmt, bit fields, counts; comparison and selection; predicates."""

from __future__ import annotations

from refluent.emulator.codegen.emitter import Emitter, Val, vec
from refluent.emulator.codegen.integer import binary, cut, extend, intrinsic, put, sources, width
from refluent.emulator.codegen.registry import Mods, emits, operand_count
from refluent.emulator.ptx import Dual, Imm, Instruction, Operand, Vec

BITS = ("b16", "b32", "b64")


@emits("and", "or", "xor", types=(*BITS, "pred"))
def logical(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 3)
    kind = mods.last()
    if kind == "pred":
        a, b = (e.predicate(o) for o in ins.operands[1:])
        e.write(ins.operands[0], combine(e, ins.opcode, a, b))
        return
    a_bits, b_bits = sources(e, ins, width(kind))
    put(e, ins, binary(e, ins.opcode, width(kind), a_bits, b_bits), width(kind))


def combine(e: Emitter, op: str, a: Val, b: Val) -> Val:
    """A bitwise operation of two predicates, in the form they have."""
    if a.lanes is not None and b.lanes is not None:
        return e.from_lanes(e.op(f"{op} <32 x i1> {a.lanes}, {b.lanes}"))
    return e.from_mask(e.op(f"{op} i32 {e.mask(a)}, {e.mask(b)}"))


@emits("not", types=(*BITS, "pred"))
def invert(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 2)
    kind = mods.last()
    if kind == "pred":
        e.write(ins.operands[0], e.invert(e.predicate(ins.operands[1])))
        return
    bits = width(kind)
    (a,) = sources(e, ins, bits)
    put(e, ins, binary(e, "xor", bits, a, f"splat (i{bits} -1)"), bits)


@emits("cnot", types=BITS)
def cnot(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 2)
    bits = width(mods.last())
    (a,) = sources(e, ins, bits)
    zero = e.op(f"icmp eq {vec(f'i{bits}')} {a}, zeroinitializer")
    put(e, ins, e.op(f"zext <32 x i1> {zero} to {vec(f'i{bits}')}"), bits)


@emits("shl", types=BITS)
@emits("shr", types=(*BITS, "u16", "u32", "u64", "s16", "s32", "s64"))
def shift(e: Emitter, ins: Instruction, mods: Mods) -> None:
    """Amounts are 32-bit and clamp at the width."""
    operand_count(e, ins, 3)
    kind = mods.last()
    bits = width(kind)
    op = "shl" if ins.opcode == "shl" else "ashr" if kind[0] == "s" else "lshr"
    a = e.bits(e.value(ins.operands[1], bits))
    amount = ins.operands[2]
    if isinstance(amount, Imm):
        n = amount.unsigned(32)
        if n < bits:
            put(e, ins, binary(e, op, bits, a, f"splat (i{bits} {n})"), bits)
        elif op == "ashr":
            put(e, ins, binary(e, op, bits, a, f"splat (i{bits} {bits - 1})"), bits)
        else:
            put(e, ins, "zeroinitializer", bits)
        return
    n32 = e.bits(e.value(amount, 32))
    put(e, ins, clamped_shift(e, op, bits, a, n32), bits)


def clamped_shift(e: Emitter, op: str, bits: int, a: str, n32: str) -> str:
    least = intrinsic(e, "umin", 32, n32, f"splat (i32 {bits - 1})")
    n = least if bits == 32 else cut(e, least, 32, bits) if bits < 32 else extend(e, least, 32, bits, False)
    shifted = binary(e, op, bits, a, n)
    if op == "ashr":
        return shifted
    inside = e.op(f"icmp ult <32 x i32> {n32}, splat (i32 {bits})")
    return e.select(inside, shifted, "zeroinitializer", f"i{bits}")


@emits("shf", types=("b32",))
def funnel(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 4)
    mods.last()
    side, mode = mods.take("l", "r"), mods.take("wrap", "clamp")
    low, high, n = sources(e, ins, 32)
    name = "fshl" if side == "l" else "fshr"
    result = intrinsic(e, name, 32, high, low, n)
    if mode == "clamp":
        over = e.op(f"icmp uge <32 x i32> {n}, splat (i32 32)")
        result = e.select(over, low if side == "l" else high, result, "i32")
    put(e, ins, result, 32)


def truth_table(e: Emitter, table: int, a: str, b: str, c: str) -> str:
    """The three-input function whose value for (a, b, c) is bit 4a + 2b + c of `table`."""
    halves = []
    for bit in (0, 1):
        two = sum(((table >> (2 * i + bit)) & 1) << i for i in range(4))
        halves.append(_two_inputs(e, two, a, b))
    if halves[0] == halves[1]:
        return halves[0]
    not_c = binary(e, "xor", 32, c, "splat (i32 -1)")
    return binary(e, "or", 32, binary(e, "and", 32, not_c, halves[0]), binary(e, "and", 32, c, halves[1]))


def _two_inputs(e: Emitter, table: int, a: str, b: str) -> str:
    """The two-input function whose value for (a, b) is bit 2a + b of `table`."""
    if table in (0, 15):
        return "zeroinitializer" if table == 0 else "splat (i32 -1)"
    if table in (12, 10):
        return a if table == 12 else b
    direct = {8: "and", 14: "or", 6: "xor"}
    if table in direct:
        return binary(e, direct[table], 32, a, b)
    if 15 - table in (12, 10, 8, 14, 6):
        return binary(e, "xor", 32, _two_inputs(e, 15 - table, a, b), "splat (i32 -1)")
    other, first = (a, b) if table in (2, 11) else (b, a)
    inverted = binary(e, "xor", 32, other, "splat (i32 -1)")
    return binary(e, "and" if table in (2, 4) else "or", 32, inverted, first)


@emits("lop3", types=("b32",))
def lop3(e: Emitter, ins: Instruction, mods: Mods) -> None:
    mods.last()
    boolean = mods.maybe("or", "and")
    operand_count(e, ins, 6 if boolean else 5)
    a, b, c = sources(e, ins, 32, 3)
    table = ins.operands[4]
    if not isinstance(table, Imm):
        raise e.refuse("a table that is no immediate")
    result = truth_table(e, table.unsigned(8), a, b, c)
    target: Operand = ins.operands[0]
    if boolean:
        if not isinstance(target, Dual):
            raise e.refuse("destination without a predicate")
        some = e.from_lanes(e.op(f"icmp ne <32 x i32> {result}, zeroinitializer"))
        e.write(target.second, combine(e, boolean, some, e.predicate(ins.operands[5])))
        target = target.first
    e.write(target, e.from_bits(result, 32))


@emits("prmt", types=("b32",))
def prmt(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 4)
    mods.take("b32")
    mode = mods.maybe("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    a, b, selector = (e.value(o, 32) for o in ins.operands[1:])
    whole = e.bits(e.from_halves(a, b))
    chosen = e.bits(selector)
    parts = []
    for i in range(4):
        pick, sign = _permute_index(e, mode, i, chosen)
        shift_by = binary(e, "shl", 64, extend(e, pick, 32, 64, False), "splat (i64 3)")
        byte = binary(e, "and", 32, cut(e, binary(e, "lshr", 64, whole, shift_by), 64, 32), "splat (i32 255)")
        if sign:
            spread = binary(e, "ashr", 32, binary(e, "shl", 32, byte, "splat (i32 24)"), "splat (i32 31)")
            spread = binary(e, "and", 32, spread, "splat (i32 255)")
            wants = e.op(f"icmp ne <32 x i32> {sign}, zeroinitializer")
            byte = e.select(wants, spread, byte, "i32")
        parts.append(binary(e, "shl", 32, byte, f"splat (i32 {8 * i})"))
    result = parts[0]
    for part in parts[1:]:
        result = binary(e, "or", 32, result, part)
    put(e, ins, result, 32)


def _permute_index(e: Emitter, mode: str, i: int, selector: str) -> tuple[str, str]:
    """Which of the eight bytes goes to byte i, and (default mode) whether its sign is spread instead."""
    if not mode:
        nibble = binary(e, "lshr", 32, selector, f"splat (i32 {4 * i})")
        return binary(e, "and", 32, nibble, "splat (i32 7)"), binary(e, "and", 32, nibble, "splat (i32 8)")
    s = binary(e, "and", 32, selector, "splat (i32 3)")
    at = f"splat (i32 {i})"
    match mode:
        case "f4e":
            return binary(e, "add", 32, s, at), ""
        case "b4e":
            return binary(e, "and", 32, binary(e, "sub", 32, s, at), "splat (i32 7)"), ""
        case "rc8":
            return s, ""
        case "ecl":
            return intrinsic(e, "umax", 32, s, at), ""
        case "ecr":
            return intrinsic(e, "umin", 32, s, at), ""
    half = binary(e, "shl", 32, binary(e, "and", 32, s, "splat (i32 1)"), "splat (i32 1)")
    return binary(e, "or", 32, half, f"splat (i32 {i & 1})"), ""


@emits("bfe", types=("u32", "s32", "u64", "s64"))
def bfe(e: Emitter, ins: Instruction, mods: Mods) -> None:
    """Position and length are bytes; a field that runs past the top is filled with the sign (or zero)."""
    operand_count(e, ins, 4)
    kind = mods.last()
    bits, signed = width(kind), kind[0] == "s"
    a = e.bits(e.value(ins.operands[1], bits))
    position, length = _byte_operands(e, ins.operands[2:])
    op = "ashr" if signed else "lshr"
    field = clamped_shift(e, op, bits, a, position)
    if signed:
        end = binary(e, "add", 32, position, length)
        last = intrinsic(e, "umin", 32, binary(e, "sub", 32, end, "splat (i32 1)"), f"splat (i32 {bits - 1})")
        sign = _sign_at(e, a, last, bits)
    keep = _low_mask(e, length, bits)
    result = binary(e, "and", bits, field, keep)
    if signed:
        above = binary(e, "xor", bits, keep, f"splat (i{bits} -1)")
        filled = binary(e, "or", bits, result, binary(e, "and", bits, above, sign))
        empty = e.op(f"icmp eq <32 x i32> {length}, zeroinitializer")
        result = e.select(empty, "zeroinitializer", filled, f"i{bits}")
    put(e, ins, result, bits)


def _sign_at(e: Emitter, a: str, at: str, bits: int) -> str:
    """Bit `at` of each lane, spread over the lane."""
    n = at if bits == 32 else extend(e, at, 32, 64, False)
    up = binary(e, "shl", bits, a, binary(e, "sub", bits, f"splat (i{bits} {bits - 1})", n))
    return binary(e, "ashr", bits, up, f"splat (i{bits} {bits - 1})")


def _byte_operands(e: Emitter, operands: tuple[Operand, ...]) -> list[str]:
    return [binary(e, "and", 32, e.bits(e.value(o, 32)), "splat (i32 255)") for o in operands]


def _low_mask(e: Emitter, length: str, bits: int) -> str:
    """(1 << length) - 1, all ones from the width on."""
    one = clamped_shift(e, "shl", bits, f"splat (i{bits} 1)", length)
    return binary(e, "sub", bits, one, f"splat (i{bits} 1)")


@emits("bfi", types=("b32", "b64"))
def bfi(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 5)
    bits = width(mods.last())
    a, b = (e.bits(e.value(o, bits)) for o in ins.operands[1:3])
    position, length = _byte_operands(e, ins.operands[3:])
    field = clamped_shift(e, "shl", bits, _low_mask(e, length, bits), position)
    moved = binary(e, "and", bits, clamped_shift(e, "shl", bits, a, position), field)
    outside = binary(e, "xor", bits, field, f"splat (i{bits} -1)")
    put(e, ins, binary(e, "or", bits, binary(e, "and", bits, b, outside), moved), bits)


@emits("bmsk", types=("b32",))
def bmsk(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 3)
    mods.last()
    mode = mods.take("clamp", "wrap")
    position, length = sources(e, ins, 32)
    if mode == "wrap":
        position, length = (binary(e, "and", 32, x, "splat (i32 31)") for x in (position, length))
    put(e, ins, clamped_shift(e, "shl", 32, _low_mask(e, length, 32), position), 32)


@emits("szext", types=("u32", "s32"))
def szext(e: Emitter, ins: Instruction, mods: Mods) -> None:
    """Extend from bit n - 1: beyond 32 bits the value stands as it is, from no bits it is zero."""
    operand_count(e, ins, 3)
    kind, mode = mods.last(), mods.take("clamp", "wrap")
    a, n = sources(e, ins, 32)
    if mode == "wrap":
        n = binary(e, "and", 32, n, "splat (i32 31)")
    least = intrinsic(e, "umin", 32, n, "splat (i32 32)")
    by = binary(e, "sub", 32, "splat (i32 32)", least)
    op = "ashr" if kind == "s32" else "lshr"
    inside = binary(e, op, 32, clamped_shift(e, "shl", 32, a, by), intrinsic(e, "umin", 32, by, "splat (i32 31)"))
    empty = e.op(f"icmp eq <32 x i32> {n}, zeroinitializer")
    put(e, ins, e.select(empty, "zeroinitializer", inside, "i32"), 32)


@emits("bfind", types=("u32", "s32", "u64", "s64"))
def bfind(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 2)
    kind, amount = mods.last(), mods.flag("shiftamt")
    bits = width(kind)
    (a,) = sources(e, ins, bits)
    if kind[0] == "s":
        a = binary(e, "xor", bits, a, binary(e, "ashr", bits, a, f"splat (i{bits} {bits - 1})"))
    zeros = intrinsic(e, "ctlz", bits, a, extra="i1 false")
    found = zeros if amount else binary(e, "sub", bits, f"splat (i{bits} {bits - 1})", zeros)
    none = e.op(f"icmp eq {vec(f'i{bits}')} {a}, zeroinitializer")
    result = found if bits == 32 else cut(e, found, 64, 32)
    put(e, ins, e.select(none, "splat (i32 -1)", result, "i32"), 32)


@emits("clz", "popc", types=("b32", "b64"))
def count(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 2)
    bits = width(mods.last())
    (a,) = sources(e, ins, bits)
    if ins.opcode == "clz":
        n = intrinsic(e, "ctlz", bits, a, extra="i1 false")
    else:
        n = intrinsic(e, "ctpop", bits, a)
    put(e, ins, n if bits == 32 else cut(e, n, 64, 32), 32)


@emits("brev", types=("b32", "b64"))
def brev(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 2)
    bits = width(mods.last())
    put(e, ins, intrinsic(e, "bitreverse", bits, *sources(e, ins, bits)), bits)


@emits("fns", types=("b32",))
def fns(e: Emitter, ins: Instruction, mods: Mods) -> None:
    """The n-th set bit of a mask from a base: walked bit by bit, it is rare."""
    operand_count(e, ins, 4)
    mods.last()
    mask, base, offset = sources(e, ins, 32)
    forward = e.op(f"icmp sgt <32 x i32> {offset}, zeroinitializer")
    here = e.op(f"icmp eq <32 x i32> {offset}, zeroinitializer")
    left = intrinsic(e, "abs", 32, offset, extra="i1 false")
    left = e.select(here, "splat (i32 1)", left, "i32")
    at, found = base, "splat (i32 -1)"
    for step in range(32):
        inside = e.op(f"icmp ult <32 x i32> {at}, splat (i32 32)")
        safe = binary(e, "and", 32, at, "splat (i32 31)")
        bit = binary(e, "and", 32, binary(e, "lshr", 32, mask, safe), "splat (i32 1)")
        bit = e.select(inside, bit, "zeroinitializer", "i32")
        if step:
            bit = e.select(here, "zeroinitializer", bit, "i32")
        left = binary(e, "sub", 32, left, bit)
        reached = e.op(f"icmp eq <32 x i32> {left}, zeroinitializer")
        set_now = e.op(f"icmp ne <32 x i32> {bit}, zeroinitializer")
        hit = e.op(f"and <32 x i1> {reached}, {set_now}")
        found = e.select(hit, at, found, "i32")
        at = e.select(
            forward,
            binary(e, "add", 32, at, "splat (i32 1)"),
            binary(e, "sub", 32, at, "splat (i32 1)"),
            "i32",
        )
    put(e, ins, found, 32)


# comparison and selection

COMPARE_SIGNED = {"eq": "eq", "ne": "ne", "lt": "slt", "le": "sle", "gt": "sgt", "ge": "sge"}
COMPARE_UNSIGNED = {"eq": "eq", "ne": "ne", "lt": "ult", "le": "ule", "gt": "ugt", "ge": "uge"}
COMPARE_UNSIGNED |= {"lo": "ult", "ls": "ule", "hi": "ugt", "hs": "uge"}
INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")


def finish_setp(e: Emitter, ins: Instruction, mods: Mods, result: Val) -> None:
    """Write p, or p|q, after the optional combination with a third predicate."""
    combined = mods.maybe("and", "or", "xor")
    operand_count(e, ins, 4 if combined else 3)
    target = ins.operands[0]
    other = e.predicate(ins.operands[3]) if combined else None
    if isinstance(target, Dual):
        opposite = e.invert(result)
        if other is not None:
            opposite = combine(e, combined, opposite, other)
        first = result if other is None else combine(e, combined, result, other)
        e.write(target.first, first)
        e.write(target.second, opposite)
        return
    e.write(target, result if other is None else combine(e, combined, result, other))


def compare_bits(e: Emitter, ins: Instruction, mods: Mods, kind: str, at: int) -> Val:
    """The integer comparison of operands at, at + 1."""
    table = COMPARE_SIGNED if kind[0] == "s" else COMPARE_UNSIGNED
    choices = ("eq", "ne") if kind[0] == "b" else tuple(table)
    test = mods.take(*choices)
    bits = width(kind)
    a, b = (e.bits(e.value(o, bits)) for o in ins.operands[at : at + 2])
    return e.from_lanes(e.op(f"icmp {table[test]} {vec(f'i{bits}')} {a}, {b}"))


@emits("setp", types=(*INTEGERS, *BITS))
def setp(e: Emitter, ins: Instruction, mods: Mods) -> None:
    kind = mods.last()
    finish_setp(e, ins, mods, compare_bits(e, ins, mods, kind, 1))


@emits("set", types=(*INTEGERS, *BITS))
def set_(e: Emitter, ins: Instruction, mods: Mods) -> None:
    kind = mods.last()
    finish_set(e, ins, mods, lambda: compare_bits(e, ins, mods, kind, 1))


def finish_set(e: Emitter, ins: Instruction, mods: Mods, compare) -> None:  # type: ignore[no-untyped-def]
    """Write all ones (integers) or 1.0 where the comparison holds."""
    kind = mods.take("u32", "s32", "f32")
    combined = mods.maybe("and", "or", "xor")
    operand_count(e, ins, 4 if combined else 3)
    result = compare()
    if combined:
        result = combine(e, combined, result, e.predicate(ins.operands[3]))
    one = "splat (i32 1065353216)" if kind == "f32" else "splat (i32 -1)"
    put(e, ins, e.select(e.lanes(result), one, "zeroinitializer", "i32"), 32)


@emits("selp", types=(*INTEGERS, *BITS, "f16", "bf16", "f32", "f64", "f16x2", "bf16x2"))
def selp(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 4)
    kind = mods.last()
    bits = 32 if kind.endswith("x2") else int(kind.lstrip("abcdefsu"))
    a, b = (e.float_value(o, bits) if "f" in kind else e.value(o, bits) for o in ins.operands[1:3])
    e.write(ins.operands[0], e.blend(e.predicate(ins.operands[3]), a, b))


@emits("slct", types=("s32", "f32"))
def slct(e: Emitter, ins: Instruction, mods: Mods) -> None:
    """a where c >= 0 (NaN is not)."""
    operand_count(e, ins, 4)
    test = mods.last()
    ftz = mods.flag("ftz")
    kind = mods.take(*INTEGERS, *BITS, "f32", "f64")
    bits = width(kind)
    a, b = (e.float_value(o, bits) if kind[0] == "f" else e.value(o, bits) for o in ins.operands[1:3])
    if test == "s32":
        if ftz:
            raise e.refuse("modifier .ftz")
        c = e.bits(e.value(ins.operands[3], 32))
        lanes = e.op(f"icmp sge <32 x i32> {c}, zeroinitializer")
    else:
        # Flushing keeps the sign of zero, so only a negative subnormal changes sides.
        x = e.float_value(ins.operands[3], 32)
        if ftz:
            from refluent.emulator.codegen.floating import flush

            x = flush(e, x)
        lanes = e.op(f"fcmp oge <32 x float> {e.fp(x)}, zeroinitializer")
    e.write(ins.operands[0], e.blend(e.from_lanes(lanes), a, b))


def vector_items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vec) else (operand,)
