"""What the roles of one CTA share: one argument instead of thirty."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from refluent.gpu.device.numerics import hidden_score
from refluent.gpu.device.scores import Scores
from refluent.gpu.device.tensors import Sources, Targets
from refluent.gpu.device.work import Call
from refluent.gpu.plans.sm100 import BackwardPlan
from refluent.gpu.sm100.backward.products import Products
from refluent.gpu.sm100.backward.storage import Accumulators, Barriers, Shared
from refluent.mods.emit import MaskMod, ScoreMod

# Warps by role; setmaxnreg acts on whole warpgroups, and warps 12-15 are one.
REDUCE_WARP, COMPUTE_WARP, MMA_WARP, LOAD_WARP = 0, 4, 12, 13
WARPS = 16

# Named barriers.
REDUCE_BARRIER, COMPUTE_BARRIER, GROUP_BARRIER = 1, 2, 3  # GROUP_BARRIER + compute warpgroup


@dataclass(frozen=True)
class Static:
    """Facts of a compiled variant that are neither sizes nor tiles."""

    dtype: type
    plan: BackwardPlan
    softcap: bool = False
    dropout: bool = False
    deterministic: bool = False
    cluster: int = 1
    negative_scale: bool = False
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None

    @property
    def hidden(self) -> float:
        """The raw score that has no weight."""
        return hidden_score(self.negative_scale)

    @property
    def shaped(self) -> bool:
        """Whether weights are made of something else than raw scores."""
        return self.softcap or self.score_mod is not None

    @property
    def keeps_score(self) -> bool:
        """Whether scores outlive the weights that are made of them."""
        return self.score_mod is not None and self.score_mod.keeps_score

    @property
    def mod_gradient(self) -> bool:
        """Whether dS goes back through score_mod where it is known, and not by way of the weights."""
        mod = self.score_mod
        return mod is not None and not mod.folded and bool(mod.scatters or not mod.identity)


@dataclass(frozen=True)
class Context:
    """One CTA: the call, the variant, memory, barriers."""

    static: cutlass.Constexpr
    call: Call
    scores: Scores
    sources: Sources
    targets: Targets
    products: Products
    shared: Shared
    barriers: Barriers
    accumulators: Accumulators
    tmem: cute.Pointer

    @property
    def plan(self) -> BackwardPlan:
        return self.static.plan


def tuple_of(arguments: tuple | None) -> tuple:
    """A tuple that travels as None where it is empty: the DSL takes no empty one."""
    return () if arguments is None else arguments
