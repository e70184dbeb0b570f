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

    def missing(self) -> str | None:
        """Why it cannot be used on this machine, in words; None if it can."""

    def supports(self, problem: Problem) -> str | None:
        """None if it serves the problem, else the reason in words."""

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """o (b, sq, h, dv), lse (b, h, sq), max_score like lse or None; packed: (tq, h, dv), (h, tq)."""

    def backward(
        self, problem: Problem, inputs: Inputs, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        """The gradients that ``needs`` names."""


MODULES = {
    "sm100": "refluent.gpu.sm100.backend",
    "sm90": "refluent.gpu.sm90.backend",
    "torch": "refluent.tiled",
    "emulate:sm100": "refluent.gpu.sm100.emulated",
    "emulate:sm90": "refluent.gpu.sm90.emulated",
}
"""The backends that are there, best first."""

ASKED_FOR = ("sm90", "emulate:sm100", "emulate:sm90")
"""Those that a call has to name: emulated ones, and one that nobody has timed yet on chips where others are fast."""


def names() -> tuple[str, ...]:
    """Every known backend's name, whether it can be used or not."""
    return tuple(MODULES)


def missing(name: str) -> str | None:
    """Why a known backend cannot be used on this machine at all; None if it can."""
    return load(name).missing()


def check_name(name: object) -> str:
    """Check the argument ``backend``; returns it, "" for None (the best that fits)."""
    if name is None:
        return ""
    if not isinstance(name, str):
        raise TypeError(f"backend: got {type(name).__name__}; allowed: None or one of {', '.join(names())}")
    if name not in MODULES:
        raise ValueError(f"backend: got {name!r}; allowed: None or one of {', '.join(names())}")
    return name


@cache
def load(name: str) -> Backend:
    """The backend's module."""
    return cast(Backend, importlib.import_module(MODULES[check_name(name)]))


def automatic() -> tuple[str, ...]:
    """The backends that this machine can use and a call need not name, best first."""
    return tuple(name for name in MODULES if name not in ASKED_FOR and missing(name) is None)


def choose(problem: Problem) -> str:
    """The name of the backend that serves the problem: the one it names, else the best that fits.

    Raises UnsupportedError with every candidate's reason if none does.
    """
    candidates = (problem.options.backend,) if problem.options.backend else automatic()
    reasons = []
    for name in candidates:
        reason = load(name).supports(problem)
        if reason is None:
            return name
        reasons.append(f"backend {name!r}: {reason}")
    raise UnsupportedError("; ".join(reasons))
