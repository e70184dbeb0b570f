"""``refluent check``: compares a backend with the float64 reference over a grid of cases and prints the errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import refluent as rf
from refluent import accuracy

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
HEAD_DIMS = (40, 64, 128, 256)
COLUMNS = ("o", "lse", "dq", "dk", "dv", "dsink", "captured")


@dataclass
class Call:
    """One call's tensors and options; ``packed`` goes to attention_varlen."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    captured: dict[str, Tensor]
    packed: bool = False


@dataclass(frozen=True)
class Shape:
    """Sizes of one case: an odd length that fills no tile, and grouped heads."""

    dtype: torch.dtype
    device: torch.device
    head_dim: int
    batch: int = 2
    seqlen_q: int = 137
    seqlen_k: int = 201
    heads: int = 4
    heads_kv: int = 2

    def random(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(size, dtype=torch.float32).to(self.device, dtype or self.dtype)

    def call(self, captured: dict[str, Tensor] | None = None, **options: Any) -> Call:
        return Call(
            self.random(self.batch, self.seqlen_q, self.heads, self.head_dim),
            self.random(self.batch, self.seqlen_k, self.heads_kv, self.head_dim),
            self.random(self.batch, self.seqlen_k, self.heads_kv, self.head_dim),
            options,
            captured or {},
        )

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32


def _plain(shape: Shape) -> Call:
    return shape.call()


def _causal(shape: Shape) -> Call:
    return shape.call(causal=True)


def _square(shape: Shape) -> Call:
    """As many queries as keys: what self-attention in training asks for, and what kernels have short cuts for."""
    return replace(shape, seqlen_k=shape.seqlen_q).call(causal=True)


def _negative_scale(shape: Shape) -> Call:
    return replace(shape, seqlen_k=shape.seqlen_q).call(causal=True, scale=-0.3)


def _zero_scale(shape: Shape) -> Call:
    """Every weight of a row the same, whatever q and k; dq and dk exactly 0."""
    return replace(shape, seqlen_k=shape.seqlen_q).call(causal=True, scale=0.0)


def _window(shape: Shape) -> Call:
    return shape.call(causal=True, window=(31, 0))


def _softcap(shape: Shape) -> Call:
    return shape.call(softcap=3.0)


def _sink(shape: Shape) -> Call:
    return shape.call(causal=True, sink=shape.random(shape.heads, dtype=shape.wide))


def _seqused(shape: Shape) -> Call:
    used = [torch.tensor(n, dtype=torch.int32, device=shape.device) for n in ([0, 100], [200, 77])]
    return shape.call(causal=True, seqused_q=used[0], seqused_k=used[1])


def _varlen(shape: Shape) -> Call:
    lengths_q, lengths_k = (65, 0, 130, 1), (70, 33, 129, 0)
    cu_q, cu_k = (
        torch.tensor([0, *lengths], device=shape.device).cumsum(0).to(torch.int32) for lengths in (lengths_q, lengths_k)
    )
    total_q, total_k = sum(lengths_q) + 3, sum(lengths_k) + 5  # rows after the last sequence
    return Call(
        shape.random(total_q, shape.heads, shape.head_dim),
        shape.random(total_k, shape.heads_kv, shape.head_dim),
        shape.random(total_k, shape.heads_kv, shape.head_dim),
        {
            "causal": True,
            "cu_seqlens_q": cu_q,
            "cu_seqlens_k": cu_k,
            "max_seqlen_q": max(lengths_q),
            "max_seqlen_k": max(lengths_k),
        },
        {},
        packed=True,
    )


def _score_mod(shape: Shape) -> Call:
    slope = shape.random(shape.heads, dtype=shape.wide)
    return shape.call({"slope": slope}, score_mod=lambda s, b, h, i, j: s + 0.02 * slope[h] * (j - i))


def _mask_mod(shape: Shape) -> Call:
    document = (torch.arange(shape.seqlen_k, device=shape.device) // 50).to(torch.int32)
    return shape.call(mask_mod=lambda b, h, i, j: document[i] == document[j])


def _block_mask(shape: Shape) -> Call:
    mask = rf.create_block_mask(
        lambda b, h, i, j: (j - i) % 96 < 48, None, None, shape.seqlen_q, shape.seqlen_k, BLOCK_SIZE=32
    )
    return shape.call(block_mask=mask.to(shape.device))


def _dropout(shape: Shape) -> Call:
    return shape.call(causal=True, dropout_p=0.2, dropout_seed=7, dropout_offset=4)


def _together(shape: Shape) -> Call:
    call = _score_mod(shape)
    call.options |= {"causal": True, "window": (90, 0), "softcap": 5.0}
    call.options["sink"] = shape.random(shape.heads, dtype=shape.wide)
    return call


CASES: dict[str, Callable[[Shape], Call]] = {
    "plain": _plain,
    "causal": _causal,
    "square": _square,
    "neg_scale": _negative_scale,
    "zero_scale": _zero_scale,
    "window": _window,
    "softcap": _softcap,
    "sink": _sink,
    "seqused": _seqused,
    "varlen": _varlen,
    "score_mod": _score_mod,
    "mask_mod": _mask_mod,
    "block_mask": _block_mask,
    "dropout": _dropout,
    "together": _together,
}


@dataclass(frozen=True)
class Row:
    """One case's outcome: error over allowed error for each tensor, or why there is none."""

    case: str
    dtype: str
    head_dim: int
    shares: dict[str, float]
    ratio: float  # the largest error over plain eager attention's, over all tensors; nan where no tensor has one
    failures: tuple[str, ...] = ()
    unsupported: str = ""


def judge(call: Call, backend: str | None) -> tuple[dict[str, float], float, tuple[str, ...]]:
    """Runs one call forward and backward and applies the accuracy rule to every tensor it made."""
    leaves = {"q": call.q, "k": call.k, "v": call.v} | call.captured
    if "sink" in call.options:
        leaves["sink"] = call.options["sink"]
    for leaf in leaves.values():
        leaf.requires_grad_()
    attention = rf.attention_varlen if call.packed else rf.attention
    o, lse = attention(call.q, call.k, call.v, **call.options, backend=backend, return_lse=True)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    made = torch.autograd.grad((o, lse), list(leaves.values()), (do, dlse))
    grads = dict(zip(leaves, made))
    expected = accuracy.expect(call.q, call.k, call.v, do, dlse, **call.options)

    shares: dict[str, float] = {}
    ratios, failures = [], []
    for judgement in _judgements(expected, o.detach(), lse.detach(), grads, list(call.captured)):
        try:
            judged = judgement()
        except accuracy.AccuracyError as over:
            failures.append(str(over))
            continue
        for error in judged:
            column = "captured" if error.name in call.captured else error.name
            shares[column] = max(shares.get(column, 0.0), _share(error))
            if error.eager_error > 0:
                ratios.append(error.ratio)
    return shares, max(ratios, default=math.nan), tuple(failures)


def _judgements(
    expected: accuracy.Expected, o: Tensor, lse: Tensor, grads: dict[str, Tensor], captured: list[str]
) -> list[Callable[[], list[accuracy.Errors]]]:
    """One check a tensor, so that a failure of one doesn't hide the others."""
    backward = expected.check_backward
    checks = [
        partial(expected.check_forward, o),
        partial(_check_lse, expected, lse),
        partial(backward, dq=grads["q"]),
        partial(backward, dk=grads["k"]),
        partial(backward, dv=grads["v"]),
    ]
    if "sink" in grads:
        checks.append(partial(backward, dsink=grads["sink"]))
    return [*checks, *(partial(backward, dcaptured={name: grads[name]}) for name in captured)]


def _check_lse(expected: accuracy.Expected, lse: Tensor) -> list[accuracy.Errors]:
    return [accuracy.check_lse("lse", lse, expected.forward.lse, expected.dtype)]


def _share(error: accuracy.Errors) -> float:
    share = error.max_error / error.max_bound if error.max_bound else float(error.max_error > 0)
    if error.frobenius_bound:
        share = max(share, error.frobenius_error / error.frobenius_bound)
    return share


def rows(
    backend: str | None,
    device: torch.device,
    dtypes: Sequence[str],
    head_dims: Sequence[int],
    cases: Sequence[str],
    seed: int,
) -> Iterator[Row]:
    """One row a case, type and head size."""
    for name in cases:
        for dtype in dtypes:
            for head_dim in head_dims:
                torch.manual_seed(seed)
                shape = Shape(DTYPES[dtype], device, head_dim)
                try:
                    shares, ratio, failures = judge(CASES[name](shape), backend)
                except rf.UnsupportedError as error:
                    yield Row(name, dtype, head_dim, {}, math.nan, unsupported=str(error))
                else:
                    yield Row(name, dtype, head_dim, shares, ratio, failures)


def run(
    backend: str | None,
    device: str | None,
    dtypes: Sequence[str],
    head_dims: Sequence[int],
    cases: Sequence[str],
    seed: int,
) -> int:
    """Prints the table as it is made; 0 if nothing failed and something ran, else 1."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    print(f"backend {backend or 'chosen per call'} on {where}; each figure is error / allowed error, 1 is the limit")
    print(f"{'case':12}{'type':6}{'D':>4}  " + "".join(f"{column:>9}" for column in COLUMNS) + "   x eager")
    counts = {"passed": 0, "failed": 0, "not supported": 0}
    for row in rows(backend, where, dtypes, head_dims, cases, seed):
        counts["not supported" if row.unsupported else "failed" if row.failures else "passed"] += 1
        print(_format(row), flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    return 0 if counts["passed"] and not counts["failed"] else 1


def _format(row: Row) -> str:
    head = f"{row.case:12}{row.dtype:6}{row.head_dim:>4}  "
    if row.unsupported:
        return f"{head}not supported: {row.unsupported}"
    cells = "".join(f"{row.shares[c]:9.3f}" if c in row.shares else f"{'-':>9}" for c in COLUMNS)
    ratio = f"{row.ratio:10.2f}" if not math.isnan(row.ratio) else f"{'-':>10}"
    return "\n".join([head + cells + ratio, *(f"    FAILED {failure}" for failure in row.failures)])
