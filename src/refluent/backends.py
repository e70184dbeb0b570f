"""The backends by name: which are there, why others are not, and which one serves a problem."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Protocol, cast

from torch import Tensor

from refluent.errors import UnsupportedError
from refluent.problem import Gradients, Inputs, Needs, Problem


class Backend(Protocol):
    """What a backend module offers."""

    def supports(self, problem: Problem) -> str | None:
        """None if it serves the problem, else the reason in words."""

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """o (b, sq, h, dv), lse (b, h, sq), max_score like lse or None; packed: (tq, h, dv), (h, tq)."""

    def backward(
        self, problem: Problem, inputs: Inputs, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        """The gradients that ``needs`` names."""


MODULES = {"torch": "refluent.tiled"}
"""The backends that are there, best first."""

MISSING = {
    name: f"{what} are not part of this version; backend='torch' computes the same on any device"
    for name, what in {
        "sm90": "kernels for Hopper GPUs",
        "sm100": "kernels for Blackwell GPUs",
        "emulate:sm90": "emulated kernels for Hopper GPUs",
        "emulate:sm100": "emulated kernels for Blackwell GPUs",
    }.items()
}
"""Known names that cannot be used, with the reason."""


def names() -> tuple[str, ...]:
    """Every known backend's name, whether it can be used or not."""
    return (*MODULES, *MISSING)


def missing(name: str) -> str | None:
    """Why a known backend cannot be used here at all; None if it can."""
    return MISSING.get(name)


def check_name(name: object) -> str:
    """Check the argument ``backend``; returns it, "" for None (the best that fits)."""
    if name is None:
        return ""
    if not isinstance(name, str):
        raise TypeError(f"backend: got {type(name).__name__}; allowed: None or one of {', '.join(names())}")
    if name in MISSING:
        raise UnsupportedError(f"backend {name!r}: {MISSING[name]}")
    if name not in MODULES:
        raise ValueError(f"backend: got {name!r}; allowed: None or one of {', '.join(names())}")
    return name


@cache
def load(name: str) -> Backend:
    """The backend's module."""
    return cast(Backend, importlib.import_module(MODULES[check_name(name)]))


def choose(problem: Problem) -> str:
    """The name of the backend that serves the problem: the one it names, else the best that fits.

    Raises UnsupportedError with every candidate's reason if none does.
    """
    candidates = (problem.options.backend,) if problem.options.backend else tuple(MODULES)
    reasons = []
    for name in candidates:
        reason = load(name).supports(problem)
        if reason is None:
            return name
        reasons.append(f"backend {name!r}: {reason}")
    raise UnsupportedError("; ".join(reasons))
