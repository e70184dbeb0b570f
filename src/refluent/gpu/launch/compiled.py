"""A variant's host function: from memory, else from disk, else compiled now and kept in both."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from refluent.gpu import cache
from refluent.gpu.cache import Artifact
from refluent.gpu.launch.variant import Variant

ENTRY = "refluent_backward"
_functions: dict[tuple[Variant, str], Callable[..., Any]] = {}
_compiling = threading.Lock()  # the DSL compiles for one thread at a time


def compiled_backward(variant: Variant, emulated: str = "") -> Callable[..., Any]:
    """The function that takes entry.BackwardEntry's arguments as torch tensors and numbers, without the stream.

    `emulated`: "" for a device; else it runs inside emulator.gpu(variant.arch), which has to be open, and this says
    what of that context's settings the code depends on.
    """
    function = _functions.get((variant, emulated))
    if function is None:
        with _compiling:
            function = _functions.get((variant, emulated))
            if function is None:
                function = _functions[variant, emulated] = _find(variant, emulated)
    return function


def _find(variant: Variant, emulated: str) -> Callable[..., Any]:
    store = cache.active()
    if store is None or cache.sources_changed():
        return _load(_build(variant, emulated), variant, emulated)
    key = cache.key_of({"entry": ENTRY, "variant": asdict(variant), "emulated": emulated})
    artifact = store.load(key)
    if artifact is None:
        with store.lock(key):
            artifact = store.load(key)  # another process may have been faster
            if artifact is None:
                artifact = _build(variant, emulated)
                if not cache.sources_changed():
                    store.save(key, artifact, ", ".join(filter(None, (variant.name, emulated))))
    return _load(artifact, variant, emulated)


def _build(variant: Variant, emulated: str) -> Artifact:
    from refluent.gpu.launch.entry import compile_backward

    compiled = compile_backward(variant)
    if emulated:
        from refluent.emulator import objects

        return Artifact(*objects.export(compiled, ENTRY))
    with tempfile.TemporaryDirectory(prefix="refluent-") as folder:
        path = Path(folder) / "backward.o"
        compiled.export_to_c(str(path), function_name=ENTRY)
        return Artifact(path.read_bytes())


def _load(artifact: Artifact, variant: Variant, emulated: str) -> Callable[..., Any]:
    if emulated:
        from refluent.emulator import objects

        return objects.load(artifact.code, artifact.ptx, ENTRY, variant.arch)
    from cutlass.cute.runtime import load_module

    with tempfile.TemporaryDirectory(prefix="refluent-") as folder:
        path = Path(folder) / "backward.o"
        path.write_bytes(artifact.code)
        module = load_module(str(path), enable_tvm_ffi=True)
    function: Callable[..., Any] = getattr(module, ENTRY)
    return function
