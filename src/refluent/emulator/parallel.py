"""A launch whose clusters are independent, in several processes.

Each process is a fork: it sees the memory of this one and writes into copies of its pages. It takes clusters one at a
time and runs each as if it had the machine for itself, by a schedule drawn for that cluster, so that nothing depends on
how many processes there are or which of them is faster. What all have left is merged only if no granule of global
memory that one cluster wrote was touched by another. Otherwise, and when a process fails in whatever way of the
kernel's, all of it is thrown away and the launch runs in this process, where memory is as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import heapq
import io
import os
import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from refluent.emulator import forks
from refluent.emulator.check.clocks import Space
from refluent.emulator.errors import ProcessError
from refluent.emulator.footprint import Touched, independent
from refluent.emulator.report import Finding
from refluent.emulator.schedule import Schedule
from refluent.emulator.trace import Bar

if TYPE_CHECKING:
    from refluent.emulator.grid import Launch
    from refluent.emulator.machine import Machine

DEPENDENT = "its CTAs depend on each other through global memory"
_IDLE_LIMIT = 64  # rounds of nothing but polling in which a cluster alone is given up
_SHARES = 1000  # into how many parts clusters are dealt at most: they have to fit into a page-sized pipe


@dataclass
class ClusterRun:
    """What one cluster leaves besides memory and sums."""

    position: int  # in the order in which clusters start
    index: int
    printed: str
    findings: list[Finding]
    bars: list[Bar]
    setmaxnreg: dict[int, int]
    actors: list[str]  # of the checks' clocks


@dataclass
class Part:
    """What one process leaves."""

    runs: list[ClusterRun]
    counters: np.ndarray
    events: list[int]
    operations: list[dict[Any, list[int]]]
    touched: list[Touched]


def run(machine: Machine) -> bool:
    """Run the first launch in several processes if that can be done; whether it has been."""
    launch = machine.launches[0]
    if launch.processes:
        return False
    launch.processes = 1
    if launch.total_clusters < 2:
        return False
    launch.obstacle = _obstacle(machine, launch)
    if launch.obstacle:
        return False
    processes = min(machine.processes, launch.total_clusters)
    parts = _gather(machine, launch, processes)
    blocks = {block.base: block for block in machine.memory.blocks}
    if parts is None or not independent([part.touched for part in parts], blocks):
        launch.obstacle = DEPENDENT
        machine.redone[launch.program] = launch
        return False
    launch.processes = processes
    _merge(machine, launch, parts)
    return True


def _obstacle(machine: Machine, launch: Launch) -> str:
    """Why this launch is not even tried."""
    if any(other.after is launch for other in machine.launches):
        return "a programmatic launch may overlap it"
    if len(launch.waiting) < launch.total_clusters:
        return "it overlaps the launch before it"
    if any(instr.opcode == "clusterlaunchcontrol" for instr in launch.kernel.instructions):
        return "its CTAs cancel each other's launches"
    if launch.request.cooperative:
        return "a cooperative launch"
    redone = machine.redone.get(launch.program)
    if redone is not None and redone.completed:
        return DEPENDENT
    ranges = forks.shared_ranges()
    if any(forks.overlap(ranges, block.base, block.end) for block in machine.memory.blocks):
        return "memory handed in is shared with other processes"
    return ""


def _first_actor(machine: Machine, launch: Launch) -> int:
    """Where the names begin that the checks give to whoever acts in a launch."""
    return launch.clocks.base if machine.check.enabled else 0


# In each process


def _work(machine: Machine, launch: Launch, shares: int, size: int) -> Part | None:
    """Run clusters, `size` in a row, for as long as there are any; None if they turn out to be dependent."""
    order = list(launch.waiting)
    launch.waiting.clear()
    machine.launches = [launch]
    machine.idle_limit = min(machine.idle_limit, _IDLE_LIMIT)
    footprint = machine.memory.watch()
    runs = []
    while share := os.read(shares, 4):
        first = int.from_bytes(share, "little") * size
        for position in range(first, min(first + size, len(order))):
            footprint.begin(order[position])
            runs.append(_run_cluster(machine, launch, position, order[position]))
            if footprint.conflicts:
                return None
    counts, touched = launch.counts, footprint.touched(_first_actor(machine, launch))
    return Part(runs, launch.counters, counts.events, [counts.operations, counts.by_warp], touched)


def _run_cluster(machine: Machine, launch: Launch, position: int, index: int) -> ClusterRun:
    report, trace = machine.report, machine.trace
    schedule = Schedule(report.schedule, random.Random(f"{machine.seed} {len(report.launches)} {index}"))
    report.findings = []
    launch.counts.setmaxnreg = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        machine.run_alone(launch, index, schedule)
    actors = launch.clocks.spaces[index].owners if machine.check.enabled else []
    bars = trace.take() if trace is not None else []
    return ClusterRun(position, index, printed.getvalue(), report.findings, bars, launch.counts.setmaxnreg, actors)


# In this process


def _gather(machine: Machine, launch: Launch, processes: int) -> list[Part] | None:
    """What each process leaves, or None if one found its clusters dependent or failed with an exception."""
    size = -(-launch.total_clusters // _SHARES)
    shares = forks.queue_of(-(-launch.total_clusters // size))
    parts: list[Part] = []
    try:
        with forks.forked(lambda: _work(machine, launch, shares, size), processes) as results:
            for part in results:
                if part is None:
                    return None
                parts.append(part)
    except (forks.Died, OSError) as error:
        raise ProcessError(
            f"{launch.name} in {processes} processes: {error}; nothing of this launch has been written "
            "(processes=1 runs it in one)"
        ) from None
    finally:
        os.close(shares)
    return parts


def _merge(machine: Machine, launch: Launch, parts: list[Part]) -> None:
    blocks = {block.base: block for block in machine.memory.blocks}
    first_actor = _first_actor(machine, launch)
    counts = launch.counts
    for part in parts:
        for touched in part.touched:
            touched.apply(blocks[touched.base], first_actor)
        launch.counters += part.counters
        counts.events = [a + b for a, b in zip(counts.events, part.events)]
        totals: list[dict[Any, list[int]]] = [counts.operations, counts.by_warp]
        for sums, more in zip(totals, part.operations):
            for key, row in more.items():
                sums[key] = [a + b for a, b in zip(sums.get(key, [0, 0, 0]), row)]
    runs = sorted((run for part in parts for run in part.runs), key=lambda run: run.position)
    for cluster in runs:
        sys.stdout.write(cluster.printed)
        for finding in cluster.findings:
            machine.report.enter(finding)
        counts.setmaxnreg.update(cluster.setmaxnreg)
        if machine.check.enabled:
            space = Space(first_actor + cluster.index * launch.clocks.capacity, cluster.index, launch.clocks.capacity)
            space.owners = cluster.actors
            launch.clocks.spaces[cluster.index] = space
    if machine.trace is not None:
        _place(machine, launch, runs)
    launch.waiting.clear()
    launch.triggered = launch.request.ctas


def _place(machine: Machine, launch: Launch, runs: list[ClusterRun]) -> None:
    """The timeline of clusters that each had its own clock: a cluster starts when there is a free place."""
    assert machine.trace is not None
    places = max(1, machine.num_sms * launch.per_sm // launch.cluster_size)
    free = [machine.now] * places
    for cluster in runs:
        end = machine.trace.place(cluster.bars, heapq.heappop(free))
        heapq.heappush(free, end)
        machine.now = max(machine.now, end)
