"""What the roles of one CTA share: one argument instead of thirty."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from refluent.gpu.device.numerics import hidden_score
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
class Sources:
    """TMA atoms and the tensors they read (sequence views), and the row statistics (heads, rows), float32."""

    q_atom: cute.CopyAtom
    q: cute.Tensor
    k_atom: cute.CopyAtom
    k: cute.Tensor
    v_atom: cute.CopyAtom
    v: cute.Tensor
    do_atom: cute.CopyAtom
    do: cute.Tensor
    lse_log2: cute.Tensor
    dpsum: cute.Tensor


@dataclass(frozen=True)
class Targets:
    """Where gradients go. Grouped heads: dk, dv are None and the float32 accumulators are used, else the reverse.

    dq (heads, m_blocks, *plan.dq_chunks), dk_accum (kv heads, n_blocks, *plan.dk_chunks), dv_accum likewise, float32;
    dk, dv (b, s, h, d) or packed (t, h, d); dq_turn (heads, m_blocks), dkv_turn (kv heads, 2 n_blocks) int32, the
    semaphores of a deterministic call.
    """

    dq: cute.Tensor
    dk: cute.Tensor | None
    dv: cute.Tensor | None
    dk_accum: cute.Tensor | None
    dv_accum: cute.Tensor | None
    dq_turn: cute.Tensor | None
    dkv_turn: cute.Tensor | None


@dataclass(frozen=True)
class Scores:
    """Run-time numbers of the score function: s = scale q k, softcap tanh; dropout's key and threshold."""

    factor: cutlass.Float32  # log2(e) scale, never 0
    softcap: cutlass.Float32
    philox: cute.Tensor | None  # int64 (2,): seed, offset
    keep_from: cutlass.Uint32  # an element is kept iff its word is at least this
    keep_scale: cutlass.Float32  # 1 / (1 - dropout_p)
    captured: tuple = ()  # by score_mod; a 0-d tensor comes as one of one element
    mask_captured: tuple = ()  # by mask_mod
    sums: tuple = ()  # gradients of `captured`, float32 or exact (device/exact.py), or None


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
