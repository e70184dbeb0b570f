"""Groups of asynchronous copies: cp.async groups (per lane, all lanes issue) and bulk groups (per issuing lane).

Source: PTX ISA, "cp.async.commit_group", "cp.async.wait_group", "cp.async.bulk.commit_group / wait_group".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from refluent.emulator.isa import AsyncOp, Outcome
from refluent.emulator.state import LANES, lanes

if TYPE_CHECKING:
    from refluent.emulator.cta import MachineWarp
    from refluent.emulator.machine import Machine


class CopyGroups:
    """A warp's cp.async operations: each belongs, lane by lane, to the group that the lane commits next."""

    def __init__(self) -> None:
        self.commits = np.zeros(LANES, np.int64)
        self.ops: list[tuple[AsyncOp, np.ndarray, np.ndarray]] = []  # operation, its lanes, their groups

    def add(self, op: AsyncOp, mask: int) -> None:
        self.ops.append((op, lanes(mask), self.commits.copy()))

    def commit(self, mask: int) -> None:
        self.commits[lanes(mask)] += 1

    def outstanding(self, mask: int, keep: int | None) -> list[AsyncOp]:
        """What lanes of the mask have to wait for: all but the newest `keep` groups; None: all, committed or not."""
        chosen = lanes(mask)
        if keep is None:
            return [op for op, issued, _ in self.ops if (issued & chosen).any()]
        newest = self.commits - keep
        return [op for op, issued, group in self.ops if (issued & chosen & (group < newest)).any()]

    def forget(self, done: list[AsyncOp]) -> None:
        self.ops = [entry for entry in self.ops if entry[0] not in done]


class BulkGroups:
    """One lane's bulk operations that complete by group."""

    def __init__(self) -> None:
        self.open: list[AsyncOp] = []
        self.committed: list[list[AsyncOp]] = []

    def commit(self) -> None:
        self.committed.append(self.open)
        self.open = []

    def waited(self, keep: int) -> list[AsyncOp]:
        """Operations of all but the newest `keep` groups."""
        return [op for group in self.committed[: len(self.committed) - keep] for op in group]

    def forget(self, keep: int) -> None:
        del self.committed[: max(0, len(self.committed) - keep)]

    def unread(self) -> list[AsyncOp]:
        """Operations whose source nobody has waited for."""
        return [op for group in [*self.committed, self.open] for op in group if op.read is not None and not op.waited]


def copy_groups(warp: MachineWarp) -> CopyGroups:
    found: CopyGroups = warp.groups.setdefault("cp.async", CopyGroups())
    return found


def bulk_groups(warp: MachineWarp, lane: int) -> BulkGroups:
    """The groups of one lane. Tensor copies that complete by group add themselves to `open`."""
    by_lane: dict[int, BulkGroups] = warp.groups.setdefault("bulk", {})
    if lane not in by_lane:
        by_lane[lane] = BulkGroups()
    return by_lane[lane]


def wait_bulk(machine: Machine, warp: MachineWarp, lane: int, keep: int, read: bool) -> Outcome:
    """cp.async.bulk.wait_group{.read} for one lane."""
    groups = bulk_groups(warp, lane)
    ops = groups.waited(keep)
    kind = "bulk groups to be read" if read else "bulk groups to be complete"
    outcome = machine.wait_for(ops, f"all but {keep} {kind}", read=read)
    if outcome.name == "continue":
        for op in ops:
            op.waited = True
            machine.check.wait_source(warp, op)
            if not read:
                machine.check.wait_op(warp, op)
        if not read:
            groups.forget(keep)
    return outcome
