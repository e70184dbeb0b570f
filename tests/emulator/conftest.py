"""Fixtures of the emulator's tests."""

from refluent.emulator.pytest_plugin import emulated

__all__ = ["emulated"]
