"""One launch: its program, the state every warp starts from, its clusters waiting for a place and running."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from refluent.emulator import isa, runtime, state
from refluent.emulator.check import wgmma_flow
from refluent.emulator.codegen.emitter import Options
from refluent.emulator.codegen.jit import CompiledKernel, compile_kernel
from refluent.emulator.codegen.registry import is_event
from refluent.emulator.cta import CTA, Cluster, MachineWarp
from refluent.emulator.isa import Handler
from refluent.emulator.launch import LaunchRequest
from refluent.emulator.memory import Block
from refluent.emulator.ptx import Module, parse
from refluent.emulator.report import Counts
from refluent.emulator.state import FULL_MASK, LANES

if TYPE_CHECKING:
    from refluent.emulator.machine import Machine

SM_THREADS, SM_SHARED, SM_CTAS, SM_REGISTERS = 2048, 228 * 1024, 32, 65536
RUNTIME_TABLE = np.zeros(state.RUNTIME_ENTRIES, np.uint64)
RUNTIME_TABLE[state.RUNTIME_MEM_ACCESS] = runtime.MEM_ACCESS


class Program:
    """A translated kernel. `run(warp.address)` executes a warp up to its next event and returns the code."""

    def __init__(self, compiled: CompiledKernel) -> None:
        self.compiled = compiled
        self.kernel = compiled.kernel
        self.run: Callable[[int], int] = compiled.run
        self.block_lengths = np.array([block.end - block.start for block in compiled.blocks], np.uint64)
        isa.load_handlers()
        self.handlers: list[Handler | None] = [None] * len(self.kernel.instructions)
        self.convergent = [False] * len(self.kernel.instructions)
        for instr in self.kernel.instructions:
            if is_event(instr):
                self.handlers[instr.index] = isa.prepare(instr, self.kernel)
                words = {instr.opcode, *instr.modifiers}
                self.convergent[instr.index] = not words.isdisjoint(("aligned", "bar", "sync"))

    @cached_property
    def wgmma_violations(self) -> list[tuple[int, str]]:
        """What the kernel's text does wrong with registers of wgmma: (instruction, words)."""
        return wgmma_flow.violations(self.kernel, self.compiled.blocks)


@lru_cache(maxsize=8)
def _module(ptx: str) -> Module:
    return parse(ptx)


@lru_cache(maxsize=24)
def translate(ptx: str, kernel: str, approx: str = "exact") -> Program:
    """Parse and compile one kernel of a PTX text. approx: see emulator.gpu. Raises UnsupportedPTX for what nobody
    knows how to execute."""
    kernels = _module(ptx).kernels
    if kernel not in kernels:
        raise LookupError(f"no kernel {kernel} among {', '.join(kernels)}")
    return Program(compile_kernel(kernels[kernel], Options(approx)))


class Launch:
    """A kernel queued or running. `after` is the launch it may overlap (programmatic dependent launch)."""

    def __init__(self, machine: Machine, request: LaunchRequest, program: Program, after: Launch | None) -> None:
        self.machine, self.request, self.program, self.after = machine, request, program, after
        self.kernel = program.kernel
        self.handlers, self.convergent = program.handlers, program.convergent
        self.grid, self.block, self.cluster = request.grid, request.block, request.cluster
        self.threads = request.threads
        self.warps = (self.threads + LANES - 1) // LANES
        self.cluster_size = self.cluster[0] * self.cluster[1] * self.cluster[2]
        self.cluster_grid = tuple(g // c for g, c in zip(self.grid, self.cluster))
        self.total_clusters = request.ctas // self.cluster_size
        dynamic = [v.offset for v in self.kernel.variables.values() if v.space == "shared" and v.dynamic]
        self.shared_end = max([self.kernel.static_shared, *dynamic]) + request.shared_bytes
        self.counts = Counts(self.kernel, self.warps, len(program.block_lengths))
        self.counters = np.zeros((self.warps, len(program.block_lengths)), np.uint64)
        self.pending_ops = 0
        self.running: list[Cluster] = []
        self.waiting = deque(machine.schedule.cta_order(self.total_clusters))
        self.triggered = 0  # CTAs that called griddepcontrol.launch_dependents or have left
        self.waiters: list[MachineWarp] = []  # warps of the next launch in griddepcontrol.wait
        self.completed = False
        self.processes = 0  # how many it runs in, once that is decided
        self.obstacle = ""  # why it is not more than one
        self.clocks: Any = None  # the checker's
        self.registers = min(SM_REGISTERS // (self.warps * LANES) // 8 * 8, 248)
        self._params = self._lay_out_params()
        self._symbols, self._symbol_blocks = self._module_variables()
        self._template = self._first_state()

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def finished(self) -> bool:
        return not self.waiting and not self.running

    @property
    def done(self) -> bool:
        """Whether every cluster has left and every asynchronous operation is done."""
        return self.finished and not self.pending_ops

    def block_counts(self, warp: int) -> np.ndarray:
        """How often warp `warp` of any CTA entered each block."""
        row: np.ndarray = self.counters[warp]
        return row

    # Placement

    @property
    def per_sm(self) -> int:
        """CTAs that one multiprocessor holds."""
        by_shared = SM_SHARED // (self.shared_end + 1) or 1
        return max(1, min(SM_THREADS // (self.warps * LANES), by_shared, SM_CTAS))

    def _eligible(self) -> bool:
        first = self.machine.launches[0]
        if self is first:
            return True
        index = self.machine.launches.index(self)
        before = self.machine.launches[index - 1]
        return self.after is before and before.may_be_overlapped

    @property
    def may_be_overlapped(self) -> bool:
        """Whether every CTA has started and has let dependents launch."""
        return not self.waiting and self.triggered >= self.request.ctas

    def start_clusters(self) -> None:
        """Give waiting clusters the places that are free."""
        if not self.waiting or not self._eligible():
            return
        machine = self.machine
        used = sum(len(other.running) * other.cluster_size / other.per_sm for other in machine.launches)
        need = self.cluster_size / self.per_sm
        while self.waiting and (used + need <= machine.num_sms or not any(o.running for o in machine.launches)):
            self.start(self.waiting.popleft())
            used += need

    def take_waiting(self) -> tuple[int, int, int] | None:
        """Cancel the launch of a waiting cluster (clusterlaunchcontrol): its first CTA's index."""
        if not self.waiting:
            return None
        index = self.waiting.popleft()
        self.triggered += self.cluster_size
        return self._origin(index)

    def _origin(self, index: int) -> tuple[int, int, int]:
        across, down, _ = self.cluster_grid
        place = (index % across, index // across % down, index // (across * down))
        return (place[0] * self.cluster[0], place[1] * self.cluster[1], place[2] * self.cluster[2])

    def start(self, index: int) -> None:
        """Give a cluster its place."""
        cluster = Cluster(self, index, self._origin(index))
        self.running.append(cluster)
        self.machine.check.cluster_starts(cluster)
        for cta in cluster.ctas:
            cta.pool = SM_REGISTERS - self.registers * self.warps * LANES
            for warp in cta.warps:
                self._initialise(warp)
        for cta in cluster.ctas:
            for warp in cta.warps:
                self.machine.start(warp)

    def _initialise(self, warp: MachineWarp) -> None:
        cta = warp.cta
        warp.block[:] = self._template
        record = warp.record
        record["regs"] = warp.buffer.ctypes.data
        record["counters"] = self.counters[warp.index].ctypes.data
        if self.kernel.local_size:
            warp.local = state.aligned_bytes(self.kernel.local_size * LANES)
            record["local"] = warp.local.ctypes.data
        record["ctaid"] = cta.ctaid
        rank, shape = cta.rank, self.cluster
        record["cluster_ctaid"] = (rank % shape[0], rank // shape[0] % shape[1], rank // (shape[0] * shape[1]))
        record["clusterid"] = tuple(c // s for c, s in zip(cta.ctaid, shape))
        record["cluster_ctarank"] = rank
        record["shared_base"] = rank << state.CTA_RANK_SHIFT
        record["warpid"] = warp.index
        record["smid"] = (cta.cluster.index * self.cluster_size + rank) % self.machine.num_sms
        thread = np.arange(LANES) + warp.index * LANES
        bx, by, _ = self.block
        record["tid"] = (thread % bx, thread // bx % by, thread // (bx * by))
        alive = state.mask_of(thread < self.threads)
        warp.mask, warp.exited = alive, FULL_MASK & ~alive
        warp.registers = self.registers
        warp.context = np.zeros(1, runtime.CONTEXT)
        context = warp.context[0]
        context["header"] = self.machine.memory.header.ctypes.data
        context["shared_end"], context["rank"], context["ranks"] = self.shared_end, rank, self.cluster_size
        context["shared"][: self.cluster_size] = [peer.shared.ctypes.data for peer in cta.cluster.ctas]
        record["cta"] = warp.context.ctypes.data
        self.machine.check.warp_starts(warp)

    # What every warp starts from

    def _lay_out_params(self) -> np.ndarray:
        params = state.aligned_bytes(max(self.kernel.param_size, 1))
        if len(self.request.params) != len(self.kernel.params):
            raise ValueError(f"{self.name} takes {len(self.kernel.params)} parameters, got {len(self.request.params)}")
        for variable, value in zip(self.kernel.params, self.request.params):
            if len(value) != variable.size:
                raise ValueError(f"parameter {variable.name} has {variable.size} bytes, got {len(value)}")
            params[variable.offset : variable.offset + variable.size] = np.frombuffer(value, np.uint8)
        self._param_block = self.machine.memory.register(
            params.ctypes.data, len(params), "the kernel's parameters", read_only=True, owner=params
        )
        return params

    def _module_variables(self) -> tuple[np.ndarray, list[Block]]:
        """Global and constant variables of the module; they live as long as the machine and keep what kernels write."""
        known = self.machine.module_variables.get(id(self.program))
        if known is not None:
            return known
        addresses = np.zeros(max(len(self.kernel.symbols), 1), np.uint64)
        blocks = []
        for variable in self.kernel.symbols:
            data = state.aligned_bytes(max(variable.size, 1))
            if variable.data:
                data[: len(variable.data)] = np.frombuffer(variable.data, np.uint8)
            block = self.machine.memory.register(
                data.ctypes.data, len(data), variable.name, read_only=variable.space == "const", owner=data
            )
            assert block is not None
            blocks.append(block)
            addresses[variable.index] = data.ctypes.data
        self.machine.module_variables[id(self.program)] = addresses, blocks
        return addresses, blocks

    def _first_state(self) -> np.ndarray:
        block = state.aligned_bytes(state.WARP_STATE.itemsize)
        record = block.view(state.WARP_STATE)[0]
        values: dict[str, Any] = {
            "params": self._params.ctypes.data,
            "param_size": self.kernel.param_size,
            "symbols": self._symbols.ctypes.data,
            "runtime": RUNTIME_TABLE.ctypes.data,
            "budget": self.machine.budget,
            "gridid": len(self.machine.report.launches),
            "nctaid": self.grid,
            "ntid": self.block,
            "nclusterid": self.cluster_grid,
            "cluster_nctaid": self.cluster,
            "cluster_nctarank": self.cluster_size,
            "nwarpid": self.warps,
            "nsmid": self.machine.num_sms,
            "dynamic_smem_size": self.request.shared_bytes,
            "total_smem_size": self.shared_end,
            "local_size": self.kernel.local_size,
            "seed": self.machine.seed & FULL_MASK,
            "is_explicit_cluster": int(self.cluster_size > 1),
        }
        for name, value in values.items():
            record[name] = value
        return block

    # The end

    def cta_left(self, cta: CTA) -> None:
        """Every warp of a CTA has left the kernel."""
        if not cta.launch_dependents:
            cta.launch_dependents = True
            self.triggered += 1
        for peer in cta.cluster.ctas:
            for warp in peer.warps:
                warp.context[0]["shared"][cta.rank] = 0
        if cta.cluster.finished:
            self.running.remove(cta.cluster)
            self.machine.check.cluster_ends(cta.cluster)

    def complete(self) -> None:
        """Every cluster has left and every asynchronous operation is done."""
        self.completed = True
        self.counts.instructions[:] = self.counters @ self.program.block_lengths
        self.machine.report.launched(self)
        self.machine.check.launch_ends(self)
        self.close()
        self.machine.wake(self)
        self.after = None

    def close(self) -> None:
        """Give the parameters' memory back."""
        if self._param_block is not None:
            self.machine.memory.unregister(self._param_block)
            self._param_block = None
