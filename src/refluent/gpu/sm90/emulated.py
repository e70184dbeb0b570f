"""backend="emulate:sm90": the Hopper kernels and their host code in the emulator, on CPU tensors."""

from __future__ import annotations

from refluent.gpu.emulated import Emulated
from refluent.gpu.support import HOPPER

_backend = Emulated(HOPPER)
missing, supports = _backend.missing, _backend.supports
forward, backward, gpu = _backend.forward, _backend.backward, _backend.gpu
