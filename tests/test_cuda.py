"""On a CUDA device: the same numbers as on the CPU, no wait for the device anywhere, CUDA graphs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import refluent as rf

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

B, S, H, HKV, D, DV = 2, 70, 4, 2, 16, 24


@contextmanager
def no_wait() -> Iterator[None]:
    """Whatever waits for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def features(device: str) -> dict[str, tuple[list[Tensor], dict[str, Any]]]:
    """Calls by name: q, k, v and the options, drawn on the CPU so that every device gets the same."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64).to(device).requires_grad_()

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def dense() -> list[Tensor]:
        return [draw(B, S, H, D), draw(B, S, HKV, D), draw(B, S, HKV, DV)]

    slope, bias = draw(H), draw(1, H, S, S)
    document = torch.arange(S, device=device) // 9
    block_mask = rf.create_block_mask(
        rf.mask_mod(lambda b, h, i, j: document[i] == document[j]), None, None, S, S, device=device, BLOCK_SIZE=16
    )
    packed = [draw(B * S, H, D), draw(B * S, HKV, D), draw(B * S, HKV, DV)]
    lengths = {"cu_seqlens_q": ints(0, 50, 50, 130), "cu_seqlens_k": ints(0, 30, 70, 140)}
    return {
        "causal": (dense(), {"causal": True}),
        "band, softcap, sink": (dense(), {"window": (9, 4), "softcap": 3.0, "sink": draw(H)}),
        "alibi": (dense(), {"causal": True, "score_mod": rf.score_mod(lambda s, b, h, i, j: s + slope[h] * (j - i))}),
        "bias": (dense(), {"score_mod": rf.score_mod(lambda s, b, h, i, j: s + bias[0, h, i, j])}),
        "documents": (dense(), {"mask_mod": rf.mask_mod(lambda b, h, i, j: document[i] == document[j])}),
        "block mask": (dense(), {"block_mask": block_mask, "causal": True}),
        "seqused": (dense(), {"seqused_q": ints(33, 70), "seqused_k": ints(70, 5), "causal": True}),
        "dropout": (dense(), {"dropout_p": 0.3, "dropout_seed": 5, "dropout_offset": 6}),
        "deterministic": (dense(), {"deterministic": True, "causal": True}),
        "varlen": (packed, {**lengths, "max_seqlen_q": 80, "max_seqlen_k": 70, "causal": True}),
        "varlen without bounds": (packed, {**lengths, "softcap": 2.0}),
    }


def run(x: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """o, lse and all gradients."""
    function = rf.attention_varlen if "cu_seqlens_q" in options else rf.attention
    o, lse = function(*x, **options, return_lse=True)
    captured = options["score_mod"].captured if "score_mod" in options else ()
    leaves = [*x, *captured, *([options["sink"]] if "sink" in options else [])]
    return [o, lse, *torch.autograd.grad([o, lse], leaves, [torch.ones_like(o), torch.full_like(lse, 0.5)])]


NAMES = (
    "causal",
    "band, softcap, sink",
    "alibi",
    "bias",
    "documents",
    "block mask",
    "seqused",
    "dropout",
    "deterministic",
    "varlen",
    "varlen without bounds",
)


@pytest.mark.parametrize("name", NAMES)
def test_same_numbers_as_on_the_cpu_without_a_wait(name: str) -> None:
    x, options = features("cuda")[name]
    run(x, options)
    with no_wait():
        got = run(x, options)
    expected = run(*features("cpu")[name])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-9, atol=1e-9)


def test_dropout_draws_without_a_wait() -> None:
    x = features("cuda")["causal"][0]
    with no_wait():
        torch.cuda.manual_seed(1)
        first, second = rf.attention(*x, dropout_p=0.5), rf.attention(*x, dropout_p=0.5)
        torch.cuda.manual_seed(1)
        again = rf.attention(*x, dropout_p=0.5)
    assert not torch.equal(first, second)
    torch.testing.assert_close(first, again, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["causal", "alibi", "block mask", "dropout", "varlen"])
def test_cuda_graph(name: str) -> None:
    x, options = features("cuda")[name]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(x, options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = run(x, options)
    with torch.no_grad():
        for tensor in x:
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    for a, b in zip(static, run(x, options), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_values_are_checked_on_request_alone() -> None:
    x, options = features("cuda")["varlen"]
    options["cu_seqlens_k"] = torch.tensor([0, 40, 30, 150], dtype=torch.int32, device="cuda")
    with no_wait():
        rf.attention_varlen(*x, **options)
    with pytest.raises(ValueError, match="cu_seqlens_k: got 40 before 30"):
        rf.validate(*x, **options)
    y, _ = features("cuda")["causal"]
    table = torch.zeros(S - 1, dtype=torch.float64, device="cuda")
    score = rf.score_mod(lambda s, b, h, i, j: s + table[j])
    with no_wait():
        rf.attention(*y, score_mod=score)
    with pytest.raises(ValueError, match="got index 69 in dimension 0 of captured tensor 'table'"):
        rf.validate(*y, score_mod=score)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    x = [t.detach().float().requires_grad_() for t in features("cuda")["causal"][0]]
    with torch.autocast("cuda", dtype=dtype):
        o = rf.attention(*x, causal=True)
    assert o.dtype == dtype
    o.sum().backward()
    low = [t.detach().to(dtype).requires_grad_() for t in x]
    rf.attention(*low, causal=True).sum().backward()
    for a, b in zip(x, low):
        torch.testing.assert_close(a.grad, b.grad.float(), rtol=0, atol=0)


def test_compiled() -> None:
    x, options = features("cuda")["alibi"]
    expected = run(x, options)
    got = torch.compile(lambda *x: rf.attention(*x, **options, return_lse=True), fullgraph=True, backend="aot_eager")(
        *x
    )
    torch.testing.assert_close(list(got), expected[:2], rtol=0, atol=0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("autocast", [False, True])
def test_second_device(autocast: bool) -> None:
    x = [t.detach().to("cuda:1").requires_grad_() for t in features("cpu")["causal"][0]]
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        o = rf.attention(*x, causal=True, dropout_p=0.1)
    assert o.device == torch.device("cuda:1")
    o.sum().backward()
    assert torch.cuda.current_device() == 0
