"""backend="sm100": the backward by our kernels on a Blackwell GPU, the forward by what torch has there."""

from __future__ import annotations

import torch
from torch import Tensor

from refluent import tiled
from refluent.gpu import sdpa
from refluent.gpu.sm100.support import CAPABILITIES, missing_device, missing_packages, unsupported
from refluent.problem import Gradients, Inputs, Needs, Problem


def missing() -> str | None:
    """Why the backend cannot be used on this machine; None if it can."""
    return missing_device() or missing_packages(emulated=False)


def supports(problem: Problem) -> str | None:
    """None when this backend can run the problem, else the reason."""
    if problem.device.type != "cuda":
        return (
            f"it needs tensors on a Blackwell GPU, got {problem.device}; "
            "backend='emulate:sm100' runs its kernels on the CPU"
        )
    capability = torch.cuda.get_device_capability(problem.device)
    if capability not in CAPABILITIES:
        return (
            f"it needs compute capability 10.0 or 10.3, got {capability[0]}.{capability[1]}; "
            "backend='torch' computes the same on any device"
        )
    return missing_packages(emulated=False) or unsupported(problem)


def forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """torch's fused kernels where they compute the same function, else backend "torch" on the device."""
    made = sdpa.forward(problem, inputs)
    return tiled.forward(problem, inputs) if made is None else made


def backward(
    problem: Problem, inputs: Inputs, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, needs: Needs
) -> Gradients:
    """The gradients that ``needs`` names."""
    from refluent.gpu import launch

    return launch.backward(problem, inputs, o, lse, do, dlse, needs)
