"""What a backward kernel reads and writes in global memory."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute


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
