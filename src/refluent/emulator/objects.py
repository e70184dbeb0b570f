"""Compiled host functions as objects, with the PTX of their kernels: loaded again without the DSL's compiler.

The object is what TVM-FFI functions export for a real device. Here its undefined symbols, the CUDA runtime's, resolve
to the stand-ins of cudart.py, and its device code is found by content, as in a function that was compiled just now.
"""

from __future__ import annotations

import ctypes
import itertools
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from refluent.emulator import cudart, driver
from refluent.emulator.errors import DriverError

_PREFIX = "__tvm_ffi_"
_LIBRARY_SYMBOLS = (  # what TVM-FFI entries call beside the CUDA runtime
    "TVMFFIEnvGetStream",
    "TVMFFIErrorSetRaisedFromCStr",
    "TVMFFIErrorSetRaisedFromCStrParts",
    "CuteDSLRT_TVMFFISetRaisedCudaError",
    "CuteDSLRT_TVMFFISetRaisedCudaLaunchError",
)
_serial = itertools.count()


def export(compiled: Any, name: str) -> tuple[bytes, str]:
    """The object, its entry named `name`, and the PTX of a TVM-FFI function that was compiled in a context."""
    fatbins = driver.embedded_fatbins(compiled.ir_module)
    if len(fatbins) != 1:
        raise DriverError(f"a function with {len(fatbins)} device images; the emulator exports exactly one")
    with tempfile.TemporaryDirectory(prefix="refluent-object-") as folder:
        path = Path(folder) / "function.o"
        compiled.export_to_c(str(path), function_name=name)
        return path.read_bytes(), cudart.image_of(fatbins[0]).ptx


def load(code: bytes, ptx: str, name: str, arch: str) -> LoadedFunction:
    """The function of an object that `export` made, callable in contexts of `arch`."""
    import tvm_ffi

    for fatbin in _fatbins(code):
        cudart.register_image(fatbin, ptx, arch)
    library = _link(code, _PREFIX + name)
    function = tvm_ffi.Function.__from_extern_c__(library[_PREFIX + name], keep_alive_object=library)
    return LoadedFunction(function, arch)


class LoadedFunction:
    """A host function that runs its launches in the emulator."""

    def __init__(self, function: Any, arch: str) -> None:
        self._function = function
        self.arch = arch

    def __call__(self, *args: Any) -> Any:
        driver.check_callable(self.arch)
        session: Any = cudart.active()
        session.handed.clear()
        args = tuple(session.handed.converted(arg) for arg in args)
        return driver.run_call(session, lambda: self._function(*args))


def _fatbins(code: bytes) -> list[bytes]:
    """The device code embedded in an object."""
    magic, found, at = cudart.FATBIN_MAGIC.to_bytes(4, "little"), [], 0
    while (at := code.find(magic, at)) >= 0:
        end = at + cudart.fatbin_bytes(code[at : at + 16])
        found.append(code[at:end])
        at = end
    if len(found) != 1:
        raise DriverError(f"an object with {len(found)} device images; the emulator expects exactly one")
    return found


@cache
def _jit() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    return llvm.create_lljit_compiler(machine)


def _link(code: bytes, symbol: str) -> Any:
    import llvmlite.binding as llvm

    builder = llvm.JITLibraryBuilder().add_object_img(code).export_symbol(symbol)
    for name, address in _runtime_symbols().items():
        builder.import_symbol(name, address)
    return builder.link(_jit(), f"refluent-{next(_serial)}")


@cache
def _runtime_symbols() -> dict[str, int]:
    """Everything that an exported object may leave undefined: name -> address."""
    from cutlass.runtime import find_runtime_libraries

    symbols = {name: _address(callback) for name, callback in cudart.callbacks().items()}
    libraries = [ctypes.CDLL(path) for path in find_runtime_libraries(enable_tvm_ffi=True)]
    for name in _LIBRARY_SYMBOLS:
        symbols[name] = next(_address(getattr(library, name)) for library in libraries if hasattr(library, name))
    return symbols


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
