"""The machine: launches in stream order, clusters on multiprocessors, warps and asynchronous operations by schedule."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from refluent.emulator import grid, isa, parallel, runtime, state
from refluent.emulator.check.checker import Checker, NoChecker
from refluent.emulator.codegen.emitter import Options
from refluent.emulator.cta import CTA, MachineWarp
from refluent.emulator.errors import DeadlockError, FaultError
from refluent.emulator.grid import Launch, Program
from refluent.emulator.isa import CONTINUE, YIELD, AsyncOp, Blocked, Outcome, Waitable, numeric
from refluent.emulator.launch import LaunchRequest
from refluent.emulator.memory import GlobalMemory, MemoryFault
from refluent.emulator.report import Report, waiting_report
from refluent.emulator.schedule import Schedule
from refluent.emulator.trace import Trace

SPIN_ROUNDS = 4  # polls a warp without any progress before the machine counts as idle
IDLE_LIMIT = 2000  # idle rounds of nothing but polling before a livelock is reported
BUDGET = 2_000_000  # backward jumps a native run may take


@contextlib.contextmanager
def _settled_objects() -> Iterator[None]:
    """Objects that exist now (the compiler's, millions of them) are left out of garbage collection for a while: a run
    makes many of its own, and each full collection would look at all of them."""
    if gc.get_freeze_count():  # the process keeps its own account
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        # What the run leaves behind are cycles. Among the compiler's objects again, they would wait for the next full
        # collection, which with so many objects hardly ever comes.
        gc.collect()
        gc.unfreeze()


class Machine:
    """A GPU. launch() queues kernels, synchronize() runs everything queued.

    For handlers: `memory` (global memory: view, gather, scatter, find), `check` (the checker; `check.enabled`),
    submit(op), wait_for(ops, reason), wake(waitable), finding(kind, text, cta, warp).
    """

    def __init__(
        self,
        arch: str,
        *,
        seed: int = 0,
        schedule: str = "fair",
        checks: str | Iterable[str] = "all",
        num_sms: int = 4,
        trace: bool = False,
        translate: Callable[[str, str], Program] | None = None,
        idle_limit: int = IDLE_LIMIT,
        accumulator: str = "fp32",
        approx: str = "exact",
        cta_order: str = "linear",
        strict: bool = False,
        processes: int = 1,
    ) -> None:
        if processes < 1:
            raise ValueError(f"processes must be at least 1, got {processes}")
        self.arch = arch
        self.arch_number = int("".join(c for c in arch if c.isdigit()))
        if accumulator not in numeric.ACCUMULATORS:
            raise ValueError(f"accumulator must be one of {', '.join(numeric.ACCUMULATORS)}, got {accumulator!r}")
        self.accumulator = accumulator
        self.num_sms = num_sms
        self.processes = processes
        self.redone: dict[Program, Launch] = {}  # launches that several processes could not run
        self.seed = seed
        self.schedule = Schedule(schedule, random.Random(seed), cta_order)
        self.report = Report(arch, seed, schedule)
        self.check: Checker | NoChecker = NoChecker() if checks == "none" else Checker(self, checks, strict)
        self.memory = GlobalMemory(shadowed=self.check.enabled)
        self.trace = Trace() if trace else None
        Options(approx)  # refuses what is no mode
        self.translate = translate or partial(grid.translate, approx=approx)
        self.module_variables: dict[int, Any] = {}
        self.budget = BUDGET
        self.idle_limit = idle_limit
        self.launches: list[Launch] = []  # queued or running, in order
        self.last_launch: Launch | None = None
        self.ready_ops: list[AsyncOp] = []
        self.queued_ops = 0
        self.sleeping: dict[MachineWarp, None] = {}  # blocked, in the order they fell asleep
        self.progress = 0  # counts whatever brings the kernel forward
        self.spins = 0  # polls since the last progress
        self.timeouts_at = -1  # progress at the last round of time-outs
        self.idle_rounds = 0
        self.now = 0  # logical time of whoever acts, for the timeline

    # Launching

    def launch(self, request: LaunchRequest) -> Launch:
        """Queue a kernel. Its global memory is registered at once, from request.allocations."""
        for part in request.allocations:
            self.memory.hand_in(part)
        request = dataclasses.replace(request, allocations=())  # their owners are not kept alive by the launch
        program = self.translate(request.ptx, request.kernel)
        launch = Launch(self, request, program, self.last_launch if request.programmatic else None)
        self.check.launched(launch)
        if self.check.enabled:
            for instr, text in program.wgmma_violations:
                self.report.add("wgmma", text, launch, instr=instr)
        self.last_launch = launch
        self.launches.append(launch)
        return launch

    def synchronize(self) -> None:
        """Run everything queued. Raises EmulatorError (deadlock, fault) after the report has been filled."""
        try:
            # A kernel's inf and NaN are its own business.
            with np.errstate(invalid="ignore", over="ignore"), _settled_objects():
                while self.launches:
                    if self.processes == 1 or not parallel.run(self):
                        self._turn()
                    while self.launches and self.launches[0].done:
                        self.launches.pop(0).complete()
        finally:
            if self.launches:
                self._abandon()
            self.memory.take_back()

    def close(self) -> None:
        """Nothing more will be launched: give up all that is known of memory. The report and the trace stay."""
        self.check, self.memory = NoChecker(), GlobalMemory()
        self.last_launch = None
        self.module_variables.clear()
        self.redone.clear()

    def _abandon(self) -> None:
        for launch in self.launches:
            launch.close()
        self.launches.clear()
        self.schedule.clear()
        self.ready_ops.clear()
        self.sleeping.clear()
        self.queued_ops = 0

    def _turn(self) -> None:
        for launch in self.launches:
            launch.start_clusters()
        polling = self.spins > SPIN_ROUNDS * (len(self.schedule) + 1)
        warp = None if polling else self.schedule.pick()
        if warp is not None:
            self._run_slice(warp)
        for op in self.schedule.due(self.ready_ops, idle=warp is None):
            self._advance(op)
        if warp is None and not self.schedule.performed:
            self._idle()

    def run_alone(self, launch: Launch, cluster: int, schedule: Schedule) -> None:
        """Run one cluster of a launch as if it had the machine for itself, by a schedule of its own."""
        self.schedule = schedule
        self.queued_ops = self.progress = self.spins = self.idle_rounds = self.now = 0
        self.timeouts_at = -1
        launch.start(cluster)
        while not launch.done:
            self._turn()

    def _idle(self) -> None:
        """Nothing can move by itself: let pollers look again, let waits time out, or report a deadlock."""
        self.spins = 0
        if self.progress != self.timeouts_at:
            self.timeouts_at = self.progress
            self.idle_rounds = 0
            self._time_out()
            return
        self.idle_rounds += 1
        if len(self.schedule) and self.idle_rounds < self.idle_limit:
            if self.idle_rounds & 63 == 63:
                self._time_out()
            return
        kind = "livelock" if len(self.schedule) else "deadlock"
        text = waiting_report(self, kind)
        self.finding(kind, text)
        raise DeadlockError(text)

    def _time_out(self) -> None:
        for warp in [warp for warp in self.sleeping if warp.blocked.timeout is not None]:
            blocked = warp.blocked
            blocked.on.waiters.remove(warp)
            self._rise(warp, blocked.timeout)

    # Warps

    def start(self, warp: MachineWarp) -> None:
        """Let a new warp run."""
        warp.time = self.now
        self.schedule.add(warp)

    def _run_slice(self, warp: MachineWarp) -> None:
        for _ in range(self.schedule.quantum()):
            outcome = self._step(warp)
            if outcome is CONTINUE:
                self.progress += 1
                self.spins = 0
            elif outcome is YIELD:
                self.spins += 1
                self.schedule.add(warp)
                return
            elif isinstance(outcome, Blocked):
                self._sleep(warp, outcome)
                return
            if warp.finished:
                return
        self.schedule.add(warp)

    def _step(self, warp: MachineWarp) -> Outcome:
        """Native code up to the next event, and the event."""
        resume, warp.resume = warp.resume, None
        try:
            if resume is not None:
                return resume()
            launch = warp.cta.launch
            code: int = (
                launch.program.run(warp.address) if self.trace is None else self._traced(launch, warp, self.trace)
            )
            if code == state.EVENT:
                return self._event(launch, warp)
        except MemoryFault as fault:
            raise self.fault(warp, str(fault)) from None
        if code == state.BUDGET:
            warp.budget = BUDGET
            return YIELD
        if code == state.FAULT:
            raise self.fault(warp, runtime.fault_text(warp))
        if self.check.enabled:
            self.check.drain(warp.cta)
        warp.finished = True
        warp.cta.warp_left(warp)
        return CONTINUE

    def _traced(self, launch: Launch, warp: MachineWarp, trace: Trace) -> int:
        counters, lengths = launch.counters[warp.index], launch.program.block_lengths
        before = int(counters @ lengths)
        code = launch.program.run(warp.address)
        trace.ran(warp, int(counters @ lengths) - before)
        self.now = warp.time
        return code

    def _event(self, launch: Launch, warp: MachineWarp) -> Outcome:
        instr = warp.instr
        launch.counts.events[warp.index] += 1
        handler = launch.handlers[instr]
        assert handler is not None
        if not self.check.enabled:
            return handler(self, warp.cta, warp, warp.event_mask)
        if launch.convergent[instr]:
            self.check.converge(warp)
        outcome = handler(self, warp.cta, warp, warp.event_mask)
        self.check.drain(warp.cta)
        return outcome

    def _sleep(self, warp: MachineWarp, outcome: Blocked) -> None:
        warp.blocked = outcome
        outcome.on.waiters.append(warp)
        self.sleeping[warp] = None
        if self.trace is not None:
            self.trace.sleeps(warp, outcome)

    def _rise(self, warp: MachineWarp, then: Callable[[], Outcome] | None) -> None:
        del self.sleeping[warp]
        if self.trace is not None:
            self.trace.rises(warp, self.now)
        warp.blocked = None
        if then is None:
            handler = warp.cta.launch.handlers[warp.instr]
            assert handler is not None
            then = partial(handler, self, warp.cta, warp, warp.event_mask)
        warp.resume = then
        self.schedule.add(warp)

    def wake(self, on: Waitable) -> None:
        """Let every warp that sleeps on this look again."""
        if on.waiters:
            waiters = on.waiters[:]
            on.waiters.clear()
            for warp in waiters:
                self._rise(warp, warp.blocked.then)

    # Asynchronous operations

    def submit(self, op: AsyncOp) -> AsyncOp:
        """Queue an asynchronous operation (the schedule may perform it at once)."""
        self.queued_ops += 1
        op.order = self.queued_ops
        op.time = op.warp.time
        op.cta.launch.pending_ops += 1
        if self.check.enabled:
            self.check.async_issue(op, op.warp)
        op.waiting = 0
        for earlier in op.after:
            if not earlier.done:
                op.waiting += 1
                earlier.followers.append(op)
        if op.waiting == 0:
            self._ready(op)
        return op

    def _ready(self, op: AsyncOp) -> None:
        if self.schedule.eager:
            self._advance(op)
            if not op.done:
                self._advance(op)
        else:
            self.ready_ops.append(op)

    def _advance(self, op: AsyncOp) -> None:
        """The next stage of a ready operation; the schedule has taken it out of ready_ops."""
        self.progress += 1
        self.spins = 0
        try:
            if self.check.enabled:
                self.check.begins(op)
            if op.read is not None and not op.read_done:
                op.read()
                op.read_done = True
                if not self.schedule.eager:
                    self.ready_ops.append(op)
                self.wake(op)
                return
            op.perform()
        except MemoryFault as fault:
            raise self.fault(op.warp, f"{op.describe()}: {fault}", op.instr) from None
        op.done = op.read_done = True
        launch = op.cta.launch
        launch.pending_ops -= 1
        launch.counts.performed(op)
        if self.trace is not None:
            self.now = self.trace.performed(op)
        if self.check.enabled:
            self.check.drain(op.cta)
        self.wake(op)
        for follower in op.followers:
            follower.waiting -= 1
            if follower.waiting == 0:
                self._ready(follower)
        op.followers.clear()
        op.after = ()

    def wait_for(self, ops: Sequence[AsyncOp], reason: str, read: bool = False) -> Outcome:
        """CONTINUE when every operation is done (`read`: has taken its source), else what to return from the handler:
        it will be called once more."""
        for op in ops:
            if not (op.read_done if read else op.done):
                return isa.blocked(op, lambda op=op: f"{reason}: {op.describe()}")  # type: ignore[misc]
        return CONTINUE

    def count_flops(self, warp: MachineWarp, flops: int, kind: str = "mma") -> None:
        """Floating-point operations of an instruction that is carried out at once."""
        warp.cta.launch.counts.add(kind, warp.index, 0, flops)

    def count_bytes(self, warp: MachineWarp, kind: str, nbytes: int) -> None:
        """Bytes moved by an instruction that is carried out at once."""
        warp.cta.launch.counts.add(kind, warp.index, nbytes, 0)

    # Saying what is wrong

    def finding(
        self,
        kind: str,
        text: str,
        cta: CTA | None = None,
        warp: MachineWarp | None = None,
        instr: int | None = None,
    ) -> None:
        """Report something wrong with the kernel (once per kind and instruction)."""
        launch = cta.launch if cta is not None else self.launches[0] if self.launches else None
        if warp is not None and instr is None:
            instr = warp.instr
        self.report.add(kind, text, launch, cta, warp, instr)

    def fault(self, warp: MachineWarp, text: str, instr: int | None = None) -> FaultError:
        """The error for an access that the kernel may not make, entered into the report."""
        index = warp.instr if instr is None else instr
        finding = self.report.add("fault", text, warp.cta.launch, warp.cta, warp, index)
        return FaultError(str(finding))
