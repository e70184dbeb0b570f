"""Checks of values: what problem.py cannot see without reading from the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, fx

from refluent.masks import check_block_tensors
from refluent.mods import graph
from refluent.mods.mod import Mod
from refluent.problem import Inputs, Problem, refuse


def check_values(problem: Problem, inputs: Inputs) -> None:
    """Read and check lengths and block lists.

    On the CPU every call does this; for tensors on a GPU it waits for the device, so only ``rf.validate`` does.
    Raises ValueError.
    """
    for side, cu, used, tensor, bound in (
        ("q", inputs.cu_seqlens_q, inputs.seqused_q, inputs.q, problem.seqlen_q),
        ("k", inputs.cu_seqlens_k, inputs.seqused_k, inputs.k, problem.seqlen_k),
    ):
        lengths = [bound] * problem.batch
        if cu is not None:
            lengths = _check_cu_seqlens(f"cu_seqlens_{side}", cu.tolist(), tensor.shape[0])
            if max(lengths, default=0) > bound:
                refuse(f"max_seqlen_{side}", bound, f"at least the longest sequence, {max(lengths)}")
        if used is not None:
            _check_seqused(f"seqused_{side}", used.tolist(), lengths)
    if inputs.blocks is not None:
        check_block_tensors(inputs.blocks)


def _check_cu_seqlens(name: str, starts: list[int], tokens: int) -> list[int]:
    if starts[0] != 0:
        refuse(name, f"first element {starts[0]}", "0")
    lengths = [after - before for before, after in pairwise(starts)]
    for index, length in enumerate(lengths):
        if length < 0:
            refuse(name, f"{starts[index]} before {starts[index + 1]} (elements {index}, {index + 1})", "no decrease")
    if starts[-1] > tokens:
        refuse(name, f"last element {starts[-1]}", f"at most the number of tokens, {tokens}")
    return lengths


def _check_seqused(name: str, used: list[int], lengths: list[int]) -> None:
    for index, (count, length) in enumerate(zip(used, lengths)):
        if not 0 <= count <= length:
            refuse(name, f"{count} for sequence {index}", f"0 to its length, {length}")


def check_reads(problem: Problem, inputs: Inputs) -> None:
    """Check, for every position inside the lengths, that mods read inside their captured tensors.

    Waits for the device. Raises ValueError with the function, the tensor, the index and the positions.
    """
    block_mask = problem.options.block_mask
    for mod, captured in (
        (problem.options.score_mod, inputs.score_captured),
        (problem.options.mask_mod, inputs.mask_captured),
        (None if block_mask is None else block_mask.mask_mod, inputs.block_captured),
    ):
        if mod is not None and mod.reads:
            for sequences, rows, columns in _boxes(problem, inputs):
                _Reads(mod, captured, sequences, problem.heads_q, rows, columns).check()


POSITIONS_AT_ONCE = 1 << 22


def _boxes(problem: Problem, inputs: Inputs) -> Iterator[tuple[range, range, range]]:
    """Boxes (sequences, rows, columns) that cover every position inside the lengths."""
    lengths_q = _lengths(problem.batch, problem.seqlen_q, inputs.cu_seqlens_q, inputs.seqused_q)
    lengths_k = _lengths(problem.batch, problem.seqlen_k, inputs.cu_seqlens_k, inputs.seqused_k)
    for (sq, sk), group in groupby(range(problem.batch), key=lambda n: (lengths_q[n], lengths_k[n])):
        sequences = list(group)
        strip = max(1, POSITIONS_AT_ONCE // max(1, sk))
        for first in range(0, sq if sk > 0 else 0, strip):
            rows = range(first, min(sq, first + strip))
            yield range(sequences[0], sequences[-1] + 1), rows, range(sk)


def _lengths(batch: int, bound: int, cu: Tensor | None, used: Tensor | None) -> list[int]:
    if used is not None:
        return used.tolist()
    return [bound] * batch if cu is None else [after - before for before, after in pairwise(cu.tolist())]


class _Reads:
    """Computes the indices of a mod's reads over a box of positions, each in the smallest shape that holds it."""

    def __init__(
        self, mod: Mod, captured: Sequence[Tensor], sequences: range, heads: int, rows: range, columns: range
    ) -> None:
        self.mod = mod
        self.captured = captured
        device = captured[0].device
        self.positions = {
            name: torch.arange(span.start, span.stop, device=device).view(shape)
            for name, span, shape in (
                ("b", sequences, (-1, 1, 1, 1)),
                ("h", range(heads), (1, -1, 1, 1)),
                ("i", rows, (1, 1, -1, 1)),
                ("j", columns, (1, 1, 1, -1)),
            )
        }
        self.nodes = {node.name: node for node in mod.graphs[torch.float32].nodes}
        self.values: dict[fx.Node, Any] = {}

    def check(self) -> None:
        for seen in self.mod.reads:
            shape = tuple(self.captured[seen.captured].shape)
            for dim, (index, size) in enumerate(zip(seen.index, shape)):
                value = index if isinstance(index, int) else self.value(self.nodes[index])
                least, most = (value, value) if isinstance(value, int) else map(int, value.aminmax())
                if least < -size or most >= size:
                    name = self.mod.captured_names[seen.captured]
                    wrong = least if least < -size else most
                    at = f"index {wrong} in dimension {dim} of captured tensor {name!r} of shape {shape}"
                    refuse(f"{self.mod.kind}_mod {self.mod.name!r}", at, f"{-size} to {size - 1}")

    def value(self, node: fx.Node) -> Any:
        """An index's value, or that of something it is computed from."""
        if node.name in self.positions:
            return self.positions[node.name]
        if node not in self.values:
            self.values[node] = self._compute(node)
        return self.values[node]

    def _compute(self, node: fx.Node) -> Any:
        if node.target is graph.constant:
            number: Any = node.args[0]
            return torch.tensor(number, dtype=graph.dtype_of(node), device=self.captured[0].device)
        if node.target is graph.read:
            source = self.captured[graph.captured_number(node)]
            index: Any = tuple(self.value(n) if isinstance(n, fx.Node) else n for n in node.args[2:])
            found = source[index] if index else source
            return (found if found.ndim == 4 else found.reshape(1, 1, 1, 1)).to(graph.dtype_of(node))
        target: Any = node.target
        return target(*fx.node.map_arg(node.args, self.value), **fx.node.map_arg(node.kwargs, self.value))
