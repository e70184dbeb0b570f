"""backend="sm100": the backward by our kernels on a Blackwell GPU, the forward by what torch has there."""

from __future__ import annotations

from refluent.gpu.backend import OnDevice
from refluent.gpu.support import BLACKWELL

_backend = OnDevice(BLACKWELL)
missing, supports = _backend.missing, _backend.supports
forward, backward = _backend.forward, _backend.backward
