"""flash-attn-4's Hopper kernels, forward and backward, through its public functions, on a device or in the emulator."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

CASES: dict[str, dict[str, Any]] = {
    "D 64": {"d": 64},
    "D 64, two batches, two heads, ragged": {"d": 64, "b": 2, "h": (2, 2), "s": (130, 200)},
    "D 64, float16, causal": {"d": 64, "dtype": torch.float16, "causal": True, "s": (250, 250)},
    "D 64, varlen": {"d": 64, "h": (2, 2), "lengths": ([70, 1, 200], [90, 40, 200])},
    "D 96, ragged": {"d": 96, "s": (300, 400)},
    "D 128": {"d": 128},
    "D 128, causal, grouped, ragged": {"d": 128, "h": (4, 2), "s": (200, 200), "causal": True},
    "D 128, deterministic, causal": {"d": 128, "h": (2, 1), "s": (300, 300), "causal": True, "deterministic": True},
    "D 128, varlen, causal": {
        "d": 128,
        "h": (2, 1),
        "causal": True,
        "lengths": ([70, 1, 200], [90, 40, 200]),
    },
    "D 256": {"d": 256},
    "D 256, causal, ragged": {"d": 256, "s": (200, 330), "causal": True},
}


def available() -> bool:
    return all(importlib.util.find_spec(name) for name in ("flash_attn", "quack", "triton"))


_compiled_for = ""


def _compile_for(interface: Any, device: str) -> None:
    """flash-attn-4 keeps compiled kernels by keys that do not name where they run."""
    global _compiled_for
    if _compiled_for not in ("", device):
        for value in list(vars(interface).values()):
            kept = getattr(value, "compile_cache", None)
            if kept is not None:
                kept.clear()
    _compiled_for = device


def run(name: str, device: str) -> dict[str, torch.Tensor]:
    """o, lse, dq, dk, dv on the CPU. device: "cuda", or "cpu" inside a context of the emulator."""
    from flash_attn.cute import interface

    _compile_for(interface, device)
    case = CASES[name]
    torch.manual_seed(2)
    d, dtype = case["d"], case.get("dtype", torch.bfloat16)
    (h, hk), causal = case.get("h", (1, 1)), case.get("causal", False)
    deterministic = case.get("deterministic", False)
    if "lengths" in case:
        (q_lengths, k_lengths) = case["lengths"]
        q_shape, k_shape = (sum(q_lengths), h, d), (sum(k_lengths), hk, d)
    else:
        b, (sq, sk) = case.get("b", 1), case.get("s", (256, 256))
        q_shape, k_shape = (b, sq, h, d), (b, sk, hk, d)
    q, do = (torch.randn(q_shape).to(dtype) for _ in range(2))
    k, v = (torch.randn(k_shape).to(dtype) for _ in range(2))
    do = put(do, device)
    q, k, v = (put(x, device).requires_grad_() for x in (q, k, v))
    if "lengths" in case:
        ends = [torch.tensor([0, *x], dtype=torch.int32).cumsum(0, dtype=torch.int32) for x in case["lengths"]]
        cu_q, cu_k = (put(x, device) for x in ends)
        o, lse = interface.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            max_seqlen_q=max(q_lengths),
            max_seqlen_k=max(k_lengths),
            causal=causal,
            deterministic=deterministic,
            return_lse=True,
        )
    else:
        o, lse = interface.flash_attn_func(q, k, v, causal=causal, deterministic=deterministic, return_lse=True)
    o.backward(do)
    if device == "cuda":
        torch.cuda.synchronize()
    results = {"o": o, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return {key: value.detach().cpu() for key, value in results.items()}


def put(tensor: torch.Tensor, device: str) -> torch.Tensor:
    return tensor.cuda() if device == "cuda" else tensor
