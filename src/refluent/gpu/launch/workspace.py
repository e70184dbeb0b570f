"""The one allocation of a call: which float32 section lies where. What the main kernel adds to comes first, in one run.

The same arithmetic runs on the host with integers, to allocate, and in the compiled host function with 64-bit values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refluent.gpu.launch.variant import Variant

ALIGN = 16  # float32 elements: 64 bytes, what torch gives on every device


@dataclass(frozen=True)
class Extents:
    """The sizes that a workspace depends on; blocks are those of the whole workspace, of every sequence."""

    heads: Any
    heads_kv: Any
    m_blocks: Any
    n_blocks: Any
    captured: tuple[Any, ...] = ()  # elements of each captured tensor that gets a gradient, 0 of the others


@dataclass(frozen=True)
class Sections:
    """Where each section starts, in float32 elements. `cleared`: where what the delta kernel zeroes ends; `total`: all.

    Sections that a variant does without are empty and start where the next one does.
    """

    dq: Any  # (heads, m_blocks, tile_m * head_dim)
    dk: Any  # (kv heads, n_blocks, tile_n * head_dim), grouped heads only
    dv: Any  # (kv heads, n_blocks, tile_n * head_dim_v), grouped heads only
    dq_turn: Any  # (heads, m_blocks) int32, deterministic only
    dkv_turn: Any  # (kv heads, 2 * n_blocks) int32, deterministic and grouped only
    dcaptured: Any  # captured tensors' gradients one after the other, each from a multiple of ALIGN
    cleared: Any
    lse_log2: Any  # (heads, m_blocks * tile_m)
    dpsum: Any  # (heads, m_blocks * tile_m)
    dsink: Any  # (heads, m_blocks), sinks only
    total: Any


def sections(variant: Variant, extents: Extents) -> Sections:
    """Lay the sections out, each from a multiple of ALIGN."""
    plan = variant.plan
    rows, keys = extents.heads * extents.m_blocks, extents.heads_kv * extents.n_blocks
    grouped = variant.group > 1
    ordered = variant.deterministic
    sizes = (
        rows * (plan.tile_m * plan.head_dim),
        keys * (plan.tile_n * plan.head_dim if grouped else 0),
        keys * (plan.tile_n * plan.head_dim_v if grouped else 0),
        rows * (1 if ordered else 0),
        keys * (2 if ordered and grouped else 0),
        rows * 0 + captured_starts(variant, extents)[-1],
        0,
        rows * plan.tile_m,
        rows * plan.tile_m,
        rows * (1 if variant.sink else 0),
        0,
    )
    starts, at = [], rows * 0
    for size in sizes:
        starts.append(at)
        at = at + (size + ALIGN - 1) // ALIGN * ALIGN
    return Sections(*starts)


def captured_starts(variant: Variant, extents: Extents) -> list[Any]:
    """Where each captured tensor's gradient starts in its section, and where the section ends."""
    starts: list[Any] = [0]
    for count, width in zip(extents.captured, variant.sums, strict=True):
        starts.append(starts[-1] + (count * width + ALIGN - 1) // ALIGN * ALIGN)
    return starts
