"""Tensors -> kernel arguments, compile cache, streams."""

from __future__ import annotations

from refluent.gpu.launch.call import backward, emulator_session

__all__ = ["backward", "emulator_session"]
