"""Host time of one small call, in microseconds: what refluent costs before any kernel starts.

Every row but the last two computes nothing (a backend that returns empty tensors), so that the path itself shows:
argument checks, autograd and dispatch. The alternatives are a registered torch.library.custom_op and a bare
autograd.Function, both with three tensors and no checks at all. Medians of interleaved rounds.

    python bench/overhead.py [--rounds N] [--calls N]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import refluent as rf
from refluent import backends, ops
from refluent.problem import Gradients, Inputs, Needs, Problem, options_key

SHAPE = (1, 16, 4, 16)  # batch, seqlen, heads, head_dim


def outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty((q.shape[0], q.shape[2], q.shape[1]))


def null_backend() -> types.ModuleType:
    """A backend that answers at once."""

    def forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, None]:
        return (*outputs(inputs.q, inputs.v), None)

    def backward(problem: Problem, inputs: Inputs, o: Any, lse: Any, do: Any, dlse: Any, needs: Needs) -> Gradients:
        captured = tuple(torch.empty_like(tensor) for tensor in inputs.score_captured)
        return Gradients(*(torch.empty_like(tensor) for tensor in (inputs.q, inputs.k, inputs.v)), None, captured)

    module = types.ModuleType("refluent_null_backend")
    module.__dict__.update(supports=lambda problem: None, forward=forward, backward=backward)
    return module


@torch.library.custom_op("refluent_bench::forward", mutates_args=())
def custom_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return outputs(q, v)


@torch.library.custom_op("refluent_bench::backward", mutates_args=())
def custom_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> list[Tensor]:
    return [torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)]


def custom_setup(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)


custom_forward.register_autograd(
    lambda ctx, do, dlse: tuple(custom_backward(do, *ctx.saved_tensors)), setup_context=custom_setup
)


class Plain(torch.autograd.Function):
    """The least that an operation with a gradient can cost in Python."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        output = outputs(q, v)
        ctx.save_for_backward(q, k, v, *output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(t) for t in ctx.saved_tensors[:3])


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def cases(inputs: list[Tensor]) -> dict[str, Callable[[], Tensor]]:
    q, k, v = inputs
    call = ops.Call(*inputs, None, None, None, None, None, [], [], [], [], None, SHAPE[1], SHAPE[1], null_options())
    cu = torch.tensor([0, SHAPE[1]], dtype=torch.int32)
    packed = [t[0].detach().requires_grad_() for t in inputs]
    lengths: dict[str, Any] = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 16, "max_seqlen_k": 16}
    slope = rf.score_mod(alibi(torch.ones(SHAPE[2], requires_grad=True)))
    return {
        "rf.attention, causal": lambda: rf.attention(q, k, v, causal=True, backend="null"),
        "rf.attention, causal, score_mod": lambda: rf.attention(q, k, v, causal=True, score_mod=slope, backend="null"),
        "rf.attention_varlen": lambda: rf.attention_varlen(*packed, **lengths, causal=True, backend="null"),
        "the registered operator alone": lambda: ops.forward_op(*call)[0],
        "torch.library.custom_op, 3 tensors": lambda: custom_forward(q, k, v)[0],
        "plain autograd.Function, 3 tensors": lambda: Plain.apply(q, k, v)[0],
        "rf.attention, backend='torch' (computes)": lambda: rf.attention(q, k, v, causal=True, backend="torch"),
        "torch SDPA (computes)": lambda: sdpa(q, k, v),
    }


def alibi(slope: Tensor) -> Callable[..., Tensor]:
    return lambda s, b, h, i, j: s + slope[h] * (j - i)


def null_options() -> str:
    return options_key(None, True, None, None, 0.0, "", "", "", 0.0, False, False, "null")


def microseconds(function: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls * 1e6


def backward_of(forward: Callable[[], Tensor], inputs: list[Tensor]) -> Callable[[], None]:
    o = forward()
    do = torch.ones_like(o)
    return lambda: o.backward(do, retain_graph=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds (default 15)")
    parser.add_argument("--calls", type=int, default=200, help="calls a round (default 200)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    sys.modules["refluent_null_backend"] = null_backend()
    backends.MODULES["null"] = "refluent_null_backend"
    inputs = [torch.randn(SHAPE, requires_grad=True) for _ in range(3)]
    table = {name: (forward, backward_of(forward, inputs), [], []) for name, forward in cases(inputs).items()}
    for _ in range(options.rounds + 1):
        for forward, backward, forward_times, backward_times in table.values():
            forward_times.append(microseconds(forward, options.calls))
            backward_times.append(microseconds(backward, options.calls))
    print(f"torch {torch.__version__}, 1 thread, (batch, seqlen, heads, head_dim) = {SHAPE}, microseconds a call")
    print(f"{'':42} {'forward':>8} {'backward':>9}")
    for name, (_, _, forward_times, backward_times) in table.items():
        forward_us, backward_us = (statistics.median(times[1:]) for times in (forward_times, backward_times))
        print(f"{name:42} {forward_us:8.1f} {backward_us:9.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
