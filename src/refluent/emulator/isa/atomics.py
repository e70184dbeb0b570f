"""Loads and stores with memory order, atom and red: what orders or polls memory.

Source: PTX ISA, "ld", "st", "atom", "red", and its memory consistency model for which of them synchronise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from refluent.emulator import runtime, state
from refluent.emulator.check.order import scope_of
from refluent.emulator.check.shadow import STRONG
from refluent.emulator.isa import CONTINUE, YIELD, Handler, Modifiers, Outcome, handles
from refluent.emulator.isa.arithmetic import combine, element_bytes
from refluent.emulator.isa.mbarrier import active
from refluent.emulator.ptx import Addr, Imm, Instruction, Kernel, Operand, Reg, Sink, Vec

if TYPE_CHECKING:
    from refluent.emulator.cta import CTA, MachineWarp
    from refluent.emulator.machine import Machine

SPACES = {
    "global": state.GLOBAL,
    "shared": state.SHARED,
    "shared::cta": state.SHARED,
    "shared::cluster": state.SHARED_CLUSTER,
    "generic": state.GENERIC,
}
SCOPES = ("cta", "cluster", "gpu", "sys")
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_CACHE = ("L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate")
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}


class Access:
    """One access of a warp's lanes: located, checked, then copied."""

    def __init__(self, machine: Machine, warp: MachineWarp, mask: int, address: Addr, nbytes: int, space: int) -> None:
        self.machine, self.warp, self.mask, self.nbytes, self.space = machine, warp, mask, nbytes, space
        self.addresses = warp.locate(address).astype(np.int64)

    def locate(self, store: bool) -> None:
        """Find every lane's memory. Raises the fault of a bad address."""
        warp = self.warp
        code = runtime.locate_lanes(
            warp.address, self.mask, self.addresses.ctypes.data, self.nbytes, self.space, int(store)
        )
        if code:
            warp.fault = code
            raise self.machine.fault(warp, runtime.fault_text(warp))

    def touch(self, store: bool) -> None:
        if self.machine.check.enabled:
            self.machine.check.lanes_access(self.warp, self.mask, self.addresses, self.nbytes, store, STRONG)

    def copy(self, data: np.ndarray, store: bool, mask: int) -> None:
        """Between memory and `data`, (count, 32) of unsigned elements."""
        runtime.copy_lanes(
            self.warp.address, mask, data.ctypes.data, data.itemsize, self.nbytes // data.itemsize, int(store)
        )

    def words(self) -> list[int]:
        """Where the lanes' memory lies, each place once: the names of semaphores."""
        pointers = self.warp.context[0]["pointers"]
        return sorted({int(pointers[lane]) for lane in active(self.mask)})


def registers(operand: Operand) -> tuple[Any, ...]:
    """The registers of a data operand."""
    return operand.items if isinstance(operand, Vec) else (operand,)


def read_data(warp: MachineWarp, operands: tuple[Any, ...], nbytes: int) -> np.ndarray:
    """(count, 32) raw elements from registers or immediates."""
    dtype = _UNSIGNED[nbytes]
    rows = []
    for operand in operands:
        if isinstance(operand, Reg) and operand.storage == 128:
            rows += list(warp.view(operand))
        elif isinstance(operand, Reg):
            rows.append(warp.view(operand).astype(dtype))
        else:
            rows.append(np.full(state.LANES, operand.unsigned(8 * nbytes), dtype))
    return np.ascontiguousarray(np.stack(rows))


def write_data(warp: MachineWarp, operands: tuple[Any, ...], data: np.ndarray, mask: int, signed: bool) -> None:
    """Put (count, 32) raw elements into registers; narrow ones are extended."""
    if len(operands) == 1 and isinstance(operands[0], Reg) and operands[0].storage == 128:
        warp.set(operands[0], data, mask)
        return
    for operand, row in zip(operands, data):
        if isinstance(operand, Reg):
            if row.dtype.itemsize * 8 < operand.storage and signed:
                row = row.view(f"i{row.dtype.itemsize}").astype(np.int64).view(np.uint64)
            warp.set(operand, row.astype(warp.view(operand).dtype), mask)


def _memory_modifiers(mods: Modifiers) -> tuple[str, str, int, str]:
    """(order, space, vector length, type) of an ld or st."""
    order = mods.choose(("relaxed", "acquire", "release", "volatile", "mmio"))
    mods.choose(SCOPES, "")
    space = mods.choose(("global", "shared", "shared::cta", "shared::cluster"), "generic")
    for names in (_CACHE, ("L2::cache_hint",), ("L2::64B", "L2::128B", "L2::256B")):
        mods.choose(names, "")
    count = _VECTORS.get(mods.choose(tuple(_VECTORS), ""), 1)
    kind = mods.left.pop() if mods.left else ""
    mods.done()
    return order, space, count, kind


@handles("ld")
def _prepare_load(instr: Instruction, kernel: Kernel) -> Handler:
    mods = Modifiers(instr, kernel)
    order, space_name, count, kind = _memory_modifiers(mods)
    nbytes = element_bytes(kind, mods)
    targets, address = registers(instr.operands[0]), instr.operands[1]
    assert isinstance(address, Addr)
    if nbytes == 16:
        nbytes, count = 8, 2
    space, scope = SPACES[space_name], scope_of(instr)

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        access = Access(machine, warp, mask, address, nbytes * count, space)
        access.locate(False)
        access.touch(False)
        data = np.zeros((count, state.LANES), _UNSIGNED[nbytes])
        access.copy(data, False, mask)
        write_data(warp, targets, data, mask, kind[0] == "s")
        if machine.check.enabled:
            machine.check.observe(warp, access.words(), order == "acquire", scope)
        polled = (warp.instr, access.addresses.tobytes(), data.tobytes())
        if warp.polled == polled:
            return YIELD
        warp.polled = polled
        return CONTINUE

    return handler


@handles("st")
def _prepare_store(instr: Instruction, kernel: Kernel) -> Handler:
    mods = Modifiers(instr, kernel)
    order, space_name, count, kind = _memory_modifiers(mods)
    nbytes = element_bytes(kind, mods)
    address, sources = instr.operands[0], registers(instr.operands[1])
    assert isinstance(address, Addr)
    if nbytes == 16:
        nbytes, count = 8, 2
    space, scope = SPACES[space_name], scope_of(instr)

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        access = Access(machine, warp, mask, address, nbytes * count, space)
        access.locate(True)
        access.touch(True)
        if machine.check.enabled:
            machine.check.announce(warp, access.words(), order == "release", scope)
        access.copy(read_data(warp, sources, nbytes), True, mask)
        return CONTINUE

    return handler


@handles("atom", "red")
def _prepare_atomic(instr: Instruction, kernel: Kernel) -> Handler:
    mods = Modifiers(instr, kernel)
    order = mods.choose(("relaxed", "acquire", "release", "acq_rel"), "relaxed")
    mods.choose(SCOPES, "gpu")
    space_name = mods.choose(("global", "shared", "shared::cta", "shared::cluster"), "generic")
    op = mods.choose(("add", "min", "max", "inc", "dec", "exch", "cas", "and", "or", "xor"))
    mods.flag("noftz")
    mods.flag("L2::cache_hint")
    count = _VECTORS.get(mods.choose(tuple(_VECTORS), ""), 1)
    kind = mods.left.pop() if mods.left else ""
    mods.done()
    nbytes = element_bytes(kind, mods)
    function = combine(op, kind, mods, flushing=space_name in ("global", "generic"))
    wide = nbytes == 16
    operands = list(instr.operands)
    target = operands.pop(0) if instr.opcode == "atom" else Sink()
    address = operands.pop(0)
    assert isinstance(address, Addr)
    sources = operands[: 2 if op == "cas" else 1]
    space, scope = SPACES[space_name], scope_of(instr)

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        access = Access(machine, warp, mask, address, nbytes * count, space)
        access.locate(True)
        access.touch(False)
        access.touch(True)
        words = access.words() if machine.check.enabled else []
        if words:
            machine.check.announce(warp, words, order in ("release", "acq_rel"), scope)
            machine.check.observe(warp, words, order in ("acquire", "acq_rel"), scope)
        size = 8 if wide else nbytes
        values = [read_data(warp, registers(source), size) for source in sources]
        old = _update(access, function, values, 2 if wide else count, _UNSIGNED[size])
        write_data(warp, registers(target), old, mask, False)
        polled = (warp.instr, access.addresses.tobytes(), old.tobytes())
        if op == "cas" and warp.polled == polled:
            return YIELD
        warp.polled = polled
        return CONTINUE

    return handler


def _update(
    access: Access, function: Callable[..., np.ndarray], values: list[np.ndarray], count: int, dtype: Any
) -> np.ndarray:
    """Read, combine and write; lanes that name the same place go one after the other. The old values."""
    old = np.zeros((count, state.LANES), dtype)
    lanes = active(access.mask)
    places = access.addresses[lanes]
    together = [access.mask] if len(np.unique(places)) == len(lanes) else [1 << lane for lane in lanes]
    for mask in together:
        access.copy(old, False, mask)
        access.copy(np.ascontiguousarray(function(old, *values)), True, mask)
    return old


@handles("st.bulk")
def _prepare_bulk_store(instr: Instruction, kernel: Kernel) -> Handler:
    mods = Modifiers(instr, kernel, skip=1)
    mods.choose(("weak",), "")
    space = SPACES[mods.choose(("shared::cta",), "generic")]
    mods.done()
    address, size, value = instr.operands
    assert isinstance(address, Addr)
    if not isinstance(value, Imm) or value.value:
        raise mods.refuse("stores zeros only")

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        nbytes = warp.scalar(size, mask)  # type: ignore[arg-type]
        for lane in active(mask):
            for start in range(0, nbytes, 8):
                access = Access(machine, warp, 1 << lane, Addr(address.base, address.offset + start), 8, space)
                access.locate(True)
                if machine.check.enabled:
                    machine.check.lanes_access(warp, 1 << lane, access.addresses, 8, True, 0)
                access.copy(np.zeros((1, state.LANES), np.uint64), True, 1 << lane)
        return CONTINUE

    return handler
