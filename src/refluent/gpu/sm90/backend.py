"""backend="sm90": the backward by our kernels on a Hopper GPU, the forward by what torch has there."""

from __future__ import annotations

from refluent.gpu.backend import OnDevice
from refluent.gpu.support import HOPPER

_backend = OnDevice(HOPPER)
missing, supports = _backend.missing, _backend.supports
forward, backward = _backend.forward, _backend.backward
