"""How the operators behave under the rest of PyTorch: autograd's checks, transforms, modes and utilities."""

import copy
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import refluent as rf
from refluent import ops, tiled
from refluent.binding import bind
from refluent.problem import Inputs, Problem
from refluent.validate import DEFAULTS

H, HKV, D, DV = 4, 2, 8, 16


def tensors(sq: int = 5, sk: int = 7, dtype: torch.dtype = torch.float64, grad: bool = True) -> list[Tensor]:
    shapes = ((2, sq, H, D), (2, sk, HKV, D), (2, sk, HKV, DV))
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


# --- gradcheck: numerical derivatives in float64 ----------------------------------------------------------------------

DOCUMENT = torch.tensor([0, 0, 0, 1, 1, 1, 1])
MASK = rf.create_block_mask(lambda b, h, i, j: (i + j) % 7 != 3, None, None, 16, 16, BLOCK_SIZE=16)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "causal window": {"causal": True, "window": (1, None)},
    "scale and softcap": {"scale": 0.7, "softcap": 1.5},
    "mask_mod": {"mask_mod": lambda b, h, i, j: DOCUMENT[i] == DOCUMENT[j]},
    "block_mask": {"block_mask": MASK, "causal": True},
    "seqused": {"seqused_q": torch.tensor([3, 5]).int(), "seqused_k": torch.tensor([7, 2]).int(), "causal": True},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 11, "dropout_offset": 3},
    "bhsd": {"layout": "bhsd", "causal": True},
    "deterministic": {"deterministic": True, "causal": True},
}


@pytest.mark.parametrize("name", FEATURES)
def test_gradcheck(name: str) -> None:
    options = FEATURES[name]
    x = tensors()
    if options.get("layout") == "bhsd":
        x = [t.detach().transpose(1, 2).requires_grad_() for t in x]
    sink = leaf(H)

    def function(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Any:
        o, lse = rf.attention(q, k, v, sink=sink, **options, return_lse=True)
        return o, torch.where(lse.isfinite(), lse, 0)  # rows outside the lengths: -inf, without a numerical derivative

    assert torch.autograd.gradcheck(function, (*x, sink), fast_mode=name != "plain")


def test_gradcheck_without_sink() -> None:
    """Rows that see nothing have lse = -inf, which has no numerical derivative: o alone."""
    options: dict[str, Any] = {"causal": True, "seqused_k": torch.tensor([2, 0]).int()}
    assert torch.autograd.gradcheck(lambda q, k, v: rf.attention(q, k, v, **options), tensors(), fast_mode=True)


@pytest.mark.parametrize(
    "mod",
    [
        lambda slope, bias: lambda s, b, h, i, j: s + slope[h] * (j - i),
        lambda slope, bias: lambda s, b, h, i, j: s * bias[0, h, i, j].sigmoid() + bias[0, h, j % 5, i],
        lambda slope, bias: lambda s, b, h, i, j: torch.where(j > i, s.sin() * slope[h], (s + slope[0]).exp()),
    ],
    ids=["alibi", "bias", "nonlinear"],
)
def test_gradcheck_of_captured_tensors(mod: Any) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, bias: Tensor) -> Any:
        options: dict[str, Any] = {"causal": True, "softcap": 2.0, "score_mod": mod(slope, bias)}
        return rf.attention(q, k, v, **options, return_lse=True)

    inputs = (*tensors(), leaf(H), leaf(1, H, 7, 7))
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


def test_gradcheck_varlen_with_everything() -> None:
    lengths: dict[str, Any] = {
        "cu_seqlens_q": torch.tensor([0, 3, 3, 8]).int(),
        "cu_seqlens_k": torch.tensor([0, 4, 6, 12]).int(),
    }
    x = [leaf(9, H, D), leaf(12, HKV, D), leaf(12, HKV, DV)]

    def function(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, slope: Tensor) -> Tensor:
        o, lse = rf.attention_varlen(
            q,
            k,
            v,
            **lengths,
            causal=True,
            window=(3, None),
            softcap=2.0,
            sink=sink,
            score_mod=lambda s, b, h, i, j: s + slope[h] * (j - i) * (b + 1),
            mask_mod=lambda b, h, i, j: (i + j + b) % 5 != 0,
            dropout_p=0.3,
            dropout_seed=5,
            return_lse=True,
        )
        return o.sum(-1) + lse[:, :8].T.sin().sum()

    assert torch.autograd.gradcheck(function, (*x, leaf(H), leaf(H)), fast_mode=True)


# --- the operators ----------------------------------------------------------------------------------------------------


def operator_calls() -> dict[str, ops.Call]:
    slope, table = leaf(H), torch.randint(0, 9, (7,))
    packed = [t.flatten(0, 1) for t in tensors()]
    cu_q, cu_k = torch.tensor([0, 4, 9]).int(), torch.tensor([0, 7, 12]).int()
    everything = {
        "causal": True,
        "sink": leaf(H),
        "score_mod": lambda s, b, h, i, j: s + slope[h] * table[j],
        "mask_mod": lambda b, h, i, j: table[j] > 1,
        "block_mask": MASK,
        "dropout_p": 0.2,
        "dropout_seed": 1,
        "return_max_score": True,
    }
    varlen = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 5, "max_seqlen_k": 7}
    calls = {"plain": (tensors(), {}), "everything": (tensors(), everything), "varlen": (packed, varlen)}
    return {name: bind(*x, **{**DEFAULTS, **options}).call for name, (x, options) in calls.items()}


@pytest.mark.parametrize("name", ["plain", "everything", "varlen"])
def test_opcheck(name: str) -> None:
    call = operator_calls()[name]
    torch.library.opcheck(ops.forward_op, tuple(call))
    o, lse, _ = ops.forward_op(*call)
    detach = lambda x: x.detach() if isinstance(x, Tensor) else x  # noqa: E731
    rest = [[detach(t) for t in x] if isinstance(x, list) else detach(x) for x in call]
    needs = [True, False, True, call.sink is not None, *[True] * len(call.score_captured)]
    for dlse in (None, torch.randn_like(lse.detach())):
        torch.library.opcheck(ops.backward_op, (torch.randn_like(o), o.detach(), lse.detach(), dlse, *rest, needs))


def test_registered_operator_equals_the_light_path() -> None:
    for name, call in operator_calls().items():
        candidates = (call.q, call.k, call.v, call.sink, *call.score_captured)
        leaves = [t for t in candidates if t is not None and t.requires_grad]
        results = []
        for run in (ops.forward, lambda call: ops.forward_op(*call)):
            o, lse, _ = run(call)
            results.append(torch.autograd.grad(o.sin().sum() + lse.sin().sum(), leaves))
        same(*results)
        assert name


def test_fake_tensors() -> None:
    with FakeTensorMode():
        q, k, v = tensors()
        o, lse = rf.attention(q, k, v, return_lse=True)
        o.sum().backward()
        assert o.shape == (2, 5, H, DV)
        assert lse.shape == (2, H, 5)
        assert q.grad.shape == q.shape
        cu = torch.zeros(3, dtype=torch.int32)
        packed = [torch.empty(6, 4, 8) for _ in range(3)]
        assert rf.attention_varlen(*packed, cu_seqlens_q=cu, cu_seqlens_k=cu).shape == (6, 4, 8)
        with pytest.raises(ValueError, match=r"max_seqlen_q: got None; allowed: an int: block_mask counts blocks"):
            rf.attention_varlen(*packed, cu_seqlens_q=cu, cu_seqlens_k=cu, block_mask=MASK)


def test_meta_tensors() -> None:
    o, lse = rf.attention(*[t.to("meta") for t in tensors()], causal=True, return_lse=True)
    assert o.device.type == lse.device.type == "meta"
    assert o.shape == (2, 5, H, DV)


def test_make_fx_keeps_the_operators() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return torch.autograd.grad(rf.attention(q, k, v, causal=True).sum(), (q, k, v))

    x = tensors()
    graph = torch.fx.experimental.proxy_tensor.make_fx(step, tracing_mode="symbolic")(*x)
    targets = [str(node.target) for node in graph.graph.nodes]
    assert "refluent.attention_forward.default" in targets
    assert "refluent.attention_backward.default" in targets
    y = tensors(9, 11)
    same(graph(*y), step(*y))


# --- derivatives that there are not -----------------------------------------------------------------------------------


class TestSecondDerivative:
    TEXT = r"refluent\.attention: double backward .* is not supported by any backend; .* differentiate twice"

    def test_by_autograd(self) -> None:
        q, k, v = tensors()
        (dq,) = torch.autograd.grad(rf.attention(q, k, v).square().sum(), q, create_graph=True)
        same(dq, torch.autograd.grad(rf.attention(q, k, v).square().sum(), q)[0])
        with pytest.raises(rf.UnsupportedError, match=self.TEXT):
            dq.sum().backward()

    def test_of_the_raw_backward(self) -> None:
        x = tensors()
        o, lse = rf.attention(*x, return_lse=True)
        got = rf.attention_backward(torch.ones_like(o), *x, o.detach(), lse.detach())
        with pytest.raises(rf.UnsupportedError, match=self.TEXT):
            got.dq.sum().backward()

    def test_of_the_registered_operator(self) -> None:
        call = operator_calls()["plain"]
        (dq,) = torch.autograd.grad(ops.forward_op(*call)[0].sum(), call.q, create_graph=True)
        with pytest.raises(rf.UnsupportedError, match=self.TEXT):
            dq.sum().backward()

    def test_by_torch_func(self) -> None:
        q, k, v = tensors(grad=False)
        inner = torch.func.grad(lambda q: rf.attention(q, k, v).sum())
        with pytest.raises(rf.UnsupportedError, match=self.TEXT):
            torch.func.grad(lambda q: inner(q).sum())(q)


class TestForwardMode:
    TEXT = r"refluent\.attention: forward-mode derivatives .* are not supported by any backend; reverse mode"

    @pytest.mark.parametrize("which", [0, 1, 2])
    def test_dual_tensors(self, which: int) -> None:
        x = tensors(grad=False)
        with forward_ad.dual_level():
            rf.attention(*x)
            x[which] = forward_ad.make_dual(x[which], torch.ones_like(x[which]))
            with pytest.raises(rf.UnsupportedError, match=self.TEXT):
                rf.attention(*x)

    @pytest.mark.parametrize("transform", ["jvp", "jacfwd"])
    def test_torch_func(self, transform: str) -> None:
        q, k, v = tensors(grad=False)
        function = lambda q: rf.attention(q, k, v)  # noqa: E731
        with pytest.raises(rf.UnsupportedError, match=self.TEXT):
            torch.func.jvp(function, (q,), (q,)) if transform == "jvp" else torch.func.jacfwd(function)(q)


# --- torch.func -------------------------------------------------------------------------------------------------------


class TestFunc:
    def test_grad_and_vjp(self) -> None:
        q, k, v = tensors()
        sink = leaf(H)
        loss = lambda q, sink: rf.attention(q, k, v, sink=sink, causal=True).sin().sum()  # noqa: E731
        same(torch.func.grad(loss, argnums=(0, 1))(q, sink), torch.autograd.grad(loss(q, sink), (q, sink)))
        _, pull = torch.func.vjp(lambda q: rf.attention(q, k, v), q)
        same(pull(torch.ones(2, 5, H, DV, dtype=q.dtype))[0], torch.autograd.grad(rf.attention(q, k, v).sum(), q)[0])

    @pytest.mark.parametrize("which", ["grad", "vmap"])
    def test_captured_tensor(self, which: str) -> None:
        x = tensors(grad=False)
        function = lambda slope: rf.attention(*x, score_mod=lambda s, b, h, i, j: s + slope[h] * (j - i)).sum()  # noqa: E731
        slopes = torch.randn(3, H, dtype=torch.float64)
        if which == "vmap":
            same(torch.vmap(function)(slopes), torch.stack([function(slope) for slope in slopes]))
        else:
            slope = slopes[0].requires_grad_()
            same(torch.func.grad(function)(slope), torch.autograd.grad(function(slope), slope)[0])


def mapped(size: int = 3) -> list[Tensor]:
    return [torch.randn(size, *t.shape, dtype=t.dtype) for t in tensors()]


class TestVmap:
    """Every sample as by itself, whatever is mapped."""

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"causal": True, "window": (2, None), "softcap": 2.0},
            {"score_mod": lambda s, b, h, i, j: s + h * (j - i)},
            {"score_mod": lambda s, b, h, i, j: s * (b + 1)},
            {"mask_mod": lambda b, h, i, j: j <= i + b},
            {"block_mask": MASK},
            {"seqused_k": torch.tensor([7, 2]).int()},
            {"sink": torch.arange(4.0)},
            {"dropout_p": 0.5, "dropout_seed": 3},
        ],
        ids=[
            "plain",
            "band",
            "score_mod",
            "score_mod by batch",
            "mask_mod by batch",
            "blocks",
            "seqused",
            "sink",
            "seed",
        ],
    )
    def test_options(self, options: dict[str, Any]) -> None:
        function = lambda q, k, v: rf.attention(q, k, v, **options, return_lse=True, return_max_score=True)  # noqa: E731
        x = mapped()
        got = torch.vmap(function)(*x)
        for parts, whole in zip(zip(*[function(*sample) for sample in zip(*x)]), got):
            same(whole, torch.stack(parts))

    def test_one_operand_another_dimension(self) -> None:
        _, k, v = tensors(grad=False)
        qs = torch.randn(2, 5, H, D, 3, dtype=torch.float64)
        got = torch.vmap(lambda q: rf.attention(q.contiguous(), k, v), in_dims=-1, out_dims=1)(qs)
        same(got, torch.stack([rf.attention(t.contiguous(), k, v) for t in qs.unbind(-1)], 1))

    def test_mapped_sink_and_lengths(self) -> None:
        x = tensors(grad=False)
        sinks = torch.randn(3, H, dtype=torch.float64)
        used = torch.tensor([[1, 7], [0, 3], [7, 7]]).int()
        got = torch.vmap(lambda sink, n: rf.attention(*x, sink=sink, seqused_k=n))(sinks, used)
        same(got, torch.stack([rf.attention(*x, sink=s, seqused_k=n) for s, n in zip(sinks, used)]))

    def test_per_sample_gradients(self) -> None:
        x, sink = mapped(), leaf(H)
        slope = leaf(H)
        score = rf.score_mod(lambda s, b, h, i, j: s + slope[h] * (j - i))

        def loss(sink: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return rf.attention(q, k, v, sink=sink, score_mod=score).square().sum()

        gradient = torch.func.grad(loss, argnums=(0, 1, 2, 3))
        got = torch.vmap(gradient, in_dims=(None, 0, 0, 0))(sink, *x)
        same(list(got), [torch.stack(parts) for parts in zip(*[gradient(sink, *sample) for sample in zip(*x)])])

    def test_per_sample_gradients_of_plain_attention(self) -> None:
        gradient = torch.func.grad(lambda *x: rf.attention(*x, causal=True).square().sum(), argnums=(0, 1, 2))
        x = mapped()
        expected = [torch.stack(parts) for parts in zip(*[gradient(*sample) for sample in zip(*x)])]
        same(list(torch.vmap(gradient)(*x)), expected)

    def test_gradients_through_vmap(self) -> None:
        x = [t.requires_grad_() for t in mapped()]
        got = torch.autograd.grad(torch.vmap(lambda *x: rf.attention(*x))(*x).square().sum(), x)
        stacked = torch.stack([rf.attention(*sample) for sample in zip(*x)])
        same(got, torch.autograd.grad(stacked.square().sum(), x))

    def test_dropout_follows_the_randomness_flag(self) -> None:
        x = [t.expand(3, *t.shape) for t in tensors(grad=False)]
        function = lambda *x: rf.attention(*x, dropout_p=0.5)  # noqa: E731
        with pytest.raises(RuntimeError, match="randomness"):
            torch.vmap(function)(*x)
        equal = torch.vmap(function, randomness="same")(*x)
        same(equal[0], equal[1])
        different = torch.vmap(function, randomness="different")(*x)
        assert not torch.equal(different[0], different[1])


# --- modes and utilities ----------------------------------------------------------------------------------------------


class TestAutocast:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_computes_in_the_autocast_type(self, dtype: torch.dtype) -> None:
        x = tensors(dtype=torch.float32)
        with torch.autocast("cpu", dtype=dtype):
            o, lse = rf.attention(*x, causal=True, return_lse=True)
        assert o.dtype == dtype
        assert lse.dtype == torch.float32
        o.sum().backward()
        low = [t.detach().to(dtype).requires_grad_() for t in x]
        expected = rf.attention(*low, causal=True)
        expected.sum().backward()
        torch.testing.assert_close(o, expected, rtol=0, atol=0)
        for a, b in zip(x, low):
            assert a.grad.dtype == torch.float32
            torch.testing.assert_close(a.grad, b.grad.float(), rtol=0, atol=0)

    def test_float64_stays(self) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert rf.attention(*tensors()).dtype == torch.float64

    def test_does_not_reach_into_the_backend(self) -> None:
        """Sums are kept in float32 whatever autocast would do to the products in a backend."""
        x = tensors(64, 64, torch.bfloat16)
        slope = torch.randn(H, requires_grad=True)
        options: dict[str, Any] = {"score_mod": lambda s, b, h, i, j: s + slope[h] * (j - i)}
        leaves = (*x, slope)
        expected = torch.autograd.grad(rf.attention(*x, **options).sum(), leaves)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = torch.autograd.grad(rf.attention(*x, **options).sum(), leaves)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)

    def test_raw_backward(self) -> None:
        x = tensors(dtype=torch.float32, grad=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            o, lse = rf.attention(*x, return_lse=True)
            got = rf.attention_backward(torch.ones_like(o), *x, o, lse)
        assert got.dq.dtype == torch.bfloat16


class TestCheckpoint:
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_dropout_is_reproduced(self, reentrant: bool) -> None:
        x = tensors(16, 16)
        block = lambda q, k, v: rf.attention(q * 1.5, k, v, dropout_p=0.5).sin()  # noqa: E731

        def run(wrap: Any) -> tuple[Tensor, ...]:
            torch.manual_seed(0)
            o = wrap(*x)
            return (o, torch.rand(()), *torch.autograd.grad(o.square().sum(), x)) if not reentrant else backward(o)

        def backward(o: Tensor) -> tuple[Tensor, ...]:
            for t in x:
                t.grad = None
            o.square().sum().backward()
            return (o, *[t.grad for t in x])

        same(run(lambda *x: checkpoint(block, *x, use_reentrant=reentrant)), run(block))

    def test_saved_tensors_can_be_moved(self) -> None:
        packed = []
        x = tensors()
        slope = leaf(H)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.clone(), lambda t: t):
            o = rf.attention(*x, score_mod=lambda s, b, h, i, j: s * slope[h])
        assert {(2, 5, H, D), (H,), (2, 5, H, DV), (2, H, 5)} <= {tuple(shape) for shape in packed}
        o.sum().backward()
        assert slope.grad is not None

    def test_changed_in_place_before_backward(self) -> None:
        q, k, v = tensors(grad=False)
        k.requires_grad_()
        o = rf.attention(q, k, v)
        q.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.sum().backward()


class TestFlops:
    def count(self, function: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            function()
        return counter.get_total_flops()

    def test_dense(self) -> None:
        q, k, v = tensors(32, 48)
        forward = 2 * 2 * H * 32 * 48 * (D + DV)
        assert self.count(lambda: rf.attention(q, k, v)) == forward
        backward = 2 * 2 * H * 32 * 48 * (3 * D + 2 * DV)
        assert self.count(lambda: rf.attention(q, k, v).sum().backward()) == forward + backward

    def test_backward_is_two_and_a_half_times_the_forward(self) -> None:
        x = [torch.randn(2, 16, 4, 8, requires_grad=True) for _ in range(3)]
        assert self.count(lambda: rf.attention(*x)) == 4 * 2 * 4 * 16 * 16 * 8
        assert self.count(lambda: rf.attention(*x).sum().backward()) == 3.5 * 4 * 2 * 4 * 16 * 16 * 8

    def test_bands(self) -> None:
        x = tensors(64, 64)
        whole = self.count(lambda: rf.attention(*x))
        assert self.count(lambda: rf.attention(*x, causal=True)) == whole / 2
        assert self.count(lambda: rf.attention(*x, window=(0, 0))) == 0
        assert self.count(lambda: rf.attention(*x, window=(16, 0))) == whole * (64 * 16 - 16 * 16 / 2) / 64**2
        assert self.count(lambda: rf.attention(*x, window=(16, 16))) == whole * (2 * 64 * 16 - 16 * 16) / 64**2
        assert self.count(lambda: rf.attention(*x, window=(99, 99))) == whole
        y = tensors(16, 64)
        whole = self.count(lambda: rf.attention(*y))
        assert self.count(lambda: rf.attention(*y, causal=True)) == whole * (16 * 64 - 16 * 16 / 2) / (16 * 64)

    def test_varlen_counts_the_bound(self) -> None:
        cu = torch.tensor([0, 8, 16, 24]).int()
        x = [torch.randn(24, 4, 8) for _ in range(3)]
        lengths: dict[str, Any] = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
        assert self.count(lambda: rf.attention_varlen(*x, **lengths)) == 3 * 4 * 4 * 8 * 8 * 8


def test_modules_that_hold_a_traced_mod_are_copied() -> None:
    slope = torch.nn.Parameter(torch.ones(H))
    module = torch.nn.Module()
    module.mod = rf.score_mod(lambda s, b, h, i, j: s * slope[h])
    twin = copy.deepcopy(module)
    assert twin.mod.mod is module.mod.mod


def test_saved_for_backward_are_no_graph_cycles() -> None:
    """The graph is freed by counting references alone."""
    import gc
    import weakref

    x = tensors()
    gc.disable()
    try:
        o = rf.attention(*x)
        alive = weakref.ref(o.grad_fn)
        del o
        assert alive() is None
    finally:
        gc.enable()


def test_backend_runs_below_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend's own operations record nothing, with and without torch.compile's way in."""
    forward = tiled.forward
    seen = []

    def watched(problem: Problem, inputs: Inputs) -> Any:
        result = forward(problem, inputs)
        seen.append(result[0].requires_grad)
        return result

    monkeypatch.setattr(tiled, "forward", watched)
    rf.attention(*tensors())
    ops.forward_op(*operator_calls()["plain"])
    assert seen == [False, False]
