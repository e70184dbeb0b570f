"""torch.compile(fullgraph=True) and torch.export: forward, backward, dynamic lengths, mods, block masks, refusals."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend

import refluent as rf

H, HKV, D, DV = 4, 2, 16, 8


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tensors(seqlen: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(2, seqlen, h, d, dtype=dtype, requires_grad=True) for h, d in ((H, D), (HKV, D), (HKV, DV))]


def compiled(function: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


def gradients(function: Callable[..., Any], *leaves: Tensor) -> list[Tensor]:
    """The function's outputs and its leaves' gradients."""
    outputs = function()
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum((o.double().sin().sum() for o in outputs if o.requires_grad), torch.zeros((), dtype=torch.float64))
    return [*outputs, *torch.autograd.grad(loss, leaves)]


def same(got: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_every_option_with_dynamic_lengths() -> None:
    sink = torch.randn(H, dtype=torch.float64, requires_grad=True)
    slope = torch.randn(H, dtype=torch.float64, requires_grad=True)
    document = torch.arange(64) // 5
    score = rf.score_mod(lambda s, b, h, i, j: s + slope[h] * (j - i))
    mask = rf.mask_mod(lambda b, h, i, j: document[i] == document[j])

    def model(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Any:
        options: dict[str, Any] = {"causal": True, "window": (7, -1), "softcap": 3.0, "scale": 0.2, "sink": sink}
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mods = {"score_mod": score, "mask_mod": mask}
        return rf.attention(q, k, v, **options, **mods, layout="bhsd", return_lse=True, return_max_score=True)

    run, counter = compiled(model)
    for seqlen in (9, 12, 33, 40):
        x = tensors(seqlen)
        leaves = (*x, sink, slope)
        same(gradients(lambda x=x: run(*x, sink), *leaves), gradients(lambda x=x: model(*x, sink), *leaves))
    assert counter.frame_count == 2  # the first length, and all others


def test_learned_slope_trains() -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(D, 3 * H * D)
            self.slope = slope = torch.nn.Parameter(torch.full((H,), 0.1))
            self.mod = rf.score_mod(lambda s, b, h, i, j: s + slope[h] * (j - i))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).view(*x.shape[:2], 3, H, D).unbind(2)
            return rf.attention(q, k, v, causal=True, score_mod=self.mod)

    def train(wrap: Callable[[torch.nn.Module], Any]) -> tuple[list[float], Tensor]:
        torch.manual_seed(0)
        model = Attention()
        run = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for seqlen in (8, 16, 24, 24):
            optimizer.zero_grad()
            loss = run(torch.randn(2, seqlen, D)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model.slope.detach()

    losses, slope = train(lambda model: compiled(model)[0])
    expected_losses, expected_slope = train(lambda model: model)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    torch.testing.assert_close(slope, expected_slope, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(slope, torch.full((H,), 0.1), atol=1e-4)


@pytest.mark.parametrize("bound", [None, 6])
def test_varlen(bound: int | None) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Any:
        lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": bound, "max_seqlen_k": bound}
        return rf.attention_varlen(q, k, v, **lengths, causal=True, return_lse=True)

    run, counter = compiled(model)
    for ends in ([0, 3, 9], [0, 6, 6, 11], [0, 1, 2, 7], [0, 5, 10, 15, 20]):
        cu = torch.tensor(ends, dtype=torch.int32)
        x = [t[0].detach().requires_grad_() for t in tensors(ends[-1] + 1)]
        same(gradients(lambda x=x, cu=cu: run(*x, cu), *x), gradients(lambda x=x, cu=cu: model(*x, cu), *x))
    assert counter.frame_count == 2


def test_options_that_change_are_compiled_again() -> None:
    run, _ = compiled(lambda q, k, v, left, scale: rf.attention(q, k, v, window=(left, 0), scale=scale))
    x = tensors(9)
    for left, scale in ((1, 0.5), (2, 0.25), (3, 0.125)):
        torch.testing.assert_close(run(*x, left, scale), rf.attention(*x, window=(left, 0), scale=scale))


def test_deterministic_flag_is_a_guard() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(lambda q, k, v: rf.attention(q, k, v), fullgraph=True, backend=counter)
    x = tensors(5)
    run(*x)
    torch.use_deterministic_algorithms(True)
    try:
        run(*x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert counter.frame_count == 2


def test_dropout_draws_anew_and_follows_its_seed() -> None:
    run, _ = compiled(lambda q, k, v: rf.attention(q, k, v, dropout_p=0.5))
    x = tensors(9)
    assert not torch.equal(run(*x), run(*x))
    seeded, _ = compiled(lambda q, k, v, seed: rf.attention(q, k, v, dropout_p=0.5, dropout_seed=seed))
    for seed in (3, 4, 5):
        function = lambda seed=seed: rf.attention(*x, dropout_p=0.5, dropout_seed=seed)  # noqa: E731
        same(gradients(lambda seed=seed: seeded(*x, seed), *x), gradients(function, *x))


def test_autocast() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return rf.attention(q, k, v, causal=True)

    x = tensors(9, torch.float32)
    got, expected = gradients(lambda: compiled(model)[0](*x), *x), gradients(lambda: model(*x), *x)
    assert got[0].dtype == torch.bfloat16
    same(got, expected)


def test_raw_backward() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Any:
        o, lse = rf.attention(q, k, v, causal=True, return_lse=True)
        return rf.attention_backward(torch.ones_like(o), q, k, v, o, lse, causal=True)

    x = [t.detach() for t in tensors(9)]
    same(list(compiled(model)[0](*x)[:3]), list(model(*x)[:3]))


class TestBlockMask:
    DOCUMENT = torch.arange(40) // 13

    def model(self, q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> Tensor:
        return rf.attention(q, k, v, block_mask=block_mask, causal=True)

    def test_traced(self) -> None:
        mask = rf.mask_mod(lambda b, h, i, j: self.DOCUMENT[i] == self.DOCUMENT[j])
        block_mask = rf.create_block_mask(mask, None, None, 40, 40, BLOCK_SIZE=16)
        run, _ = compiled(self.model)
        x = tensors(40)
        same(gradients(lambda: run(*x, block_mask), *x), gradients(lambda: self.model(*x, block_mask), *x))

    def test_plain_function(self) -> None:
        block_mask = rf.create_block_mask(lambda b, h, i, j: j <= i + 3, None, None, 40, 40, BLOCK_SIZE=16)
        x = tensors(40)
        with pytest.raises(Unsupported, match="block_mask: its mask_mod is a plain function"):
            compiled(self.model)[0](*x, block_mask)
        with_break = torch.compile(self.model, backend="aot_eager")
        torch.testing.assert_close(with_break(*x, block_mask), self.model(*x, block_mask))


class TestPlainFunction:
    """A bare lambda cannot be traced inside a graph: it is refused in words, or runs beside the graph."""

    def model(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rf.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (j - i)).sin()

    def test_fullgraph(self) -> None:
        text = r"score_mod: got a plain function inside a compiled region; make m = rf\.score_mod\(function\) outside"
        with pytest.raises(Unsupported, match=text):
            compiled(self.model)[0](*tensors(5))

    def test_graph_break(self) -> None:
        x = tensors(5)
        run = torch.compile(self.model, backend="aot_eager")
        same(gradients(lambda: run(*x), *x), gradients(lambda: self.model(*x), *x))


def test_wrong_arguments_are_named_while_compiling() -> None:
    with pytest.raises(Unsupported, match=r"softcap: got -1\.0; allowed"):
        compiled(lambda q, k, v: rf.attention(q, k, v, softcap=-1.0))[0](*tensors(5))
    q, k, v = tensors(5)
    with pytest.raises(Unsupported, match="k: got 2 sequences; allowed: 1, as q has"):
        compiled(lambda q, k, v: rf.attention(q, k, v))[0](q[:1], k, v)


def test_values_are_checked_by_compiled_code_too() -> None:
    run, _ = compiled(lambda q, k, v, used: rf.attention(q, k, v, seqused_k=used))
    x = tensors(5)
    run(*x, torch.tensor([5, 2], dtype=torch.int32))
    with pytest.raises(ValueError, match="seqused_k: got 6 for sequence 1; allowed: 0 to its length, 5"):
        run(*x, torch.tensor([5, 6], dtype=torch.int32))


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
def test_inductor() -> None:
    slope = torch.randn(H, requires_grad=True)
    score = rf.score_mod(lambda s, b, h, i, j: s + slope[h] * (j - i))

    def model(qkv: Tensor) -> Tensor:
        q, k, v = (qkv * 2).unbind(2)
        o, lse = rf.attention(q, k, v, causal=True, score_mod=score, return_lse=True)
        return (o.transpose(1, 2) * lse[..., None]).cos()

    qkv = torch.randn(2, 9, 3, H, D, requires_grad=True)
    run = torch.compile(model, fullgraph=True)
    got, expected = gradients(lambda: run(qkv), qkv, slope), gradients(lambda: model(qkv), qkv, slope)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    slope = torch.randn(H, dtype=torch.float64)
    score = rf.score_mod(lambda s, b, h, i, j: s + slope[h] * (j - i))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope = torch.nn.Buffer(slope)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return rf.attention(q, k, v, causal=True, window=(5, 0), score_mod=score)

    seqlen = torch.export.Dim("seqlen", min=2, max=64)
    x = [t.detach() for t in tensors(9)]
    program = torch.export.export(Model(), tuple(x), dynamic_shapes=[{1: seqlen}] * 3, strict=strict)
    assert any("attention_forward" in str(node.target) for node in program.graph.nodes)
    for length in (9, 17):
        x = [t.detach() for t in tensors(length)]
        torch.testing.assert_close(program.module()(*x), Model()(*x), rtol=0, atol=0)
