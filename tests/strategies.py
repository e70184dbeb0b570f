"""Random attention calls: ``Case`` is plain data that hypothesis draws and prints, ``build`` makes its tensors."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MODS = ("alibi", "table", "relative", "gain", "temperature", "kinds", "minus_inf", "square", "constant")
MASKS = ("documents", "sparse", "prefix", "heads", "nothing")


@dataclass(frozen=True)
class Case:
    """One call.  lengths_*: the tokens of each sequence; spare_*: tokens that belong to none (padding, tail)."""

    dtype: torch.dtype
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    heads_kv: int = 1
    group: int = 1
    head_dim: int = 8
    head_dim_v: int = 8
    packed_q: bool = False
    packed_k: bool = False
    used_q: tuple[int, ...] | None = None  # seqused; at most lengths_q
    used_k: tuple[int, ...] | None = None
    tail_q: int = 0  # packed tokens after the last cu_seqlens
    tail_k: int = 0
    layout: str = "bshd"
    strides: str = "contiguous"  # of q, k, v
    do_strides: str = "contiguous"
    scale: float | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float = 0.0
    score_mod: str | None = None
    mask_mod: str | None = None
    block_mask: tuple[str, int, int, bool, bool] | None = None  # rule, block_m, block_n, full batch, full heads
    sink: bool = False
    dropout_p: float = 0.0
    use_lse: bool = False
    seed: int = 0

    @property
    def varlen(self) -> bool:
        return self.packed_q or self.packed_k

    @property
    def heads(self) -> int:
        return self.heads_kv * self.group

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32


@dataclass
class Built:
    """The tensors of a case: leaves that require grad, the options as the API takes them, and the cotangents."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor | None
    options: dict[str, Any]
    captured: dict[str, Tensor] = field(default_factory=dict)  # floating point ones of score_mod


def build(case: Case) -> Built:
    random = torch.Generator().manual_seed(case.seed)
    used_q = case.lengths_q if case.used_q is None else case.used_q
    used_k = case.lengths_k if case.used_k is None else case.used_k
    longest = (max(used_q, default=0), max(used_k, default=0))

    def side(packed: bool, lengths: tuple[int, ...], used: tuple[int, ...], tail: int, heads: int, dim: int) -> Tensor:
        """Values in the used rows and NaN in every other, (b, s, h, d) or (t, h, d)."""
        shape = (sum(lengths) + tail, heads, dim) if packed else (len(lengths), max(lengths, default=0), heads, dim)
        x = torch.full(shape, math.nan, dtype=torch.float64)
        start = 0
        for b, (n, count) in enumerate(zip(lengths, used, strict=True)):
            rows = x[start : start + count] if packed else x[b, :count]
            rows.copy_(torch.randn(rows.shape, generator=random, dtype=torch.float64))
            start += n
        return x.to(case.dtype)

    def queries(dim: int) -> Tensor:
        return side(case.packed_q, case.lengths_q, used_q, case.tail_q, case.heads, dim)

    def keys(dim: int) -> Tensor:
        return side(case.packed_k, case.lengths_k, used_k, case.tail_k, case.heads_kv, dim)

    leaves = [queries(case.head_dim), keys(case.head_dim), keys(case.head_dim_v)]
    leaves = [restride(x, case.strides).requires_grad_() for x in leaves]
    do = restride_do(queries(case.head_dim_v), case.do_strides)
    dlse = None
    if case.use_lse:
        outside = queries(1).squeeze(-1).isnan()  # (b, sq, h) or (tq, h)
        dlse = torch.randn(outside.shape, generator=random, dtype=torch.float64).to(case.wide)
        dlse = dlse.masked_fill(outside, math.nan).transpose(-1, -2)
    if case.layout == "bhsd":
        q, k, v, do = (x.detach().transpose(1, 2) if x.dim() == 4 else x for x in (*leaves, do))
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    options = _options(case, random, used_q, used_k, longest)
    built = Built(leaves[0], leaves[1], leaves[2], do, dlse, options)
    if case.score_mod is not None:
        options["score_mod"], built.captured = make_score_mod(case, random, longest)
    return built


def _options(
    case: Case, random: torch.Generator, used_q: tuple[int, ...], used_k: tuple[int, ...], longest: tuple[int, int]
) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name in ("causal", "softcap", "scale", "window", "layout", "dropout_p"):
        if getattr(case, name) != Case.__dataclass_fields__[name].default:
            options[name] = getattr(case, name)
    if case.dropout_p:
        options |= {"dropout_seed": 2**40 + case.seed, "dropout_offset": 2**33 + 17}
    for name, packed, lengths, used, given in (
        ("q", case.packed_q, case.lengths_q, used_q, case.used_q),
        ("k", case.packed_k, case.lengths_k, used_k, case.used_k),
    ):
        if packed:
            ends = torch.tensor([0, *lengths]).cumsum(0)
            options[f"cu_seqlens_{name}"] = ends.to(torch.int32)
            options[f"max_seqlen_{name}"] = max(lengths, default=0)
        if given is not None:
            options[f"seqused_{name}"] = torch.tensor(used, dtype=torch.int32)
    if case.sink:
        options["sink"] = torch.randn(case.heads, generator=random, dtype=case.wide).requires_grad_()
    if case.mask_mod is not None:
        options["mask_mod"] = make_mask_mod(case.mask_mod, longest, len(case.lengths_q), random)
    if case.block_mask is not None:
        rule, block_m, block_n, full_batch, full_heads = case.block_mask
        sizes = (max(case.lengths_q), max(case.lengths_k))
        options["block_mask"] = create_block_mask(
            make_mask_mod(rule, sizes, len(case.lengths_q), random, margin=256),
            len(case.lengths_q) if full_batch else None,
            case.heads if full_heads else None,
            *sizes,
            device="cpu",
            BLOCK_SIZE=(block_m, block_n),
        )
    return options


def restride(x: Tensor, how: str) -> Tensor:
    """The same values with other strides, last stride 1; NaN lies around a slice."""
    if how == "transposed":  # heads before positions in memory
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if how == "sliced":  # as if cut out of a fused projection
        fused = torch.full((*x.shape[:-2], x.shape[-2] + 3, x.shape[-1] + 8), math.nan, dtype=x.dtype)
        view = fused[..., 1 : 1 + x.shape[-2], 8:]
        view.copy_(x)
        return view.detach()
    if how == "every other row":
        wide = torch.full((*x.shape[:-3], 2 * x.shape[-3], *x.shape[-2:]), math.nan, dtype=x.dtype)
        view = wide[..., ::2, :, :]
        view.copy_(x)
        return view.detach()
    return x


def restride_do(x: Tensor, how: str) -> Tensor:
    if how == "stride 0":  # what o.sum().backward() hands over
        return torch.ones((), dtype=x.dtype).expand(x.shape)
    if how == "last not 1":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    return restride(x, how)


def make_score_mod(case: Case, random: torch.Generator, longest: tuple[int, int]) -> tuple[Any, dict[str, Tensor]]:
    """A mod by name and the floating point tensors that it captures, which require grad.

    Tables are exactly as long as the longest sequence's used part: a read outside the lengths would leave them.
    """

    def leaf(*shape: int, factor: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=random, dtype=torch.float64) * factor).to(case.wide).requires_grad_()

    name, (sq, sk), batch = case.score_mod, longest, len(case.lengths_q)
    if name == "alibi":
        slope = leaf(case.heads, factor=4 / max(sq, sk, 40))  # rounding of far larger scores fails eager attention too
        return (lambda s, b, h, i, j: s + slope[h] * (j - i)), {"slope": slope}
    if name == "table":
        bias = leaf(1, case.heads, max(sq, 1), max(sk, 1))
        return (lambda s, b, h, i, j: s + bias[0, h, i, j]), {"bias": bias}
    if name == "relative":
        reach = leaf(17)
        return (lambda s, b, h, i, j: s + reach[(j - i).clamp(-8, 8) + 8]), {"reach": reach}
    if name == "gain":
        gain = leaf()
        return (lambda s, b, h, i, j: torch.tanh(s) * gain + s), {"gain": gain}
    if name == "temperature":
        temperature, shift = leaf(batch, case.heads), leaf(max(sk, 1))
        return (lambda s, b, h, i, j: s * temperature[b, h] + shift[j]), {"temperature": temperature, "shift": shift}
    if name == "kinds":
        kinds, weight = torch.arange(max(sk, 1)) % 3, leaf(3)
        return (lambda s, b, h, i, j: torch.where(i > j, s * weight[kinds[j]], s)), {"weight": weight}
    if name == "minus_inf":
        return (lambda s, b, h, i, j: torch.where((i + j) % 4 == 0, -math.inf, s)), {}
    if name == "square":
        return (lambda s, b, h, i, j: s - 0.1 * s * s), {}
    level = leaf(case.heads)
    return (lambda s, b, h, i, j: level[h]), {"level": level}


def make_mask_mod(name: str, longest: tuple[int, int], batch: int, random: torch.Generator, margin: int = 0) -> Any:
    if name == "documents":
        documents = torch.arange(max(*longest, 1) + margin) // 21
        return lambda b, h, i, j: documents[i] == documents[j]
    if name == "prefix":
        prefix = torch.randint(0, max(longest[1], 1), (batch,), generator=random)
        return lambda b, h, i, j: (j < prefix[b]) | (j <= i)
    if name == "heads":
        return lambda b, h, i, j: (j // 16 + h) % 2 == 0
    if name == "nothing":
        return lambda b, h, i, j: j < 0
    return lambda b, h, i, j: (i * 7 + j * 3) % 5 < 2


def lengths(longest: int = 300) -> st.SearchStrategy[int]:
    """Mostly short, at times around the edges of tiles, at times nothing at all."""
    edges = [n for n in (0, 1, 63, 64, 65, 127, 128, 129, 255, 257) if n <= longest]
    return st.one_of(st.integers(2, 40), st.sampled_from(edges), st.integers(2, longest))


@st.composite
def cases(draw: st.DrawFn, varlen: bool | None = None, longest: int = 300) -> Case:
    """Any combination of features.  Each is off more often than on, so that pairs and triples of them meet."""

    def rarely(strategy: st.SearchStrategy[Any], off: Any = None) -> Any:
        return draw(strategy) if draw(st.integers(0, 2)) == 0 else off

    varlen = draw(st.booleans()) if varlen is None else varlen
    packed_q, packed_k = draw(st.sampled_from([(True, True), (True, True), (True, False), (False, True)]))
    packed_q, packed_k = varlen and packed_q, varlen and packed_k
    batch = draw(st.integers(1, 4 if varlen else 3))
    same = draw(st.booleans())

    def side(packed: bool) -> tuple[int, ...]:
        if packed:
            return tuple(draw(st.lists(lengths(longest), min_size=batch, max_size=batch)))
        return (draw(lengths(longest)),) * batch

    lengths_q = side(packed_q)
    lengths_k = lengths_q if same and packed_q == packed_k else side(packed_k)

    def used(of: tuple[int, ...]) -> tuple[int, ...] | None:
        return rarely(st.tuples(*(st.one_of(st.integers(n // 2, n), st.integers(0, n)) for n in of)))

    side_q, side_k = max(lengths_q), max(lengths_k)
    rules = st.sampled_from(MASKS[:-1])  # a mask that allows nothing would leave little to compare
    blocks = st.tuples(rules, st.sampled_from([16, 48, 128]), st.sampled_from([16, 32, 128]), *[st.booleans()] * 2)
    open_or = st.one_of(st.none(), st.just(-1), st.integers(0, 80))
    return Case(
        dtype=draw(st.sampled_from(DTYPES)),
        lengths_q=lengths_q,
        lengths_k=lengths_k,
        heads_kv=draw(st.sampled_from([1, 2, 3])),
        group=draw(st.sampled_from([1, 2, 3])),
        head_dim=8 * draw(st.sampled_from([1, 2, 3, 5, 8, 9])),
        head_dim_v=8 * draw(st.sampled_from([1, 2, 3, 5, 8, 9])),
        packed_q=packed_q,
        packed_k=packed_k,
        used_q=used(lengths_q),
        used_k=used(lengths_k),
        tail_q=draw(st.sampled_from([0, 0, 5])) if packed_q else 0,
        tail_k=draw(st.sampled_from([0, 0, 5])) if packed_k else 0,
        layout="bshd" if varlen else draw(st.sampled_from(["bshd", "bhsd"])),
        strides=draw(st.sampled_from(["contiguous", "transposed", "sliced", "every other row"])),
        do_strides=draw(st.sampled_from(["contiguous", "stride 0", "transposed", "last not 1"])),
        scale=rarely(st.sampled_from([0.2, 0.1, 0.01])),
        causal=draw(st.booleans()),
        window=rarely(st.tuples(open_or, open_or)),
        softcap=rarely(st.sampled_from([0.7, 30.0]), 0.0),
        score_mod=rarely(st.sampled_from(MODS)),
        mask_mod=rarely(rules),
        block_mask=rarely(blocks) if side_q and side_k else None,
        sink=rarely(st.just(True), False),
        dropout_p=rarely(st.sampled_from([0.1, 0.6]), 0.0),
        use_lse=draw(st.booleans()),
        seed=draw(st.integers(0, 10**6)),
    )


@st.composite
def long_cases(draw: st.DrawFn) -> Case:
    """A long side against a short one: several tiles of rows or of keys, few enough scores for the oracle."""
    case = draw(cases(longest=40))
    side, length = draw(st.sampled_from("qk")), draw(st.integers(500, 1100))
    packed, old = (case.packed_q, case.lengths_q) if side == "q" else (case.packed_k, case.lengths_k)
    new = (length, *old[1:]) if packed else (length,) * len(old)
    changed: dict[str, Any] = {f"lengths_{side}": new, f"used_{side}": None}
    return replace(case, **changed)
