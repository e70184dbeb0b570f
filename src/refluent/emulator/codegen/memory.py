"""Plain loads and stores, through the memory runtime; parameters at fixed offsets are read in place."""

from __future__ import annotations

from refluent.emulator.codegen import control
from refluent.emulator.codegen.emitter import Emitter, Val, vec
from refluent.emulator.codegen.integer import binary, cut, extend
from refluent.emulator.codegen.moves import source
from refluent.emulator.codegen.registry import INTEGER, Mods, emits
from refluent.emulator.ptx import Addr, Imm, Instruction, Operand, Reg, Sink, Symbol, Vec
from refluent.emulator.state import (
    FAULT,
    GENERIC,
    GLOBAL,
    LOCAL,
    PARAM,
    RUNTIME_MEM_ACCESS,
    SHARED,
    SHARED_CLUSTER,
    offset_of,
)

SPACES = {
    "": GENERIC,
    "global": GLOBAL,
    "const": GLOBAL,
    "shared": SHARED,
    "shared::cta": SHARED,
    "shared::cluster": SHARED_CLUSTER,
    "local": LOCAL,
    "param": PARAM,
    "param::entry": PARAM,
    "param::func": PARAM,
}
CACHE = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "weak", "unified")
MEMORY_TYPES = (*INTEGER, "b128", "f32", "f64", "f16", "bf16", "f16x2", "bf16x2")


def take_space(mods: Mods) -> str:
    return mods.maybe(*(name for name in SPACES if name))


def drop_hints(mods: Mods) -> bool:
    """Caching is not modelled. True when a cache policy operand follows."""
    policy = "L2::cache_hint" in mods.left
    mods.left = [m for m in mods.left if m not in CACHE and not m.startswith(("L1::", "L2::"))]
    return policy


def element(e: Emitter, mods: Mods) -> tuple[int, bool, int]:
    """Bytes of an element, whether it is signed, and how many a lane moves."""
    kind = mods.last()
    count = mods.maybe("v2", "v4", "v8")
    size = {"f16x2": 4, "bf16x2": 4}.get(kind) or int(kind.lstrip("abcdefsu")) // 8
    return size, kind[0] == "s", int(count[1:]) if count else 1


def items_of(e: Emitter, operand: Operand, count: int) -> tuple[Operand, ...]:
    items = operand.items if isinstance(operand, Vec) else (operand,)
    if len(items) != count:
        raise e.refuse(f"{len(items)} registers for {count} elements")
    return items


@emits("ld", "ldu", types=MEMORY_TYPES)
def load(e: Emitter, ins: Instruction, mods: Mods) -> None:
    space = take_space(mods)
    policy = drop_hints(mods)
    size, signed, count = element(e, mods)
    if len(ins.operands) != (3 if policy else 2):
        raise e.refuse(f"{len(ins.operands)} operands")
    targets = items_of(e, ins.operands[0], count)
    address = ins.operands[1]
    if not isinstance(address, Addr):
        raise e.refuse(f"address {address}")
    base = address.base
    if isinstance(base, Reg) and base.name in e.kernel.call_params:
        e.write(targets[0], fit(e, e.read(base), targets[0], signed))
        return
    fixed = isinstance(base, Symbol) and e.kernel.variables[base.name].space == "param"
    if fixed and space.startswith("param"):
        _load_parameter(e, address, targets, size, signed)
        return
    access(e, ins, address, SPACES[space], size, count, False)
    for i, target in enumerate(targets):
        if not isinstance(target, Sink):
            e.write(target, fit(e, _from_data(e, size, i), target, signed))


def _load_parameter(e: Emitter, address: Addr, targets: tuple[Operand, ...], size: int, signed: bool) -> None:
    assert isinstance(address.base, Symbol)
    variable = e.kernel.variables[address.base.name]
    start = variable.offset + address.offset
    if address.offset < 0 or address.offset + size * len(targets) > variable.size:
        raise e.refuse(f"a read past parameter {variable.name}")
    params = e.load_field("params", "ptr")
    for i, target in enumerate(targets):
        parts = []
        for step in range(0, size, 8):
            at = e.op(f"getelementptr i8, ptr {params}, i64 {start + size * i + step}")
            n = 8 * min(size, 8)
            scalar = e.op(f"load i{n}, ptr {at}, align {min(size, 4)}")
            parts.append(e.from_bits(e.splat(scalar, f"i{n}"), n))
        val = parts[0] if len(parts) == 1 else e.from_halves(parts[0], parts[1])
        if not isinstance(target, Sink):
            e.write(target, fit(e, val, target, signed))


def fit(e: Emitter, val: Val, target: Operand, signed: bool) -> Val:
    """A loaded element in its register, which may be wider."""
    if not isinstance(target, Reg):
        raise e.refuse(f"destination {target}")
    if target.storage == val.bits:
        return val
    if target.storage < val.bits or val.bits == 128 or target.storage == 128:
        raise e.refuse(f"{val.bits}-bit element in {target.bits}-bit register {target.name}")
    return e.from_bits(extend(e, e.bits(val), val.bits, target.storage, signed), target.storage)


def _from_data(e: Emitter, size: int, i: int) -> Val:
    start = offset_of("data") + 32 * size * i
    n = min(8 * size, 64)
    if size == 16:
        # Low and high words are elements of their own.
        low, high = (e.op(f"getelementptr i8, ptr %s, i64 {start + step}") for step in (0, 256))
        pair = [e.op(f"load <32 x i64>, ptr {p}, align 64") for p in (low, high)]
        return e.from_halves(e.from_bits(pair[0], 64), e.from_bits(pair[1], 64))
    at = e.op(f"getelementptr i8, ptr %s, i64 {start}")
    return e.from_bits(e.op(f"load {vec(f'i{n}')}, ptr {at}, align 32"), n)


@emits("st", types=MEMORY_TYPES, writes=0)
def store(e: Emitter, ins: Instruction, mods: Mods) -> None:
    space = take_space(mods)
    policy = drop_hints(mods)
    size, _, count = element(e, mods)
    if len(ins.operands) != (3 if policy else 2):
        raise e.refuse(f"{len(ins.operands)} operands")
    address = ins.operands[0]
    if not isinstance(address, Addr):
        raise e.refuse(f"address {address}")
    items = items_of(e, ins.operands[1], count)
    if isinstance(address.base, Reg) and address.base.name in e.kernel.call_params:
        e.write(address.base, source(e, items[0], 8 * size, False))
        return
    for i, item in enumerate(items):
        _to_data(e, item, size, i)
    access(e, ins, address, SPACES[space], size, count, True)


def _to_data(e: Emitter, item: Operand, size: int, i: int) -> None:
    start = offset_of("data") + 32 * size * i
    bits = 8 * size
    if isinstance(item, Reg):
        val = e.read(item)
        if val.bits < bits:
            raise e.refuse(f"{bits}-bit element from {item.bits}-bit register {item.name}")
    else:
        is_float = isinstance(item, Imm) and item.float_bits != 0
        val = e.float_value(item, bits) if is_float else e.value(item, bits)
    if bits == 128:
        for half, step in zip(e.halves(val), (0, 256)):
            at = e.op(f"getelementptr i8, ptr %s, i64 {start + step}")
            e.line(f"store <32 x i64> {e.bits(half)}, ptr {at}, align 64")
        return
    name = e.bits(val)
    if val.bits > bits:
        name = cut(e, name, val.bits, bits)
    at = e.op(f"getelementptr i8, ptr %s, i64 {start}")
    e.line(f"store {vec(f'i{bits}')} {name}, ptr {at}, align 32")


def address_lanes(e: Emitter, address: Addr) -> str:
    """u64 lane addresses; a 32-bit base wraps at 32 bits."""
    base = address.base
    if isinstance(base, Reg) and base.bits == 32:
        at = e.bits(e.read(base))
        if address.offset:
            at = binary(e, "add", 32, at, f"splat (i32 {address.offset & 0xFFFFFFFF})")
        return extend(e, at, 32, 64, False)
    at = e.bits(source(e, base, 64, False))
    if address.offset:
        at = binary(e, "add", 64, at, f"splat (i64 {address.offset})")
    return at


def access(e: Emitter, ins: Instruction, address: Addr, space: int, size: int, count: int, stores: bool) -> None:
    """Call the memory runtime; data waits (or will wait) in the record. A 16-byte element counts as two of 8."""
    lanes = address_lanes(e, address)
    addresses = e.op(f"getelementptr i8, ptr %s, i64 {offset_of('addresses')}")
    e.line(f"store <32 x i64> {lanes}, ptr {addresses}, align 64")
    active = e.active()
    n = e.name()[1:]
    if e.guard is not None:
        none = e.op(f"icmp eq i32 {active}, 0")
        e.line(f"br i1 {none}, label %join_{n}, label %do_{n}")
        e.label(f"do_{n}")
    table = e.load_field("runtime", "ptr")
    slot = e.op(f"getelementptr ptr, ptr {table}, i64 {RUNTIME_MEM_ACCESS}")
    function = e.op(f"load ptr, ptr {slot}, align 8")
    data = e.op(f"getelementptr i8, ptr %s, i64 {offset_of('data')}")
    numbers = [e.op(f"ptrtoint ptr {p} to i64") for p in ("%s", addresses, data)]
    elements = (8, 2 * count) if size == 16 else (size, count)
    result = e.op(
        f"call i32 {function}(i64 {numbers[0]}, i32 {ins.index}, i32 {active}, i64 {numbers[1]}, i64 {numbers[2]}, "
        f"i32 {elements[0]}, i32 {elements[1]}, i32 {space}, i32 {int(stores)})"
    )
    failed = e.op(f"icmp ne i32 {result}, 0")
    e.line(f"br i1 {failed}, label %bad_{n}, label %join_{n}, !prof !0")
    e.label(f"bad_{n}")
    e.store_field("instr", str(ins.index))
    e.store_field("fault", result)
    control.leave(e, FAULT)
    e.label(f"join_{n}")


__all__ = ["access", "address_lanes", "load", "store"]
