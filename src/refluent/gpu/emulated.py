"""A backend in the emulator: the kernels of an architecture and their host code, on CPU tensors."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch import Tensor

from refluent import tiled
from refluent.errors import UnsupportedError
from refluent.gpu.support import Architecture, missing_packages
from refluent.problem import Gradients, Inputs, Needs, Problem

if TYPE_CHECKING:
    from refluent.emulator.context import Gpu


class Emulated:
    """A backends.Backend that emulates a GPU of an architecture."""

    def __init__(self, architecture: Architecture):
        self.architecture = architecture

    def missing(self) -> str | None:
        """Why the backend cannot be used on this machine; None if it can."""
        return missing_packages(emulated=True)

    def supports(self, problem: Problem) -> str | None:
        """None when this backend can run the problem, else the reason."""
        lacking = self.missing()
        if lacking is not None:
            return lacking
        if problem.device.type != "cpu" and self._session() is None:
            return f"it emulates a GPU for tensors on the CPU, got {problem.device}; move them there with .cpu()"
        return self.architecture.unsupported(problem)

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """By backend "torch": the forward kernel is not part of this version."""
        return tiled.forward(problem, inputs)

    def backward(
        self, problem: Problem, inputs: Inputs, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        """The gradients that ``needs`` names, in the emulator's open context, else in one with every check on."""
        from refluent.gpu import launch

        with self._context():
            return launch.backward(problem, inputs, o, lse, do, dlse, needs)

    def gpu(self, **options: Any) -> Gpu:
        """The emulated chip as a context manager: the backend's calls inside run there. Options: emulator.gpu's."""
        from refluent import emulator

        return emulator.gpu(self.architecture.target, **options)

    def _session(self) -> Any:
        if self.missing() is not None:
            return None
        from refluent.gpu import launch

        return launch.emulator_session()

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        session, target = self._session(), self.architecture.target
        if session is None:
            return self.gpu()
        if session.arch != target:
            raise UnsupportedError(
                f"backend 'emulate:{self.architecture.name}': the open emulator.gpu(...) is {session.arch}; "
                f"open one of {target!r}, or none"
            )
        return contextlib.nullcontext()
