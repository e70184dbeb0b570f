"""A traced score_mod or mask_mod: what it reads, how to run it on tiles, how to run its gradient.

A :class:`Mod` is static: it holds graphs and names but no tensors, hashes by content and may be part of a cache key.
A :class:`TracedMod` pairs it with the live tensors that the user's function captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, fx

POSITIONS = ("b", "h", "i", "j")
"""Names of the position arguments: batch, query head, query row, key column (rows and columns inside the sequence)."""

Origin = tuple[int, int, int, int]
"""First b, h, i and j of a tile whose positions ascend by one along every dimension."""


@dataclass(frozen=True)
class Captured:
    """A tensor that the function reads: its name in the user's code, dtype and number of dimensions.

    ``shape`` is set only when the function looked at the tensor's shape, which is then part of the traced code.
    """

    name: str
    dtype: torch.dtype
    ndim: int
    shape: tuple[int, ...] | None = None

    @property
    def differentiable(self) -> bool:
        return self.dtype.is_floating_point


@dataclass(frozen=True)
class Read:
    """One read of one captured tensor: ``captured[index]``.

    ``captured`` is the tensor's number. ``node`` is the name of the read's node in the graph. ``index`` holds, per
    dimension, the name of the graph node that computes the index (``"b"``, ``"h"``, ``"i"``, ``"j"`` are the
    positions themselves) or a python number. ``depends_on`` says which positions the indices depend on. A read of a
    0-d tensor has an empty index. Indices never depend on the score.
    """

    captured: int
    node: str
    index: tuple[str | int, ...]
    depends_on: frozenset[str]


@dataclass(frozen=True, eq=False)
class Mod:
    """A traced function of one score, or of one position. Equality and hash are those of ``key``.

    ``graphs`` maps the accumulate type (torch.float32, torch.float64) to the traced graph: placeholders score, b, h,
    i, j (a mask_mod has no score) and one per captured tensor, pointwise aten operations, and
    :func:`refluent.mods.graph.read` for every read. ``depends_on`` is a subset of {"score", "b", "h", "i", "j"}.
    ``uses_score_in_grad``: the gradient needs the raw scores. ``score_grad_is_identity``: d mod / d score is 1, so
    :meth:`backward` hands ``g`` itself back.
    """

    kind: Literal["score", "mask"]
    name: str
    key: str
    captured: tuple[Captured, ...]
    reads: tuple[Read, ...]
    graphs: dict[torch.dtype, fx.Graph]
    depends_on: frozenset[str]
    uses_score_in_grad: bool
    score_grad_is_identity: bool
    _programs: dict[object, Callable[..., object]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        _MODS[self.key] = self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mod) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def captured_names(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.captured)

    def evaluate(
        self,
        score: Tensor | None,
        b: Tensor,
        h: Tensor,
        i: Tensor,
        j: Tensor,
        captured: Sequence[Tensor],
        *,
        origin: Origin | None = None,
        clamp: bool = False,
    ) -> Tensor:
        """Run the function on a tile of broadcastable tensors.

        score: (B, H, Tm, Tn) in float32 or float64, None for a mask_mod; b (B, 1, 1, 1), h (1, H, 1, 1),
        i (1, 1, Tm, 1) and j (1, 1, 1, Tn) int64 (B, H count the tile's batches and query heads). ``score`` is never
        written to. The result broadcasts to (B, H, Tm, Tn): the modified score (dtype of ``score``), or bool.

        ``origin`` = (first b, h, i, j) promises that the positions ascend by one along each dimension, so that reads
        such as ``bias[b, h, i, j]`` become slices instead of gathers. ``clamp`` moves indices that are out of range
        to the nearest valid one (for padded tiles); without it they raise ValueError (on the CPU).
        """
        raise NotImplementedError

    def backward(
        self,
        score: Tensor | None,
        b: Tensor,
        h: Tensor,
        i: Tensor,
        j: Tensor,
        captured: Sequence[Tensor],
        g: Tensor,
        *,
        needs: Sequence[bool] = (),
        out: Sequence[Tensor | None] = (),
        origin: Origin | None = None,
        clamp: bool = False,
    ) -> Tensor:
        """Gradient of :meth:`evaluate`: returns d loss / d score for ``g`` = d loss / d result.

        ``g`` (B, H, Tm, Tn) must be exactly 0 wherever the position is masked. Wherever it is 0 nothing is
        contributed, whatever the function or its derivative returns there (inf, NaN). ``score`` (the raw score, as
        given to evaluate) may be None unless ``uses_score_in_grad``. For every captured tensor with ``needs`` true,
        its gradient is added to ``out`` (same shape, float32 or float64) in a fixed order. The result may be ``g``
        itself; ``g`` is never written to.
        """
        raise NotImplementedError

    def grad_buffers(
        self, captured: Sequence[Tensor], needs: Sequence[bool], dtype: torch.dtype
    ) -> tuple[Tensor | None, ...]:
        """Zeroed contiguous accumulators for :meth:`backward`: one per captured tensor, None where not needed."""
        return tuple(
            torch.zeros(c.shape, dtype=dtype, device=c.device) if need else None for c, need in zip(captured, needs)
        )


_MODS: dict[str, Mod] = {}


def find_mod(key: str) -> Mod:
    """The mod of that key: torch.library ops and compiled graphs carry keys (which contain neither "|" nor ",")."""
    try:
        return _MODS[key]
    except KeyError:
        raise ValueError(f"mod {key!r}: not traced in this process; call rf.score_mod or rf.mask_mod first") from None


@dataclass(frozen=True, eq=False)
class TracedMod:
    """A function traced by :func:`refluent.score_mod` or :func:`refluent.mask_mod` and its live captured tensors.

    ``captured`` stands in the order of ``mod.captured``. Calling the object calls the user's function.
    """

    mod: Mod
    captured: tuple[Tensor, ...]
    fn: Callable[..., Tensor]

    def __call__(self, *args: Tensor) -> Tensor:
        return self.fn(*args)
