"""Compiled variants: from memory or compiled now."""

from __future__ import annotations

from functools import lru_cache

from refluent.gpu.launch.variant import Variant


@lru_cache
def compiled_backward(variant: Variant):
    from refluent.gpu.launch.entry import compile_backward

    return compile_backward(variant)
