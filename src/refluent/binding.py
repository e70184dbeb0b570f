"""A user's arguments, checked and normalised into one operator call."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from refluent import backends, masks, mods, ops
from refluent.errors import UnsupportedError
from refluent.mods.mod import TracedMod
from refluent.problem import (
    TensorMetas,
    block_key,
    check_captured,
    check_max_seqlen,
    check_seed,
    check_tensors,
    check_window,
    describe,
    mod_key,
    options_key,
    refuse,
)


class Bound(NamedTuple):
    """A checked and normalised call."""

    call: ops.Call
    score_mod: TracedMod | None
    mask_mod: TracedMod | None
    block_mod: TracedMod | None


def _memo(check: Any, *args: Any) -> Any:
    """Run a check, remembered by its arguments where these can be hashed (symbolic sizes and wrong types cannot)."""
    if not torch.compiler.is_compiling():
        try:
            return check(*args)
        except TypeError:
            pass
    return check.__wrapped__(*args)


def describe_optional(name: str, tensor: Any) -> Any:
    return None if tensor is None else describe(name, tensor)


def _traced(name: str, kind: str, fn: Any, device: torch.device) -> TracedMod | None:
    if fn is None:
        return None
    if isinstance(fn, TracedMod):
        if fn.mod.kind != kind:
            refuse(name, f"a {fn.mod.kind}_mod", f"a function or rf.{name}(function)")
    elif not callable(fn):
        refuse(name, type(fn).__name__, f"a function or rf.{name}(function)", TypeError)
    elif torch.compiler.is_compiling():
        raise UnsupportedError(
            f"{name}: got a plain function inside a compiled region; make m = rf.{name}(function) outside of it and "
            f"pass {name}=m"
        )
    if not torch.compiler.is_compiling():
        # A traced one too: its captured tensors may have changed their type since, as module.to(dtype) does.
        fn = mods.score_mod(fn) if kind == "score" else mods.mask_mod(fn)
    check_captured(fn.mod.captured_names, fn.captured, name, device)
    return fn


def _philox(p: float, seed: Any, offset: Any, device: torch.device) -> Tensor | None:
    """Seed and offset of the dropout bits as one int64 tensor on the device, without waiting for it."""
    if p == 0:
        for name, value in (("dropout_seed", seed), ("dropout_offset", offset)):
            if value is not None:
                refuse(name, value, "None while dropout_p is 0")
        return None
    if seed is None:
        if offset is not None:
            refuse("dropout_offset", offset, "None while dropout_seed is None")
        return torch.randint(2**62, (2,), dtype=torch.int64, device=device)
    parts = []
    for name, value in (("dropout_seed", seed), ("dropout_offset", 0 if offset is None else offset)):
        check_seed(name, value, device)
        if not isinstance(value, Tensor):
            value = torch.full((), value, dtype=torch.int64, device=device)
        parts.append(value.reshape(()))
    return torch.stack(parts)


def _max_seqlen(side: str, cu: Tensor | None, given: int | None, padded: int, blocks: bool) -> Any:
    """The longest sequence of a side: given, the padded length, or for a packed side a bound that needs no wait."""
    name = f"max_seqlen_{side}"
    if cu is None:
        if given is not None:
            refuse(name, given, f"None while cu_seqlens_{side} is None")
        return padded
    if given is not None:
        return check_max_seqlen(name, given)
    on_host = cu.device.type == "cpu" and type(cu) is Tensor and not torch.compiler.is_compiling()
    if on_host and torch._C._functorch.peek_interpreter_stack() is None:
        starts = cu.tolist()
        return max((after - before for before, after in pairwise(starts)), default=0)
    if blocks:
        refuse(name, None, f"an int: block_mask counts blocks of it, and cu_seqlens_{side} cannot be read here")
    return padded


def _blocks(
    block_mask: Any, batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: torch.device
) -> tuple[masks.BlockSpec | None, list[Tensor], TracedMod | None]:
    """The block mask's static facts, its lists (without those that are None) and its own mask_mod."""
    if block_mask is None:
        return None, [], None
    if torch.compiler.is_compiling() and not masks.is_traced(block_mask):
        raise UnsupportedError(
            "block_mask: its mask_mod is a plain function, which cannot be traced inside a compiled region; make the "
            "block mask outside of it with m = rf.mask_mod(function) in place of the function"
        )
    spec, lists, block_mod = masks.bind_block_mask(block_mask, batch, heads, seqlen_q, seqlen_k, device)
    return spec, [tensor for tensor in lists if tensor is not None], block_mod


def autocast(tensors: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    # Asking about a device type that has no autocast raises.
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return tensors
    dtype = torch.get_autocast_dtype(device.type)
    return tuple(t.to(dtype) if t.dtype in (torch.float32, torch.float16, torch.bfloat16) else t for t in tensors)


def bind(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: Any,
    causal: Any,
    window: Any,
    softcap: Any,
    score_mod: Any,
    mask_mod: Any,
    block_mask: Any,
    sink: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    dropout_p: Any,
    dropout_seed: Any,
    dropout_offset: Any,
    deterministic: Any,
    return_max_score: Any = False,
    backend: Any,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
) -> Bound:
    """Check everything that needs no value from a device; q, k, v as (b, s, h, d), or (t, h, d) where packed."""
    metas = TensorMetas(
        describe("q", q),
        describe("k", k),
        describe("v", v),
        describe_optional("cu_seqlens_q", cu_seqlens_q),
        describe_optional("cu_seqlens_k", cu_seqlens_k),
        describe_optional("seqused_q", seqused_q),
        describe_optional("seqused_k", seqused_k),
        describe_optional("sink", sink),
    )
    batch = _memo(check_tensors, metas)
    device = metas.q.device
    packed_q, packed_k = cu_seqlens_q is not None, cu_seqlens_k is not None
    blocked = block_mask is not None
    max_q = _max_seqlen("q", cu_seqlens_q, max_seqlen_q, q.shape[0 if packed_q else 1], blocked)
    max_k = _max_seqlen("k", cu_seqlens_k, max_seqlen_k, k.shape[0 if packed_k else 1], blocked)
    score = _traced("score_mod", "score", score_mod, device)
    mask = _traced("mask_mod", "mask", mask_mod, device)
    spec, blocks, block_mod = _blocks(block_mask, batch, q.shape[-2], max_q, max_k, device)
    options = _memo(
        options_key,
        scale,
        causal,
        *check_window(window),
        softcap,
        mod_key(score.mod) if score is not None else "",
        mod_key(mask.mod) if mask is not None else "",
        block_key(spec),
        dropout_p,
        torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        return_max_score,
        backends.check_name(backend),
    )
    q, k, v = autocast((q, k, v), device)
    call = ops.Call(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        sink,
        list(score.captured) if score is not None else [],
        list(mask.captured) if mask is not None else [],
        list(block_mod.captured) if block_mod is not None else [],
        blocks,
        _philox(dropout_p, dropout_seed, dropout_offset, device),
        max_q,
        max_k,
        options,
    )
    return Bound(call, score, mask, block_mod)
