"""backend="emulate:sm100": the Blackwell kernels and their host code in the emulator, on CPU tensors."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch import Tensor

from refluent import tiled
from refluent.errors import UnsupportedError
from refluent.gpu.sm100.support import missing_packages, unsupported
from refluent.problem import Gradients, Inputs, Needs, Problem

if TYPE_CHECKING:
    from refluent.emulator.context import Gpu

ARCH = "sm_100a"


def missing() -> str | None:
    """Why the backend cannot be used on this machine; None if it can."""
    return missing_packages(emulated=True)


def supports(problem: Problem) -> str | None:
    """None when this backend can run the problem, else the reason."""
    lacking = missing()
    if lacking is not None:
        return lacking
    if problem.device.type != "cpu" and _session() is None:
        return f"it emulates a GPU for tensors on the CPU, got {problem.device}; move them there with .cpu()"
    return unsupported(problem)


def forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """By backend "torch": the forward kernel is not part of this version."""
    return tiled.forward(problem, inputs)


def backward(
    problem: Problem, inputs: Inputs, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, needs: Needs
) -> Gradients:
    """The gradients that ``needs`` names, in the emulator's open context, else in one with every check on."""
    from refluent.gpu import launch

    with _context():
        return launch.backward(problem, inputs, o, lse, do, dlse, needs)


def gpu(**options: Any) -> Gpu:
    """The emulated chip as a context manager: this backend's calls inside run there. Options as for emulator.gpu."""
    from refluent import emulator

    return emulator.gpu(ARCH, **options)


def _session() -> Any:
    if missing() is not None:
        return None
    from refluent.gpu import launch

    return launch.emulator_session()


def _context() -> contextlib.AbstractContextManager[Any]:
    session = _session()
    if session is None:
        return gpu()
    if session.arch != ARCH:
        raise UnsupportedError(
            f"backend 'emulate:sm100': the open emulator.gpu(...) is {session.arch}; open one of {ARCH!r}, or none"
        )
    return contextlib.nullcontext()
