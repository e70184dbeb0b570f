"""The accuracy rule: how far from the float64 reference an implementation may be.

A tensor passes when its largest error is at most twice that of plain eager PyTorch attention in the same type plus
2 u T, and its Frobenius error at most 4 u times its norm plus 2 u T sqrt(numel).  u is the type's unit, T the largest
single contribution to the tensor.  lse and max_score have an absolute-relative bound of their own, dsink a relative
one.  Rows that no query or key takes part in have to be exactly 0 (-inf in lse).

Where the rule leaves room: eager's error is the larger of two runs whose products sum in opposite orders, and at least
what rounding the exact result costs, because the largest error of one run is luck to a good part.  An element of a
captured tensor sums what every score that reads it contributes, often with cancelling signs, and each contribution is
rounded: T grows with the root of their number, as dsink's bound does with that of its rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import reference

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23, torch.float64: 2.0**-52}


class AccuracyError(AssertionError):
    """A tensor is further from the reference than the rule allows."""


@dataclass(frozen=True)
class Errors:
    """The measured errors of one tensor and what the rule allows."""

    name: str
    max_error: float
    max_bound: float
    frobenius_error: float
    frobenius_bound: float
    eager_error: float  # largest error of plain eager attention; nan where the rule does not use it

    @property
    def ratio(self) -> float:
        """max_error over eager's; 0 where both are 0."""
        return self.max_error / self.eager_error if self.eager_error else (math.inf if self.max_error else 0.0)

    @property
    def passed(self) -> bool:
        return self.max_error <= self.max_bound and self.frobenius_error <= self.frobenius_bound

    def __str__(self) -> str:
        return (
            f"{self.name}: max error {self.max_error:.3e} (allowed {self.max_bound:.3e}, "
            f"eager's {self.eager_error:.3e}), "
            f"Frobenius error {self.frobenius_error:.3e} (allowed {self.frobenius_bound:.3e})"
        )


def measure(name: str, got: Tensor, expected: Tensor, eager: Tensor, largest: float, dtype: torch.dtype) -> Errors:
    """Errors of ``got`` against the rule for o, dq, dk, dv and captured gradients; NaN counts as infinite error."""
    if got.shape != expected.shape:
        raise AccuracyError(f"{name}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    unit = max(UNIT[dtype], UNIT[got.dtype])
    error, eager_error = _error(got, expected), reference.peak(_error(eager, expected))
    # a small tensor can leave eager exact by luck: what rounding the exact result may cost is allowed to everybody
    luckless = max(eager_error, unit / 2 * reference.peak(expected))
    return Errors(
        name,
        max_error=reference.peak(error),
        max_bound=2 * luckless + 2 * unit * largest,
        frobenius_error=float(torch.linalg.vector_norm(error)),
        frobenius_bound=float(4 * unit * torch.linalg.vector_norm(expected))
        + 2 * unit * largest * math.sqrt(expected.numel()),
        eager_error=eager_error,
    )


def check(name: str, got: Tensor, expected: Tensor, eager: Tensor, largest: float, dtype: torch.dtype) -> Errors:
    """``measure``, raising AccuracyError with the numbers when the tensor does not pass."""
    return _judge(measure(name, got, expected, eager, largest, dtype))


def check_lse(name: str, got: Tensor, expected: Tensor, dtype: torch.dtype) -> Errors:
    """The rule for lse and max_score: |error| <= 1e-5 max(1, |value|), 1e-12 for float64; -inf matches exactly."""
    if got.shape != expected.shape:
        raise AccuracyError(f"{name}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    if not torch.equal(got == -math.inf, expected == -math.inf):
        raise AccuracyError(f"{name}: -inf in {int((got == -math.inf).sum())} rows, not the same as the reference's")
    finite = expected > -math.inf
    error = _error(got, expected)[finite] / expected[finite].abs().clamp(min=1.0)
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    return _judge(Errors(name, reference.peak(error), bound, 0.0, 0.0, math.nan))


def check_sink(got: Tensor, expected: Tensor, largest: float, rows: int, dtype: torch.dtype) -> Errors:
    """The rule for dsink: relative 4 u, plus 2 u of the largest row contribution times sqrt(rows)."""
    unit = max(UNIT[dtype], UNIT[got.dtype])
    excess = _error(got, expected) - 4 * unit * expected.abs()
    return _judge(
        Errors("dsink", reference.peak(excess.clamp(min=0.0)), 2 * unit * largest * math.sqrt(rows), 0, 0, math.nan)
    )


@dataclass(frozen=True)
class Expected:
    """What one call has to give: the reference's tensors, eager's and the largest contributions."""

    dtype: torch.dtype
    forward: reference.Result
    backward: reference.Gradients | None
    eager: dict[str, Tensor]
    heads_first: tuple[bool, bool]  # whether q's side, k's side came as (b, h, s, d)

    def check_forward(self, o: Tensor, lse: Tensor | None = None, max_score: Tensor | None = None) -> list[Errors]:
        """Judges the forward's outputs; returns their errors."""
        errors = [check("o", o, self.forward.o, self.eager["o"], self.forward.largest["o"], self.dtype)]
        _check_zero("o", o, self._silent())
        if lse is not None:
            errors.append(check_lse("lse", lse, self.forward.lse, self.dtype))
        if max_score is not None:
            errors.append(check_lse("max_score", max_score, self.forward.max_score, self.dtype))
        return errors

    def check_backward(
        self,
        dq: Tensor | None = None,
        dk: Tensor | None = None,
        dv: Tensor | None = None,
        dsink: Tensor | None = None,
        dcaptured: dict[str, Tensor] | None = None,
    ) -> list[Errors]:
        """Judges the gradients that are given; returns their errors."""
        if self.backward is None:
            raise ValueError("expect() was called without do: there are no gradients to compare with")
        got = {"dq": dq, "dk": dk, "dv": dv}
        expected = _by_name(self.forward, self.backward)
        errors = []
        for name, tensor in (got | (dcaptured or {})).items():
            if tensor is None:
                continue
            errors.append(_judge(self.measure(name, tensor, expected[name])))
            if name in got:
                _check_zero(name, tensor, self._silent() if name == "dq" else ~self.forward.reached)
        if dsink is not None and self.backward.dsink is not None:
            rows = self.forward.lse.numel() // max(1, dsink.numel())
            errors.append(check_sink(dsink, self.backward.dsink, self.backward.largest["dsink"], rows, self.dtype))
        return errors

    def measure(self, name: str, got: Tensor, expected: Tensor) -> Errors:
        """Errors of dq, dk, dv or a captured tensor's gradient, ``expected`` by the reference; does not raise."""
        if self.backward is None:
            raise ValueError("expect() was called without do: there are no gradients to compare with")
        largest = self.backward.largest[name]
        if name in self.backward.dcaptured:  # scores that add to one of its elements, on average
            keys = self.forward.reached.shape[-1 if self.heads_first[1] else -2]
            largest *= math.sqrt(max(1.0, self.forward.lse.numel() * keys / max(1, got.numel())))
        return measure(name, got, expected, self.eager[name], largest, self.dtype)

    def _silent(self) -> Tensor:
        """Which (row, head) of o and dq take part in nothing: outside every sequence, or empty."""
        silent = self.forward.max_score == -math.inf  # (b, h, sq) or (h, tq)
        return silent if self.heads_first[0] else silent.transpose(-1, -2)


def expect(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor | None = None,
    dlse: Tensor | None = None,
    **options: Any,
) -> Expected:
    """Runs the reference and eager attention on the same inputs; options as for ``refluent.attention``."""
    forward = reference.attention(q, k, v, **options)
    backward = None if do is None else reference.attention_backward(do, q, k, v, dlse, **options)
    eager, other = (eager_attention(q, k, v, do, dlse, backwards, **options) for backwards in (False, True))
    exact = _by_name(forward, backward)
    for name, t in eager.items():  # the largest error of one run is luck to a good part; of two, less
        eager[name] = max(t, other[name], key=lambda x: reference.peak(_error(x, exact[name])))
    heads_first = reference.prepare(q, k, v, **options).transposed
    return Expected(q.dtype, forward, backward, eager, heads_first)


def _by_name(forward: reference.Result, backward: reference.Gradients | None) -> dict[str, Tensor]:
    tensors = {"o": forward.o}
    if backward is not None:
        tensors |= {"dq": backward.dq, "dk": backward.dk, "dv": backward.dv} | backward.dcaptured
    return tensors


def eager_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor | None = None,
    dlse: Tensor | None = None,
    backwards: bool = False,
    **options: Any,
) -> dict[str, Tensor]:
    """Plain eager attention in the inputs' type: the matrix products in that type, the softmax in float32 (float64).

    Returns o and, where ``do`` is given, dq, dk, dv and the captured tensors' gradients by autograd.  ``backwards``
    runs every sum of a product from the last term to the first.
    """
    call = reference.prepare(q, k, v, **options)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    swap = reference.swap_layout
    q, k, v = (x.to(q.dtype) for x in (call.q, call.k, call.v))
    captured = {
        name: (t, t.detach().to(wide).requires_grad_())
        for name, t in reference.captured_tensors(call.score_mod).items()
        if t.is_floating_point()
    }
    got = {"o": q.new_zeros(*q.shape[:-1], v.shape[-1])}
    if do is not None:
        do = swap(do, call.transposed[0])
        got |= {"dq": torch.zeros_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
        got |= {name: torch.zeros_like(stand_in) for name, (_, stand_in) in captured.items()}
    stand_ins = {id(t): stand_in for t, stand_in in captured.values()}
    for b in range(reference.batch_size(call)):
        rows, keys = reference.span(q, call.lengths_q, b), reference.span(k, call.lengths_k, b)
        leaves = [x.detach().requires_grad_() for x in (q[rows], k[keys], v[keys])]
        with torch.enable_grad():
            o, lse = _eager_sequence(call, b, leaves[0], leaves[1], leaves[2], stand_ins, backwards)
        got["o"][rows] = o.detach()
        if do is None or not o.requires_grad:  # a sequence without keys depends on nothing
            continue
        seen = (lse > -math.inf).detach()
        cotangents = [torch.where(seen[..., None], do[rows], 0.0), torch.zeros_like(lse)]
        if dlse is not None:
            cotangents[1] = torch.where(seen, dlse.transpose(-1, -2)[rows].to(wide), 0.0)
        grads = torch.autograd.grad(
            [o, lse], [*leaves, *stand_ins.values()], cotangents, allow_unused=True, materialize_grads=True
        )
        got["dq"][rows] += grads[0]
        got["dk"][keys] += grads[1]
        got["dv"][keys] += grads[2]
        for name, grad in zip(captured, grads[3:], strict=True):
            got[name] += grad
    for name, (t, _) in captured.items():
        if do is not None:
            got[name] = got[name].to(t.dtype)
    sides = {"o": 0, "dq": 0, "dk": 1, "dv": 1}
    return {name: swap(t, name in sides and call.transposed[sides[name]]) for name, t in got.items()}


def _eager_sequence(
    call: reference.Call, b: int, q: Tensor, k: Tensor, v: Tensor, stand_ins: dict[int, Tensor], backwards: bool
) -> tuple[Tensor, Tensor]:
    """One sequence, q (sq, h, d), k (sk, hkv, d), v (sk, hkv, dv) -> o (sq, h, dv), lse (sq, h)."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1]
    q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    score = _product(q, k.transpose(-1, -2), backwards).to(wide) * call.scale
    grid = (q.shape[0], q.shape[1], k.shape[1])
    allowed = reference.allowed_positions(call, b, grid, q.device)
    if call.softcap:
        score = call.softcap * torch.tanh(score / call.softcap)
    if call.score_mod is not None:
        where = [x[allowed.flatten()] for x in reference.positions(grid, q.device)]
        probes = {key: score.new_zeros(where[0].shape) for key in stand_ins}
        values = reference.score_at(call.score_mod, score[allowed], b, where, stand_ins, probes).to(wide)
        score = torch.zeros_like(score).masked_scatter(allowed, values)
    allowed = allowed & (score > -math.inf)
    score = torch.where(allowed, score, -math.inf)
    if call.sink is not None:
        score = torch.cat([score, call.sink.to(wide)[:, None, None].expand(*grid[:2], 1)], -1)
        allowed = torch.cat([allowed, allowed.new_ones(*grid[:2], 1)], -1)
    if score.shape[-1] == 0:
        return q.new_zeros(q.shape[1], q.shape[0], v.shape[-1]), score.new_full((q.shape[1], q.shape[0]), -math.inf)
    top = score.detach().amax(-1, keepdim=True)
    top = torch.where(top > -math.inf, top, 0.0)
    weights = torch.where(allowed, torch.exp(torch.where(allowed, score - top, 0.0)), 0.0)
    total = weights.sum(-1, keepdim=True)
    some = total > 0
    p = (weights / torch.where(some, total, 1.0))[..., : grid[2]]
    lse = torch.where(some, torch.log(torch.where(some, total, 1.0)) + top, -math.inf)
    if call.dropout_p:
        keep = reference.dropout_mask(call.seed, call.offset, b, *grid, call.dropout_p)
        p = p * torch.from_numpy(keep).to(p) / (1.0 - call.dropout_p)
    return _product(p.to(v.dtype), v, backwards).transpose(0, 1), lse.squeeze(-1).transpose(0, 1)


def _product(a: Tensor, b: Tensor, backwards: bool) -> Tensor:
    return (a.flip(-1, -2) @ b.flip(-1, -2)).flip(-1, -2) if backwards else a @ b


def _check_zero(name: str, got: Tensor, silent: Tensor) -> None:
    wrong = int((got[silent] != 0).sum())
    if wrong:
        raise AccuracyError(f"{name}: {wrong} elements are not exactly 0 in rows that take part in nothing")


def _judge(errors: Errors) -> Errors:
    if not errors.passed:
        raise AccuracyError(str(errors))
    return errors


def _error(got: Tensor, expected: Tensor) -> Tensor:
    return (got.detach().double() - expected.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
