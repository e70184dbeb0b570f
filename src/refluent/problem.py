"""One frozen description of what is asked, and every check of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from refluent.masks import BlockSpec, BlockTensors
    from refluent.mods.mod import Mod


@dataclass(frozen=True)
class Options:
    """The static facts of a call: hashable, no tensors, no sizes."""

    scale: float | None = None  # None: 1 / sqrt(head_dim)
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)  # None: open
    softcap: float = 0.0  # 0: off
    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    block_mask: BlockSpec | None = None
    dropout_p: float = 0.0
    deterministic: bool = False
    return_max_score: bool = False
    backend: str = "torch"


@dataclass(frozen=True)
class Problem:
    """Options plus sizes, type and device: everything that a plan may depend on.

    ``seqlen_q`` and ``seqlen_k`` are the padded lengths, or max_seqlen_* of a packed side (tokens).
    """

    options: Options
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device
    varlen_q: bool = False
    varlen_k: bool = False
    has_seqused_q: bool = False
    has_seqused_k: bool = False
    has_sink: bool = False

    @property
    def scale(self) -> float:
        """What multiplies <q_i, k_j>: as given, else 1 / sqrt(head_dim)."""
        return 1.0 / math.sqrt(self.head_dim) if self.options.scale is None else self.options.scale

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads_q // self.heads_kv

    @property
    def accum_dtype(self) -> torch.dtype:
        """The type of lse, max_score and of every sum."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors of one call: (b, s, h, d), or packed (t, h, d) on a side that has cu_seqlens."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None = None  # int32 (b + 1,)
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None  # int32 (b,)
    seqused_k: Tensor | None = None
    sink: Tensor | None = None  # (heads_q,)
    score_captured: tuple[Tensor, ...] = ()  # in the order of Mod.captured_names
    mask_captured: tuple[Tensor, ...] = ()
    block_captured: tuple[Tensor, ...] = ()  # captured by the block mask's own mask_mod
    blocks: BlockTensors | None = None
    philox: Tensor | None = None  # int64 (2,): seed, offset; None without dropout


@dataclass(frozen=True)
class Needs:
    """Which gradients a backward has to make."""

    dq: bool = True
    dk: bool = True
    dv: bool = True
    dsink: bool = False
    dcaptured: tuple[bool, ...] = ()  # one per Inputs.score_captured


@dataclass(frozen=True, eq=False)
class Gradients:
    """What a backward made; None where it was not asked to."""

    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsink: Tensor | None = None
    dcaptured: tuple[Tensor | None, ...] = ()
