"""Problem -> Plan: tile sizes, stages, warps and memory maps, as tables."""

from __future__ import annotations

from refluent.gpu.plans import sm90, sm100

BackwardPlan = sm90.BackwardPlan | sm100.BackwardPlan


def backward_plan(arch: str, head_dim: int, head_dim_v: int, linear: bool = True) -> BackwardPlan:
    """The smallest plan of the target (as "sm_90a") that holds these head dimensions; linear: no softcap or dropout."""
    if arch == "sm_90a":
        return sm90.backward_plan(head_dim, head_dim_v, linear)
    return sm100.backward_plan(head_dim, head_dim_v)
