"""A machine that only remembers what it was told to launch."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

from refluent.emulator.chips import make_chip
from refluent.emulator.context import Gpu


class Recorder:
    trace = None

    def __init__(self):
        self.launches = []
        self.synchronized = 0
        self.report = SimpleNamespace(findings=[])

    def launch(self, request):
        self.launches.append(request)

    def synchronize(self):
        self.synchronized += 1

    def close(self):
        """Launches stay."""


@contextmanager
def recording(arch, num_sms=8, **options):
    """A context whose launches are recorded instead of run."""
    machine = Recorder()
    with Gpu(make_chip(arch, num_sms), machine, **options) as gpu:
        gpu.recorder = machine
        yield gpu
