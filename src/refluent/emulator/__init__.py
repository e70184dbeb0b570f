"""Runs CuTe DSL kernels for Hopper and Blackwell on a CPU, and says what is wrong with them.

`with gpu("sm_100a") as chip:` compiles and launches there; see `gpu`.
"""

from __future__ import annotations

from refluent.emulator.context import Gpu, gpu
from refluent.emulator.errors import (
    DeadlockError,
    DriverError,
    EmulatorError,
    FaultError,
    FindingsError,
    ProcessError,
)

__all__ = [
    "DeadlockError",
    "DriverError",
    "EmulatorError",
    "FaultError",
    "FindingsError",
    "Gpu",
    "ProcessError",
    "gpu",
]
