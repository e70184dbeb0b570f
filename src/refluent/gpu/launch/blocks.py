"""A block mask as kernels take it: a mask_mod for the scores, and lists of the tiles that it leaves something of."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from refluent.gpu.plans.sm100 import backward_plan
from refluent.masks import BlockSpec, BlockTensors, dense_blocks, list_blocks
from refluent.mods.graph import POSITIONS, aten, output_of, read
from refluent.mods.mod import Captured, Mod
from refluent.problem import Inputs, Options, Problem

EMPTY, PARTIAL, FULL = 0, 1, 2


def mask_of(options: Options) -> Mod | None:
    """Everything that masks single scores, as one mask_mod. It captures what mask_tensors gives."""
    if options.block_mask is None:
        return options.mask_mod
    return _combined(options.block_mask, options.mask_mod)


def mask_tensors(options: Options, inputs: Inputs) -> tuple[Tensor, ...]:
    """What mask_of captures, in its order."""
    if options.block_mask is None or inputs.blocks is None:
        return inputs.mask_captured
    return (states_of(inputs.blocks), *inputs.block_captured, *inputs.mask_captured)


def states_of(blocks: BlockTensors) -> Tensor:
    """(Bm, Hm, num_m, num_n) uint8: EMPTY, PARTIAL or FULL. Waits for nothing."""
    columns = blocks.kv_idx.shape[-1]
    states = dense_blocks(blocks.kv_num, blocks.kv_idx, columns).to(torch.uint8)
    if blocks.full_kv_num is not None and blocks.full_kv_idx is not None:
        states.masked_fill_(dense_blocks(blocks.full_kv_num, blocks.full_kv_idx, columns), FULL)
    return states


@lru_cache(maxsize=256)
def _combined(spec: BlockSpec, mask_mod: Mod | None) -> Mod:
    """(full or partial and the block mask's own function) and `mask_mod`."""
    own = spec.mask_mod
    states = Captured("block_mask", torch.uint8, 4)
    captured = (states, *(own.captured if own else ()), *(mask_mod.captured if mask_mod else ()))
    graph = fx.Graph()
    at = {name: graph.placeholder(name) for name in POSITIONS}
    tensors = [graph.placeholder(f"c{number}") for number in range(len(captured))]
    for node in at.values():
        node.meta["dtype"] = torch.int64

    def add(target: Any, *args: Any, dtype: torch.dtype = torch.bool) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["dtype"] = dtype
        return node

    rows = add(aten.floor_divide.default, at["i"], spec.block_m, dtype=torch.int64)
    keys = add(aten.floor_divide.default, at["j"], spec.block_n, dtype=torch.int64)
    state = add(read, tensors[0], torch.uint8, at["b"], at["h"], rows, keys, dtype=torch.uint8)
    if own is None:
        seen = add(aten.ne.Scalar, state, EMPTY)
    else:
        partial = add(
            aten.bitwise_and.Tensor, add(aten.eq.Scalar, state, PARTIAL), _copied(graph, own, at, tensors[1:])
        )
        seen = add(aten.bitwise_or.Tensor, add(aten.eq.Scalar, state, FULL), partial)
    if mask_mod is not None:
        rest = tensors[len(tensors) - len(mask_mod.captured) :]
        seen = add(aten.bitwise_and.Tensor, seen, _copied(graph, mask_mod, at, rest))
    graph.output(seen)
    return Mod("mask", "block_mask", captured, {torch.float32: graph}, {})


def _copied(graph: fx.Graph, mod: Mod, at: dict[str, fx.Node], tensors: list[fx.Node]) -> fx.Node:
    """A mask_mod's nodes in `graph`; the one of its result."""
    source = mod.graphs[torch.float32]
    known: dict[fx.Node, fx.Node] = {}
    for node in source.nodes:
        if node.op == "placeholder":
            known[node] = at[node.name] if node.name in at else tensors[int(node.name[1:])]
        elif node.op != "output":
            known[node] = graph.node_copy(node, lambda n: known[n])
    return known[output_of(source)]


def tile_lists(problem: Problem, states: Tensor) -> tuple[Tensor, ...]:
    """The tensors of device.blocks.Blocks for a problem with a block mask of these states."""
    spec = problem.options.block_mask
    assert spec is not None
    plan = backward_plan(problem.head_dim, problem.head_dim_v)
    counts = (states != EMPTY).to(torch.int32)
    for dim, block, tile, size in (
        (-2, spec.block_m, plan.tile_m, problem.seqlen_q),
        (-1, spec.block_n, plan.tile_n, problem.seqlen_k),
    ):
        first = torch.arange(0, size, tile, device=states.device)
        sums = torch.nn.functional.pad(counts.cumsum(dim, dtype=torch.int32), (1, 0) if dim == -1 else (0, 0, 1, 0))
        last = ((first + tile + block - 1) // block).clamp(max=counts.shape[dim])
        counts = sums.index_select(dim, last) - sums.index_select(dim, first // block)
    left = counts > 0
    lists = (*list_blocks(left.transpose(-1, -2)), *list_blocks(left))
    return tuple(x.expand(problem.batch, problem.heads_q, *x.shape[2:]) for x in lists)
