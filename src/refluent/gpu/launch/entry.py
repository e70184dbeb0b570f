"""The host function of one variant, compiled: delta, main kernel and convert from one call with torch's tensors."""

from __future__ import annotations

from typing import Any, cast

import cutlass
import cutlass.cute as cute
import torch

from refluent.gpu.collect import collect
from refluent.gpu.convert import Convert
from refluent.gpu.delta import Delta, DeltaTensors
from refluent.gpu.device import arithmetic
from refluent.gpu.device.blocks import Blocks
from refluent.gpu.device.seqlen import Side, workspace_blocks
from refluent.gpu.device.tensors import Targets
from refluent.gpu.launch import fakes
from refluent.gpu.launch.variant import Variant
from refluent.gpu.launch.workspace import ALIGN, Extents, Sections, captured_starts, sections
from refluent.gpu.plans.sm100 import EXACT, LIMBS
from refluent.gpu.sm90.backward import kernel as sm90
from refluent.gpu.sm100.backward import kernel as sm100
from refluent.gpu.sm100.backward.context import tuple_of
from refluent.mods.emit import MaskMod, ScoreMod
from refluent.mods.mod import find_mod


class BackwardEntry:
    """Launches every kernel of a backward on one stream."""

    def __init__(self, variant: Variant):
        self.variant = variant
        self.plan = plan = variant.plan
        self.delta = Delta(plan.tile_m, plan.head_dim_v)
        self.main = main_kernel(variant)
        self.convert_dq = Convert(plan.tile_m, plan.head_dim, plan.transposed_q, plan.exchanged)
        self.convert_dk = Convert(plan.tile_n, plan.head_dim, plan.transposed_kv, plan.exchanged)
        self.convert_dv = Convert(plan.tile_n, plan.head_dim_v, plan.transposed_kv, plan.exchanged)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (b, sq, h, d), or packed (tq, h, d)
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        do: cute.Tensor,
        lse: cute.Tensor,  # (b, h, sq), or (h, tq)
        dlse: cute.Tensor | None,
        sink: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        seqused_q: cute.Tensor | None,
        seqused_k: cute.Tensor | None,
        philox: cute.Tensor | None,
        workspace: cute.Tensor,  # see workspace.py
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        dsink: cute.Tensor | None,
        captured: tuple | None,  # by score_mod and by mask_mod, see fakes.captured
        mask_captured: tuple | None,
        dcaptured: tuple | None,  # (n,) of a captured tensor's type, or None
        blocks: tuple | None,  # device.blocks.Blocks
        batch: cutlass.Int32,
        seqlen_q: cutlass.Int32,
        seqlen_k: cutlass.Int32,
        left: cutlass.Int32,
        right: cutlass.Int32,
        scale: cutlass.Float32,
        softcap: cutlass.Float32,
        keep_from: cutlass.Uint32,
        keep_scale: cutlass.Float32,
        ctas: cutlass.Int32,
        stream,
    ):
        variant, plan = self.variant, self.plan
        queries = side(q, cu_seqlens_q, seqused_q, seqlen_q)
        keys = side(k, cu_seqlens_k, seqused_k, seqlen_k)
        extents = Extents(
            cutlass.Int64(q.shape[cute.rank(q) - 2]),
            cutlass.Int64(k.shape[cute.rank(k) - 2]),
            cutlass.Int64(workspace_blocks(batch, seqlen_q, queries.tokens, plan.tile_m, variant.packed_q)),
            cutlass.Int64(workspace_blocks(batch, seqlen_k, keys.tokens, plan.tile_n, variant.packed_k)),
            tuple(cutlass.Int64(0 if out is None else out.shape[0]) for out in tuple_of(dcaptured)),
        )
        views = Views(workspace, variant, extents, sections(variant, extents))
        lse_log2, dpsum = views.statistic(views.at.lse_log2), views.statistic(views.at.dpsum)
        tensors = DeltaTensors(o, do, lse, dlse, sink, lse_log2, dpsum, views.clear(), views.dsink(), dsink)
        heads, m_blocks = cutlass.Int32(extents.heads), cutlass.Int32(extents.m_blocks)
        self.delta(tensors, queries, heads, batch, m_blocks, stream)
        mods: Any = ()
        if cutlass.const_expr(variant.arch != "sm_90a"):
            mods = (captured, mask_captured, views.sums(tuple_of(captured)), blocks_of(blocks))
        self.main(
            q,
            k,
            v,
            do,
            lse_log2,
            dpsum,
            views.targets(dk, dv),
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_q,
            seqused_k,
            philox,
            batch,
            seqlen_q,
            seqlen_k,
            left,
            right,
            scale,
            softcap,
            keep_from,
            keep_scale,
            ctas,
            *mods,
            stream,
        )
        self.convert_dq(views.dq(4), dq, queries, scale, batch, stream)
        if cutlass.const_expr(variant.group > 1):
            self.convert_dk(views.dk(4), dk, keys, scale, batch, stream)
            self.convert_dv(views.dv(4), dv, keys, cutlass.Float32(1.0), batch, stream)
        views.collect(tuple_of(dcaptured), stream)


def main_kernel(variant: Variant) -> Any:
    """The kernel of the variant's architecture."""
    dtype, plan = fakes.TYPES[variant.dtype], cast(Any, variant.plan)
    modes = {name: getattr(variant, name) for name in ("softcap", "dropout", "deterministic", "negative_scale")}
    sides = variant.group, variant.has_left, variant.has_right
    if variant.arch == "sm_90a":
        return sm90.Backward(sm90.Static(dtype, plan, **modes), *sides)
    score = find_mod(variant.score_mod) if variant.score_mod else None
    mask = find_mod(variant.mask_mod) if variant.mask_mod else None
    static = sm100.Static(
        dtype,
        plan,
        **modes,
        cluster=variant.cluster,
        score_mod=ScoreMod(score, variant.dcaptured, variant.softcap, arithmetic) if score else None,
        mask_mod=MaskMod(mask, arithmetic) if mask else None,
    )
    return sm100.Backward(static, *sides)


def side(tensor: cute.Tensor, cu_seqlens, seqused, seqlen) -> Side:
    tokens = seqlen if cu_seqlens is None else tensor.shape[0]
    return Side(cu_seqlens, seqused, seqlen, tokens)


def blocks_of(lists: tuple | None) -> Blocks | None:
    return None if lists is None else Blocks(*lists)


class Views:
    """The workspace's sections as tensors. Outer strides are 64-bit; every section starts at 64 bytes."""

    def __init__(self, workspace: cute.Tensor, variant: Variant, extents: Extents, at: Sections):
        self.base, self.variant, self.plan = workspace.iterator, variant, variant.plan
        self.extents, self.at = extents, at

    def _tensor(self, start, shape, stride) -> cute.Tensor:
        pointer = (self.base + cute.assume(start, divby=ALIGN)).align(ALIGN * 4)
        return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))

    def clear(self) -> cute.Tensor:
        return self._tensor(cutlass.Int64(0), (4, self.at.cleared // 4), (1, cutlass.Int64(4)))

    def statistic(self, start) -> cute.Tensor:
        """(heads, rows)"""
        rows = cute.assume(self.extents.m_blocks * self.plan.tile_m, divby=self.plan.tile_m)
        return self._tensor(start, (cutlass.Int32(self.extents.heads), rows), (rows, 1))

    def dsink(self) -> cute.Tensor | None:
        """(heads, m_blocks)"""
        if not self.variant.sink:
            return None
        blocks = self.extents.m_blocks
        return self._tensor(self.at.dsink, (cutlass.Int32(self.extents.heads), cutlass.Int32(blocks)), (blocks, 1))

    def _accumulator(self, start, heads, blocks, acc, width: int) -> cute.Tensor:
        """(heads, blocks, and the modes of one block, as the plan's accumulator lays it out in chunks of `width`)."""
        size = acc.rows * acc.columns
        block = cute.assume(cutlass.Int64(size), divby=ALIGN)
        shape, stride = acc.layout(width)
        outer = cutlass.Int32(heads), cutlass.Int32(blocks)
        return self._tensor(start, (*outer, *shape), (cute.assume(blocks * size, divby=ALIGN), block, *stride))

    def dq(self, width: int) -> cute.Tensor:
        return self._accumulator(self.at.dq, self.extents.heads, self.extents.m_blocks, self.plan.dq, width)

    def dk(self, width: int) -> cute.Tensor:
        return self._accumulator(self.at.dk, self.extents.heads_kv, self.extents.n_blocks, self.plan.dk, width)

    def dv(self, width: int) -> cute.Tensor:
        return self._accumulator(self.at.dv, self.extents.heads_kv, self.extents.n_blocks, self.plan.dv, width)

    def _turns(self, start, heads, count) -> cute.Tensor:
        turns = self._tensor(start, (cutlass.Int32(heads), cutlass.Int32(count)), (count, 1))
        return cute.make_tensor(cute.recast_ptr(turns.iterator, dtype=cutlass.Int32), turns.layout)

    def sum_of(self, number: int, shape: tuple) -> cute.Tensor:
        """(*shape) float32: the gradient of a captured tensor; exact sums: int64, of each element its first limb."""
        start = self.at.dcaptured + captured_starts(self.variant, self.extents)[number]
        exact = self.variant.sums[number] == EXACT
        strides: list[Any] = []
        step = cutlass.Int64(LIMBS + 1 if exact else 1)
        for size in reversed(shape):
            strides.insert(0, step)
            step = step * size
        made = self._tensor(start, shape, tuple(strides))
        if not exact:
            return made
        return cute.make_tensor(cute.recast_ptr(made.iterator, dtype=cutlass.Int64), made.layout)

    def sums(self, captured: tuple) -> tuple | None:
        """Of every captured tensor, None where none is needed; None where none at all is."""
        made = [
            self.sum_of(number, tensor.shape) if width else None
            for number, (tensor, width) in enumerate(zip(captured, self.variant.sums))
        ]
        return tuple(made) or None

    def collect(self, dcaptured: tuple, stream) -> None:
        """Launch what makes the gradients of captured tensors of their sums."""
        for number, out in enumerate(dcaptured):
            if out is not None:
                collect(self.sum_of(number, (out.shape[0],)), out, stream)

    def targets(self, dk: cute.Tensor, dv: cute.Tensor) -> Targets:
        """Where the main kernel's gradients go."""
        grouped, ordered, e = self.variant.group > 1, self.variant.deterministic, self.extents
        return Targets(
            dq=self.dq(self.plan.reduce_columns),
            dk=None if grouped else dk,
            dv=None if grouped else dv,
            dk_accum=self.dk(self.plan.group_columns) if grouped else None,
            dv_accum=self.dv(self.plan.group_columns) if grouped else None,
            dq_turn=self._turns(self.at.dq_turn, e.heads, e.m_blocks) if ordered else None,
            dkv_turn=self._turns(self.at.dkv_turn, e.heads_kv, e.n_blocks * 2) if ordered and grouped else None,
        )


def compile_backward(variant: Variant):
    """The variant's host function for torch's tensors, compiled for its architecture."""
    kind = fakes.TYPES[variant.dtype]
    integers = [cutlass.Int32(0) for _ in range(5)]
    sink = fakes.TYPES[variant.sink] if variant.sink else None
    indices = [variant.packed_q, variant.packed_k, variant.used_q, variant.used_k]
    return cute.compile(
        BackwardEntry(variant),
        fakes.operand(kind, variant.packed_q),
        fakes.operand(kind, variant.packed_k),
        fakes.operand(kind, variant.packed_k),
        fakes.operand(kind, variant.packed_q),
        fakes.operand(kind, variant.packed_q),
        fakes.statistic(variant.packed_q),
        fakes.statistic(variant.packed_q) if variant.dlse else None,
        fakes.vector(sink) if sink else None,
        *(fakes.vector(cutlass.Int32) if there else None for there in indices),
        fakes.vector(cutlass.Int64) if variant.dropout else None,
        fakes.vector(cutlass.Float32, ALIGN * 4),
        fakes.operand(kind, variant.packed_q),
        fakes.operand(kind, variant.packed_k),
        fakes.operand(kind, variant.packed_k),
        fakes.vector(sink) if sink else None,
        *_captured(variant),
        tuple(fakes.captured(torch.int32, ndim) for ndim in (3, 4, 3, 4)) if variant.block_mask else None,
        *integers,
        cutlass.Float32(0),
        cutlass.Float32(0),
        cutlass.Uint32(0),
        cutlass.Float32(0),
        cutlass.Int32(0),
        fakes.stream(),
        options=f"{fakes.TVM_FFI} --gpu-arch {variant.arch}",
    )


def _captured(variant: Variant) -> tuple[tuple | None, tuple | None, tuple | None]:
    """Stand-ins for the tensors that score_mod and mask_mod capture, and for the former's gradients; None for none."""
    score, mask = (find_mod(key).captured if key else () for key in (variant.score_mod, variant.mask_mod))
    gradients = zip(score, variant.dcaptured)
    return (
        tuple(fakes.captured(c.dtype, c.ndim) for c in score) or None,
        tuple(fakes.captured(c.dtype, c.ndim) for c in mask) or None,
        tuple(fakes.vector(fakes.STORED[c.dtype]) if need else None for c, need in gradients) or None,
    )
