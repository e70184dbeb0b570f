"""The public functions: what they accept, what they return, and what they hand to a backend."""

import inspect
import sys
import types
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import refluent as rf
from refluent import backends, reference, tiled
from refluent.masks import BlockSpec
from refluent.mods.mod import find_mod
from refluent.problem import Inputs, Needs, Options, Problem, block_key, options_key

H, HKV, D, DV = 4, 2, 16, 8


def tensors(sq: int = 5, sk: int = 7, batch: int = 2, dtype: torch.dtype = torch.float64, grad: bool = True) -> Any:
    shapes = ((batch, sq, H, D), (batch, sk, HKV, D), (batch, sk, HKV, DV))
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.detach(), expected.detach(), rtol=1e-10, atol=1e-10)


class Spy:
    """Remembers what the backend was asked."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.inputs: list[Inputs] = []
        self.needs: list[Needs] = []

    @property
    def options(self) -> Options:
        return self.problems[-1].options


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    seen = Spy()
    forward, backward = tiled.forward, tiled.backward

    def watched_forward(problem: Problem, inputs: Inputs) -> Any:
        seen.problems.append(problem)
        seen.inputs.append(inputs)
        return forward(problem, inputs)

    def watched_backward(problem: Problem, inputs: Inputs, o: Any, lse: Any, do: Any, dlse: Any, needs: Needs) -> Any:
        seen.problems.append(problem)
        seen.inputs.append(inputs)
        seen.needs.append(needs)
        return backward(problem, inputs, o, lse, do, dlse, needs)

    monkeypatch.setattr(tiled, "forward", watched_forward)
    monkeypatch.setattr(tiled, "backward", watched_backward)
    return seen


class TestSignatures:
    def test_public_names(self) -> None:
        assert all(hasattr(rf, name) for name in rf.__all__)
        assert {"attention", "attention_varlen", "attention_backward", "validate", "UnsupportedError"} <= set(
            rf.__all__
        )
        assert {"score_mod", "mask_mod", "create_block_mask"} <= set(rf.__all__)

    @pytest.mark.parametrize("function", [rf.attention, rf.attention_varlen, rf.attention_backward, rf.validate])
    def test_everything_else_is_keyword_only(self, function: Any) -> None:
        tensors_first = {"do", "q", "k", "v", "o", "lse"}
        for name, parameter in inspect.signature(function).parameters.items():
            keyword = parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
            assert keyword != (name in tensors_first), name

    @pytest.mark.parametrize("function", [rf.attention_varlen, rf.attention_backward])
    def test_the_same_options_everywhere(self, function: Any) -> None:
        left_out = {"q", "k", "v", "layout", "return_lse", "return_max_score"}
        there = inspect.signature(function).parameters
        for name, parameter in inspect.signature(rf.attention).parameters.items():
            if name not in left_out:
                assert there[name].default == parameter.default, name

    @pytest.mark.parametrize("name", [n for n in rf.__all__ if inspect.isfunction(getattr(rf, n))])
    def test_docstrings_name_every_argument(self, name: str) -> None:
        function = getattr(rf, name)
        text = function.__doc__
        for parameter in inspect.signature(function).parameters:
            assert parameter in text or f"``{parameter}" in text, parameter


class TestReturns:
    def test_tuples(self) -> None:
        x = tensors()
        o = rf.attention(*x)
        assert isinstance(o, Tensor)
        assert o.shape == (2, 5, H, DV)
        both = rf.attention(*x, return_lse=True)
        full = rf.attention(*x, return_lse=True, return_max_score=True)
        last = rf.attention(*x, return_max_score=True)
        assert [len(result) for result in (both, full, last)] == [2, 3, 2]
        assert both[1].shape == full[2].shape == last[1].shape == (2, H, 5)
        close(full[2], last[1])
        close(full[1], both[1])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    def test_types(self, dtype: torch.dtype) -> None:
        x = tensors(dtype=dtype)
        sink = torch.zeros(H, requires_grad=True)
        o, lse, max_score = rf.attention(*x, sink=sink, return_lse=True, return_max_score=True)
        assert o.dtype == dtype
        assert lse.dtype == max_score.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        o.sum().backward()
        assert [t.grad.dtype for t in (*x, sink)] == [dtype, dtype, dtype, torch.float32]

    def test_results_are_contiguous(self) -> None:
        x = tensors()
        o, lse = rf.attention(*x, return_lse=True)
        assert o.is_contiguous()
        assert lse.is_contiguous()

    def test_bhsd(self) -> None:
        x = tensors()
        o, lse = rf.attention(*x, causal=True, return_lse=True)
        (o.sin().sum() + lse.sin().sum()).backward()
        y = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in x]
        o2, lse2 = rf.attention(*y, causal=True, return_lse=True, layout="bhsd")
        (o2.sin().sum() + lse2.sin().sum()).backward()
        close(o2, o.transpose(1, 2))
        close(lse2, lse)
        for a, b in zip(x, y):
            close(b.grad, a.grad.transpose(1, 2))

    def test_max_score_has_no_gradient(self) -> None:
        _, lse, max_score = rf.attention(*tensors(), return_lse=True, return_max_score=True)
        assert lse.requires_grad
        assert not max_score.requires_grad


class TestArguments:
    def test_defaults(self, spy: Spy) -> None:
        rf.attention(*tensors())
        assert spy.options == Options(backend="torch")
        problem = spy.problems[-1]
        assert (problem.batch, problem.seqlen_q, problem.seqlen_k) == (2, 5, 7)
        assert (problem.heads_q, problem.heads_kv, problem.group) == (H, HKV, 2)
        assert (problem.head_dim, problem.head_dim_v) == (D, DV)
        assert problem.scale == D**-0.5
        assert problem.accum_dtype == torch.float64

    @pytest.mark.parametrize(
        ("window", "expected"),
        [
            (None, (None, None)),
            ((-1, -1), (None, None)),
            ((-1, 0), (None, 0)),
            ([3, None], (3, None)),
            ((None, 2), (None, 2)),
        ],
    )
    def test_window(self, spy: Spy, window: Any, expected: Any) -> None:
        rf.attention(*tensors(), window=window)
        assert spy.options.window == expected

    def test_softcap_off(self, spy: Spy) -> None:
        for softcap in (0, 0.0, None):
            rf.attention(*tensors(), softcap=softcap)
            assert spy.options.softcap == 0.0

    def test_deterministic_follows_torch(self, spy: Spy) -> None:
        rf.attention(*tensors())
        assert not spy.options.deterministic
        torch.use_deterministic_algorithms(True)
        try:
            rf.attention(*tensors())
            assert spy.options.deterministic
            rf.attention(*tensors(), deterministic=False)
            assert not spy.options.deterministic
        finally:
            torch.use_deterministic_algorithms(False)

    def test_integers_for_floats(self, spy: Spy) -> None:
        rf.attention(*tensors(), scale=2, softcap=3)
        assert spy.options.scale == 2.0
        assert spy.options.softcap == 3.0

    def test_packed_qkv_runs_without_copies(self, spy: Spy) -> None:
        qkv = torch.randn(2, 6, 3, H, D, requires_grad=True)
        q, k, v = qkv.unbind(2)
        o = rf.attention(q, k, v, causal=True)
        seen = spy.inputs[-1]
        assert [t.data_ptr() for t in (seen.q, seen.k, seen.v)] == [t.data_ptr() for t in (q, k, v)]
        assert seen.q.stride() == q.stride()
        o.sum().backward()
        same = [t.detach().contiguous().requires_grad_() for t in (q, k, v)]
        rf.attention(*same, causal=True).sum().backward()
        torch.testing.assert_close(qkv.grad, torch.stack([t.grad for t in same], 2))

    def test_bhsd_runs_without_copies(self, spy: Spy) -> None:
        x = [t.detach().transpose(1, 2) for t in tensors()]
        rf.attention(*x, layout="bhsd")
        assert spy.inputs[-1].q.data_ptr() == x[0].data_ptr()

    @pytest.mark.parametrize("needed", ["q", "k", "v", "sink", "slope"])
    def test_only_what_is_needed(self, spy: Spy, needed: str) -> None:
        q, k, v = tensors(grad=False)
        sink, slope = torch.randn(H, dtype=torch.float64), torch.randn(H, dtype=torch.float64)
        leaves = {"q": q, "k": k, "v": v, "sink": sink, "slope": slope}
        leaves[needed].requires_grad_()
        rf.attention(q, k, v, sink=sink, score_mod=lambda s, b, h, i, j: s * slope[h]).sum().backward()
        needs = spy.needs[-1]
        assert dict(zip(leaves, (needs.dq, needs.dk, needs.dv, needs.dsink, *needs.dcaptured))) == {
            name: name == needed for name in leaves
        }
        assert all((t.grad is not None) == (name == needed) for name, t in leaves.items())

    def test_without_grad_mode_there_is_no_graph(self) -> None:
        x = tensors()
        with torch.no_grad():
            assert not rf.attention(*x).requires_grad
        with torch.inference_mode():
            assert rf.attention(*x).is_inference()
        assert not rf.attention(*[t.detach() for t in x]).requires_grad

    def test_gradient_of_lse_alone(self) -> None:
        x, y = tensors(), tensors()
        for a, b in zip(x, y):
            b.data.copy_(a)
        rf.attention(*x, causal=True, return_lse=True)[1].sin().sum().backward()
        o, lse = rf.attention(*y, causal=True, return_lse=True)
        (o * 0 + lse.sin().sum()).mean().backward()
        for a, b in zip(x, y):
            close(a.grad, b.grad)
        assert x[2].grad.count_nonzero() == 0

    def test_module_that_changes_its_type(self) -> None:
        """A traced mod keeps its captured parameter through module.to()."""
        module = torch.nn.Linear(1, H, bias=False)
        slope = module.weight
        score = rf.score_mod(lambda s, b, h, i, j: s + slope[h, 0] * (j - i))
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            module.to(dtype)
            x = tensors(dtype=dtype)
            module.zero_grad()
            rf.attention(*x, score_mod=score).sum().backward()
            assert slope.grad.dtype == dtype

    @pytest.mark.parametrize("empty", ["batch", "sq", "sk"])
    def test_empty(self, empty: str) -> None:
        x = tensors(**{"batch": 2, "sq": 3, "sk": 4} | {empty: 0})
        o, lse = rf.attention(*x, return_lse=True)
        (o.sum() + lse.exp().sum()).backward()
        assert all(t.grad.count_nonzero() == 0 and t.grad.shape == t.shape for t in x)
        if empty == "sk":
            assert o.count_nonzero() == 0
            assert torch.all(lse == -torch.inf)


class TestRawBackward:
    @pytest.mark.parametrize("layout", ["bshd", "bhsd"])
    @pytest.mark.parametrize("dropout", [{}, {"dropout_p": 0.3, "dropout_seed": 5, "dropout_offset": 7}])
    def test_equals_autograd(self, layout: str, dropout: dict[str, Any]) -> None:
        x = tensors()
        if layout == "bhsd":
            x = [t.detach().transpose(1, 2).requires_grad_() for t in x]
        sink = torch.randn(H, dtype=torch.float64, requires_grad=True)
        slope = torch.randn(H, dtype=torch.float64, requires_grad=True)
        table = torch.randint(0, 3, (7,))
        options: dict[str, Any] = {
            "causal": True,
            "softcap": 2.0,
            "window": (3, 1),
            "sink": sink,
            "score_mod": lambda s, b, h, i, j: s + slope[h] * table[j],
            "layout": layout,
            **dropout,
        }
        o, lse = rf.attention(*x, **options, return_lse=True)
        do, dlse = torch.randn_like(o), torch.randn_like(lse)
        torch.autograd.backward([o, lse], [do, dlse])
        got = rf.attention_backward(do, *x, o, lse, dlse=dlse, **options)
        assert isinstance(got, rf.AttentionGradients)
        for gradient, leaf in zip(got[:4], (*x, sink)):
            close(gradient, leaf.grad)
            assert gradient.shape == leaf.shape
        assert list(got.dcaptured) == ["slope"]
        close(got.dcaptured["slope"], slope.grad)

    def test_varlen(self) -> None:
        q, k, v = torch.randn(9, H, D), torch.randn(8, HKV, D), torch.randn(8, HKV, DV)
        x = [t.double().requires_grad_() for t in (q, k, v)]
        lengths = {
            "cu_seqlens_q": torch.tensor([0, 4, 4, 8], dtype=torch.int32),
            "cu_seqlens_k": torch.tensor([0, 5, 7, 8], dtype=torch.int32),
        }
        o, lse = rf.attention_varlen(*x, **lengths, causal=True, return_lse=True)
        assert lse.shape == (H, 9)
        do = torch.randn_like(o)
        o.backward(do)
        got = rf.attention_backward(do, *x, o, lse, **lengths, causal=True)
        assert got.dsink is None
        assert got.dcaptured == {}
        for gradient, leaf in zip(got[:3], x):
            close(gradient, leaf.grad)

    def test_gradients_are_made_for_captured_tensors_that_do_not_require_them(self) -> None:
        x = tensors(grad=False)
        slope = torch.randn(H, dtype=torch.float64)
        options = {"score_mod": lambda s, b, h, i, j: s * slope[h]}
        o, lse = rf.attention(*x, **options, return_lse=True)
        got = rf.attention_backward(torch.ones_like(o), *x, o, lse, **options)
        assert got.dcaptured["slope"].shape == (H,)
        assert not got.dq.requires_grad

    @pytest.mark.parametrize("how", ["expanded", "transposed"])
    def test_any_strides_of_do(self, how: str) -> None:
        x = tensors(grad=False)
        o, lse = rf.attention(*x, return_lse=True)
        do = (
            o.new_ones(()).expand(o.shape)
            if how == "expanded"
            else torch.randn(o.shape[::-1]).double().permute(3, 2, 1, 0)
        )
        got = rf.attention_backward(do, *x, o, lse)
        for a, b in zip(got[:3], rf.attention_backward(do.contiguous(), *x, o, lse)):
            close(a, b)


class TestVarlen:
    LENGTHS = torch.tensor([0, 2, 5, 5], dtype=torch.int32)

    def packed(self) -> list[Tensor]:
        return [torch.randn(6, heads, dim, dtype=torch.float64) for heads, dim in ((H, D), (HKV, D), (HKV, DV))]

    def test_lengths_on_the_host_give_the_bound(self, spy: Spy) -> None:
        rf.attention_varlen(*self.packed(), cu_seqlens_q=self.LENGTHS, cu_seqlens_k=self.LENGTHS)
        assert (spy.problems[-1].seqlen_q, spy.problems[-1].seqlen_k, spy.problems[-1].batch) == (3, 3, 3)
        assert spy.problems[-1].varlen_q
        assert spy.problems[-1].varlen_k

    def test_given_bound(self, spy: Spy) -> None:
        lengths = {"cu_seqlens_q": self.LENGTHS, "cu_seqlens_k": self.LENGTHS, "max_seqlen_q": 4, "max_seqlen_k": 9}
        x = self.packed()
        o = rf.attention_varlen(*x, **lengths, causal=True)
        assert (spy.problems[-1].seqlen_q, spy.problems[-1].seqlen_k) == (4, 9)
        close(o, rf.attention_varlen(*x, cu_seqlens_q=self.LENGTHS, cu_seqlens_k=self.LENGTHS, causal=True))

    @pytest.mark.parametrize("packed_side", ["q", "k"])
    def test_one_side_padded(self, packed_side: str) -> None:
        q, k, v = self.packed()
        options: dict[str, Any] = {"causal": True, f"cu_seqlens_{packed_side}": self.LENGTHS}
        if packed_side == "q":
            k, v = (torch.randn(3, 4, *t.shape[1:], dtype=t.dtype) for t in (k, v))
        else:
            q = torch.randn(3, 4, H, D, dtype=torch.float64)
        o, lse = rf.attention_varlen(q, k, v, **options, return_lse=True)
        expected = reference.attention(q, k, v, **options)
        close(o, expected.o)
        close(lse, expected.lse)

    def test_no_sequences(self) -> None:
        none = torch.zeros(1, dtype=torch.int32)
        o, lse = rf.attention_varlen(*self.packed(), cu_seqlens_q=none, cu_seqlens_k=none, return_lse=True)
        assert o.count_nonzero() == 0
        assert torch.all(lse == -torch.inf)


class TestDropoutSeeds:
    def test_drawn_from_torch_generator(self, spy: Spy) -> None:
        x = tensors()
        torch.manual_seed(1)
        first = rf.attention(*x, dropout_p=0.5)
        second = rf.attention(*x, dropout_p=0.5)
        torch.manual_seed(1)
        close(rf.attention(*x, dropout_p=0.5), first)
        assert not torch.equal(first, second)
        assert spy.inputs[-1].philox.dtype == torch.int64

    def test_given(self, spy: Spy) -> None:
        x = tensors()
        state = torch.get_rng_state()
        a = rf.attention(*x, dropout_p=0.5, dropout_seed=-(2**63), dropout_offset=2**63 - 1)
        assert spy.inputs[-1].philox.tolist() == [-(2**63), 2**63 - 1]
        seed, offset = torch.tensor(-(2**63)), torch.tensor([2**63 - 1])
        close(rf.attention(*x, dropout_p=0.5, dropout_seed=seed, dropout_offset=offset), a)
        rf.attention(*x, dropout_p=0.5, dropout_seed=3)
        assert spy.inputs[-1].philox.tolist() == [3, 0]
        assert torch.equal(state, torch.get_rng_state())

    def test_nothing_is_drawn_without_dropout(self, spy: Spy) -> None:
        state = torch.get_rng_state()
        rf.attention(*tensors(grad=False))
        spy.inputs.clear()
        torch.set_rng_state(state)
        x = tensors(grad=False)
        state = torch.get_rng_state()
        rf.attention(*x)
        assert torch.equal(state, torch.get_rng_state())
        assert spy.inputs[-1].philox is None


class TestKeys:
    """Options travel through operators and graphs as a string."""

    @given(
        scale=st.none() | st.floats(allow_nan=False, allow_infinity=False),
        causal=st.booleans(),
        left=st.none() | st.integers(0, 2**40),
        right=st.none() | st.integers(0, 2**40),
        softcap=st.floats(0, 1e300),
        dropout_p=st.floats(0, 1, exclude_max=True),
        deterministic=st.booleans(),
        return_max_score=st.booleans(),
    )
    def test_round_trip(self, softcap: float, dropout_p: float, **options: Any) -> None:
        key = options_key(
            options["scale"],
            options["causal"],
            options["left"],
            options["right"],
            softcap,
            "",
            "",
            "",
            dropout_p,
            options["deterministic"],
            options["return_max_score"],
            "torch",
        )
        window = (options.pop("left"), options.pop("right"))
        assert Options.from_key(key) == Options(**options, window=window, softcap=softcap, dropout_p=dropout_p)

    def test_mods_and_blocks(self) -> None:
        score, mask = rf.score_mod(lambda s, b, h, i, j: s * 2), rf.mask_mod(lambda b, h, i, j: j <= i)
        for spec in (BlockSpec(128, 64, mask.mod, True), BlockSpec(16, 16, None, False)):
            key = options_key(
                None, True, None, None, 0, score.mod.key, mask.mod.key, block_key(spec), 0, False, False, ""
            )
            options = Options.from_key(key)
            assert options.score_mod == score.mod
            assert options.mask_mod == mask.mod
            assert options.block_mask == spec
            assert options.backend == ""

    def test_mod_of_another_process(self) -> None:
        with pytest.raises(ValueError, match="not traced in this process; call rf"):
            find_mod("score-0000000000000000")


class TestBackends:
    def test_none_is_the_best_that_fits(self, spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
        picky = types.ModuleType("picky_backend")
        picky.__dict__.update(
            missing=lambda: None,
            supports=lambda problem: None if problem.head_dim == 64 else "head_dim must be 64",
        )
        monkeypatch.setitem(sys.modules, "picky_backend", picky)
        monkeypatch.setattr(backends, "MODULES", {"picky": "picky_backend", **backends.MODULES})
        rf.attention(*tensors(sq=3, sk=11))
        assert spy.options.backend == "torch"
        with pytest.raises(rf.UnsupportedError, match="backend 'picky': head_dim must be 64"):
            rf.attention(*tensors(sq=3, sk=12), backend="picky")
        assert (
            backends.choose(Problem(Options(backend=""), 1, 2, 3, 1, 1, 64, 8, torch.float32, torch.device("cpu")))
            == "picky"
        )

    def test_named(self, spy: Spy) -> None:
        rf.attention(*tensors(), backend="torch")
        assert spy.options.backend == "torch"
        assert backends.missing("torch") is None
