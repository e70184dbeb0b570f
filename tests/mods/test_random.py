"""Random mods, drawn as expression trees, against float64 autograd through nested vmap over scalars."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

import refluent.mods as mods
from mods.tiles import run_tiled

SIZES = (2, 2, 5, 6)

NUMBERS = st.sampled_from([-2.0, -0.5, 0.3, 1.0, 2.5])
WHOLE = st.one_of(
    st.sampled_from(["b", "h", "i", "j"]),
    st.tuples(st.just("whole"), st.integers(-3, 5)),
    st.tuples(st.just("bucket"), st.sampled_from(["i", "j"])),
)


def whole_of(inner: Any) -> Any:
    binary = st.sampled_from(["iadd", "isub", "imul"])
    return st.one_of(
        st.tuples(binary, inner, inner),
        st.tuples(st.sampled_from(["shift", "div", "mod"]), inner, st.integers(1, 4)),
        st.tuples(st.just("clamp"), inner),
    )


WHOLES = st.recursive(WHOLE, whole_of, max_leaves=4)
READS = st.one_of(
    st.tuples(st.just("slope"), st.just("h")),
    st.tuples(st.just("bias"), st.just("b"), st.just("h"), st.just("i"), st.just("j")),
    st.tuples(st.just("bias"), st.just("b"), st.just("h"), st.just("j"), st.just("i")),
    st.tuples(st.just("table"), WHOLES, st.sampled_from(["h", "b"])),
    st.tuples(st.just("gain")),
)
LEAVES = st.one_of(
    st.just("s"), st.just("s"), READS, st.tuples(st.just("number"), NUMBERS), st.tuples(st.just("float"), WHOLES)
)


def floats_of(inner: Any) -> Any:
    compare = st.sampled_from(["lt", "ge", "eq"])
    condition = st.one_of(
        st.tuples(compare, WHOLES, WHOLES),
        st.tuples(st.just("flt"), inner, inner),
        st.tuples(st.just("and"), st.tuples(compare, WHOLES, WHOLES), st.tuples(compare, WHOLES, WHOLES)),
        st.tuples(st.just("not"), st.tuples(compare, WHOLES, WHOLES)),
    )
    return st.one_of(
        st.tuples(st.sampled_from(["add", "sub", "mul", "min", "max", "ratio"]), inner, inner),
        st.tuples(st.sampled_from(["tanh", "sigmoid", "exp", "neg", "abs", "clip", "stop", "square"]), inner),
        st.tuples(st.just("where"), condition, inner, inner),
    )


TREES = st.recursive(LEAVES, floats_of, max_leaves=8)

BINARY = {
    "iadd": lambda x, y: x + y,
    "isub": lambda x, y: x - y,
    "imul": lambda x, y: x * y,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: torch.tanh(x) * y,
    "min": torch.minimum,
    "max": torch.maximum,
    "ratio": lambda x, y: x / (1 + y * y),
    "lt": lambda x, y: x < y,
    "flt": lambda x, y: x < y,
    "ge": lambda x, y: x >= y,
    "eq": lambda x, y: x == y,
    "and": lambda x, y: x & y,
}
UNARY = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": lambda x: torch.exp(-x * x / 4),
    "neg": lambda x: -x,
    "abs": abs,
    "clip": lambda x: x.clamp(-1.0, 2.0),
    "stop": lambda x: x.detach(),
    "square": lambda x: torch.tanh(x) ** 2,
    "not": lambda x: ~x,
    "clamp": lambda x: x.clamp(0, 3),
}


def evaluate(tree: Any, env: dict[str, Tensor]) -> Any:
    """The value of a tree for the scalars and tensors in ``env``."""
    if isinstance(tree, str):
        return env[tree]
    name, *rest = tree
    if name == "number":
        return torch.as_tensor(rest[0], dtype=env["s"].dtype)
    if name == "whole":
        return torch.tensor(rest[0])
    if name == "gain":
        return env["gain"]
    if name == "bucket":
        return env["bucket"][evaluate(rest[0], env)]
    if name == "table":
        return env["table"][evaluate(rest[0], env) % 7, evaluate(rest[1], env)]
    if name in ("slope", "bias"):
        return env[name][tuple(evaluate(r, env) for r in rest)]
    if name in ("shift", "div", "mod"):
        x = evaluate(rest[0], env)
        return x >> rest[1] if name == "shift" else x // rest[1] if name == "div" else x % rest[1]
    if name == "float":
        return evaluate(rest[0], env).to(env["s"].dtype) / 4
    if name == "where":
        return torch.where(*(evaluate(r, env) for r in rest))
    values = [evaluate(r, env) for r in rest]
    return BINARY[name](*values) if len(values) == 2 else UNARY[name](*values)


class _IndexByScalars(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[1], Tensor | tuple):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return torch.ops.aten.index(args[0], [torch.as_tensor(i) for i in index])
        return func(*args, **(kwargs or {}))


def oracle(
    tree: Any, captured: dict[str, Tensor], score: Tensor, g: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Value and gradients, in float64, one position at a time."""
    leaves = {n: t.double().requires_grad_() if t.is_floating_point() else t for n, t in captured.items()}
    s = score.double().requires_grad_()

    def at(s, b, h, i, j):
        with _IndexByScalars():
            return evaluate(tree, {**leaves, "s": s, "b": b, "h": h, "i": i, "j": j}) + 0 * s

    fn = at
    for dims in (
        (0, None, None, None, 0),
        (0, None, None, 0, None),
        (0, None, 0, None, None),
        (0, 0, None, None, None),
    ):
        fn = torch.vmap(fn, in_dims=dims)
    result = fn(s, *(torch.arange(n) for n in SIZES))
    floats = {n: t for n, t in leaves.items() if t.is_floating_point()}
    ds, *rest = torch.autograd.grad(result, [s, *floats.values()], g.double(), allow_unused=True)
    grads = {n: torch.zeros_like(t) if x is None else x for (n, t), x in zip(floats.items(), rest)}
    return result.detach(), ds, grads


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    tree=TREES,
    seed=st.integers(0, 1000),
    tile=st.sampled_from([(1, 2, 3, 4), (2, 1, 5, 6), (2, 2, 2, 6)]),
    use_origin=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_random_mod(tree, seed, tile, use_origin, dtype):
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=random, dtype=dtype)

    captured = {
        "slope": normal(2),
        "bias": normal(2, 2, 6, 6)[..., ::1].transpose(2, 3),
        "table": normal(7, 2),
        "gain": normal(),
        "bucket": torch.randint(0, 7, (6,), generator=random, dtype=torch.int32),
    }
    score, g = normal(*SIZES), normal(*SIZES)

    def fn(s, b, h, i, j):
        return evaluate(tree, {**captured, "s": s, "b": b, "h": h, "i": i, "j": j})

    mods.clear_cache()
    traced = mods.score_mod(fn)
    result, dscore, out = run_tiled(traced, score, g, tile, use_origin=use_origin)
    value, ds, grads = oracle(tree, captured, score, g)
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(result.double(), value, **tolerance)
    torch.testing.assert_close(dscore.double(), ds, **tolerance)
    names = {id(t): n for n, t in captured.items()}
    for tensor, got in zip(traced.captured, out):
        if got is not None:
            torch.testing.assert_close(got.double(), grads[names[id(tensor)]], **tolerance)
