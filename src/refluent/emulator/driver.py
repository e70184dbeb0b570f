"""The CuTe DSL's hooks: what it compiles inside the context is for the emulated chip, what it launches is captured.

Everything here is specific to one version of nvidia-cutlass-dsl and refuses others. The DSL's own pipeline runs
unchanged up to three points: the MLIR pipeline string gets a place to leave the PTX, the execution engine gets the
stand-ins of cudart.py for the CUDA runtime, and a finished host call runs the launches that it captured.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from refluent.emulator import cudart
from refluent.emulator.errors import DriverError
from refluent.emulator.handed import HandedIn
from refluent.emulator.patches import Patches

SUPPORTED_DSL = ("4.8.1",)
_TVM_ENTRY = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)
_DUMP = re.compile(r"dump-ptx-path='([^']*)'")


class Session(Protocol):
    """What the hooks need of the active context."""

    arch: str
    line_info: bool
    handed: HandedIn

    def finish_call(self) -> None:
        """Raise what went wrong while capturing, else run what was captured."""

    def abandon_call(self) -> None:
        """Forget what was captured; raise what went wrong while capturing, if anything did."""


def check_dsl_version() -> None:
    try:
        version = importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        raise DriverError(
            f"the emulator needs the CuTe DSL: pip install nvidia-cutlass-dsl=={SUPPORTED_DSL[-1]}"
        ) from None
    if version not in SUPPORTED_DSL:
        raise DriverError(
            f"nvidia-cutlass-dsl {version} is installed; the emulator knows the host code of "
            f"{', '.join(SUPPORTED_DSL)} only (its TMA descriptors and runtime symbols may differ)"
        )


class HostFunction:
    """A compiled host function: callable inside a context of its architecture, and nowhere else."""

    def __init__(self, function: Any, arch: str) -> None:
        self._function = function
        self.arch = arch

    @property
    def restype(self) -> Any:
        return self._function.restype

    @restype.setter
    def restype(self, value: Any) -> None:
        self._function.restype = value

    def __call__(self, *args: Any) -> Any:
        check_callable(self.arch)
        return self._function(*args)


class Engine:
    """An execution engine whose functions are callable inside a context of its architecture, and nowhere else."""

    def __init__(self, engine: Any, arch: str) -> None:
        self._engine = engine
        self.arch = arch

    def lookup(self, name: str) -> HostFunction:
        return HostFunction(self._engine.lookup(name), self.arch)

    def raw_lookup(self, name: str) -> Any:
        check_callable(self.arch)
        return self._engine.raw_lookup(name)


def check_callable(arch: str | None) -> None:
    """Refuse, in words, to call a function compiled for `arch` (None: outside the emulator) in the present context."""
    sink = cudart.active()
    if arch is None:
        raise DriverError("this function was compiled outside emulator.gpu(...); compile it inside to run it here")
    if sink is None:
        raise DriverError(
            f"this function was compiled inside emulator.gpu({arch!r}) and runs inside such a context only"
        )
    if sink.arch != arch:
        raise DriverError(f"this function was compiled for {arch}; the emulated chip is {sink.arch}")


def install(session: Session, patches: Patches) -> None:
    """Put every hook in place; `patches` takes them away again."""
    check_dsl_version()
    _install_compiler(session, patches)
    _install_executor(session, patches)
    _install_arguments(session, patches)
    if _has_tvm_ffi():
        _install_tvm_ffi(session, patches)


def _has_tvm_ffi() -> bool:
    return importlib.util.find_spec("tvm_ffi") is not None


def _install_compiler(session: Session, patches: Patches) -> None:
    from cutlass.base_dsl import compile_backend, compiler, dsl, env_manager

    original_compile = compiler.Compiler.compile
    original_jit = compiler.Compiler.jit
    original_hash = dsl.BaseDSL.get_module_hash
    original_options = compiler.CompileOptions.apply_envar_settings

    def compile_keeping_ptx(self: Any, module: Any, pipeline: str, *args: Any, **kwargs: Any) -> Any:
        with tempfile.TemporaryDirectory(prefix="refluent-ptx-") as folder:
            pipeline, stem = _with_dump_path(pipeline, folder)
            compiled = original_compile(self, module, pipeline, *args, **kwargs)
            _remember_image(compiled, stem, session.arch)
        return compiled

    def options(self: Any, *args: Any) -> None:
        original_options(self, *args)
        if session.line_info:
            self.options[compiler.GenerateLineInfo].value = True

    def jit(self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        engine = original_jit(self, module, *args, **kwargs)
        cudart.register_symbols(engine)
        _register_tvm_ffi_symbols(engine, module)
        return Engine(engine, session.arch)

    def module_hash(self: Any, *args: Any) -> str:
        # The DSL's own cache of compiled functions must not mix emulated and real ones.
        return f"{original_hash(self, *args)}-emulated"

    patches.set(compiler.Compiler, "compile", compile_keeping_ptx)
    patches.set(compiler.Compiler, "jit", jit)
    patches.set(compiler.CompileOptions, "apply_envar_settings", options)
    patches.set(dsl.BaseDSL, "get_module_hash", module_hash)
    # Files of earlier processes hold no PTX.
    patches.set(compile_backend, "load_cache_from_path", lambda *args, **kwargs: None)
    patches.set(compile_backend, "dump_cache_to_path", lambda *args, **kwargs: None)
    patches.set(
        env_manager.EnvironmentVarManager, "arch", property(lambda self: session.arch, lambda self, value: None)
    )


def _with_dump_path(pipeline: str, folder: str) -> tuple[str, str]:
    """The pipeline that also writes its PTX, and the path (without suffix) that it writes to."""
    asked = _DUMP.search(pipeline)
    if asked:
        return pipeline, asked[1]
    end = pipeline.rindex("})")
    stem = f"{folder}/module"
    return f"{pipeline[:end]} dump-ptx-path='{stem}'{pipeline[end:]}", stem


def _remember_image(module: Any, stem: str, arch: str) -> None:
    """Tie the device code embedded in a compiled module to the PTX that was written while it was compiled."""
    fatbins = embedded_fatbins(module)
    if not fatbins:
        return  # a host function without kernels
    path = Path(stem)
    written = sorted(path.parent.glob(f"{path.name}.*ptx"))
    if len(fatbins) != 1 or len(written) != 1:
        raise DriverError(
            f"a module with {len(fatbins)} device images and {len(written)} PTX files; the emulator expects one of each"
        )
    cudart.register_image(fatbins[0], written[0].read_text(), arch)


def embedded_fatbins(module: Any) -> list[bytes]:
    """The constants of an LLVM-dialect module that hold device code."""
    from cutlass._mlir import ir

    found = []
    for op in module.body.operations:
        if op.operation.name != "llvm.mlir.global" or "value" not in op.attributes:
            continue
        value = op.attributes["value"]
        if isinstance(value, ir.StringAttr):
            raw = value.value_bytes
            if raw[:4] == cudart.FATBIN_MAGIC.to_bytes(4, "little"):
                found.append(bytes(raw))
    return found


def _install_executor(session: Session, patches: Patches) -> None:
    from cutlass.base_dsl import jit_executor
    from cutlass.cute import runtime
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

    original_run = jit_executor.JitExecutor.run_compiled_program
    original_load = CudaDialectJitCompiledFunction._load_cuda_library

    def run(self: Any, exe_args: list[Any]) -> Any:
        check_callable(getattr(self.capi_func, "arch", None))
        return run_call(session, lambda: original_run(self, exe_args))

    def load(self: Any) -> list[Any]:
        check_callable(getattr(self.engine, "arch", None))
        try:
            original_load(self)
        except Exception:
            session.abandon_call()
            raise
        return []  # no library of the real driver to unload later

    def load_module(*args: Any, **kwargs: Any) -> Any:
        raise DriverError(
            "object files of compiled kernels hold no PTX: the emulator cannot load them, compile instead"
        )

    patches.set(jit_executor.JitExecutor, "run_compiled_program", run)
    patches.set(CudaDialectJitCompiledFunction, "_load_cuda_library", load)
    patches.set(CudaDialectJitCompiledFunction, "num_devices", property(lambda self: 1))
    patches.set(runtime, "load_module", load_module)


def run_call(session: Session, call: Callable[[], Any]) -> Any:
    """Run a host function, then the kernels that it launched. What it left behind is gone afterwards in any case."""
    try:
        result = call()
    except BaseException:
        session.abandon_call()
        raise
    session.finish_call()
    return result


def _install_arguments(session: Session, patches: Patches) -> None:
    """Learn of every tensor and pointer that is turned into an argument of host code."""
    from cutlass.base_dsl import dsl, jit_executor
    from cutlass.cute import runtime

    original_execution_args = jit_executor.ExecutionArgs.generate_execution_args
    original_types = dsl.BaseDSL.generate_mlir_function_types
    original_init = runtime._Tensor.__init__
    original_tensor = runtime._Tensor.__c_pointers__
    original_pointer = runtime._Pointer.__c_pointers__
    original_raw = jit_executor._RuntimePointerArg.__c_pointers__

    def execution_args(self: Any, *args: Any, **kwargs: Any) -> Any:
        session.handed.clear()
        return original_execution_args(self, *args, **kwargs)

    def function_types(self: Any, *args: Any, **kwargs: Any) -> Any:
        session.handed.clear()
        return original_types(self, *args, **kwargs)

    def init(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, session.handed.relabelled(tensor), *args, **kwargs)
        self._emulated_source = tensor

    def tensor_pointers(self: Any) -> Any:
        session.handed.add_runtime_tensor(self)
        return original_tensor(self)

    def pointer_pointers(self: Any) -> Any:
        session.handed.add_pointer(int(self._pointer))
        return original_pointer(self)

    def raw_pointers(self: Any) -> Any:
        session.handed.add_pointer(self._desc.value or 0)
        return original_raw(self)

    patches.set(jit_executor.ExecutionArgs, "generate_execution_args", execution_args)
    patches.set(dsl.BaseDSL, "generate_mlir_function_types", function_types)
    patches.set(runtime._Tensor, "__init__", init)
    patches.set(runtime._Tensor, "__c_pointers__", tensor_pointers)
    patches.set(runtime._Pointer, "__c_pointers__", pointer_pointers)
    patches.set(jit_executor._RuntimePointerArg, "__c_pointers__", raw_pointers)


def _register_tvm_ffi_symbols(engine: Any, module: Any) -> None:
    """libtvm_ffi's C functions: Python loads that library privately, so the engine does not find them by itself."""
    names = [op.attributes["sym_name"].value for op in module.body.operations if op.operation.name == "llvm.func"]
    wanted = [name for name in names if name.startswith("TVMFFI")]
    if wanted:
        library = _tvm_ffi_library()
        for name in wanted:
            engine.raw_register_runtime(name, ctypes.cast(getattr(library, name), ctypes.c_void_p))


def _tvm_ffi_library() -> ctypes.CDLL:
    from tvm_ffi import libinfo

    return ctypes.CDLL(libinfo.find_libtvm_ffi())


def _install_tvm_ffi(session: Session, patches: Patches) -> None:
    import tvm_ffi
    from cutlass.cutlass_dsl import tvm_ffi_provider as provider

    base = provider.TVMFFIJitCompiledFunctionBase

    def create(self: Any) -> Any:
        """The function from the first engine, whose symbols are ours, instead of a second one from an object file."""
        if self.engine is None:
            return None
        self._emulated_arch = session.arch
        packed = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.engine.raw_lookup("__tvm_ffi_" + self.function_name))
        entry = _tvm_entry(packed, session.arch)
        address = ctypes.cast(entry, ctypes.c_void_p).value or 0
        return tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=(self.engine, entry))

    def calling(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            check_callable(getattr(self, "_emulated_arch", None))
            session.handed.clear()
            args = tuple(session.handed.converted(arg) for arg in args)
            kwargs = {name: session.handed.converted(arg) for name, arg in kwargs.items()}
            return run_call(session, lambda: original(self, *args, **kwargs))

        return call

    patches.set(base, "_create_tvm_ffi_function", create)
    for cls in (provider.TVMFFIJitCompiledFunction, provider.TVMFFIJitCompiledFunctionWithKwargs):
        patches.set(cls, "__call__", calling(cls.__call__))


def _tvm_entry(packed: Any, arch: str) -> Any:
    """int (void* self, const TVMFFIAny* args, int32 n, TVMFFIAny* result), over the engine's packed void** form."""

    def entry(handle: int, args: int, count: int, result: int) -> int:
        try:
            check_callable(arch)
        except DriverError as error:
            _tvm_ffi_library().TVMFFIErrorSetRaisedFromCStr(b"RuntimeError", str(error).encode())
            return -1
        values = (ctypes.c_void_p(handle), ctypes.c_void_p(args), ctypes.c_int32(count), ctypes.c_void_p(result))
        status = ctypes.c_int32(-1)
        slots = (ctypes.c_void_p * 5)(*(ctypes.addressof(v) for v in values), ctypes.addressof(status))
        packed(ctypes.addressof(slots))
        return status.value

    return _TVM_ENTRY(entry)
