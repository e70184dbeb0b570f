"""backend="emulate:sm100": the Blackwell kernels and their host code in the emulator, on CPU tensors."""

from __future__ import annotations

from refluent.gpu.emulated import Emulated
from refluent.gpu.support import BLACKWELL

_backend = Emulated(BLACKWELL)
missing, supports = _backend.missing, _backend.supports
forward, backward, gpu = _backend.forward, _backend.backward, _backend.gpu
