"""Chunks on several threads of the CPU, each doing its products and passes alone.

A tile takes a dozen short operations. Split among threads, each of them ends in a barrier: on a machine that is busy
with other things, where a thread may be off its core, the waits add up to 20 times the work. Threads that take whole
chunks meet once, at the end.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Job = TypeVar("Job")
Result = TypeVar("Result")


def share(jobs: Sequence[Job], work: Callable[[Sequence[Job]], Result], workers: int) -> list[Result]:
    """``work`` on every ``workers``-th job from the first, the second, ... on; the results in that order.

    The split depends on the number of workers alone, so sums over results come out the same on every run.
    """
    workers = min(workers, len(jobs))
    if workers < 2:
        return [work(jobs)]
    pool = _pool(os.getpid(), workers, max(1, torch.get_num_threads() // workers))
    inference = torch.is_inference_mode_enabled()

    def part(number: int) -> Result:
        # Both are settings of a thread.
        with torch.inference_mode(inference), torch.no_grad():
            return work(jobs[number::workers])

    return [future.result() for future in [pool.submit(part, number) for number in range(workers)]]


@functools.lru_cache(maxsize=2)
def _pool(process: int, workers: int, threads_each: int) -> ThreadPoolExecutor:
    """``workers`` threads whose operations use ``threads_each`` threads; a forked process makes its own."""
    threads = torch.get_num_threads()
    started = threading.Barrier(workers + 1)

    def start() -> None:
        # torch.set_num_threads sets this thread's number and the one that threads start with, which they take up at
        # their first use of it: that use comes first here, and the starting number is restored below.
        torch.get_num_threads()
        started.wait()
        torch.set_num_threads(threads_each)
        started.wait()

    pool = ThreadPoolExecutor(workers, "refluent", initializer=start)
    # An executor starts a thread for a task that finds none idle, and none is idle before the second barrier.
    for _ in range(workers):
        pool.submit(int)
    started.wait()
    started.wait()
    torch.set_num_threads(threads)
    return pool
