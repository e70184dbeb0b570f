"""One frozen description of what is asked, and every check of it that needs no device-side value.

The checks read metadata alone (shapes, types, devices, strides, options): they run before anything is launched, under
torch.compile and on fake tensors too. Values are checked in validate.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from refluent.masks import BlockSpec, BlockTensors, normalize_window
from refluent.mods.mod import Mod, find_mod


@dataclass(frozen=True)
class Options:
    """The static facts of a call: hashable, no tensors, no sizes."""

    scale: float | None = None  # None: 1 / sqrt(head_dim)
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)  # None: open
    softcap: float = 0.0  # 0: off
    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    block_mask: BlockSpec | None = None
    dropout_p: float = 0.0
    deterministic: bool = False
    return_max_score: bool = False
    backend: str = "torch"  # "" until backends.choose has resolved it

    @staticmethod
    @lru_cache(maxsize=4096)
    def from_key(key: str) -> Options:
        """The options that :func:`options_key` wrote down."""
        scale, causal, left, right, softcap, score, mask, block, dropout_p, fixed, max_score, backend = key.split("|")
        return Options(
            scale=None if scale == "None" else float(scale),
            causal=causal == "True",
            window=(None if left == "None" else int(left), None if right == "None" else int(right)),
            softcap=float(softcap),
            score_mod=_mod(score),
            mask_mod=_mod(mask),
            block_mask=_block_spec(block),
            dropout_p=float(dropout_p),
            deterministic=fixed == "True",
            return_max_score=max_score == "True",
            backend=backend,
        )


def _mod(key: str) -> Mod | None:
    return find_mod(key) if key else None


def _block_spec(text: str) -> BlockSpec | None:
    if not text:
        return None
    block_m, block_n, has_full, key = text.split(",")
    return BlockSpec(int(block_m), int(block_n), _mod(key), has_full == "True")


def block_key(spec: BlockSpec | None) -> str:
    """A block mask's static facts as a part of :func:`options_key`."""
    if spec is None:
        return ""
    return f"{spec.block_m},{spec.block_n},{spec.has_full},{mod_key(spec.mask_mod)}"


def mod_key(mod: Mod | None) -> str:
    """A mod as a part of :func:`options_key`."""
    return "" if mod is None else mod.key


@dataclass(frozen=True)
class Problem:
    """Options plus sizes, type and device: everything that a plan may depend on.

    ``seqlen_q`` and ``seqlen_k`` are the padded lengths, or max_seqlen_* of a packed side (tokens).
    """

    options: Options
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device
    varlen_q: bool = False
    varlen_k: bool = False
    has_seqused_q: bool = False
    has_seqused_k: bool = False
    has_sink: bool = False

    @property
    def scale(self) -> float:
        """What multiplies <q_i, k_j>: as given, else 1 / sqrt(head_dim)."""
        return 1.0 / math.sqrt(self.head_dim) if self.options.scale is None else self.options.scale

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads_q // self.heads_kv

    def with_backend(self, name: str) -> Problem:
        """The same problem for the backend of that name."""
        return replace(self, options=replace(self.options, backend=name))

    @property
    def accum_dtype(self) -> torch.dtype:
        """The type of lse, max_score and of every sum."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors of one call: (b, s, h, d), or packed (t, h, d) on a side that has cu_seqlens."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None = None  # int32 (b + 1,)
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None  # int32 (b,)
    seqused_k: Tensor | None = None
    sink: Tensor | None = None  # (heads_q,)
    score_captured: tuple[Tensor, ...] = ()  # in the order of Mod.captured_names
    mask_captured: tuple[Tensor, ...] = ()
    block_captured: tuple[Tensor, ...] = ()  # captured by the block mask's own mask_mod
    blocks: BlockTensors | None = None
    philox: Tensor | None = None  # int64 (2,): seed, offset; None without dropout


@dataclass(frozen=True)
class Needs:
    """Which gradients a backward has to make."""

    dq: bool = True
    dk: bool = True
    dv: bool = True
    dsink: bool = False
    dcaptured: tuple[bool, ...] = ()  # one per Inputs.score_captured


@dataclass(frozen=True, eq=False)
class Gradients:
    """What a backward made; None where it was not asked to."""

    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsink: Tensor | None = None
    dcaptured: tuple[Tensor | None, ...] = ()


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MAX_HEAD_DIM = 256
LAYOUTS = ("bshd", "bhsd")


def refuse(name: str, got: object, allowed: str, kind: type[Exception] = ValueError) -> NoReturn:
    """The one form of every error text: the argument, what it got, what is allowed."""
    raise kind(f"{name}: got {got}; allowed: {allowed}")


def _number(name: str, value: Any, allowed: str) -> float:
    # float() also turns a symbolic float of torch.compile into a guarded constant.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        refuse(name, f"{type(value).__name__} {value!r}", allowed, TypeError)
    value = float(value)
    if not -math.inf < value < math.inf:
        refuse(name, value, allowed)
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        refuse(name, f"{type(value).__name__} {value!r}", "True or False", TypeError)
    return value


def check_scale(scale: Any) -> float | None:
    """What multiplies <q_i, k_j>, any finite number."""
    return None if scale is None else _number("scale", scale, "a finite number, or None for 1 / sqrt(head_dim)")


def check_softcap(softcap: Any) -> float:
    """0.0 means off."""
    allowed = "a finite number >= 0 (0 or None: off)"
    value = 0.0 if softcap is None else _number("softcap", softcap, allowed)
    if value < 0:
        refuse("softcap", value, allowed)
    return value


def check_dropout_p(dropout_p: Any) -> float:
    """The probability that a weight is zeroed."""
    allowed = "a number with 0 <= dropout_p < 1"
    value = _number("dropout_p", dropout_p, allowed)
    if not 0 <= value < 1:
        refuse("dropout_p", value, allowed)
    return value


def check_window(window: Any) -> tuple[int | None, int | None]:
    """(left, right) in positions beside the bottom-right diagonal; None is open."""
    left, right = normalize_window(window)
    # int() turns a symbolic int of torch.compile into a guarded constant.
    return None if left is None else int(left), None if right is None else int(right)


def check_layout(layout: Any) -> bool:
    """Whether heads come before positions."""
    if layout not in LAYOUTS:
        refuse("layout", repr(layout), "'bshd' or 'bhsd'")
    return layout == "bhsd"


def check_max_seqlen(name: str, value: Any) -> int | torch.SymInt:
    """A bound that launches depend on, so it lives on the host."""
    allowed = "an int >= 0 (a tensor would have to be read from the device)"
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        refuse(name, type(value).__name__, allowed, TypeError)
    if value < 0:
        refuse(name, value, allowed)
    return value


def check_seed(name: str, value: Any, device: torch.device) -> None:
    """dropout_seed or dropout_offset: an int64, on the host or on the device."""
    allowed = f"an int in [-2**63, 2**63), or an int64 tensor of one element on {device}"
    if isinstance(value, Tensor):
        if value.dtype != torch.int64 or value.numel() != 1 or value.device != device:
            refuse(name, f"{value.dtype} {tuple(value.shape)} on {value.device}", allowed)
    elif isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        refuse(name, f"{type(value).__name__} {value!r}", allowed, TypeError)
    elif not -(2**63) <= value < 2**63:
        refuse(name, value, allowed)


@lru_cache(maxsize=4096, typed=True)
def options_key(
    scale: Any,
    causal: Any,
    left: int | None,
    right: int | None,
    softcap: Any,
    score_mod: str,
    mask_mod: str,
    block: str,
    dropout_p: Any,
    deterministic: Any,
    return_max_score: Any,
    backend: str,
) -> str:
    """Check the static arguments and write them as one string, which a torch.library op can carry.

    Mods appear as their keys and the block mask as ``block_m,block_n,has_full,key``; "" stands for none.
    """
    fields = (
        f"{check_scale(scale)}",
        f"{_flag('causal', causal)}",
        f"{left}",
        f"{right}",
        f"{check_softcap(softcap)}",
        score_mod,
        mask_mod,
        block,
        f"{check_dropout_p(dropout_p)}",
        f"{_flag('deterministic', deterministic)}",
        f"{_flag('return_max_score', return_max_score)}",
        backend,
    )
    return "|".join(fields)


class Meta(NamedTuple):
    """What a check may look at in a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    last_stride: int


def describe(name: str, tensor: Any) -> Meta:
    """The metadata of a dense tensor argument."""
    if not isinstance(tensor, Tensor):
        refuse(name, type(tensor).__name__, "a torch.Tensor", TypeError)
    if tensor.is_nested or tensor.layout != torch.strided:
        got = "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
        refuse(name, got, "a dense tensor (ragged: attention_varlen)", TypeError)
    return Meta(tensor.shape, tensor.dtype, tensor.device, tensor.stride(-1) if tensor.dim() else 1)


class TensorMetas(NamedTuple):
    """The metadata of one call's tensors."""

    q: Meta
    k: Meta
    v: Meta
    cu_seqlens_q: Meta | None
    cu_seqlens_k: Meta | None
    seqused_q: Meta | None
    seqused_k: Meta | None
    sink: Meta | None


@lru_cache(maxsize=4096)
def check_tensors(metas: TensorMetas) -> int:
    """Check shapes, types, devices and strides against each other; returns the number of sequences."""
    q, k, v = metas.q, metas.k, metas.v
    for name, meta, packed in (
        ("q", q, metas.cu_seqlens_q is not None),
        ("k", k, metas.cu_seqlens_k is not None),
        ("v", v, metas.cu_seqlens_k is not None),
    ):
        _check_operand(name, meta, q, packed)
    batch = _check_batch(metas)
    _check_heads(q.shape, k.shape, v.shape)
    for name, cu in (("cu_seqlens_q", metas.cu_seqlens_q), ("cu_seqlens_k", metas.cu_seqlens_k)):
        if cu is not None:
            _check_int32(name, cu, (batch + 1,), "(batch + 1,)", q.device)
    for name, used in (("seqused_q", metas.seqused_q), ("seqused_k", metas.seqused_k)):
        if used is not None:
            _check_int32(name, used, (batch,), "(batch,)", q.device)
    if metas.sink is not None:
        _check_sink(metas.sink, q)
    return batch


def _check_operand(name: str, meta: Meta, q: Meta, packed: bool) -> None:
    form = "(tokens, heads, head_dim)" if packed else "(batch, seqlen, heads, head_dim)"
    if len(meta.shape) != (3 if packed else 4):
        refuse(name, f"shape {tuple(meta.shape)}", form)
    if meta.dtype not in DTYPES:
        refuse(name, f"type {meta.dtype}", "bfloat16, float16, float32 or float64")
    if meta.dtype != q.dtype:
        refuse(name, f"type {meta.dtype}", f"q's type, {q.dtype}")
    if meta.device != q.device:
        refuse(name, f"device {meta.device}", f"q's device, {q.device}")
    head_dim = meta.shape[-1]
    if not 8 <= head_dim <= MAX_HEAD_DIM or head_dim % 8 != 0:
        refuse(name, f"head dimension {head_dim}", f"a multiple of 8 up to {MAX_HEAD_DIM}")
    if meta.last_stride != 1:
        refuse(name, f"last stride {meta.last_stride}", "last stride 1 (the head dimension contiguous; others free)")


def _check_heads(q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> None:
    if k[-1] != q[-1]:
        refuse("k", f"head dimension {k[-1]}", f"q's, {q[-1]}")
    heads_q, heads_kv = q[-2], k[-2]
    if heads_q == 0:
        refuse("q", "0 heads", "at least 1")
    if heads_kv == 0 or heads_q % heads_kv != 0:
        refuse("k", f"{heads_kv} heads", f"a divisor of q's {heads_q} heads")
    if k[:-1] != v[:-1]:
        refuse("v", f"shape {tuple(v)}", f"k's shape {tuple(k)} up to the last dimension")


def _check_batch(metas: TensorMetas) -> int:
    sources: list[tuple[str, int]] = []
    for name, meta, cu_name, cu in (
        ("q", metas.q, "cu_seqlens_q", metas.cu_seqlens_q),
        ("k", metas.k, "cu_seqlens_k", metas.cu_seqlens_k),
    ):
        if cu is None:
            sources.append((name, meta.shape[0]))
            continue
        if len(cu.shape) != 1 or cu.shape[0] == 0:
            refuse(cu_name, f"shape {tuple(cu.shape)}", "shape (batch + 1,)")
        sources.append((cu_name, cu.shape[0] - 1))
    (name_q, batch), (name_k, batch_k) = sources
    if batch != batch_k:
        refuse(name_k, f"{batch_k} sequences", f"{batch}, as {name_q} has")
    return batch


def _check_int32(name: str, meta: Meta, shape: tuple[int, ...], form: str, device: torch.device) -> None:
    if meta.dtype != torch.int32:
        refuse(name, f"type {meta.dtype}", "int32")
    if tuple(meta.shape) != shape:
        refuse(name, f"shape {tuple(meta.shape)}", f"{form} = {shape}")
    if meta.device != device:
        refuse(name, f"device {meta.device}", f"q's device, {device}")


def _check_sink(sink: Meta, q: Meta) -> None:
    if tuple(sink.shape) != (q.shape[-2],):
        refuse("sink", f"shape {tuple(sink.shape)}", f"(q's heads,) = ({q.shape[-2]},)")
    if sink.dtype not in DTYPES:
        refuse("sink", f"type {sink.dtype}", "bfloat16, float16, float32 or float64")
    if sink.device != q.device:
        refuse("sink", f"device {sink.device}", f"q's device, {q.device}")


def check_output_side(q: Meta, v: Meta, do: Meta, o: Meta, lse: Meta, dlse: Meta | None) -> None:
    """Check what a backward gets beside the forward's arguments (layout "bshd" or packed)."""
    shape = (*q.shape[:-1], v.shape[-1])
    rows = (q.shape[1], q.shape[0]) if len(q.shape) == 3 else (q.shape[0], q.shape[2], q.shape[1])
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    for name, meta, expected, dtype in (
        ("do", do, shape, q.dtype),
        ("o", o, shape, q.dtype),
        ("lse", lse, rows, sums),
        ("dlse", dlse, rows, sums),
    ):
        if meta is None:
            continue
        if tuple(meta.shape) != tuple(expected):
            refuse(name, f"shape {tuple(meta.shape)}", f"{tuple(expected)}")
        if meta.dtype != dtype:
            refuse(name, f"type {meta.dtype}", f"{dtype}")
        if meta.device != q.device:
            refuse(name, f"device {meta.device}", f"q's device, {q.device}")


def check_captured(names: Sequence[str], captured: Sequence[Tensor], argument: str, device: torch.device) -> None:
    """Captured tensors travel to the kernel, so they live beside q."""
    for name, tensor in zip(names, captured):
        if tensor.device != device:
            refuse(argument, f"captured tensor {name!r} on {tensor.device}", f"q's device, {device}")
