"""What the emulator raises."""

from __future__ import annotations


class EmulatorError(RuntimeError):
    """A kernel, or the way it was launched, cannot go on in the emulator."""


class DriverError(EmulatorError):
    """The CUDA driver would refuse the call, or the emulator cannot serve it: compile, load, launch, arguments."""


class DeadlockError(EmulatorError):
    """No warp can go on, or all that can only poll. The text says who waits for what."""


class FaultError(EmulatorError):
    """A kernel did what stops it on a chip: an access outside memory or misaligned, a trap, a malformed operand."""


class FindingsError(EmulatorError):
    """The checks found something wrong with a kernel."""


class ProcessError(EmulatorError):
    """A process that was to run a part of a launch was killed, or could not be made. Nothing of that launch has been
    written."""
