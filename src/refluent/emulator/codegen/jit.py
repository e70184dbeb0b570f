"""From a parsed kernel to callable native code, with object code cached on disk.

The code holds no addresses: runtime functions, parameters and tables are reached through the warp's record. So an
object file is good in every process, and is kept under a key made of the kernel's text, this package's own source,
LLVM's version and the host CPU with its features.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from refluent.emulator import codegen
from refluent.emulator.codegen import module
from refluent.emulator.codegen.emitter import Options
from refluent.emulator.codegen.flow import Block, Flow
from refluent.emulator.ptx import Kernel
from refluent.emulator.state import RegisterLayout, Warp

CACHE_BYTES = 512 << 20
OPT_LEVEL = 0
_LOCK = threading.Lock()
_Run = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_uint64)


def _digest_sources() -> bytes:
    """Everything that the generated code depends on in this package."""
    digest = hashlib.sha256()
    folder = Path(codegen.__file__).parent
    for path in [
        *sorted(folder.glob("*.py")),
        *(folder.parent / name for name in ("state.py", "ptx.py", "ptx_parser.py")),
    ]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.digest()


# Taken at import: later the files may no longer be those that this process runs.
SOURCE_DIGEST = _digest_sources()


@dataclass
class CompiledKernel:
    """Native code of one kernel. `run(warp.address)` runs a warp until its next event and says why it stopped."""

    kernel: Kernel
    flow: Flow
    layout: RegisterLayout
    run_address: int
    run: Any
    seconds: dict[str, float]  # translate, compile (0 when the object came from the cache), load
    cached: bool
    engine: Any = field(repr=False)

    @property
    def blocks(self) -> list[Block]:
        return self.flow.blocks

    def prepare(self, count: int) -> tuple[list[Warp], np.ndarray]:
        """`count` warps at the start of the kernel, and their common block counters, (blocks,) uint64."""
        counters = np.zeros(len(self.blocks), np.uint64)
        return [Warp(self.kernel, counters) for _ in range(count)], counters

    def executed(self, counters: np.ndarray) -> np.ndarray:
        """(instructions,) uint64: how often a warp executed each, from block counters."""
        times = np.zeros(len(self.kernel.instructions), np.uint64)
        for block in self.blocks:
            times[block.start : block.end] += counters[block.index]
        return times


def compile_kernel(
    kernel: Kernel, options: Options | None = None, *, cache_dir: Path | None = None, use_cache: bool = True
) -> CompiledKernel:
    """Translate and compile. Raises UnsupportedPTX when an instruction is not known.

    `cache_dir` defaults to refluent/emulator in the user's cache directory.
    """
    options = options or Options()
    start = time.perf_counter()
    flow = module.analyse(kernel)
    key = _key(kernel, flow, options)
    directory = cache_dir or default_cache()
    data = _read(directory, key) if use_cache else None
    cached = data is not None
    translated = compiled = time.perf_counter()
    with _LOCK:
        if data is None:
            text = module.generate(kernel, flow, options)
            translated = time.perf_counter()
            data = _to_object(text)
            compiled = time.perf_counter()
            if use_cache:
                _write(directory, key, data)
        engine = _engine()
        engine.add_object_file(llvm.ObjectFileRef.from_data(data))
        engine.finalize_object()
        address = engine.get_function_address("run")
    end = time.perf_counter()
    seconds = {"translate": translated - start, "compile": compiled - translated, "load": end - compiled}
    layout = RegisterLayout.of(kernel)
    return CompiledKernel(kernel, flow, layout, address, _Run(address), seconds, cached, engine)


# LLVM


@cache
def _target() -> tuple[Any, str, str]:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    check_host(llvm.get_default_triple(), features)
    return llvm.Target.from_default_triple(), llvm.get_host_cpu_name(), features.flatten()


def check_host(triple: str, features: Mapping[str, bool]) -> None:
    """Half precision and fused multiply-add must be instructions: elsewhere LLVM calls functions nobody provides."""
    missing = [name for name in ("avx2", "fma", "f16c") if not features.get(name)]
    if triple.startswith("x86_64") and missing:
        raise RuntimeError(
            f"the emulator needs a CPU with AVX2, FMA and F16C (x86-64-v3); this one has no {', '.join(missing)}"
        )


def _machine() -> Any:
    target, cpu, features = _target()
    return target.create_target_machine(cpu=cpu, features=features, opt=OPT_LEVEL, reloc="pic", jit=True)


def _to_object(text: str) -> bytes:
    machine = _machine()
    parsed = llvm.parse_assembly(text)
    parsed.verify()
    return bytes(machine.emit_object(parsed))


def _engine() -> Any:
    _target()
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())


# the cache


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "refluent" / "emulator"


def _key(kernel: Kernel, flow: Flow, options: Options) -> str:
    _, cpu, features = _target()
    digest = hashlib.sha256(SOURCE_DIGEST)
    facts = (llvm.llvm_version_info, cpu, features, OPT_LEVEL, sorted(vars(options).items()), kernel.target)
    digest.update(repr(facts).encode())
    for variable in kernel.variables.values():
        digest.update(repr((variable.name, variable.space, variable.offset, variable.index, variable.size)).encode())
    for block in flow.blocks:
        digest.update(repr((block.start, block.targets, block.follows, block.reconvergence, block.live_out)).encode())
    digest.update(kernel.digest_text.encode())
    return digest.hexdigest()


def _read(directory: Path, key: str) -> bytes | None:
    """A cached object; its checksum is its first 32 bytes, so that a damaged file is just compiled again."""
    path = directory / f"{key}.o"
    try:
        data = path.read_bytes()
        if path.stat().st_uid != os.getuid() or hashlib.sha256(data[32:]).digest() != data[:32]:
            return None
        os.utime(path)
    except OSError:
        return None
    return data[32:]


def _write(directory: Path, key: str, data: bytes) -> None:
    """Written aside and renamed, so that readers see all or nothing. Without a writable cache, nothing is kept."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=directory, suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(data).digest() + data)
        os.replace(temporary, directory / f"{key}.o")
        _trim(directory)
    except OSError:
        return


def _trim(directory: Path) -> None:
    """Drop the objects used longest ago until the cache fits; another process may drop them first."""
    files = []
    for path in directory.glob("*.o"):
        try:
            stat = path.stat()
        except OSError:
            continue
        files.append((stat.st_mtime, stat.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= CACHE_BYTES:
            return
        path.unlink(missing_ok=True)
        total -= size
