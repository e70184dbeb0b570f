"""cp.async.bulk.tensor and cp.reduce.async.bulk.tensor: boxes of a tensor between global and shared memory.

Source: PTX ISA, "cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor", "cp.async.bulk.prefetch.tensor". Tile mode only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from refluent.emulator import tensormap
from refluent.emulator.isa import CONTINUE, AsyncOp, Handler, Modifiers, Outcome, handles
from refluent.emulator.isa.bulk import add_to_group, reduce_elements
from refluent.emulator.isa.mbarrier import complete_tx, completion
from refluent.emulator.isa.operand import CHUNK
from refluent.emulator.isa.registers import lane_value, lanes_of
from refluent.emulator.isa.tma_box import Region, box_elements, clip, inside, load_box, shared_chunks
from refluent.emulator.memory import MemoryFault, shared_offset, shared_rank
from refluent.emulator.ptx import Addr, Composite, Instruction, Kernel, Operand, Vec
from refluent.emulator.state import CTA_RANK_SHIFT
from refluent.emulator.tensormap import TensorMap

if TYPE_CHECKING:
    from refluent.emulator.cta import CTA, MachineWarp
    from refluent.emulator.machine import Machine

_DIMENSIONS = ["1d", "2d", "3d", "4d", "5d"]


@dataclass(frozen=True)
class _Tensor:
    """The operand [tensorMap, {coordinates}]."""

    address: Addr
    coordinates: tuple[Operand, ...]

    @staticmethod
    def of(operand: Operand, modifiers: Modifiers, rank: int) -> _Tensor:
        if not isinstance(operand, Composite) or not isinstance(operand.items[1], Vec):
            raise modifiers.refuse("[tensorMap, {coordinates}] expected")
        base, coordinates = operand.items[0], operand.items[1].items
        if len(coordinates) != rank:
            raise modifiers.refuse(f"{len(coordinates)} coordinates for {rank} dimensions")
        return _Tensor(base if isinstance(base, Addr) else Addr(base, 0), coordinates)  # type: ignore[arg-type]

    def read(self, machine: Machine, warp: MachineWarp, lane: int) -> tuple[TensorMap, tuple[int, ...]]:
        address = int(warp.locate(self.address)[lane])
        raw = bytes(machine.memory.view(address, tensormap.DESCRIPTOR_BYTES))
        values = [lane_value(warp, c, lane) & 0xFFFFFFFF for c in self.coordinates]
        return _parse(raw), tuple(v - (1 << 32) if v >> 31 else v for v in values)


@lru_cache(maxsize=1024)
def _parse(raw: bytes) -> TensorMap:
    parsed = tensormap.parse(raw)
    problems = tensormap.violations(parsed)
    if problems:
        raise MemoryFault("TMA descriptor: " + "; ".join(problems))
    inner = parsed.box[0] * parsed.element_bytes
    if parsed.swizzle and inner != parsed.swizzle:
        raise MemoryFault(
            f"TMA box with {inner} inner bytes under a {parsed.swizzle}-byte swizzle: layout not modelled"
        )
    return parsed


@handles("cp.async.bulk.tensor")
def prepare_copy(instr: Instruction, kernel: Kernel) -> Handler:
    """Loads (shared destination) and stores (global destination)."""
    modifiers = Modifiers(instr, kernel, skip=3)
    rank = int(modifiers.choose(_DIMENSIONS)[0])
    if modifiers.left and modifiers.left[0] == "global":
        return _prepare_store(instr, modifiers, rank, None)
    modifiers.choose(["shared::cluster", "shared::cta"])
    modifiers.choose(["global"])
    modifiers.choose(["tile"], "tile")
    modifiers.choose(["mbarrier::complete_tx::bytes"])
    multicast = modifiers.flag("multicast::cluster")
    group = modifiers.take("cta_group::")
    modifiers.flag("L2::cache_hint")
    modifiers.done()
    destination, source, barrier, *rest = instr.operands
    tensor = _Tensor.of(source, modifiers, rank)
    if not isinstance(destination, Addr) or not isinstance(barrier, Addr):
        raise modifiers.refuse("[dst], [tensorMap, {...}], [mbarrier] expected")
    pair = group == "cta_group::2"

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        for lane in lanes_of(mask):
            box, coordinates = tensor.read(machine, warp, lane)
            target = int(warp.locate(destination)[lane])
            signal = int(warp.locate(barrier)[lane])
            ranks = lane_value(warp, rest[0], lane) & 0xFFFF if multicast else 1 << shared_rank(target)
            load = _Load(machine, cta, warp, instr, box, coordinates, target, signal, ranks, pair, multicast)
            load.submit()
        return CONTINUE

    return handler


@dataclass(frozen=True, eq=False)
class _Load:
    """One box on its way into the shared memory of one or more CTAs."""

    machine: Machine
    cta: CTA
    warp: MachineWarp
    instr: Instruction
    box: TensorMap
    coordinates: tuple[int, ...]
    target: int
    signal: int
    ranks: int
    pair: bool
    multicast: bool

    def submit(self) -> None:
        offset = shared_offset(self.target)
        _check_shared(self.cta, offset, self.box, self.instr)
        first = self.cta.peer((self.ranks & -self.ranks).bit_length() - 1)
        signal_cta, signal_offset = self._signal(first)
        completion(self.machine, self.warp, signal_cta.rank << CTA_RANK_SHIFT | signal_offset)
        op = AsyncOp(
            kind="tma load",
            cta=self.cta,
            warp=self.warp,
            instr=self.instr.index,
            perform=lambda: self._perform(op, shared_chunks(offset, self.box.box_bytes, self.box.swizzle)),
            describe=lambda: f"{self.instr.name} of box {self.box.box} at {self.coordinates}",
            nbytes=self.box.box_bytes * self.ranks.bit_count(),
            channel=self.machine.check.channel_of(signal_cta, signal_offset),
        )
        self.machine.submit(op)

    def _perform(self, op: AsyncOp, chunks: np.ndarray) -> None:
        check, region = self.machine.check, clip(self.box, self.coordinates)
        if check.enabled and not region.empty:
            starts, run = region.rows()
            check.async_global(op, starts, run, write=False)
        data = _read_global(self.machine, self.box, region)
        for cta in self.cta.cluster.ctas:
            if not self.ranks >> cta.rank & 1:
                continue
            signal_cta, signal_offset = self._signal(cta)
            if check.enabled:
                channel = check.channel_of(signal_cta, signal_offset)
                check.async_shared(op, cta, chunks * CHUNK, CHUNK, write=True, channel=channel)
            cta.shared.view(np.complex128)[chunks] = data
            complete_tx(self.machine, signal_cta, signal_offset, self.box.box_bytes, op)

    def _signal(self, cta: CTA) -> tuple[CTA, int]:
        """The barrier that hears of the bytes that arrive in a CTA."""
        return cta.peer(self._signal_rank(cta.rank)), shared_offset(self.signal)

    def _signal_rank(self, rank: int) -> int:
        """CTA whose barrier hears of the bytes that arrived in CTA `rank`."""
        if self.pair:
            return rank & ~1 | shared_rank(self.signal) & 1
        return rank if self.multicast else shared_rank(self.signal)


def _read_global(machine: Machine, box: TensorMap, region: Region) -> np.ndarray:
    if region.empty:
        return load_box(box, region, None, 0)
    block = machine.memory.find(region.address, region.end - region.address)
    if machine.memory.footprint is not None:
        machine.memory.note(block, *region.rows(), False)
    return load_box(box, region, block.data, block.base)


def _check_shared(cta: CTA, offset: int, box: TensorMap, instr: Instruction) -> None:
    if offset % 128:
        raise MemoryFault(f"{instr.name}: shared address {offset:#x} is not a multiple of 128 bytes")
    if offset + box.box_bytes > cta.shared_end:
        raise MemoryFault(f"{instr.name}: the box of {box.box_bytes} bytes at {offset:#x} leaves shared memory")


@handles("cp.reduce.async.bulk.tensor")
def prepare_reduce(instr: Instruction, kernel: Kernel) -> Handler:
    """cp.reduce.async.bulk.tensor.Nd.global.shared::cta.{add,min,max,inc,dec,and,or,xor}.tile.bulk_group"""
    modifiers = Modifiers(instr, kernel, skip=4)
    rank = int(modifiers.choose(_DIMENSIONS)[0])
    operation = modifiers.choose(["add", "min", "max", "inc", "dec", "and", "or", "xor"])
    return _prepare_store(instr, modifiers, rank, operation)


def _prepare_store(instr: Instruction, modifiers: Modifiers, rank: int, operation: str | None) -> Handler:
    modifiers.choose(["global"])
    modifiers.choose(["shared::cta"])
    modifiers.choose(["tile"], "tile")
    modifiers.choose(["bulk_group"])
    modifiers.flag("L2::cache_hint")
    modifiers.done()
    tensor = _Tensor.of(instr.operands[0], modifiers, rank)
    source = instr.operands[1]
    if not isinstance(source, Addr):
        raise modifiers.refuse("[tensorMap, {...}], [src] expected")

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        offsets = warp.locate(source)
        stores = []
        for lane in lanes_of(mask):
            store = (*tensor.read(machine, warp, lane), shared_offset(int(offsets[lane])))
            if operation is None and store in stores:
                continue  # a warp that does not elect a lane stores the same box many times: once is the same
            stores.append(store)
        for box, coordinates, offset in stores:
            _check_shared(cta, offset, box, instr)
            _submit_store(machine, cta, warp, instr, box, coordinates, offset, operation)
        return CONTINUE

    return handler


def _submit_store(
    machine: Machine,
    cta: CTA,
    warp: MachineWarp,
    instr: Instruction,
    box: TensorMap,
    coordinates: tuple[int, ...],
    offset: int,
    operation: str | None,
) -> None:
    region = clip(box, coordinates)
    chunks = shared_chunks(offset, box.box_bytes, box.swizzle)
    data: list[np.ndarray] = []

    def read() -> None:
        if machine.check.enabled:
            machine.check.async_shared(op, cta, chunks * CHUNK, CHUNK, write=False)
        data.append(cta.shared.view(np.complex128)[chunks])

    def write() -> None:
        if region.empty:
            return
        block = machine.memory.find(region.address, region.end - region.address)
        if block.read_only:
            raise MemoryFault(f"{instr.name}: write to read-only memory ({block.name})")
        if machine.memory.footprint is not None:
            machine.memory.note(block, *region.rows(), True)
        if machine.check.enabled:
            starts, run = region.rows()
            for writes in (True,) if operation is None else (False, True):
                machine.check.async_global(op, starts, run, write=writes, atomic=operation is not None)
        target = region.view(block.data, block.base)
        values = box_elements(box, data[0])[inside(region)]
        target[...] = values if operation is None else reduce_elements(target, values, operation, box.element)

    op = AsyncOp(
        kind="tma store" if operation is None else f"tma reduce {operation}",
        cta=cta,
        warp=warp,
        instr=instr.index,
        read=read,
        perform=write,
        describe=lambda: f"{instr.name} of box {box.box} at {coordinates}",
        nbytes=box.box_bytes,
        row="bulk",
        source_channel=machine.check.channel(warp, "bulk source"),
    )
    add_to_group(warp, op)
    machine.submit(op)


@handles("cp.async.bulk.prefetch.tensor")
def prepare_prefetch(instr: Instruction, kernel: Kernel) -> Handler:
    """A hint: no effect on memory."""
    modifiers = Modifiers(instr, kernel, skip=4)
    modifiers.choose(_DIMENSIONS)
    modifiers.choose(["L2"])
    modifiers.choose(["global"])
    modifiers.choose(["tile"], "tile")
    modifiers.flag("L2::cache_hint")
    modifiers.done()
    return lambda machine, cta, warp, mask: CONTINUE
