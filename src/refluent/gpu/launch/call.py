"""One backward on a GPU, or on the emulated one whose context is open: torch's tensors in, gradients out."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from refluent.errors import UnsupportedError
from refluent.gpu.device.seqlen import workspace_blocks
from refluent.gpu.launch.blocks import mask_of, mask_tensors, tile_lists
from refluent.gpu.launch.compiled import compiled_backward
from refluent.gpu.launch.variant import Variant, variant_of
from refluent.gpu.launch.workspace import Extents, sections
from refluent.mods.mod import Mod
from refluent.problem import Gradients, Inputs, Needs, Problem

VECTOR = 8  # 16-bit elements: what strides have to be multiples of
_PASSED_AS = {torch.bool: torch.uint8, torch.uint16: torch.int16, torch.uint32: torch.int32}
OPEN = 1 << 29  # keys: more than a sequence has, and sums of two with a position stay 32-bit


def backward(
    problem: Problem,
    inputs: Inputs,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    needs: Needs,
    *,
    ctas: int = 0,
    cluster: int = 1,
) -> Gradients:
    """The gradients of a call that the backend supports.

    `ctas`: of the main kernel's grid at most, each of which walks tiles; 0: one a tile. If deterministic, no more than
    the device runs at once: a tile waits for earlier ones, and a CTA that has not started has tiles among those.
    `cluster`: CTAs that load Q and dO for each other, 1 or 2; nobody has measured yet where 2 is the better choice. Not
    2 with a block mask, whose lists make each CTA walk query blocks of its own.
    """
    if cluster > 1 and problem.options.block_mask is not None:
        raise UnsupportedError(
            f"cluster={cluster} and a block mask: the CTAs of a cluster walk the same query blocks, "
            "and those of a block mask each its own list; pass cluster=1"
        )
    if _nothing_to_do(problem, inputs):
        return _empty(problem, inputs, lse, dlse, needs)
    arch, emulated = target(inputs.q.device)
    sink = inputs.sink
    sink_type = None if sink is None else sink.dtype
    wanted = needs.dcaptured if any(needs.dcaptured) else ()
    captured = pass_captured(inputs.score_captured, problem.options.score_mod)
    mask_captured = mask_tensors(problem.options, inputs)
    blocks = tile_lists(problem, mask_captured[0]) if problem.options.block_mask is not None else None
    mask_captured = pass_captured(mask_captured, mask_of(problem.options))
    elements = tuple(tensor.numel() if need else 0 for tensor, need in zip(captured, wanted))
    rows = inputs.q.shape[0], inputs.k.shape[0]
    prepared = prepare(problem, arch, dlse is not None, sink_type, *rows, cluster, wanted, elements)
    variant = prepared.variant
    if may_have_empty_rows(problem, inputs):
        do = silence(problem, inputs, o, lse, do)
    q, k, v, o, do = (fit(tensor) for tensor in (inputs.q, inputs.k, inputs.v, o, do))
    dq = _output(q, cleared=problem.varlen_q)
    whole = problem.varlen_k or (problem.has_seqused_k and variant.group == 1)
    dk, dv = (_output(tensor, cleared=whole) for tensor in (k, v))
    dsink = None if sink is None else sink.new_empty(sink.shape)
    dcaptured = gradients_of(inputs.score_captured, needs.dcaptured)
    workspace = q.new_empty(prepared.elements, dtype=torch.float32)
    compiled_backward(variant, emulated)(
        q,
        k,
        v,
        o,
        do,
        lse,
        dlse,
        fit_vector(sink),
        fit_vector(inputs.cu_seqlens_q),
        fit_vector(inputs.cu_seqlens_k),
        fit_vector(inputs.seqused_q),
        fit_vector(inputs.seqused_k),
        fit_vector(inputs.philox),
        workspace,
        dq,
        dk,
        dv,
        dsink,
        captured or None,
        mask_captured or None,
        tuple(None if gradient is None else gradient.view(-1) for gradient in dcaptured) if wanted else None,
        blocks,
        *prepared.numbers,
        ctas,
    )
    return Gradients(
        dq if needs.dq else None,
        dk if needs.dk else None,
        dv if needs.dv else None,
        dsink if needs.dsink else None,
        dcaptured,
    )


def may_have_empty_rows(problem: Problem, inputs: Inputs) -> bool:
    """Whether a query may see no key, as far as the host knows; then its do, which may be NaN, must not count."""
    options, lengths = problem.options, (inputs.seqused_q, inputs.seqused_k)
    if options.mask_mod is not None or options.block_mask is not None:
        return True
    left, right = options.window
    if (left is not None and left < 0) or (right is not None and right < 0):
        return True
    bounded = options.causal or left is not None or right is not None
    if problem.varlen_q or problem.varlen_k or lengths != (None, None):
        same = inputs.cu_seqlens_q is inputs.cu_seqlens_k and lengths[0] is lengths[1]
        return not same or problem.seqlen_q != problem.seqlen_k
    return bounded and problem.seqlen_q > problem.seqlen_k


def silence(problem: Problem, inputs: Inputs, o: Tensor, lse: Tensor, do: Tensor) -> Tensor:
    """do with zeros in the rows that see no key: products would spread what stands there, 0 times NaN being NaN."""
    empty = (lse == -torch.inf).transpose(-1, -2)
    if inputs.sink is not None:
        sink = inputs.sink.to(lse.dtype)
        alone = lse == (sink[:, None] if problem.varlen_q else sink[None, :, None])
        empty = empty | (alone.transpose(-1, -2) & (o == 0).all(-1))
    return do.masked_fill(empty.unsqueeze(-1), 0.0)


def target(device: torch.device) -> tuple[str, str]:
    """The architecture to compile for, the open emulator's or the device's, and compiled_backward's `emulated`."""
    session = emulator_session()
    if session is None:
        return _device_target(device), ""
    return session.arch, "emulated" if session.line_info else "emulated, no source lines"


def emulator_session() -> Any:
    """The emulated GPU whose context is open, or None. Does not import the emulator."""
    cudart = sys.modules.get("refluent.emulator.cudart")
    return None if cudart is None else cudart.active()


@lru_cache(maxsize=64)
def _device_target(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a"


def fit(tensor: Tensor) -> Tensor:
    """The tensor itself if TMA can read it (last stride 1, the others and the address whole 16 bytes), else a copy.

    A stride of 0 is copied too: whether TMA takes it is not documented. A dimension of size 1 may have any stride.
    """
    strides, sizes = tensor.stride(), tensor.shape
    if strides[-1] == 1 and not tensor.data_ptr() % (2 * VECTOR):
        unfit = [n for n, stride in enumerate(strides[:-1]) if stride % VECTOR or stride < VECTOR]
        if not unfit:
            return tensor
        if all(sizes[n] == 1 for n in unfit):
            return tensor.as_strided(sizes, [VECTOR if n in unfit else stride for n, stride in enumerate(strides)])
    return tensor.clone(memory_format=torch.contiguous_format)


def fit_vector(vector: Tensor | None) -> Tensor | None:
    """The vector itself if its elements lie side by side, else a copy."""
    if vector is None or vector.stride(0) == 1:
        return vector
    return vector.clone(memory_format=torch.contiguous_format)


def pass_captured(captured: tuple[Tensor, ...], mod: Mod | None) -> tuple[Tensor, ...]:
    """Captured tensors as the kernels take them, without a copy: at least one dimension, no unsigned type but bytes."""
    made = []
    for number, tensor in enumerate(captured):
        if mod is not None and tensor.numel() == 0:
            name = mod.captured_names[number]
            raise ValueError(f"{mod.label} reads {name}, of shape {tuple(tensor.shape)}, which holds nothing")
        tensor = tensor.detach() if tensor.ndim else tensor.detach().view(1)
        made.append(tensor.view(_PASSED_AS.get(tensor.dtype, tensor.dtype)))
    return tuple(made)


def gradients_of(captured: tuple[Tensor, ...], needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """Contiguous outputs; None where no gradient is needed."""
    wanted = needs or (False,) * len(captured)
    return tuple(
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) if need else None
        for tensor, need in zip(captured, wanted)
    )


def _output(like: Tensor, cleared: bool) -> Tensor:
    """A contiguous gradient; cleared where it has rows that no kernel writes."""
    return like.new_zeros(like.shape) if cleared else like.new_empty(like.shape)


def _nothing_to_do(problem: Problem, inputs: Inputs) -> bool:
    return 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k, inputs.q.shape[0], inputs.k.shape[0])


def _empty(problem: Problem, inputs: Inputs, lse: Tensor, dlse: Tensor | None, needs: Needs) -> Gradients:
    """Without queries or keys every gradient is zero, but a sink's: rows that see it alone add their dlse."""
    dsink = None
    if inputs.sink is not None and needs.dsink:
        dsink = torch.zeros_like(inputs.sink)
        if dlse is not None and dlse.numel():
            rows = dlse.masked_fill(lse == -torch.inf, 0.0)
            dsink += rows.sum(1) if problem.varlen_q else rows.sum((0, 2))
    dq, dk, dv = (
        torch.zeros_like(tensor) if need else None
        for tensor, need in ((inputs.q, needs.dq), (inputs.k, needs.dk), (inputs.v, needs.dv))
    )
    dcaptured = tuple(
        None if gradient is None else gradient.zero_()
        for gradient in gradients_of(inputs.score_captured, needs.dcaptured)
    )
    return Gradients(dq, dk, dv, dsink, dcaptured)


@dataclass(frozen=True)
class Prepared:
    """What a call needs beside its tensors. elements: of the workspace, float32; numbers: see _numbers."""

    variant: Variant
    elements: int
    numbers: tuple[Any, ...]


@lru_cache(maxsize=4096)
def prepare(
    problem: Problem,
    arch: str,
    dlse: bool,
    sink: torch.dtype | None,
    tokens_q: int,
    tokens_k: int,
    cluster: int,
    dcaptured: tuple[bool, ...] = (),
    captured: tuple[int, ...] = (),
) -> Prepared:
    """tokens: rows that q and k hold, of packed sequences; dcaptured: as Needs says; captured: those tensors' elements,
    0 of the others."""
    variant = variant_of(problem, arch, dlse, sink, cluster, dcaptured)
    plan = variant.plan
    m_blocks = workspace_blocks(problem.batch, problem.seqlen_q, tokens_q, plan.tile_m, variant.packed_q)
    n_blocks = workspace_blocks(problem.batch, problem.seqlen_k, tokens_k, plan.tile_n, variant.packed_k)
    extents = Extents(problem.heads_q, problem.heads_kv, m_blocks, n_blocks, captured)
    return Prepared(variant, int(sections(variant, extents).total), _numbers(problem))


def _numbers(problem: Problem) -> tuple[Any, ...]:
    """batch, seqlen_q, seqlen_k, left, right, scale, softcap, keep_from, keep_scale."""
    options = problem.options
    left, right = options.window
    if options.causal:
        right = 0 if right is None else min(right, 0)
    keep_from, keep_scale = dropout_numbers(options.dropout_p)
    return (
        problem.batch,
        problem.seqlen_q,
        problem.seqlen_k,
        OPEN if left is None else min(left, OPEN),
        OPEN if right is None else min(right, OPEN),
        problem.scale,
        options.softcap,
        keep_from,
        keep_scale,
    )


def dropout_numbers(dropout_p: float) -> tuple[int, float]:
    """The smallest 32-bit word that keeps an element, and what kept ones are multiplied by."""
    return min(round(dropout_p * 2**32), 2**32 - 1), 1.0 / (1.0 - dropout_p)
