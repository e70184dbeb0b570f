"""The float64 oracle: attention and its gradients written out formula by formula.

Dense, slow and plain on purpose.  It shares no code with the backends that it judges: mods are evaluated one
position at a time under ``torch.vmap``, gradients of q, k, v and sink are the written-out formulas (never autograd),
and the dropout bits come from a Philox of its own.  Everything is computed in float64 whatever the inputs' type.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class Result:
    """What the forward computes, in float64; ``largest`` holds the largest single contribution to o."""

    o: Tensor  # (b, sq, h, dv) or packed (tq, h, dv); follows ``layout``
    lse: Tensor  # (b, h, sq) or packed (h, tq)
    max_score: Tensor  # like lse
    reached: Tensor  # which keys some query sees, bool, (b, sk, hkv) or packed (tk, hkv); follows ``layout``
    largest: dict[str, float]


@dataclass(frozen=True)
class Gradients:
    """What the backward computes, in float64; ``largest`` holds the largest single contribution to each tensor."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None  # (h,)
    dcaptured: dict[str, Tensor]  # one for each floating point tensor that score_mod captures
    largest: dict[str, float]


@dataclass(frozen=True)
class Call:
    """One call's arguments: float64 tensors as (b, s, h, d) or packed (t, h, d), and the options."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    causal: bool
    window: tuple[int | None, int | None]
    softcap: float
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    block_mask: Any
    sink: Tensor | None
    dropout_p: float
    seed: int
    offset: int
    lengths_q: tuple[Tensor | None, Tensor | None]  # cu_seqlens, seqused
    lengths_k: tuple[Tensor | None, Tensor | None]
    transposed: tuple[bool, bool]  # q's side, k's side came as (b, h, s, d)


@dataclass(frozen=True)
class _Softmax:
    """One sequence's forward, (h, sq, sk) unless said otherwise; k and v repeated for the group."""

    rows: Index  # where the sequence's queries stand in q
    keys: Index
    q: Tensor  # (h, sq, d)
    k: Tensor  # (h, sk, d)
    v: Tensor  # (h, sk, dv)
    raw: Tensor  # scale * <q, k>
    capped: Tensor
    p: Tensor
    z: Tensor
    o: Tensor  # (h, sq, dv)
    lse: Tensor  # (h, sq)
    max_score: Tensor  # (h, sq)


@torch.no_grad()
def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Result:
    """Attention in float64; takes the keyword arguments of ``refluent.attention`` and ``refluent.attention_varlen``.

    Shapes: q (b, sq, h, d), k (b, sk, hkv, d), v (b, sk, hkv, dv), or packed (t, h, d) where cu_seqlens_q or
    cu_seqlens_k is given.  ``dropout_seed`` and ``dropout_offset`` are needed when ``dropout_p`` is not 0.
    """
    call = prepare(q, k, v, **options)
    o = call.q.new_zeros(*call.q.shape[:-1], call.v.shape[-1])
    lse = call.q.new_full(call.q.shape[:-1], -math.inf)  # (b, sq, h) or (tq, h) until the end
    max_score = lse.clone()
    reached = torch.zeros(call.k.shape[:-1], dtype=torch.bool, device=call.k.device)
    largest = 0.0
    for b in range(batch_size(call)):
        one = _forward(call, b)
        o[one.rows] = one.o.transpose(0, 1)
        lse[one.rows] = one.lse.transpose(0, 1)
        max_score[one.rows] = one.max_score.transpose(0, 1)
        reached[one.keys] = _group(one.p > 0, reached.shape[-1]).any(1).any(1).transpose(0, 1)
        largest = max(largest, peak(one.z * one.p * _peak_of_rows(one.v)[:, None, :]))
    return Result(
        swap_layout(o, call.transposed[0]),
        lse.transpose(-1, -2),
        max_score.transpose(-1, -2),
        swap_layout(reached, call.transposed[1]),
        {"o": largest},
    )


@torch.no_grad()
def attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, dlse: Tensor | None = None, **options: Any
) -> Gradients:
    """Gradients of attention in float64, from ``do`` (shaped like o) and ``dlse`` (shaped like lse)."""
    call = prepare(q, k, v, **options)
    do = swap_layout(do.double(), call.transposed[0])
    dlse_rows = None if dlse is None else dlse.double().transpose(-1, -2)  # (b, sq, h) or (tq, h)
    dq, dk, dv = torch.zeros_like(call.q), torch.zeros_like(call.k), torch.zeros_like(call.v)
    dsink = None if call.sink is None else torch.zeros_like(call.sink)
    captured = {name: t for name, t in captured_tensors(call.score_mod).items() if t.is_floating_point()}
    dcaptured = {name: _Sum(torch.zeros_like(t, dtype=torch.float64)) for name, t in captured.items()}
    largest = dict.fromkeys(["dq", "dk", "dv", "dsink", *captured], 0.0)
    for b in range(batch_size(call)):
        one = _forward(call, b)
        do_b = do[one.rows].transpose(0, 1)  # (h, sq, dv)
        # dlse on a row whose lse is -inf counts for nothing, even when it is NaN
        dlse_b = torch.zeros_like(one.lse) if dlse_rows is None else dlse_rows[one.rows].transpose(0, 1)
        dlse_b = torch.where(one.lse == -math.inf, 0.0, dlse_b)
        # a row with nothing allowed has o = 0, and what its do holds counts for nothing
        empty = one.max_score == -math.inf
        do_b = torch.where(empty[..., None], 0.0, do_b)
        delta = (do_b * one.o).sum(-1) - dlse_b  # (h, sq)
        dp = one.z * _product(do_b, one.v.transpose(-1, -2))
        ds = torch.where(one.p > 0, one.p * (dp - delta[..., None]), 0.0)
        bound = torch.where(one.p > 0, one.p * (dp.abs() + delta.abs()[..., None]), 0.0)
        ds, slope = _mods_backward(call, b, one, ds, bound, dcaptured, largest)

        dv[one.keys] += _sum_group(_product((one.z * one.p).transpose(-1, -2), do_b), dv.shape[-2])
        dq[one.rows] += (call.scale * _product(ds, one.k)).transpose(0, 1)
        dk[one.keys] += _sum_group(call.scale * _product(ds.transpose(-1, -2), one.q), dk.shape[-2])
        if dsink is not None and call.sink is not None:
            p_sink = torch.where(one.lse > -math.inf, torch.exp(call.sink[:, None] - one.lse), 0.0)
            dsink -= (p_sink * delta).sum(-1)
            terms = (do_b * one.o).abs().sum(-1) + dlse_b.abs()  # what delta is made of, which may cancel in it
            largest["dsink"] = max(largest["dsink"], peak(p_sink * terms))

        steepest = max(1.0, peak(slope))
        largest["dv"] = max(largest["dv"], peak(one.z * one.p * _peak_of_rows(do_b)[..., None]))
        largest["dq"] = max(largest["dq"], peak(bound) * steepest * abs(call.scale) * peak(one.k))
        largest["dk"] = max(largest["dk"], peak(bound) * steepest * abs(call.scale) * peak(one.q))
    return Gradients(
        swap_layout(dq, call.transposed[0]),
        swap_layout(dk, call.transposed[1]),
        swap_layout(dv, call.transposed[1]),
        dsink,
        {name: total.value for name, total in dcaptured.items()},
        largest,
    )


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = 0.0,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_mask: Any = None,
    sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    dropout_offset: int | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_max_score: bool = False,
    layout: str = "bshd",
    backend: str | None = None,
) -> Call:
    """Step 0: everything as float64 in (b, s, h, d) or packed (t, h, d); arguments that change no value end here."""
    if dropout_p and (dropout_seed is None or dropout_offset is None):
        raise ValueError("the reference draws no random numbers: give dropout_seed and dropout_offset")
    transposed = (layout == "bhsd" and cu_seqlens_q is None, layout == "bhsd" and cu_seqlens_k is None)
    left, right = (None, None) if window is None else window
    return Call(
        q=swap_layout(q.detach().double(), transposed[0]),
        k=swap_layout(k.detach().double(), transposed[1]),
        v=swap_layout(v.detach().double(), transposed[1]),
        scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        causal=causal,
        window=(None if left == -1 else left, None if right == -1 else right),
        softcap=float(softcap or 0.0),
        score_mod=_function(score_mod),
        mask_mod=_function(mask_mod),
        block_mask=block_mask,
        sink=None if sink is None else sink.detach().double(),
        dropout_p=float(dropout_p),
        seed=int(dropout_seed or 0),
        offset=int(dropout_offset or 0),
        lengths_q=(cu_seqlens_q, seqused_q),
        lengths_k=(cu_seqlens_k, seqused_k),
        transposed=transposed,
    )


def _forward(call: Call, b: int) -> _Softmax:
    rows, keys = span(call.q, call.lengths_q, b), span(call.k, call.lengths_k, b)
    q = call.q[rows].transpose(0, 1)  # (h, sq, d)
    group = q.shape[0] // call.k.shape[-2]
    k = call.k[keys].transpose(0, 1).repeat_interleave(group, 0)  # (h, sk, d): head h reads kv head h // group
    v = call.v[keys].transpose(0, 1).repeat_interleave(group, 0)
    grid = (q.shape[0], q.shape[1], k.shape[1])

    raw = call.scale * _product(q, k.transpose(-1, -2))
    capped = call.softcap * torch.tanh(raw / call.softcap) if call.softcap else raw
    score = capped
    if call.score_mod is not None:
        where = positions(grid, raw.device)
        stand_ins = {id(t): t.double() for t in captured_tensors(call.score_mod).values() if t.is_floating_point()}
        probes = {key: capped.new_zeros(capped.numel()) for key in stand_ins}
        score = score_at(call.score_mod, capped.flatten(), b, where, stand_ins, probes).reshape(grid)
    score = torch.where(allowed_positions(call, b, grid, raw.device), score, -math.inf)

    max_score = score.amax(-1) if grid[2] else raw.new_full(grid[:2], -math.inf)
    logits = score
    if call.sink is not None:
        logits = torch.cat([score, call.sink[:, None, None].expand(*grid[:2], 1)], -1)
    lse = torch.logsumexp(logits, -1) if logits.shape[-1] else raw.new_full(grid[:2], -math.inf)
    # exp(score - lse) would round lse once for a whole row; the quotient does not
    p = torch.where(score == -math.inf, 0.0, torch.softmax(logits, -1)[..., : grid[2]])
    z = torch.ones_like(p)
    if call.dropout_p:
        keep = dropout_mask(call.seed, call.offset, b, *grid, call.dropout_p)
        z = torch.from_numpy(keep).to(p) / (1.0 - call.dropout_p)
    return _Softmax(rows, keys, q, k, v, raw, capped, p, z, _product(z * p, v), lse, max_score)


def allowed_positions(call: Call, b: int, grid: tuple[int, int, int], device: torch.device) -> Tensor:
    """Which positions every mask allows, (h, sq, sk)."""
    _, sq, sk = grid
    i = torch.arange(sq, device=device)[:, None]
    j = torch.arange(sk, device=device)[None, :]
    diagonal = i + sk - sq  # bottom-right: the last query stands at the last key
    allowed = torch.ones(grid, dtype=torch.bool, device=device)
    if call.causal:
        allowed &= j <= diagonal
    left, right = call.window
    if left is not None:
        allowed &= j >= diagonal - left
    if right is not None:
        allowed &= j <= diagonal + right
    if call.mask_mod is not None:
        allowed &= _mask_at(call.mask_mod, b, grid, device)
    if call.block_mask is not None:
        allowed &= _block_allowed(call.block_mask, b, grid, device)
    return allowed


def _block_allowed(block_mask: Any, b: int, grid: tuple[int, int, int], device: torch.device) -> Tensor:
    """What a BlockMask allows: its full blocks, and its partial blocks where its own mask_mod agrees."""
    heads, sq, sk = grid
    block_m, block_n = block_mask.BLOCK_SIZE

    def blocks(count: Tensor, index: Tensor) -> Tensor:  # (b, h, m), (b, h, m, n) -> (heads, sq, sk)
        listed = torch.zeros(count.shape[1:] + (index.shape[-1],), dtype=torch.bool, device=device)  # (h, m, n)
        row = min(b, count.shape[0] - 1)
        for h in range(count.shape[1]):
            for m in range(count.shape[2]):
                listed[h, m, index[row, h, m, : int(count[row, h, m])].long()] = True
        listed = listed.repeat_interleave(block_m, 1).repeat_interleave(block_n, 2)
        if listed.shape[1] < sq or listed.shape[2] < sk:
            raise ValueError(f"block_mask covers {tuple(listed.shape[1:])} positions, the sequence has {(sq, sk)}")
        return listed[:, :sq, :sk].expand(heads, sq, sk)

    allowed = blocks(block_mask.kv_num_blocks, block_mask.kv_indices)
    if block_mask.mask_mod is not None:
        allowed = allowed & _mask_at(_function(block_mask.mask_mod), b, grid, device)
    if block_mask.full_kv_num_blocks is not None:
        allowed = allowed | blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return allowed


def _mods_backward(
    call: Call,
    b: int,
    one: _Softmax,
    ds: Tensor,
    bound: Tensor,
    dcaptured: dict[str, _Sum],
    largest: dict[str, float],
) -> tuple[Tensor, Tensor]:
    """Takes ds back through score_mod and softcap; adds to dcaptured.  Returns ds of the raw score, and its slope.

    Only positions with p > 0 take part: elsewhere ds is exactly 0, and 0 times an infinite derivative must not enter.
    """
    slope = torch.ones_like(ds)
    live = one.p > 0
    if call.score_mod is not None and bool(live.any()):
        where = [x[live.flatten()] for x in positions(tuple(ds.shape), ds.device)]
        # In parts, because autograd adds up a captured tensor's gradient term by term.
        parts = [x.tensor_split(16) for x in (one.capped[live], ds[live], bound[live], *where)]
        done = [
            _score_mod_backward(call.score_mod, b, score, part, top, at, dcaptured, largest)
            for score, part, top, *at in zip(*parts, strict=True)
        ]
        ds = torch.zeros_like(ds).masked_scatter_(live, torch.cat([dscore for dscore, _ in done]))
        slope = torch.zeros_like(ds).masked_scatter_(live, torch.cat([slopes for _, slopes in done]))
    if call.softcap:
        bend = 1.0 - torch.tanh(one.raw / call.softcap) ** 2
        ds, slope = ds * bend, slope * bend
    return ds, slope


def _score_mod_backward(
    score_mod: ScoreMod,
    b: int,
    score: Tensor,
    ds: Tensor,
    bound: Tensor,
    where: list[Tensor],
    dcaptured: dict[str, _Sum],
    largest: dict[str, float],
) -> tuple[Tensor, Tensor]:
    """The vjp of score_mod at a list of positions, all (n,): the score's part of it, and the slope in the score."""
    captured = captured_tensors(score_mod)
    stand_ins = {id(captured[name]): captured[name].detach().double().requires_grad_() for name in dcaptured}
    score = score.requires_grad_()
    probes = {key: torch.zeros_like(score).requires_grad_() for key in stand_ins}
    with torch.enable_grad():
        out = score_at(score_mod, score, b, where, stand_ins, probes)
    if not out.requires_grad:
        return torch.zeros_like(ds), torch.zeros_like(ds)

    def vjp(leaves: list[Tensor], cotangent: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, cotangent, retain_graph=True, allow_unused=True, materialize_grads=True)

    dscore, *grads = vjp([score, *stand_ins.values()], ds)
    slope, *reads = vjp([score, *probes.values()], torch.ones_like(ds))
    for name, grad, read in zip(dcaptured, grads, reads, strict=True):
        dcaptured[name].add(grad)
        largest[name] = max(largest[name], peak(bound * read))
    return dscore, slope


class _ScalarReads(TorchFunctionMode):
    """Runs a mod written for scalars under vmap.

    ``x[h]`` with 0-d tensors becomes an index operation (Python's own would ask for the number), and captured tensors
    are swapped for float64 stand-ins, each read of which carries a zero probe: the probe's gradient is the
    derivative at that one position.
    """

    def __init__(self, stand_ins: dict[int, Tensor], probes: dict[int, Tensor]) -> None:
        super().__init__()
        self.stand_ins, self.probes = stand_ins, probes

    def _swap(self, x: Any) -> Any:
        if id(x) not in self.stand_ins:
            return x
        stand_in = self.stand_ins[id(x)]
        return stand_in + self.probes[id(x)] if x.dim() == 0 else stand_in

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        source = id(args[0]) if args else None
        args, kwargs = tree_map(self._swap, (args, kwargs or {}))
        if func is not torch.Tensor.__getitem__:
            return func(*args, **kwargs)
        x, index = args
        index = index if isinstance(index, tuple) else (index,)
        if any(isinstance(i, Tensor) for i in index):
            value = torch.ops.aten.index(x, [torch.as_tensor(i, device=x.device) for i in index])
        else:
            value = x[index]
        return value + self.probes[source] if source in self.probes and x.dim() else value


def score_at(
    score_mod: ScoreMod,
    score: Tensor,
    b: int,
    where: list[Tensor],
    stand_ins: dict[int, Tensor],
    probes: dict[int, Tensor],
) -> Tensor:
    """score_mod at a list of positions: score, h, i, j are (n,)."""
    if score.numel() == 0:
        return score
    batch = torch.tensor(b, device=score.device)

    def at(s: Tensor, h: Tensor, i: Tensor, j: Tensor, *probe: Tensor) -> Tensor:
        with _ScalarReads(stand_ins, dict(zip(stand_ins, probe, strict=True))):
            return score_mod(s, batch, h, i, j)

    return torch.vmap(at)(score, *where, *probes.values()).double()


def _mask_at(mask_mod: MaskMod, b: int, grid: tuple[int, int, int], device: torch.device) -> Tensor:
    where = positions(grid, device)
    if where[0].numel() == 0:
        return torch.ones(grid, dtype=torch.bool, device=device)
    batch = torch.tensor(b, device=device)

    def at(h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        with _ScalarReads({}, {}):
            return mask_mod(batch, h, i, j)

    return torch.vmap(at)(*where).reshape(grid).bool()


def captured_tensors(mod: Any) -> dict[str, Tensor]:
    """The tensors that a mod reads besides its arguments, by the variable's name."""
    return dict(_captured(_function(mod)))


def _captured(fn: Any) -> Iterator[tuple[str, Tensor]]:
    named: dict[str, Any] = {}
    if isinstance(fn, functools.partial):
        named = dict(fn.keywords)
        yield from _captured(fn.func)
    elif inspect.ismethod(fn):
        named = _attributes(fn.__self__)
    elif inspect.isfunction(fn):
        variables = inspect.getclosurevars(fn)
        defaults = {n: p.default for n, p in inspect.signature(fn).parameters.items()}
        named = {**variables.globals, **variables.nonlocals, **defaults}
    elif fn is not None:
        named = _attributes(fn)
    for name, value in named.items():
        if isinstance(value, Tensor):
            yield name, value
        elif inspect.isfunction(value) or isinstance(value, functools.partial):
            yield from _captured(value)


def _attributes(holder: Any) -> dict[str, Any]:
    if isinstance(holder, torch.nn.Module):
        return {**dict(holder.named_parameters()), **dict(holder.named_buffers())}
    return dict(vars(holder)) if hasattr(holder, "__dict__") else {}


def _function(mod: Any) -> Any:
    """The plain function inside a traced mod; anything else as it is."""
    return getattr(mod, "fn", mod)


def philox4x32(counter: tuple[np.ndarray, ...], key: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3).

    counter: four uint64 arrays of one shape that hold 32-bit words; returns four like them.
    """
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    c0, c1, c2, c3 = (np.asarray(c, dtype=np.uint64) for c in counter)
    k0, k1 = key
    for _ in range(10):
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (second >> half) ^ c1 ^ np.uint64(k0),
            second & low,
            (first >> half) ^ c3 ^ np.uint64(k1),
            first & low,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def dropout_mask(seed: int, offset: int, b: int, heads: int, sq: int, sk: int, p: float) -> np.ndarray:
    """Which elements of sequence b dropout keeps, bool (heads, sq, sk): word >= round(p * 2**32).

    One Philox call serves the 2 x 2 positions (i, j), (i, j + 1), (i + 1, j), (i + 1, j + 1), i and j even.
    """
    mask = 0xFFFFFFFF
    key = (seed & mask, ((seed >> 32) ^ (offset >> 32)) & mask)
    h, i, j = np.meshgrid(np.arange(heads), np.arange(-(-sq // 2)), np.arange(-(-sk // 2)), indexing="ij")
    words = philox4x32((i, j, b * heads + h, np.full_like(i, offset & mask)), key)
    bits = np.empty((heads, 2 * i.shape[1], 2 * j.shape[2]), dtype=np.uint64)
    for word, (odd_i, odd_j) in zip(words, [(0, 0), (0, 1), (1, 0), (1, 1)], strict=True):
        bits[:, odd_i::2, odd_j::2] = word
    return bits[:, :sq, :sk] >= min(round(p * 2**32), mask)


def batch_size(call: Call) -> int:
    cu_seqlens = call.lengths_q[0]
    return call.q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1


def span(x: Tensor, lengths: tuple[Tensor | None, Tensor | None], b: int) -> Index:
    """Where the rows of sequence b that count stand in x."""
    cu_seqlens, seqused = lengths
    if cu_seqlens is None:
        return b, slice(0, x.shape[1] if seqused is None else int(seqused[b]))
    start, end = int(cu_seqlens[b]), int(cu_seqlens[b + 1])
    return (slice(start, end if seqused is None else min(end, start + int(seqused[b]))),)


def positions(grid: tuple[int, ...], device: torch.device) -> list[Tensor]:
    """h, i, j of every element of an (h, sq, sk) grid, each (h * sq * sk,)."""
    axes = [torch.arange(n, device=device) for n in grid]
    return [x.flatten() for x in torch.meshgrid(*axes, indexing="ij")]


class _Sum:
    """A running sum that carries what rounding loses (Neumaier, "Rundungsfehleranalyse einiger Verfahren", 1974).

    So that float64 inputs can be judged too: the oracle's sums are closer than those of plain float64.
    """

    def __init__(self, zeros: Tensor) -> None:
        self._total, self._lost = zeros, torch.zeros_like(zeros)

    def add(self, part: Tensor) -> None:
        new = self._total + part
        added = new - self._total
        self._lost += (self._total - (new - added)) + (part - added)
        self._total = new

    @property
    def value(self) -> Tensor:
        return self._total + self._lost


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, each sum exact to the last bit or two (Ozaki et al., "Error-free transformations of matrix
    multiplication by using fast routines of matrix multiplication", 2012): products of 21-bit slices lose nothing."""
    left, right = _slices(a, -1), _slices(b, -2)
    result = _Sum(a.new_zeros(*a.shape[:-1], b.shape[-1]))
    for depth in (2, 1, 0):  # small terms first
        for n in range(depth + 1):
            result.add(left[n] @ right[depth - n])
    return result.value


def _slices(x: Tensor, dim: int) -> list[Tensor]:
    """x as the sum of three tensors of 21 bits each, aligned along ``dim``; sums of up to 2**11 terms stay exact."""
    slices: list[Tensor] = []
    for _ in range(3):
        top = x.abs().amax(dim, keepdim=True) if x.numel() else x
        exponent = torch.frexp(top).exponent.clamp(min=-1000)  # a unit of less would be 0
        unit = torch.ldexp(torch.ones_like(top), exponent - 21)
        slices.append(torch.round(x / unit) * unit)
        x = x - slices[-1]
    return slices


def _sum_group(x: Tensor, heads_kv: int) -> Tensor:
    """(h, sk, d) of the query heads -> (sk, hkv, d), summed over each group."""
    return _group(x, heads_kv).sum(1).transpose(0, 1)


def _group(x: Tensor, heads_kv: int) -> Tensor:
    """(h, ...) -> (hkv, h / hkv, ...)"""
    return x.unflatten(0, (heads_kv, x.shape[0] // heads_kv))


def swap_layout(x: Tensor, transposed: bool) -> Tensor:
    return x.transpose(1, 2) if transposed else x


def peak(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _peak_of_rows(x: Tensor) -> Tensor:
    return x.abs().amax(-1)
