"""A plan as text: tiles, warps, and both memories drawn to scale."""

from __future__ import annotations

from refluent.gpu.plans.sm100 import SHARED_BYTES, TENSOR_COLUMNS, BackwardPlan

WIDTH = 64  # characters that all of a memory takes
MATRICES = {"s": "S", "dv": "dV", "dp": "dP", "dq": "dQ", "dk": "dK"}
BUFFERS = {"q": "Q", "k": "K", "v": "V", "do": "dO", "ds": "dS", "dq": "dQ", "p": "P", "lse": "LSE", "dpsum": "dPsum"}


def draw(plan: BackwardPlan, head_dim: int, head_dim_v: int, has_left: bool, has_right: bool) -> str:
    """The plan that serves these head dimensions (elements, as the user gave them); closed sides of the window."""
    padded = "" if (head_dim, head_dim_v) == (plan.head_dim, plan.head_dim_v) else _padding(plan)
    order = f"the last first: it has the {'fewest' if has_right else 'most'} query blocks"
    if not has_left and not has_right:
        order = "the first first"
    lines = [
        f"backward on sm100, head dimensions {head_dim} (q, k) and {head_dim_v} (v){padded}",
        "",
        f"a CTA    {plan.tile_n} keys of one head, walks {plan.tile_m} queries a step; key blocks in order, {order}",
        f"stages   Q {plan.stages_q}, dO {plan.stages_do}, staging of dQ {plan.stages_reduce}",
        f"products {_products(plan)}",
        f"warps    {_warps(plan)}",
        "",
        *_tensor_memory(plan),
        "",
        *_shared_memory(plan),
    ]
    return "\n".join(lines)


def _warps(plan: BackwardPlan) -> str:
    return (
        f"0-3 reduce dQ ({plan.reduce_registers} registers a thread), 4-11 compute ({plan.compute_registers}), "
        f"12 MMA, 13 loads, 14-15 idle ({plan.other_registers})"
    )


def _padding(plan: BackwardPlan) -> str:
    return f", padded to {plan.head_dim} and {plan.head_dim_v}"


def _products(plan: BackwardPlan) -> str:
    """What each product's accumulator holds; ^T: queries (S, dP) or head dimensions (gradients) along its columns."""
    turned = {"dV": plan.transposed_kv, "dK": plan.transposed_kv, "dQ": plan.transposed_q}
    return ", ".join(["S^T", "dP^T", *(f"{name}^T" if there else name for name, there in turned.items())])


def _bar(first: float, end: float, whole: float) -> str:
    """[first, end) of a memory, at least one character wide."""
    start = min(int(first / whole * WIDTH), WIDTH - 1)
    stop = max(round(end / whole * WIDTH), start + 1)
    return "·" * start + "█" * (stop - start) + "·" * (WIDTH - stop)


def _tensor_memory(plan: BackwardPlan) -> list[str]:
    lines = [f"tensor memory: {plan.tmem_columns} of {TENSOR_COLUMNS} columns, what overlaps takes turns"]
    for name, (first, end) in sorted(plan.tensor_map.items(), key=lambda item: item[1]):
        lines.append(f"  {MATRICES[name]:12} {first:>4}-{end - 1:<4}  {_bar(first, end, TENSOR_COLUMNS)}")
    return lines


def _shared_memory(plan: BackwardPlan) -> list[str]:
    used, at = plan.shared_bytes, 0
    lines = [f"shared memory: {used:,} of {SHARED_BYTES:,} bytes, barriers aside"]
    for name, size in plan.shared_map.items():
        lines.append(f"  {_label(name):12} {size:>9,}  {_bar(at, at + size, SHARED_BYTES)}")
        at += size
    return [*lines, f"  {'left':12} {SHARED_BYTES - used:>9,}  {_bar(at, SHARED_BYTES, SHARED_BYTES)}"]


def _label(name: str) -> str:
    return " ".join(BUFFERS.get(word, word) for word in name.split())
