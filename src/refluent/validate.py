"""rf.validate: what is otherwise left unread on a GPU, read and checked."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from refluent import ops
from refluent.attention import AttentionOptions, swap_layout
from refluent.binding import bind
from refluent.problem import check_layout
from refluent.values import check_reads, check_values


def validate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    layout: str = "bshd",
    **options: Unpack[AttentionOptions],
) -> None:
    """Check a call's arguments together with the values that live on the device, without computing anything.

    :func:`attention` and :func:`attention_varlen` never read values from a GPU (no wait, CUDA graphs): their kernels
    clamp lengths and indices so that no access leaves a tensor, and wrong values give wrong results. This function
    waits for the device and checks cu_seqlens, seqused, max_seqlen against the lengths, the block mask's lists, and
    that every read of a captured tensor stays inside it wherever its indices depend on positions and integer tensors.

    Args:
        q, k, v: As in :func:`attention`, or packed as in :func:`attention_varlen` where cu_seqlens are given.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: As in :func:`attention_varlen`.
        layout: As in :func:`attention`.
        options: The other keyword arguments of :func:`attention`.

    Raises:
        ValueError: A wrong value, with the argument's name, what it holds and what is allowed.
        TypeError: An argument of the wrong kind.
        UnsupportedError: No backend can serve the call.
    """
    unknown = options.keys() - DEFAULTS.keys()
    if unknown:
        raise TypeError(f"validate() got an unexpected keyword argument {min(unknown)!r}")
    heads_first = check_layout(layout)
    q, k, v = (swap_layout(tensor, name, heads_first) for name, tensor in (("q", q), ("k", k), ("v", v)))
    lengths: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }
    bound = bind(q, k, v, **{**DEFAULTS, **options, **lengths})
    problem = ops.problem_of(bound.call)
    inputs = ops.inputs_of(bound.call, problem)
    check_values(problem, inputs)
    check_reads(problem, inputs)


DEFAULTS: dict[str, Any] = {
    "scale": None,
    "causal": False,
    "window": None,
    "softcap": 0.0,
    "score_mod": None,
    "mask_mod": None,
    "block_mask": None,
    "sink": None,
    "seqused_q": None,
    "seqused_k": None,
    "dropout_p": 0.0,
    "dropout_seed": None,
    "dropout_offset": None,
    "deterministic": None,
    "backend": None,
}
