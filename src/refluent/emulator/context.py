"""`gpu()`: inside it, CuTe DSL kernels are compiled for an emulated chip and run there."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from refluent.emulator import cudart, driver
from refluent.emulator.chips import Chip, make_chip
from refluent.emulator.errors import DriverError, EmulatorError, FindingsError
from refluent.emulator.handed import HandedIn
from refluent.emulator.launch import LaunchRequest
from refluent.emulator.patches import Patches

if TYPE_CHECKING:
    from refluent.emulator.machine import Machine
    from refluent.emulator.report import Finding, Report
    from refluent.emulator.trace import Trace

_RAISED = ("fault", "deadlock", "livelock")  # kinds that end the call with a FaultError or DeadlockError


def gpu(
    arch: str,
    *,
    seed: int = 0,
    schedule: str = "fair",
    checks: str | Iterable[str] = "all",
    num_sms: int = 8,
    on_finding: str = "raise",
    line_info: bool = True,
    trace: bool = False,
    strict: bool = False,
    accumulator: str = "fp32",
    approx: str = "exact",
    cta_order: str = "linear",
    processes: int = 1,
) -> Gpu:
    """An emulated GPU, as a context manager.

    Inside the `with` block, whatever the CuTe DSL compiles is compiled for `arch`, and its launches run here instead of
    on a device; CPU tensors stand for GPU tensors (`is_cuda`, `device`, queries of torch.cuda), and a kernel may touch
    the storages of the tensors that its call is given, nothing else. Functions compiled inside can be called in any
    later context of the same arch. One context at a time.

    arch: "sm_90a" or "sm_100a". seed, schedule: which legal order of warps, CTAs and asynchronous operations: "fair",
    "random", "late" or "early"; the same seed is the same run. checks: "all", "none" or names of checks; ("all",
    "order") also names bulk reductions that may come in any order, for kernels that promise the same bits in every run.
    num_sms: how many multiprocessors the chip has. on_finding: "raise" a FindingsError on leaving the block, or
    "record" only. line_info: compile with source lines, so that findings name them. trace: keep what `timeline` needs.
    strict: hold kernels to the letter of the PTX manual where compiled code is known to rely on more (tcgen05.wait::ld
    before loaded registers are used). accumulator: how tensor cores add: "fp32", or
    "truncate", the published model of the chips (arXiv 2512.07004, 2511.10909). approx: what the hardware approximates
    (ex2, rcp, tanh, ...) is "exact", or "perturbed" within the PTX manual's bound, by seed. cta_order: in which order
    CTAs get a place on the chip: "linear", as chips do, or "random" or "reverse", which the programming model allows as
    well; a kernel whose CTAs wait for earlier ones needs them all resident then (num_sms). processes: how many share
    the clusters of a launch; one whose clusters turn out to depend on each other runs in one, as the report says.

    Raises DriverError (unknown DSL version, bad argument, context inside a context) and, from calls inside, what the
    machine raises: faults, deadlocks, unsupported PTX; ProcessError if one of several processes is killed.
    """
    from refluent.emulator.machine import Machine  # brings numba and LLVM

    chip = make_chip(arch, num_sms)
    machine = Machine(
        arch,
        seed=seed,
        schedule=schedule,
        checks=checks,
        num_sms=num_sms,
        trace=trace,
        strict=strict,
        accumulator=accumulator,
        approx=approx,
        cta_order=cta_order,
        processes=processes,
    )
    return Gpu(chip, machine, on_finding=on_finding, line_info=line_info)


class Gpu:
    """The emulated chip of one `with` block, and afterwards what was seen there."""

    def __init__(self, chip: Chip, machine: Machine, *, on_finding: str = "raise", line_info: bool = True) -> None:
        if on_finding not in ("raise", "record"):
            raise DriverError(f"on_finding must be 'raise' or 'record', got {on_finding!r}")
        self.chip = chip
        self.arch = chip.arch
        self.line_info = line_info
        self.on_finding = on_finding
        self.handed = HandedIn()
        self.machine = machine
        self._pending: list[LaunchRequest] = []
        self._error: Exception | None = None
        self._patches = Patches()
        self._mode: Any = None
        self._used = False

    def __enter__(self) -> Gpu:
        from refluent.emulator import host

        if cudart.active() is not None:
            raise DriverError("emulator.gpu(...) inside emulator.gpu(...): leave the first context before the second")
        if self._used:
            raise DriverError("this emulated GPU has been used: make another with emulator.gpu(...)")
        self._used = True
        try:
            driver.install(self, self._patches)
            self._mode = host.install(self.chip, self.handed, self._patches)
            self._mode.__enter__()
        except BaseException:
            self._patches.undo()
            raise
        cudart.activate(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from refluent.emulator import host

        cudart.activate(None)
        try:
            self._mode.__exit__(kind, error, trace)
        finally:
            self._patches.undo()
            host.uninstall()
            self._pending.clear()
            self.handed.forget()
            self.machine.close()
        if kind is None and self.on_finding == "raise" and self.open_findings():
            raise FindingsError(str(self.report()))

    def report(self) -> Report:
        """Launches, counters and findings so far."""
        return self.machine.report

    def open_findings(self) -> list[Finding]:
        """Findings that no exception has carried out of a call yet."""
        return [finding for finding in self.report().findings if finding.kind not in _RAISED]

    def timeline(self, folder: str | os.PathLike[str]) -> None:
        """Write what each warp did: timeline.json (Perfetto) and timeline.svg. Needs gpu(..., trace=True)."""
        self._trace().write(Path(folder))

    def picture(self, kernel: str, labels: Mapping[str, str], across: int) -> str:
        """The timeline of a kernel's CTA that takes the longest, as an SVG with `across` pixels of time and `labels`
        instead of its rows' names ("warp 00", "TMA", ...). Needs gpu(..., trace=True)."""
        return self._trace().longest(kernel).svg(labels, across)

    def _trace(self) -> Trace:
        if self.machine.trace is None:
            raise EmulatorError("nothing was traced: use emulator.gpu(..., trace=True)")
        return self.machine.trace

    def hand_in(self, value: Any) -> None:
        """Name a tensor or array whose memory kernels will reach through raw pointers."""
        self.handed.note(value)

    # What driver.py and cudart.py need

    def capture(self, launch: LaunchRequest) -> None:
        self._pending.append(launch)

    def fail(self, error: Exception) -> None:
        self._error = self._error or error

    def abandon_call(self) -> None:
        self._pending.clear()
        self.handed.clear()
        error, self._error = self._error, None
        if error is not None:
            raise error from None

    def finish_call(self) -> None:
        launches, self._pending = self._pending, []
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            allocations = self.handed.allocations()
            for launch in launches:
                self.machine.launch(dataclasses.replace(launch, allocations=allocations))
            if launches:
                self.machine.synchronize()
        finally:
            self.handed.clear()
