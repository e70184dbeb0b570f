"""Checks of values: what problem.py cannot see without reading from the device."""

from __future__ import annotations

from itertools import pairwise

from refluent.masks import check_block_tensors
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
    """Check that reads of captured tensors stay inside them."""
