"""A traced score_mod or mask_mod: what it reads, how to run it on tiles, how to run its gradient.

A :class:`Mod` is static: it holds graphs and names but no tensors, hashes by content and may be part of a cache key.
A :class:`TracedMod` pairs it with the live tensors that the user's function captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from refluent.mods.graph import captured_number, dependencies, describe, digest, output_of, reads_of
from refluent.mods.program import compile_backward, compile_forward
from refluent.mods.reads import Reader, Tile, reader_of

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


class Mod:
    """A traced function of one score, or of one position. Holds no tensor; equality and hash are those of ``key``.

    ``kind``: "score" or "mask". ``name``: the function's own. ``captured``: the tensors it reads, in the order in
    which every method takes them. ``reads``: every read of one.

    ``graphs`` maps the accumulate type (torch.float32, torch.float64) to the traced graph: placeholders score, b, h,
    i, j (a mask_mod has no score) and c0, c1, ... for the captured tensors, pointwise aten operations, and
    :func:`refluent.mods.graph.read` for every read. ``grad_graphs`` holds the derived gradients likewise, with one
    more placeholder, g, and the output (dscore, per read None or (its gradient, *its indices)).

    ``depends_on`` is a subset of {"score", "b", "h", "i", "j"}. ``uses_score_in_grad``: the gradient needs the raw
    scores. ``score_grad_is_identity``: d mod / d score is 1, so :meth:`backward` hands ``g`` itself back.
    """

    def __init__(
        self,
        kind: Literal["score", "mask"],
        name: str,
        captured: tuple[Captured, ...],
        graphs: dict[torch.dtype, fx.Graph],
        grad_graphs: dict[torch.dtype, fx.Graph],
    ) -> None:
        self.kind = kind
        self.name = name
        self.captured = captured
        self.graphs = graphs
        self.grad_graphs = grad_graphs
        self.key = f"{kind}-{digest([describe(g) for g in graphs.values()] + [repr(c) for c in captured])}"
        graph = next(iter(graphs.values()))
        depends = dependencies(graph)
        result = output_of(graph)
        self.depends_on: frozenset[str] = depends[result]
        self.reads = tuple(_describe_read(node, depends) for node in reads_of(graph))
        self.uses_score_in_grad = False
        self.score_grad_is_identity = False
        for grad_graph in grad_graphs.values():
            placeholders = {n.name: n for n in grad_graph.nodes if n.op == "placeholder"}
            self.uses_score_in_grad |= bool(placeholders["score"].users)
            self.score_grad_is_identity = output_of(grad_graph)[0] is placeholders["g"]
        self._programs: dict[object, Callable[..., Any]] = {}
        _MODS.setdefault(self.key, self)

    def __repr__(self) -> str:
        return f"Mod({self.name!r}, {self.key}, captured={list(self.captured_names)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mod) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __deepcopy__(self, memo: object) -> Mod:
        return self

    @property
    def label(self) -> str:
        """How messages call the function."""
        return f"{self.kind}_mod {self.name!r}"

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
        dtype = torch.float32 if score is None else score.dtype
        box = origin is not None
        program = self._programs.get((dtype, box))
        if program is None:
            program = compile_forward(self._graph(self.graphs, dtype), self.captured_names, self.label, box=box)
            self._programs[dtype, box] = program
        tile = Tile(origin, (b.shape[0], h.shape[1], i.shape[2], j.shape[3]) if origin else _NO_SIZES, clamp)
        with torch.no_grad():
            result: Tensor = program(score, b, h, i, j, captured, tile)
        return result

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
        needs = tuple(needs)
        box = origin is not None
        program = self._programs.get((g.dtype, needs, box))
        if program is None:
            graph = self._graph(self.grad_graphs, g.dtype)
            readers = self._readers_of(g.dtype)
            program = compile_backward(graph, readers, self.captured_names, self.label, needs=needs, box=box)
            self._programs[g.dtype, needs, box] = program
        tile = Tile(origin, (b.shape[0], h.shape[1], i.shape[2], j.shape[3]) if origin else _NO_SIZES, clamp)
        with torch.no_grad():
            dscore: Tensor = program(score, b, h, i, j, captured, g, out, tile)
        return dscore

    def _graph(self, graphs: dict[torch.dtype, fx.Graph], dtype: torch.dtype) -> fx.Graph:
        if dtype not in graphs:
            raise ValueError(f"{self.label} runs on scores of type {list(graphs)}, got {dtype}")
        return graphs[dtype]

    def _readers_of(self, dtype: torch.dtype) -> tuple[Reader, ...]:
        graph = self.graphs[dtype]
        depends = dependencies(graph)
        return tuple(reader_of(n, depends, self.captured_names, self.label) for n in reads_of(graph))

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


_NO_SIZES = (0, 0, 0, 0)


def _describe_read(node: fx.Node, depends: dict[fx.Node, frozenset[str]]) -> Read:
    index = tuple(a.name if isinstance(a, fx.Node) else a for a in node.args[2:])
    return Read(captured_number(node), node.name, index, depends[node])  # type: ignore[arg-type]


class TracedMod:
    """A function traced by :func:`refluent.score_mod` or :func:`refluent.mask_mod` and its live captured tensors.

    ``captured`` stands in the order of ``mod.captured``. Calling the object calls the user's function.
    """

    def __init__(self, mod: Mod, captured: tuple[Tensor, ...], fn: Callable[..., Any]) -> None:
        self.mod = mod
        self.captured = captured
        self.fn = fn

    def __repr__(self) -> str:
        return f"TracedMod({self.mod!r})"

    def __call__(self, *args: Tensor) -> Any:
        return self.fn(*args)
