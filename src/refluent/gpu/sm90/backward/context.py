"""What the roles of one CTA share: one argument instead of thirty."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from refluent.gpu.device.numerics import hidden_score
from refluent.gpu.device.scores import Scores
from refluent.gpu.device.tensors import Sources, Targets
from refluent.gpu.device.work import Call
from refluent.gpu.plans.sm90 import BackwardPlan
from refluent.gpu.sm90.backward.products import Products
from refluent.gpu.sm90.backward.storage import Barriers, Shared

# Warps by role; setmaxnreg acts on whole warpgroups, and warps 0-3 are one.
LOAD_WARP, REDUCE_WARP, COMPUTE_WARP = 0, 1, 4

# Named barriers.
COMPUTE_BARRIER, GROUP_BARRIER = 1, 2  # GROUP_BARRIER + compute warpgroup


@dataclass(frozen=True)
class Static:
    """Facts of a compiled variant that are neither sizes nor tiles."""

    dtype: type
    plan: BackwardPlan
    softcap: bool = False
    dropout: bool = False
    deterministic: bool = False
    negative_scale: bool = False

    @property
    def hidden(self) -> float:
        """The raw score that has no weight."""
        return hidden_score(self.negative_scale)


@dataclass(frozen=True)
class Stores:
    """TMA atoms and the tensors that they write a warpgroup's part of dK and dV to; None for grouped heads."""

    dk_atom: cute.CopyAtom | None
    dk: cute.Tensor | None
    dv_atom: cute.CopyAtom | None
    dv: cute.Tensor | None


@dataclass(frozen=True)
class Context:
    """One CTA: the call, the variant, memory, barriers."""

    static: cutlass.Constexpr
    call: Call
    scores: Scores
    sources: Sources
    stores: Stores
    targets: Targets
    products: Products
    shared: Shared
    barriers: Barriers

    @property
    def plan(self) -> BackwardPlan:
        return self.static.plan
