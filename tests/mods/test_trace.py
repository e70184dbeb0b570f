"""What can be traced: where captured tensors are found, what they may be, and which operations work."""

import functools
import math
import types

import pytest
import torch
import torch.nn.functional as F

import refluent.mods as mods
from mods.tiles import compare, positions

SIZES = (2, 3, 7, 9)
TILE = (1, 2, 4, 5)

slope_of_module = torch.randn(3)
FACTOR = 0.5


def check(make, *captured, dtype=torch.float64):
    """Trace ``make(*captured)`` and compare it, tile by tile, with the function itself run densely."""
    traced = mods.score_mod(make(*captured))
    for use_origin in (True, False):
        compare(make, captured, traced, SIZES, TILE, dtype, use_origin)
    return traced


# --- where captured tensors may live


def test_closure():
    def make(slope):
        return lambda s, b, h, i, j: s + slope[h] * (j - i)

    traced = check(make, torch.randn(3, requires_grad=True))
    assert traced.mod.captured_names == ("slope",)
    assert traced.mod.score_grad_is_identity
    assert not traced.mod.uses_score_in_grad


def test_global_tensor_and_number():
    traced = mods.score_mod(lambda s, b, h, i, j: s * FACTOR + slope_of_module[h])
    assert traced.mod.captured_names == ("slope_of_module",)
    assert traced.captured[0] is slope_of_module
    s = torch.randn(SIZES)
    expected = s * 0.5 + slope_of_module[:, None, None]
    torch.testing.assert_close(traced.mod.evaluate(s, *positions(SIZES), traced.captured), expected)


def test_default_argument():
    def make(slope):
        def fn(s, b, h, i, j, bias=slope, *, scale=2.0):
            return s * scale + bias[h]

        return fn

    assert check(make, torch.randn(3)).mod.captured_names == ("bias",)


def test_partial_keywords_and_arguments():
    def keyword(s, b, h, i, j, *, bias):
        return s + bias[h]

    def positional(bias, s, b, h, i, j):
        return s + bias[h]

    traced = check(lambda bias: functools.partial(keyword, bias=bias), torch.randn(3))
    assert traced.mod.captured_names == ("bias",)
    check(lambda bias: functools.partial(positional, bias), torch.randn(3))


class Bias:
    """A callable object, and methods, that read tensors through attributes, properties and slots."""

    def __init__(self, table, scale):
        self.table = table
        self.scale = scale
        self.unrelated = object()

    @property
    def doubled(self):
        return self.scale * 2

    def __call__(self, s, b, h, i, j):
        return s + self.table[h] * self.doubled

    def method(self, s, b, h, i, j):
        return self(s, b, h, i, j) + self.scale


def test_callable_object_and_bound_method():
    assert check(lambda table: Bias(table, 1.5), torch.randn(3)).mod.captured_names == ("table",)
    assert check(lambda table: Bias(table, 1.5).method, torch.randn(3)).mod.captured_names == ("table",)


def test_module_parameters_and_nested_objects():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Module()
            self.inner.slope = torch.nn.Parameter(torch.randn(3))
            self.register_buffer("gain", torch.tensor(1.5))

        def mod(self, s, b, h, i, j):
            return s * self.gain + self.inner.slope[h]

    layer = Layer()
    traced = mods.score_mod(layer.mod)
    assert set(traced.mod.captured_names) == {"gain", "inner.slope"}
    assert any(t is layer.inner.slope for t in traced.captured)
    space = types.SimpleNamespace(layer=layer)
    traced = mods.score_mod(lambda s, b, h, i, j: s + space.layer.inner.slope[h])
    assert traced.mod.captured_names == ("space.layer.inner.slope",)


def test_containers_and_helpers():
    def make(first, second):
        tables = {"a": [first], "b": (second,)}

        def look(table, h):
            return table[h]

        def fn(s, b, h, i, j):
            return s + look(tables["a"][0], h) * look(tables["b"][0], h)

        return fn

    names = check(make, torch.randn(3), torch.randn(3)).mod.captured_names
    assert names == ("tables['a'][0]", "tables['b'][0]")


def test_same_tensor_under_two_names_is_one():
    def make(x):
        y = x
        return lambda s, b, h, i, j: s * x[h] + y[(h + 1) % 3]

    traced = check(make, torch.randn(3, requires_grad=True))
    assert len(traced.captured) == 1


def test_two_tensors_of_one_name_are_told_apart():
    def inner(x):
        return lambda h: x[h]

    def make(first, second):
        x, other = first, inner(second)
        return lambda s, b, h, i, j: s * x[h] + other(h)

    names = check(make, torch.randn(3), torch.randn(3)).mod.captured_names
    assert sorted(names) == ["x", "x_2"]


# --- what a captured tensor may be


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]
)
def test_captured_types(dtype):
    def make(x):
        return lambda s, b, h, i, j: s * x[h] + x[i % 3]

    check(make, torch.randint(0, 5, (3,)).to(dtype))


def test_captured_bool():
    def make(flags):
        return lambda s, b, h, i, j: torch.where(flags[h, j], s, -1.0)

    check(make, torch.rand(3, 9) < 0.5)


def test_sixteen_bit_reads_compute_in_the_scores_type():
    slope = torch.full((3,), 1 / 3).to(torch.bfloat16)
    traced = mods.score_mod(lambda s, b, h, i, j: s + slope[h] * (i * 7 + 3))
    value = traced.mod.evaluate(torch.zeros(SIZES), *positions(SIZES), traced.captured)
    expected = slope.float()[0] * (torch.arange(7) * 7 + 3)
    torch.testing.assert_close(value[0, 0, :, 0], expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("rank", [0, 1, 2, 3, 4])
def test_ranks_and_strides(rank):
    full = torch.randn(9, 7, 3, 2).permute(3, 2, 1, 0)[..., ::2] if rank == 4 else torch.randn(14, 14, 14)[::2, 1::2]

    def make(x):
        index = {
            0: lambda b, h, i, j: x,
            1: lambda b, h, i, j: x[i],
            2: lambda b, h, i, j: x[j % 7, h],
            3: lambda b, h, i, j: x[h, i, j % 3],
            4: lambda b, h, i, j: x[b, h, i, j // 2],
        }[rank]
        return lambda s, b, h, i, j: s * index(b, h, i, j)

    captured = {
        0: torch.tensor(1.5),
        1: torch.randn(14)[::2],
        2: torch.randn(3, 7).t(),
        3: full,
        4: full,
    }[rank]
    check(make, captured)


def test_expanded_tensor_gets_the_gradient_of_every_element():
    def make(x):
        return lambda s, b, h, i, j: s + x[h, i]

    check(make, torch.randn(3, 1).expand(3, 7))


def test_reads_in_any_order_of_dimensions_and_with_numbers():
    def make(x):
        return lambda s, b, h, i, j: s * x[j, 1, i, b] + x[2, h, i, -1]

    check(make, torch.randn(9, 3, 7, 2))


def test_partial_and_chained_indexing():
    def chained(x, y):
        def fn(s, b, h, i, j):
            row = x[h]
            return s + row[i][j] * y[:, i][b] * y[..., 2][b] + y[b, ...][i].detach() * x[0].float()[i, j]

        return fn

    def at_once(x, y):
        return lambda s, b, h, i, j: s + x[h, i, j] * y[b, i] * y[b, 2] + y[b, i].detach() * x[0, i, j]

    captured = torch.randn(3, 7, 9), torch.randn(2, 7)
    compare(at_once, captured, mods.score_mod(chained(*captured)), SIZES, TILE)


def test_nested_reads_and_negative_indices():
    def make(table, bucket):
        return lambda s, b, h, i, j: s + table[bucket[j - i + 6], h] * table[-1 - h, h]

    check(make, torch.randn(5, 3), torch.randint(0, 5, (20,)))


def test_index_from_a_fresh_constant():
    def make(table):
        return lambda s, b, h, i, j: s + table[torch.tensor(1), i]

    check(make, torch.randn(3, 7))


def test_index_by_negative_positions_wraps():
    def make(x):
        return lambda s, b, h, i, j: s + x[i - j]

    check(make, torch.randn(9))


# --- operations

OPERATIONS = {
    "arithmetic": lambda s, x, i, j: (2 - s) * 3 / (x * x + 2) + 2 / (1 + s * s) - -s + (+s),
    "powers": lambda s, x, i, j: s**2 + 2.0**s + (s * s + 1) ** x + (s * s) ** 0.5 + torch.square(s),
    "positions": lambda s, x, i, j: s * ((i * 3 - j // 2) % 4) + ((i << 2) >> 1) - (j | 1) + (i & 3) + (i ^ j) + ~i,
    "python": lambda s, x, i, j: abs(s) + pow(s, 2) + sum([s, x, i]) * (x if FACTOR else s),
    "comparisons": lambda s, x, i, j: torch.where((i > j) & ~(s < x) | (i == 2) ^ (j != 3), s, x * s),
    "logical": lambda s, x, i, j: (
        s * torch.logical_or(i > j, torch.logical_not(x > 0)) + torch.logical_and(i > 1, j > 1)
    ),
    "where numbers": lambda s, x, i, j: s * torch.where(i > j, 1.5, 0.5) + torch.where(j > 3, s, 0.0),
    "fill": lambda s, x, i, j: s.masked_fill(j > i, -2.0) * torch.tanh(x).clamp(min=-0.5, max=0.5),
    "minimum": lambda s, x, i, j: torch.minimum(s, x) * torch.maximum(s, torch.tensor(0.3)) + torch.clamp(s, x, x + 1),
    "exponentials": lambda s, x, i, j: torch.exp(-s * s) + torch.log1p(s * s) + torch.expm1(x / 4) + torch.exp2(x / 4),
    "trigonometry": lambda s, x, i, j: s.sin() * x.cos() + torch.atan2(s, x * x + 1) + (i * 0.3).sin() * s,
    "activations": lambda s, x, i, j: (
        F.gelu(s) + F.softplus(x * s) + F.silu(s) + F.elu(s) + F.leaky_relu(s) + F.relu(x)
    ),
    "sigmoids": lambda s, x, i, j: torch.sigmoid(s) * torch.tanh(x) + F.logsigmoid(s) + F.hardtanh(x) + F.mish(s),
    "rounding": lambda s, x, i, j: s * torch.floor(x) + torch.ceil(x) * torch.trunc(s) + torch.sign(x) * s + s.frac(),
    "conversions": lambda s, x, i, j: (
        s * i.float() + (x * 2).to(torch.int32) * s + j.double().to(s.dtype) + s.to(x.dtype)
    ),
    "constants": lambda s, x, i, j: (
        s * torch.tensor(2.0) + torch.zeros(()) + torch.ones_like(s) + torch.full_like(x, 2.0)
    ),
    "new constants": lambda s, x, i, j: (
        s * s.new_tensor(2.0) + s.new_zeros(()) + torch.tensor(3) * (i + torch.tensor(1))
    ),
    "distances": lambda s, x, i, j: s + x * (i - j).abs().clamp(max=3) + math.log(2.0) * torch.hypot(s, x),
    "nan checks": lambda s, x, i, j: torch.where(torch.isnan(s / x), 0.0, torch.nan_to_num(s / x)),
    "division": lambda s, x, i, j: s + i / (j + 1) + torch.div(i, 2, rounding_mode="floor") + torch.fmod(j, 3),
    "lerp": lambda s, x, i, j: torch.lerp(s, x, 0.3) + torch.addcmul(s, x, x, value=2.0) + torch.add(s, x, alpha=3),
    "error function": lambda s, x, i, j: torch.erf(s) * torch.rsqrt(x * x + 1) + torch.sqrt(s * s + 1).reciprocal(),
    "shapes of one": lambda s, x, i, j: s.view(()) + x.squeeze().reshape(()) + s.clone().contiguous() * x.expand(()),
    "stopped": lambda s, x, i, j: s.detach() * s + x.detach() * x,
    "score twice": lambda s, x, i, j: s * s + s,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name, dtype):
    torch.manual_seed(len(name))
    fn = OPERATIONS[name]

    def make(x):
        return lambda s, b, h, i, j: fn(s, x[h, i], i, j)

    if name == "shapes of one":  # cannot be run densely as it stands
        x = torch.randn(3, 7)
        s = torch.randn(SIZES, dtype=dtype)
        traced = mods.score_mod(make(x))
        value = traced.mod.evaluate(s, *positions(SIZES), traced.captured)
        at = x.to(dtype)[:, :, None]
        torch.testing.assert_close(value, s + at + s * at)
        return
    check(make, torch.randn(3, 7), dtype=dtype)


def test_in_place_on_own_numbers():
    def traced_form(s, b, h, i, j):
        x = s * 2
        x += 1
        x.mul_(s).clamp_(max=3.0)
        count = torch.zeros(())
        count += i
        x -= count
        x.copy_(x * 2)
        return x

    def plain(s, b, h, i, j):
        return ((s * 2 + 1) * s).clamp(max=3.0) * 2 - i * 2

    compare(lambda: plain, [], mods.score_mod(traced_form), SIZES, TILE)


def test_float64_scores_stay_exact_through_conversions():
    def make(x):
        def fn(s, b, h, i, j):
            return s + x[h].to(s.dtype) * torch.zeros_like(s).add(j).to(s.dtype) / 3

        return fn

    check(make, torch.randn(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda s, b, h, i, j: 3, 3.0),
        (lambda s, b, h, i, j: 0.5, 0.5),
        (lambda s, b, h, i, j: torch.tensor(2), 2.0),
        (lambda s, b, h, i, j: i - j, None),
    ],
)
def test_functions_that_ignore_the_score(fn, expected):
    traced = mods.score_mod(fn)
    score, g = torch.randn(SIZES), torch.randn(SIZES)
    value = traced.mod.evaluate(score, *positions(SIZES), ()).expand(SIZES)
    assert value.dtype == torch.float32
    i, j = positions(SIZES)[2:]
    wanted = (i - j).float().expand(SIZES) if expected is None else torch.full(SIZES, expected)
    assert torch.equal(value, wanted)
    assert torch.equal(traced.mod.backward(None, *positions(SIZES), (), g), torch.zeros(SIZES))
    assert "score" not in traced.mod.depends_on


def test_identity():
    traced = mods.score_mod(lambda s, b, h, i, j: s)
    g = torch.randn(SIZES)
    assert traced.mod.backward(None, *positions(SIZES), (), g) is g


@pytest.mark.parametrize("value", [True, False])
def test_constant_masks(value):
    for fn in (lambda b, h, i, j: value, lambda b, h, i, j: torch.tensor(value)):
        traced = mods.mask_mod(fn)
        allowed = traced.mod.evaluate(None, *positions(SIZES), ())
        assert allowed.dtype == torch.bool
        assert bool(allowed.expand(SIZES).all()) is value


def test_mask_reads_keep_float64():
    limit = torch.tensor([1.0 + 2.0**-40], dtype=torch.float64)
    traced = mods.mask_mod(lambda b, h, i, j: limit[0] > 1.0)
    assert bool(traced.mod.evaluate(None, *positions(SIZES), traced.captured).all())


def test_traced_mod_is_the_function_too():
    slope = torch.randn(3)
    traced = mods.score_mod(lambda s, b, h, i, j: s + slope[h] * j)
    assert mods.score_mod(traced) is traced
    at = positions(SIZES)
    s = torch.randn(SIZES)
    torch.testing.assert_close(traced(s, *at), s + slope[at[1]] * at[3])
    with pytest.raises(TypeError, match="mask_mod got a traced score_mod"):
        mods.mask_mod(traced)


def test_reads_are_described():
    table, bucket = torch.randn(5, 3), torch.zeros(20, dtype=torch.int64)
    mod = mods.score_mod(lambda s, b, h, i, j: s + table[bucket[j - i + 6], h] * table[2, 1]).mod
    by_name = [(mod.captured_names[r.captured], r.depends_on) for r in mod.reads]
    assert by_name == [("bucket", {"i", "j"}), ("table", {"h", "i", "j"}), ("table", frozenset())]
    assert mod.reads[2].index == (2, 1)
    assert mod.reads[1].index == (mod.reads[0].node, "h")
    assert mod.depends_on == {"score", "h", "i", "j"}


def test_traced_after_a_change_of_type():
    layer = torch.nn.Module()
    layer.slope = torch.nn.Parameter(torch.randn(3))
    traced = mods.score_mod(lambda s, b, h, i, j: s + layer.slope[h])
    layer.bfloat16()
    again = mods.score_mod(traced)
    assert again.mod.captured[0].dtype == torch.bfloat16
    assert again.captured[0] is layer.slope


def test_tracing_under_autocast_and_no_grad_and_vmap():
    slope = torch.randn(3, requires_grad=True)

    def make(x):
        return lambda s, b, h, i, j: torch.tanh(s * x[h])

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        traced = mods.score_mod(make(slope))
    compare(make, [slope], traced, SIZES, TILE)
    mods.clear_cache()
    found = []

    def inside(q):
        found.append(mods.score_mod(make(slope)))
        return q

    torch.vmap(inside)(torch.ones(2))
    assert found[0].mod == traced.mod
