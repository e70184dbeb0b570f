"""mov (with packing, special registers and addresses), cvta, isspacep, mapa, getctarank, createpolicy."""

from __future__ import annotations

from refluent.emulator.codegen.emitter import Emitter, Val
from refluent.emulator.codegen.integer import binary, cut, extend, put, width
from refluent.emulator.codegen.registry import INTEGER, Mods, emits, operand_count
from refluent.emulator.ptx import Addr, Imm, Instruction, Operand, Reg, Special, Symbol, Vec
from refluent.emulator.state import CTA_RANK_SHIFT, LOCAL_WINDOW, SHARED_WINDOW

WORD_FIELDS = {
    "%warpid": "warpid",
    "%nwarpid": "nwarpid",
    "%smid": "smid",
    "%nsmid": "nsmid",
    "%cluster_ctarank": "cluster_ctarank",
    "%cluster_nctarank": "cluster_nctarank",
    "%dynamic_smem_size": "dynamic_smem_size",
    "%total_smem_size": "total_smem_size",
}
VECTOR_FIELDS = ("ctaid", "nctaid", "ntid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
LANE_MASKS = {
    "%lanemask_eq": lambda i: 1 << i,
    "%lanemask_le": lambda i: (2 << i) - 1,
    "%lanemask_lt": lambda i: (1 << i) - 1,
    "%lanemask_ge": lambda i: 0xFFFFFFFF & ~((1 << i) - 1),
    "%lanemask_gt": lambda i: 0xFFFFFFFF & ~((2 << i) - 1),
}
FLOAT_KINDS = ("f16", "bf16", "f16x2", "bf16x2", "f32", "f64")


def lane_constant(values: list[int]) -> str:
    return "<" + ", ".join(f"i32 {v}" for v in values) + ">"


def special(e: Emitter, name: str, bits: int) -> Val:
    """A special register, 32 or 64 bits wide as it is defined."""
    word, _, axis = name.rpartition(".")
    if axis in ("x", "y", "z"):
        result = _vector_special(e, name, word, "xyz".index(axis))
    elif name == "%laneid":
        result = e.from_bits(lane_constant(list(range(32))), 32)
    elif name in LANE_MASKS:
        result = e.from_bits(lane_constant([LANE_MASKS[name](i) for i in range(32)]), 32)
    elif name in WORD_FIELDS:
        result = e.from_bits(e.splat(e.load_field(WORD_FIELDS[name]), "i32"), 32)
    elif name in ("%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"):
        result = _timer(e, name)
    elif name == "%gridid":
        result = e.from_bits(e.splat(e.load_field("gridid", "i64"), "i64"), 64)
    else:
        raise e.refuse(f"special register {name}")
    if result.bits == bits:
        return result
    if result.bits == 32 and bits == 64:
        return e.from_bits(extend(e, e.bits(result), 32, 64, False), 64)
    if result.bits == 64 and bits == 32 and name == "%gridid":
        return e.halves(result)[0]
    raise e.refuse(f"{bits} bits of special register {name}")


def _vector_special(e: Emitter, name: str, word: str, axis: int) -> Val:
    if word == "%tid":
        at = e.field("tid", axis, 128)
        return e.from_bits(e.op(f"load <32 x i32>, ptr {at}, align 64"), 32)
    if word[1:] in VECTOR_FIELDS:
        return e.from_bits(e.splat(e.load_field(word[1:], element=axis), "i32"), 32)
    raise e.refuse(f"special register {name}")


def _timer(e: Emitter, name: str) -> Val:
    """A reading differs from the one before it, so that code that waits for time to pass ends."""
    field = "clock" if name.startswith("%clock") else "globaltimer"
    now = e.op(f"add i64 {e.load_field(field, 'i64')}, 1")
    e.store_field(field, now, "i64")
    whole = e.from_bits(e.splat(now, "i64"), 64)
    if name in ("%clock64", "%globaltimer"):
        return whole
    return e.halves(whole)[1 if name.endswith("_hi") else 0]


def symbol(e: Emitter, name: str, bits: int) -> Val:
    """Address of a variable in its own space, or of a parameter (which is its generic address too)."""
    variable = e.kernel.variables.get(name)
    if variable is None:
        raise e.refuse(f"name {name}")
    match variable.space:
        case "shared":
            scalar = e.op(f"or i32 {e.load_field('shared_base')}, {variable.offset}")
            if bits == 64:
                scalar = e.op(f"zext i32 {scalar} to i64")
            return e.from_bits(e.splat(scalar, f"i{bits}"), bits)
        case "local":
            return e.constant(variable.offset, bits)
        case "param":
            scalar = e.op(f"add i64 {e.load_field('params', 'i64')}, {variable.offset}")
        case _:
            table = e.load_field("symbols", "ptr")
            at = e.op(f"getelementptr i64, ptr {table}, i64 {variable.index}")
            scalar = e.op(f"load i64, ptr {at}, align 8")
    if bits != 64:
        raise e.refuse(f"{bits}-bit address of {variable.space} variable {name}")
    return e.from_bits(e.splat(scalar, "i64"), 64)


def source(e: Emitter, operand: Operand, bits: int, is_float: bool) -> Val:
    """Any operand that mov takes."""
    match operand:
        case Reg() | Imm():
            return e.float_value(operand, bits) if is_float else e.value(operand, bits)
        case Special(name=name):
            return special(e, name, bits)
        case Symbol(name=name):
            return symbol(e, name, bits)
        case Addr(base=Symbol(name=name), offset=offset):
            base = e.bits(symbol(e, name, bits))
            return e.from_bits(binary(e, "add", bits, base, f"splat (i{bits} {offset})"), bits)
        case Vec(items=items):
            part = bits // len(items)
            if part == 8:
                return pack(e, pair_bytes(e, items))
            return pack(e, [source(e, item, part, False) for item in items])
    raise e.refuse(f"operand {operand}")


def pack(e: Emitter, parts: list[Val]) -> Val:
    """Parts, lowest first, as one value."""
    while len(parts) > 1:
        parts = [e.from_halves(parts[i], parts[i + 1]) for i in range(0, len(parts), 2)]
    return parts[0]


def pair_bytes(e: Emitter, items: tuple[Operand, ...]) -> list[Val]:
    """8-bit registers, which live in 16-bit ones, two by two."""
    bytes_ = []
    for item in items:
        if not isinstance(item, Reg) or item.bits != 8:
            raise e.refuse(f"operand {item} where an 8-bit register is wanted")
        bytes_.append(binary(e, "and", 16, e.bits(e.read(item)), "splat (i16 255)"))
    pairs = []
    for low, high in zip(bytes_[::2], bytes_[1::2]):
        up = binary(e, "shl", 16, high, "splat (i16 8)")
        pairs.append(e.from_bits(binary(e, "or", 16, up, low), 16))
    return pairs


def unpack(e: Emitter, val: Val, count: int) -> list[Val]:
    """Equal parts, lowest first; bytes come as the 16-bit values that hold them."""
    parts = [val]
    while len(parts) < count and parts[0].bits > 16:
        parts = [half for part in parts for half in e.halves(part)]
    if len(parts) == count:
        return parts
    bytes_ = []
    for part in parts:
        bits = e.bits(part)
        bytes_.append(e.from_bits(binary(e, "and", 16, bits, "splat (i16 255)"), 16))
        bytes_.append(e.from_bits(binary(e, "lshr", 16, bits, "splat (i16 8)"), 16))
    return bytes_


@emits("mov", types=(*INTEGER, *FLOAT_KINDS, "b128", "pred"))
def mov(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 2)
    kind = mods.last()
    target, operand = ins.operands
    if kind == "pred":
        if operand == Special("%is_explicit_cluster"):
            flag = e.op(f"icmp ne i32 {e.load_field('is_explicit_cluster')}, 0")
            e.write(target, e.from_mask(e.op(f"sext i1 {flag} to i32")))
            return
        e.write(target, e.predicate(operand))
        return
    bits = 32 if kind.endswith("x2") else int(kind.lstrip("abcdefsu"))
    if isinstance(target, Vec):
        wanted = bits // len(target.items)
        for item, part in zip(target.items, unpack(e, source(e, operand, bits, False), len(target.items))):
            if isinstance(item, Reg) and item.bits != wanted:
                raise e.refuse(f"{item.bits}-bit register {item.name} for {wanted} bits")
            e.write(item, part)
        return
    e.write(target, source(e, operand, bits, kind in FLOAT_KINDS))


@emits("cvta", types=("u32", "u64"))
def cvta(e: Emitter, ins: Instruction, mods: Mods) -> None:
    """Global, const and param addresses are generic ones; shared and local have windows."""
    operand_count(e, ins, 2)
    bits = width(mods.last())
    to = mods.flag("to")
    space = mods.take("global", "const", "param", "param::entry", "shared", "shared::cta", "shared::cluster", "local")
    value = source(e, ins.operands[1], bits, False)
    windows = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}
    window = windows.get(space.split("::")[0])
    if window is None:
        e.write(ins.operands[0], value)
        return
    if bits == 32:
        raise e.refuse("32-bit generic addresses")
    if to:
        put(e, ins, binary(e, "and", 64, e.bits(value), "splat (i64 4294967295)"), 64)
    else:
        put(e, ins, binary(e, "or", 64, e.bits(value), f"splat (i64 {window})"), 64)


@emits("isspacep", types=("",))
def isspacep(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 2)
    space = mods.take("global", "const", "param", "param::entry", "shared", "shared::cta", "shared::cluster", "local")
    value = e.bits(source(e, ins.operands[1], 64, False))
    window = binary(e, "lshr", 64, value, "splat (i64 56)")
    if space == "shared" or space == "shared::cta":
        base = e.op(f"zext i32 {e.load_field('shared_base')} to i64")
        own = e.splat(e.op(f"or i64 {base}, {SHARED_WINDOW}"), "i64")
        rank = binary(e, "and", 64, value, f"splat (i64 {~((1 << CTA_RANK_SHIFT) - 1)})")
        result = e.op(f"icmp eq <32 x i64> {rank}, {own}")
    elif space in ("shared::cluster", "local"):
        number = (SHARED_WINDOW if space != "local" else LOCAL_WINDOW) >> 56
        result = e.op(f"icmp eq <32 x i64> {window}, splat (i64 {number})")
    else:
        params = e.load_field("params", "i64")
        inside = binary(e, "sub", 64, value, e.splat(params, "i64"))
        size = e.splat(e.op(f"zext i32 {e.load_field('param_size')} to i64"), "i64")
        is_param = e.op(f"icmp ult <32 x i64> {inside}, {size}")
        if space.startswith("param"):
            result = is_param
        elif space == "const":
            raise e.refuse("const windows")
        else:
            low = e.op(f"icmp eq <32 x i64> {window}, zeroinitializer")
            outside = e.op(f"xor <32 x i1> {is_param}, splat (i1 true)")
            result = e.op(f"and <32 x i1> {low}, {outside}")
    e.write(ins.operands[0], e.from_lanes(result))


@emits("mapa", types=("u32", "u64"))
def mapa(e: Emitter, ins: Instruction, mods: Mods) -> None:
    """The same offset in the shared memory of another CTA of the cluster."""
    operand_count(e, ins, 3)
    bits = width(mods.last())
    mods.maybe("shared::cluster")
    address = e.bits(source(e, ins.operands[1], bits, False))
    rank = e.bits(e.value(ins.operands[2], 32))
    if bits == 64:
        rank = extend(e, rank, 32, 64, False)
    keep = (1 << CTA_RANK_SHIFT) - 1 | (0 if bits == 32 else 0xFF << 56)
    offset = binary(e, "and", bits, address, f"splat (i{bits} {keep})")
    up = binary(e, "shl", bits, rank, f"splat (i{bits} {CTA_RANK_SHIFT})")
    put(e, ins, binary(e, "or", bits, offset, up), bits)


@emits("getctarank", types=("u32", "u64"))
def getctarank(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 2)
    bits = width(mods.last())
    mods.maybe("shared::cluster")
    address = e.bits(source(e, ins.operands[1], bits, False))
    rank = binary(e, "lshr", bits, address, f"splat (i{bits} {CTA_RANK_SHIFT})")
    rank = rank if bits == 32 else cut(e, rank, 64, 32)
    put(e, ins, binary(e, "and", 32, rank, "splat (i32 255)"), 32)


@emits("createpolicy", types=("b64",))
def createpolicy(e: Emitter, ins: Instruction, mods: Mods) -> None:
    """Cache policies change nothing here: each is 0."""
    mods.left.clear()
    e.write(ins.operands[0], e.constant(0, 64))
