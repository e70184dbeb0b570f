"""score_mod() and mask_mod(): from a function to a TracedMod, through a cache of traces."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import fx

from refluent.mods.capture import Seen, TraceCache
from refluent.mods.grad import derive
from refluent.mods.graph import simplify
from refluent.mods.mod import Captured, Mod, TracedMod
from refluent.mods.trace import SIGNATURES, Trace, name_of_function, record

Kind = Literal["score", "mask"]


class _Entry(NamedTuple):
    mod: Mod
    numbers: tuple[int, ...]  # where the mod's captured tensors stand among those that the function sees
    shapes: tuple[tuple[int, tuple[int, ...]], ...]  # of the captured tensors whose shape the trace depends on


_caches: dict[Kind, TraceCache[_Entry]] = {"score": TraceCache(), "mask": TraceCache()}
_interned: WeakValueDictionary[str, Mod] = WeakValueDictionary()


def score_mod(fn: Callable[..., Any]) -> TracedMod:
    """Trace ``fn(score, b, h, i, j) -> score``: torch code on scalars that may read captured tensors.

    score: the scaled (and softcapped) product of query row i and key column j of query head h in batch b; i and j
    count inside the sequence. The gradient is derived, for the score and for every captured floating point tensor.
    Reads of captured floating point tensors are converted to the type of the score (float32; float64 where q is).
    The trace is cached by code and by what the function can see, never by tensors' values.

    Raises ValueError, with the function's line, where it cannot be traced or differentiated; TypeError where ``fn`` is
    no function of five arguments.
    """
    return _traced(fn, "score")


def mask_mod(fn: Callable[..., Any]) -> TracedMod:
    """Trace ``fn(b, h, i, j) -> bool``: True where query row i sees key column j. Otherwise as :func:`score_mod`."""
    return _traced(fn, "mask")


def _traced(fn: Callable[..., Any], kind: Kind) -> TracedMod:
    if isinstance(fn, TracedMod):
        if fn.mod.kind != kind:
            raise TypeError(f"{kind}_mod got a traced {fn.mod.kind}_mod ({fn.mod.name!r})")
        if all(t.dtype == c.dtype and t.ndim == c.ndim for t, c in zip(fn.captured, fn.mod.captured)):
            return fn
        fn = fn.fn
    if not callable(fn):
        raise TypeError(f"{kind}_mod must be a function {SIGNATURES[kind]} or None, got {type(fn).__name__}")
    seen, entries = _caches[kind].find(fn)
    for entry in entries:
        if all(seen.tensors[number].shape == shape for number, shape in entry.shapes):
            return TracedMod(entry.mod, tuple([seen.tensors[number] for number in entry.numbers]), fn)
    if torch._C._functorch.peek_interpreter_stack() is None:
        return _trace(fn, kind, seen)
    # torch.func's transforms belong to a thread: in another one nothing of them reaches the recording.
    with ThreadPoolExecutor(1) as outside:
        return outside.submit(_trace, fn, kind, seen).result()


def _trace(fn: Callable[..., Any], kind: Kind, seen: Seen) -> TracedMod:
    _check_signature(fn, kind)
    known = {id(t): name for t, name in zip(seen.tensors, seen.names)}
    graphs, grad_graphs = {}, {}
    trace = Trace(fx.Graph())
    for dtype in (torch.float32, torch.float64) if kind == "score" else (torch.float32,):
        trace = record(fn, kind, dtype, known, seen_before=trace.tensors)
        graphs[dtype] = simplify(trace.graph, keep_detach=True)
        if kind == "score":
            grad_graphs[dtype] = derive(graphs[dtype], name_of_function(fn))
    mod = Mod(kind, name_of_function(fn), _captured(trace), graphs, grad_graphs)
    mod = _interned.setdefault(mod.key, mod)
    places = {id(t): number for number, t in enumerate(seen.tensors)}
    if all(id(t) in places for t in trace.tensors):
        numbers = tuple(places[id(t)] for t in trace.tensors)
        shapes = tuple((numbers[k], tuple(trace.tensors[k].shape)) for k in sorted(trace.shapes_used))
        _caches[kind].store(fn, seen, _Entry(mod, numbers, shapes))
    return TracedMod(mod, tuple(trace.tensors), fn)


def _captured(trace: Trace) -> tuple[Captured, ...]:
    """Descriptions of the captured tensors under names of their own."""
    taken: set[str] = set()
    found = []
    for number, (tensor, name) in enumerate(zip(trace.tensors, trace.names)):
        unique = base = name or f"captured_{number}"
        count = 1
        while unique in taken:
            count += 1
            unique = f"{base}_{count}"
        taken.add(unique)
        shape = tuple(tensor.shape) if number in trace.shapes_used else None
        found.append(Captured(unique, tensor.dtype, tensor.ndim, shape))
    return tuple(found)


def _check_signature(fn: Callable[..., Any], kind: Kind) -> None:
    try:
        signature = inspect.signature(fn)
    except (ValueError, TypeError):  # a builtin without one: the call itself will tell
        return
    try:
        signature.bind(*range(5 if kind == "score" else 4))
    except TypeError:
        raise TypeError(
            f"{kind}_mod must take {SIGNATURES[kind]}, but {name_of_function(fn)!r} takes {signature}"
        ) from None


def clear_cache() -> None:
    """Forget every cached trace."""
    for cache in _caches.values():
        cache.clear()
