"""Forked processes that each send one result back, and what there is to know about memory before forking."""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

from numba.core.compiler_lock import global_compiler_lock


class Died(Exception):
    """A process ended without a result."""


def queue_of(count: int) -> int:
    """A pipe to read 0 to count - 1 from, 4 bytes each, by as many processes as like; they have to fit into it."""
    receive, send = os.pipe()
    os.write(send, b"".join(i.to_bytes(4, "little") for i in range(count)))
    os.close(send)
    return receive


@contextlib.contextmanager
def forked(work: Callable[[], Any], processes: int) -> Iterator[Iterator[Any]]:
    """Run work() in so many forks. Yields their results as they come, None for one that raised; an iteration raises
    Died for one that ended in any other way. Processes that still run when the block is left are killed.

    A fork has one thread: work must not use thread pools of this process that do not survive it (OpenMP's: no torch).
    """
    running: dict[int, int] = {}  # read end: process
    try:
        for _ in range(processes):
            pid, receive = _fork(work)
            running[receive] = pid
        yield _results(running)
    finally:
        for receive, pid in running.items():
            os.close(receive)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _fork(work: Callable[[], Any]) -> tuple[int, int]:
    receive, send = os.pipe()
    # No other thread may hold numba's lock at this moment: nobody would ever release it in the fork.
    with warnings.catch_warnings(), global_compiler_lock:
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads exist: those of torch and BLAS
        pid = os.fork()
    if pid:
        os.close(send)
        return pid, receive
    status = 1
    try:
        os.close(receive)
        try:
            result = work()
        except Exception:
            result = None
        _write(send, pickle.dumps(result, protocol=5))
        status = 0
    finally:
        os._exit(status)


def _write(send: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(send, view) :]


def _results(running: dict[int, int]) -> Iterator[Any]:
    received: dict[int, list[bytes]] = {receive: [] for receive in running}
    with selectors.DefaultSelector() as selector:
        for receive in running:
            selector.register(receive, selectors.EVENT_READ)
        while running:
            for key, _ in selector.select():
                receive = key.fd
                if data := os.read(receive, 1 << 20):
                    received[receive].append(data)
                    continue
                selector.unregister(receive)
                _, status = os.waitpid(running.pop(receive), 0)
                os.close(receive)
                if status:
                    raise Died(_how(status))
                yield pickle.loads(b"".join(received.pop(receive)))


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"a process was killed ({signal.Signals(-code).name})" if code < 0 else f"a process ended with status {code}"


def shared_ranges() -> list[tuple[int, int]]:
    """The parts of this process's memory that a fork does not get a copy of, sorted."""
    ranges = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            place, permissions = line.split(" ", 2)[:2]
            if permissions[3] == "s":
                start, end = place.split("-")
                ranges.append((int(start, 16), int(end, 16)))
    return ranges


def overlap(ranges: list[tuple[int, int]], start: int, end: int) -> bool:
    """Whether [start, end) meets one of these sorted ranges."""
    index = bisect_right(ranges, (end,)) - 1
    return index >= 0 and ranges[index][1] > start and ranges[index][0] < end
