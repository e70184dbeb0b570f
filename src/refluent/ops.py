"""The two torch.library operators, and the light autograd.Function around them for eager mode.

``refluent::attention_forward`` and ``refluent::attention_backward`` carry the static facts of a call as one string
(problem.options_key), so that a graph can hold them. Under torch.compile, torch.export and torch.func the registered
operator with its fake, autograd and vmap rules is used. Eager mode calls the same operator below its autograd kernel
from a plain autograd.Function: that kernel, written in Python, would cost more than all the rest (bench/overhead.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from refluent import backends
from refluent.errors import UnsupportedError
from refluent.masks import BlockTensors
from refluent.problem import Inputs, Needs, Options, Problem
from refluent.values import check_values


class Call(NamedTuple):
    """The operators' common arguments, in the order of their schemas."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    sink: Tensor | None
    score_captured: Sequence[Tensor]
    mask_captured: Sequence[Tensor]
    block_captured: Sequence[Tensor]
    blocks: Sequence[Tensor]  # BlockTensors, without the entries that are None
    philox: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    options: str

    def pack(self) -> tuple[list[Tensor | None], tuple[int, int, int, int], tuple[int, int, str]]:
        """(the tensors in one flat list, the lengths of the four lists, the rest)."""
        lists = (self.score_captured, self.mask_captured, self.block_captured, self.blocks)
        tensors = [*self[:8], self.philox, *(tensor for part in lists for tensor in part)]
        lengths = (len(lists[0]), len(lists[1]), len(lists[2]), len(lists[3]))
        return tensors, lengths, (self.max_seqlen_q, self.max_seqlen_k, self.options)

    @classmethod
    def unpack(cls, tensors: Sequence[Any], lengths: Sequence[int], rest: tuple[int, int, str]) -> Call:
        """The inverse of pack."""
        lists, start = [], 9
        for length in lengths:
            lists.append(list(tensors[start : start + length]))
            start += length
        return cls._make((*tensors[:8], *lists, tensors[8], *rest))


SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "Tensor? sink, Tensor[] score_captured, Tensor[] mask_captured, Tensor[] block_captured, Tensor[] blocks, "
    "Tensor? philox, SymInt max_seqlen_q, SymInt max_seqlen_k, str options"
)

library = torch.library.Library("refluent", "FRAGMENT")
library.define(
    f"attention_forward({SCHEMA}) -> (Tensor o, Tensor lse, Tensor max_score)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
library.define(
    f"attention_backward(Tensor do, Tensor o, Tensor lse, Tensor? dlse, {SCHEMA}, bool[] needs) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
forward_op = torch.ops.refluent.attention_forward.default
backward_op = torch.ops.refluent.attention_backward.default


# --- running a backend ------------------------------------------------------------------------------------------------


def problem_of(call: Call) -> Problem:
    """The problem that a call poses, its backend resolved; raises UnsupportedError if no backend serves it."""
    return _problem(
        call.options,
        call.q.shape[0] if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1,
        call.max_seqlen_q,
        call.max_seqlen_k,
        call.q.shape[-2:],
        call.v.shape[-2:],
        call.q.dtype,
        call.q.device,
        tuple(tensor is not None for tensor in call[3:8]),
    )


@lru_cache(maxsize=4096)
def _problem(
    options: str,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    q_tail: tuple[int, int],
    v_tail: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    present: tuple[bool, ...],
) -> Problem:
    asked = Problem(
        options=Options.from_key(options),
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_q=q_tail[0],
        heads_kv=v_tail[0],
        head_dim=q_tail[1],
        head_dim_v=v_tail[1],
        dtype=dtype,
        device=device,
        varlen_q=present[0],
        varlen_k=present[1],
        has_seqused_q=present[2],
        has_seqused_k=present[3],
        has_sink=present[4],
    )
    return asked.with_backend(backends.choose(asked))


def inputs_of(call: Call, problem: Problem) -> Inputs:
    """The tensors of a call as a backend wants them."""
    spec = problem.options.block_mask
    blocks = None
    if spec is not None:
        blocks = BlockTensors(*_spread(call.blocks, (True, True, spec.has_full, spec.has_full) * 2))  # type: ignore[arg-type]
    lists = (tuple(call.score_captured), tuple(call.mask_captured), tuple(call.block_captured))
    return Inputs(*call[:8], *lists, blocks, call.philox)


def _surroundings(device: torch.device) -> AbstractContextManager[object]:
    """What a backend runs in: no autocast (it would turn sums of fp32 into 16 bits), on the tensors' GPU."""
    guard = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    if not torch.is_autocast_enabled(device.type):
        return guard
    both = ExitStack()
    both.enter_context(guard)
    both.enter_context(torch.autocast(device.type, enabled=False))
    return both


def _prepare(call: Call) -> tuple[Problem, Inputs]:
    problem = problem_of(call)
    inputs = inputs_of(call, problem)
    if problem.device.type == "cpu":
        check_values(problem, inputs)
    return problem, inputs


def _run_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem, inputs = _prepare(Call(*args))
    with _surroundings(problem.device):
        o, lse, max_score = backends.load(problem.options.backend).forward(problem, inputs)
        max_score = lse.new_empty(0) if max_score is None else max_score.contiguous()
        return o.contiguous(), lse.contiguous(), max_score


def _run_backward(do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None, *args: Any) -> list[Tensor]:
    call, needs = Call(*args[:-1]), args[-1]
    problem, inputs = _prepare(call)
    needed = Needs(needs[0], needs[1], needs[2], needs[3], tuple(needs[4:]))
    with _surroundings(problem.device):
        gradients = backends.load(problem.options.backend).backward(problem, inputs, o, lse, do, dlse, needed)
        made = (gradients.dq, gradients.dk, gradients.dv, gradients.dsink, *gradients.dcaptured)
        targets = _differentiable(call)
        # Sums are kept in fp32 or fp64; autograd wants a gradient in its tensor's own type.
        return [
            gradient.to(target.dtype).contiguous()
            for gradient, target, need in zip(made, targets, needs)
            if need and gradient is not None and target is not None
        ]


def _differentiable(call: Call) -> list[Tensor | None]:
    return [call.q, call.k, call.v, call.sink, *call.score_captured]


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = Call(*args)
    q, shape = call.q, call.q.shape
    rows = (shape[1], shape[0]) if call.cu_seqlens_q is not None else (shape[0], shape[2], shape[1])
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    max_score = rows if Options.from_key(call.options).return_max_score else (0,)
    o = q.new_empty((*shape[:-1], call.v.shape[-1]))
    return o, q.new_empty(rows, dtype=sums), q.new_empty(max_score, dtype=sums)


def _fake_backward(do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None, *args: Any) -> list[Tensor]:
    targets = zip(_differentiable(Call(*args[:-1])), args[-1])
    return [target.new_empty(target.shape) for target, need in targets if need and target is not None]


library.impl("attention_forward", _run_forward, "CompositeExplicitAutograd")
library.impl("attention_backward", _run_backward, "CompositeExplicitAutograd")
torch.library.register_fake("refluent::attention_forward", _fake_forward, lib=library)
torch.library.register_fake("refluent::attention_backward", _fake_backward, lib=library)


# --- autograd ---------------------------------------------------------------------------------------------------------


def _save(ctx: Any, tensors: Sequence[Tensor | None], output: tuple[Tensor, Tensor, Tensor]) -> None:
    o, lse, max_score = output
    ctx.save_for_backward(*tensors, o, lse)
    ctx.mark_non_differentiable(max_score)
    ctx.set_materialize_grads(False)


def _saved(ctx: Any, do: Tensor | None) -> tuple[list[Tensor | None], Tensor, Tensor, Tensor]:
    *tensors, o, lse = ctx.saved_tensors
    return tensors, o.new_zeros(()).expand(o.shape) if do is None else do, o, lse


def _spread(made: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    remaining = iter(made)
    return [next(remaining) if need else None for need in needs]


def _registered_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    tensors, ctx.lengths, ctx.rest = Call(*inputs).pack()
    _save(ctx, tensors, output)


def _registered_backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Any, ...]:
    tensors, do, o, lse = _saved(ctx, do)
    call = Call.unpack(tensors, ctx.lengths, ctx.rest)
    wanted = ctx.needs_input_grad
    needs = [*wanted[:3], wanted[7], *(wanted[8] if call.score_captured else [])]
    dq, dk, dv, dsink, *dcaptured = _spread(backward_op(do, o, lse, dlse, *call, needs), needs)
    lists = ([None] * len(part) for part in (call.mask_captured, call.block_captured, call.blocks))
    return (dq, dk, dv, None, None, None, None, dsink, dcaptured, *lists, None, None, None, None)


def _no_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """A backward that always refuses keeps nothing."""


def _no_second_backward(ctx: Any, *grads: Any) -> None:
    raise UnsupportedError(
        "refluent.attention: double backward (a gradient of its gradient) is not supported by any backend; "
        "plain PyTorch operations or torch SDPA's math backend differentiate twice"
    )


torch.library.register_autograd(
    "refluent::attention_forward", _registered_backward, setup_context=_registered_setup, lib=library
)
torch.library.register_autograd(
    "refluent::attention_backward", _no_second_backward, setup_context=_no_context, lib=library
)

FORWARD_MODE = (
    "refluent.attention: forward-mode derivatives (jvp, jacfwd, dual tensors) are not supported by any backend; "
    "reverse mode (backward, torch.func.grad, vjp, jacrev) is"
)


class _Transformable(torch.autograd.Function):
    """Below torch.func's transforms; takes all tensors as one flat row, as Call.pack makes it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(lengths: Any, rest: Any, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return forward_op(*Call.unpack(tensors, lengths, rest))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.lengths, ctx.rest, *tensors = inputs
        _save(ctx, tensors, output)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Any, ...]:
        tensors, do, o, lse = _saved(ctx, do)
        wanted, captured = ctx.needs_input_grad[2:], ctx.lengths[0]
        needs = (*wanted[:3], wanted[7], *wanted[9 : 9 + captured])
        # Only with create_graph=True (torch.func does that too) can a second derivative follow.
        run = _AttentionBackward.apply if torch.is_grad_enabled() else _AttentionBackward.forward
        made = run(ctx.lengths, ctx.rest, needs, do, o, lse, dlse, *tensors)
        dq, dk, dv, dsink, *dcaptured = _spread(made, needs)
        others = [None] * (len(tensors) - 9 - captured)
        return (None, None, dq, dk, dv, None, None, None, None, dsink, None, *dcaptured, *others)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError(FORWARD_MODE)


class _Attention(torch.autograd.Function):
    """The light way: a forward that sets its own context costs 10 us a call less than a separate setup_context."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        output = _Transformable.forward(*inputs)
        _Transformable.setup_context(ctx, inputs, output)
        return output

    backward = _Transformable.backward
    jvp = _Transformable.jvp


class _AttentionBackward(torch.autograd.Function):
    """The backward, which refuses to be differentiated once more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        lengths: Any, rest: Any, needs: Any, do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None, *tensors: Any
    ) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(backward_op(do, o, lse, dlse, *Call.unpack(tensors, lengths, rest), needs))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        """Nothing to keep."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _no_second_backward(ctx, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError(FORWARD_MODE)


def _tracked(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a derivative of either mode can be asked for."""
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def forward(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward by the cheapest way that is right here: (o, lse, max_score; empty unless asked for)."""
    if torch.compiler.is_compiling():
        return forward_op(*call)
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if transformed or _tracked(_differentiable(call)):
        tensors, lengths, rest = call.pack()
        return (_Transformable if transformed else _Attention).apply(lengths, rest, *tensors)
    with torch._C._AutoDispatchBelowAutograd():
        return forward_op(*call)


def backward(
    call: Call, do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Run the backward operator: dq, dk, dv, dsink and one gradient for each captured tensor, None where not needed."""
    if torch.compiler.is_compiling():
        return _spread(backward_op(do, o, lse, dlse, *call, needs), needs)
    tensors, lengths, rest = call.pack()
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    tracked = transformed or _tracked([do, o, lse, dlse, *_differentiable(call)])
    run = _AttentionBackward.apply if tracked else _AttentionBackward.forward
    return _spread(run(lengths, rest, tuple(needs), do, o, lse, dlse, *tensors), needs)
