"""What the emulator raises."""

from __future__ import annotations


class EmulatorError(RuntimeError):
    """A kernel, or the way it was launched, cannot go on in the emulator."""


class DriverError(EmulatorError):
    """The CUDA driver would refuse the call, or the emulator cannot serve it: compile, load, launch, arguments."""
