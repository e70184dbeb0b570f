"""What a compiled backward depends on, and nothing else: never a length, a batch size or a head count, and of the scale
its sign alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

import torch

from refluent.gpu.launch.blocks import mask_of
from refluent.gpu.plans import BackwardPlan, backward_plan
from refluent.gpu.plans.sm100 import EXACT
from refluent.mods.emit import adds_once
from refluent.mods.mod import find_mod
from refluent.problem import Problem, mod_key


@dataclass(frozen=True)
class Variant:
    """The static facts of a call. Head dimensions are the true ones' plan; `sink` is its type's name, or ""."""

    arch: str  # the target, as "sm_100a"
    dtype: str  # "bfloat16" or "float16"
    head_dim: int  # padded to a plan's
    head_dim_v: int
    group: int = 1  # query heads a key head
    has_left: bool = False  # the window's left side is closed
    has_right: bool = False
    packed_q: bool = False
    packed_k: bool = False
    used_q: bool = False
    used_k: bool = False
    softcap: bool = False
    dropout: bool = False
    deterministic: bool = False
    negative_scale: bool = False
    dlse: bool = False
    sink: str = ""
    cluster: int = 1  # CTAs that share Q and dO
    score_mod: str = ""  # a mod's key: the digest of its graph, with its captured tensors' types and dimensions
    mask_mod: str = ""
    block_mask: bool = False  # tiles are listed; what it masks within them is part of mask_mod
    dcaptured: tuple[bool, ...] = ()  # which tensors that score_mod captures get a gradient

    @cached_property
    def plan(self) -> BackwardPlan:
        return backward_plan(self.arch, self.head_dim, self.head_dim_v, not (self.softcap or self.dropout))

    @property
    def sums(self) -> tuple[int, ...]:
        """float32 elements of workspace that an element of each captured tensor's gradient takes; 0: it gets none."""
        return tuple(self._sum(number) if need else 0 for number, need in enumerate(self.dcaptured))

    def _sum(self, number: int) -> int:
        return EXACT if self.deterministic and not adds_once(find_mod(self.score_mod), number) else 1

    @property
    def name(self) -> str:
        """Its facts in a line, defaults left out."""
        facts = asdict(self)
        window = [side for side in ("left", "right") if facts.pop(f"has_{side}")]
        head = f"backward {facts.pop('arch')} {facts.pop('dtype')} {facts.pop('head_dim')}/{facts.pop('head_dim_v')}"
        counts = {name: facts.pop(name) for name in ("group", "cluster")}
        more = [f"{name} {count}" for name, count in counts.items() if count > 1]
        more += [f"window {' and '.join(window)}"] if window else []
        more += [f"sink {facts.pop('sink')}"] if facts["sink"] else []
        more += [f"{kind} {facts.pop(kind)}" for kind in ("score_mod", "mask_mod") if facts[kind]]
        gradients = [str(number) for number, need in enumerate(facts.pop("dcaptured")) if need]
        more += [f"gradients of captured {', '.join(gradients)}"] if gradients else []
        more += [name.replace("_", " ") for name, value in facts.items() if value]
        return ", ".join([head, *more])


def variant_of(
    problem: Problem,
    arch: str,
    dlse: bool,
    sink: torch.dtype | None,
    cluster: int = 1,
    dcaptured: tuple[bool, ...] = (),
) -> Variant:
    """The variant that serves a call on `arch`; `sink`: the type of the sinks, if there are any; `dcaptured`: see
    Needs."""
    plan = backward_plan(arch, problem.head_dim, problem.head_dim_v)
    left, right = problem.options.window
    return Variant(
        arch=arch,
        dtype=_name(problem.dtype),
        head_dim=plan.head_dim,
        head_dim_v=plan.head_dim_v,
        group=problem.group,
        has_left=left is not None,
        has_right=right is not None or problem.options.causal,
        packed_q=problem.varlen_q,
        packed_k=problem.varlen_k,
        used_q=problem.has_seqused_q,
        used_k=problem.has_seqused_k,
        softcap=problem.options.softcap > 0,
        dropout=problem.options.dropout_p > 0,
        deterministic=problem.options.deterministic,
        negative_scale=problem.scale < 0,
        dlse=dlse,
        sink="" if sink is None else _name(sink),
        cluster=cluster,
        score_mod=mod_key(problem.options.score_mod),
        mask_mod=mod_key(mask_of(problem.options)),
        block_mask=problem.options.block_mask is not None,
        dcaptured=dcaptured if any(dcaptured) else (),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
