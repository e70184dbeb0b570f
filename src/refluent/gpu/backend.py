"""A backend on a real GPU: the backward by our kernels, the forward by what torch has there."""

from __future__ import annotations

from torch import Tensor

from refluent import tiled
from refluent.gpu import sdpa
from refluent.gpu.support import Architecture, missing_packages
from refluent.problem import Gradients, Inputs, Needs, Problem


class OnDevice:
    """A backends.Backend for the GPUs of an architecture."""

    def __init__(self, architecture: Architecture):
        self.architecture = architecture

    def missing(self) -> str | None:
        """Why the backend cannot be used on this machine; None if it can."""
        return self.architecture.missing_device() or missing_packages(emulated=False)

    def supports(self, problem: Problem) -> str | None:
        """None when this backend can run the problem, else the reason."""
        return (
            self.architecture.unsupported_device(problem.device)
            or missing_packages(emulated=False)
            or self.architecture.unsupported(problem)
        )

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """torch's fused kernels where they compute the same function, else backend "torch" on the device."""
        made = sdpa.forward(problem, inputs)
        return tiled.forward(problem, inputs) if made is None else made

    def backward(
        self, problem: Problem, inputs: Inputs, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        """The gradients that ``needs`` names."""
        from refluent.gpu import launch

        return launch.backward(problem, inputs, o, lse, do, dlse, needs)
