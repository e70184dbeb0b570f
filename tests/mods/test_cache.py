"""Tracing happens once per code and what it sees; nothing is kept alive; the look-up is quick."""

import gc
import time
import weakref

import pytest
import torch

import refluent.mods as mods
from mods.tiles import positions
from refluent.mods import api


@pytest.fixture(autouse=True)
def traces(monkeypatch):
    """Counts traces, from an empty cache."""
    mods.clear_cache()
    counted = []
    original = api._trace

    def counting(fn, kind, seen):
        counted.append(fn)
        return original(fn, kind, seen)

    monkeypatch.setattr(api, "_trace", counting)
    yield counted
    mods.clear_cache()


def alibi(slope):
    return lambda s, b, h, i, j: s + slope[h] * (j - i)


def test_a_lambda_made_on_every_step_is_traced_once(traces):
    found = []
    for _ in range(5):
        slope = torch.randn(4, requires_grad=True)
        traced = mods.score_mod(alibi(slope))
        assert traced.captured[0] is slope
        found.append(traced.mod)
    assert len(traces) == 1
    assert all(mod is found[0] for mod in found)


def test_sizes_of_captured_tensors_do_not_matter_but_types_and_ranks_do(traces):
    mods.score_mod(alibi(torch.randn(4)))
    mods.score_mod(alibi(torch.randn(9)))
    assert len(traces) == 1
    mods.score_mod(alibi(torch.randn(4).bfloat16()))
    assert len(traces) == 2
    with pytest.raises(ValueError, match="whole tensor"):
        mods.score_mod(alibi(torch.randn(4, 4)))
    assert len(traces) == 3


def test_shapes_that_the_function_looks_at_do_matter(traces):
    def clipped(table):
        return lambda s, b, h, i, j: s + table[(j - i).clamp(0, table.shape[0] - 1)]

    for size in (5, 7, 5, 7):
        table = torch.arange(float(size))
        traced = mods.score_mod(clipped(table))
        value = traced.mod.evaluate(torch.zeros(1, 1, 1, 20), *positions((1, 1, 1, 20)), traced.captured)
        assert value.max() == size - 1
    assert len(traces) == 2


def test_python_numbers_are_part_of_the_key(traces):
    def scaled(factor):
        return lambda s, b, h, i, j: s * factor

    def value(factor):
        traced = mods.score_mod(scaled(factor))
        return traced.mod.evaluate(torch.ones(1, 1, 1, 1), *positions((1, 1, 1, 1)), ()).item()

    for factor in (1.0, 2.0, 1.0, 2, True, -0.0, 0.0):
        assert value(factor) == factor
    assert len(traces) == 6
    nan = float("nan")
    for _ in range(3):
        assert value(nan) != value(nan)
    assert len(traces) == 7


def test_globals_helpers_and_attributes_are_seen(traces):
    class Config:
        def __init__(self, left):
            self.left = left
            self.step = 0

        def __float__(self):
            return float(self.left)

    def helper_of(sign):
        def helper(x):
            return sign * x

        return helper

    def make(config, helper):
        return lambda s, b, h, i, j: s + helper(j) * config.left + float(config)

    def value(config, helper):
        traced = mods.score_mod(make(config, helper))
        return traced.mod.evaluate(torch.zeros(1, 1, 1, 3), *positions((1, 1, 1, 3)), ())[0, 0, 0, 2].item()

    config = Config(3)
    assert value(config, helper_of(1)) == 9
    config.left = 5
    assert value(config, helper_of(1)) == 15
    assert value(Config(5), helper_of(-1)) == -5
    assert len(traces) == 3
    config.step += 1  # not mentioned by any code
    assert value(config, helper_of(1)) == 15
    assert len(traces) == 3


def test_aliasing_is_part_of_the_key(traces):
    def pair(x, y):
        return lambda s, b, h, i, j: s * x[h] + y[h]

    x, y = torch.tensor([2.0]), torch.tensor([3.0])
    for first, second in ((x, y), (x, x), (y, x)):
        traced = mods.score_mod(pair(first, second))
        value = traced.mod.evaluate(torch.ones(1, 1, 1, 1), *positions((1, 1, 1, 1)), traced.captured)
        assert value.item() == (first + second).item()
    assert len(traces) == 2


def test_a_captured_value_that_changes_is_read_anew():
    slope = torch.zeros(1)
    fn = alibi(slope)
    at = positions((1, 1, 1, 3))
    mods.score_mod(fn)
    slope.fill_(2.0)
    traced = mods.score_mod(fn)
    assert traced.mod.evaluate(torch.zeros(1, 1, 1, 3), *at, traced.captured)[0, 0, 0, 2].item() == 4


def test_nothing_is_kept_alive(traces):
    class Owner:
        pass

    owner, slope = Owner(), torch.randn(4)
    gone = weakref.ref(slope), weakref.ref(owner)

    def make(owner, slope):
        return lambda s, b, h, i, j: s + slope[h] if owner is not None else s

    mods.score_mod(make(owner, slope))
    traces.clear()
    del owner, slope
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_entries_of_code_that_is_gone_are_gone(traces):
    cache = api._caches["score"]
    space = {}
    exec("def fn(s, b, h, i, j):\n    return s + 1", space)
    mods.score_mod(space["fn"])
    assert len(cache._roots) == 1
    space.clear()
    traces.clear()
    gc.collect()
    assert len(cache._roots) == 0


def test_the_number_of_entries_is_bounded(traces):
    def scaled(factor):
        return lambda s, b, h, i, j: s * factor

    for n in range(80):
        mods.score_mod(scaled(float(n)))
    ((_, entries),) = api._caches["score"]._roots.values()
    assert len(entries) == 64


def test_equal_graphs_are_one_mod():
    first = mods.score_mod(lambda s, b, h, i, j: s + (j - i))
    second = mods.score_mod(lambda s, b, h, i, j: s + (j - i))
    third = mods.score_mod(lambda s, b, h, i, j: s + (i - j))
    assert first.mod is second.mod
    assert hash(first.mod) == hash(second.mod)
    assert first.mod != third.mod


def test_the_look_up_takes_microseconds():
    slope = torch.randn(4)
    mods.score_mod(alibi(slope))
    best = min(_time(lambda: mods.score_mod(alibi(slope)), 200) for _ in range(20))
    assert best < 50e-6  # about 5 on an idle machine


def _time(fn, count):
    start = time.perf_counter()
    for _ in range(count):
        fn()
    return (time.perf_counter() - start) / count
