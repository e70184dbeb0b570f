"""The machine: launches in stream order, clusters on multiprocessors, warps and asynchronous operations by schedule."""

from __future__ import annotations

from typing import Any

from refluent.emulator.cta import CTA
from refluent.emulator.isa import AsyncOp, Outcome, Waitable
from refluent.emulator.memory import GlobalMemory
from refluent.emulator.ptx import Instruction, Module


class Machine:
    """A GPU. launch() queues kernels, synchronize() runs everything queued.

    For handlers: `memory` (global memory: view, gather, scatter, find), `check` (the checker; `check.enabled`),
    submit(op), wait_for(ops, reason), wake(waitable), finding(kind, text, cta, warp).
    """

    arch: str
    memory: GlobalMemory
    check: Any

    def launch(
        self,
        module: Module,
        name: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        cluster: tuple[int, int, int],
        shared_bytes: int,
        params: bytes,
        *,
        attributes: dict[int, Any] | None = None,
        stream: int = 0,
    ) -> None:
        """Queue a kernel. `params`: the parameter block, laid out as the kernel's params; `attributes` by CUDA's id."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Run everything queued. Raises EmulatorError (deadlock, fault) after the report has been filled."""
        raise NotImplementedError

    def submit(self, op: AsyncOp) -> AsyncOp:
        """Queue an asynchronous operation (the schedule may perform it at once)."""
        raise NotImplementedError

    def wait_for(self, ops: list[AsyncOp], reason: str, read: bool = False) -> Outcome:
        """CONTINUE when every operation is done (`read`: has taken its source), else what to return from the handler:
        it will be called once more."""
        raise NotImplementedError

    def wake(self, on: Waitable) -> None:
        """Let every warp that sleeps on this look again."""
        raise NotImplementedError

    def finding(
        self, kind: str, text: str, cta: CTA | None = None, warp: Any = None, instr: Instruction | None = None
    ) -> None:
        """Report something wrong with the kernel (once per kind and instruction)."""
        raise NotImplementedError
