"""What this machine's CPU is good at; decides between ways that give the same numbers."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch


@functools.cache
def fast_bfloat16() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware (oneDNN; several times its float32 rate)."""
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


@functools.cache
def onednn_beats_mkl() -> bool:
    """Whether float32 products run faster in oneDNN than in MKL, which torch.bmm and torch's own kernels use.

    MKL keeps to AVX2 on AMD's processors: on a Zen 5 core 107 GFLOP/s against oneDNN's 230. On Intel's (Sapphire
    Rapids) MKL is 1.1 times as fast, and elementwise passes over tiles cost more than in a fused kernel.
    """
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return _vendor_is_amd() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _vendor_is_amd() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else platform.processor()
    return "AuthenticAMD" in text
