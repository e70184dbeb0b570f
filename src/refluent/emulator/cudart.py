"""Stand-ins for the CUDA runtime functions that the DSL's compiled host code calls.

The host code reaches the runtime through symbols of its own (`_cudaLaunchKernelEx`, ...), which the execution engine
resolves by name: registering these callbacks under those names is all it takes. Code is found by content: the fatbin
that the host code loads is the one that the compiler embedded, and `register_image` was told its PTX. Handles are
numbers that mean something here only; they stay valid for the life of the process, as compiled functions do.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from refluent.emulator.errors import DriverError
from refluent.emulator.launch import Dim3, LaunchRequest

SUCCESS, INVALID_VALUE, NO_DEVICE, NOT_SUPPORTED, UNKNOWN = 0, 1, 100, 801, 999
MAX_SHARED_OPTIN = 232448  # bytes: 227 KB on compute capability 9.0 and 10.0
ATTRIBUTE_SHARED_OPTIN = 97
FATBIN_MAGIC = 0xBA55ED50
LAUNCH_ATTRIBUTE_BYTES = 72
ATTRIBUTE_IGNORE, ATTRIBUTE_COOPERATIVE, ATTRIBUTE_CLUSTER, ATTRIBUTE_PROGRAMMATIC = 0, 2, 4, 6

_ENTRY = re.compile(r"\.entry\s+([\w$%]+)\s*\(([^)]*)\)", re.S)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([bsuf])(\d+)(?:\s+\.ptr[^,]*?)?\s+[\w$%]+(?:\[(\d+)\])?")


class LaunchSink(Protocol):
    """Who receives launches while the emulator is active."""

    arch: str

    def capture(self, launch: LaunchRequest) -> None: ...

    def fail(self, error: Exception) -> None: ...


@dataclass(frozen=True)
class Image:
    """A compiled module: its PTX, and the size in bytes of every parameter of every kernel in it."""

    ptx: str
    arch: str
    parameters: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Kernel:
    image: Image
    name: str


_images: dict[bytes, Image] = {}
_handles: list[Any] = []
_sink: LaunchSink | None = None
_FIRST_HANDLE = 0x1000


def activate(sink: LaunchSink | None) -> None:
    """Launches go to `sink` from now on; None: the emulator is not active."""
    global _sink
    _sink = sink


def active() -> LaunchSink | None:
    return _sink


def parameter_sizes(ptx: str) -> dict[str, tuple[int, ...]]:
    """Bytes of each parameter of each .entry, in order."""
    sizes = {}
    for name, text in _ENTRY.findall(ptx):
        found = _PARAM.findall(text)
        if len(found) != text.count(".param"):
            raise DriverError(f"the parameter list of kernel {name} is not understood: {text.strip()!r}")
        sizes[name] = tuple(int(bits) // 8 * int(count or 1) for _, _, bits, count in found)
    return sizes


def fatbin_key(raw: bytes) -> bytes:
    return hashlib.sha256(raw[: fatbin_bytes(raw)]).digest()


def fatbin_bytes(raw: bytes) -> int:
    """Size of the fatbin container at the start of raw (only its header is looked at)."""
    magic, _, header, size = struct.unpack_from("<IHHQ", raw)
    if magic != FATBIN_MAGIC:
        raise DriverError(f"device code that is not a fatbin (it starts with {magic:#x})")
    return int(header + size)


def register_image(fatbin: bytes, ptx: str, arch: str) -> None:
    _images[fatbin_key(fatbin)] = Image(ptx, arch, parameter_sizes(ptx))


def image_of(fatbin: bytes) -> Image:
    """The module that `register_image` was told of."""
    image = _images.get(fatbin_key(fatbin))
    if image is None:
        raise DriverError("device code whose PTX the emulator never saw: compile it inside emulator.gpu(...)")
    return image


def _new_handle(item: Any) -> int:
    _handles.append(item)
    return _FIRST_HANDLE + len(_handles) - 1


def _lookup(handle: int | None, kind: type) -> Any:
    index = (handle or 0) - _FIRST_HANDLE
    item = _handles[index] if 0 <= index < len(_handles) else None
    if not isinstance(item, kind):
        raise DriverError(f"{handle!r} is not the handle of a {kind.__name__.lower()} that the emulator loaded")
    return item


def _store(address: int, kind: Any, value: int) -> None:
    kind.from_address(address).value = value


def _library_load_data(library: int, code: int, *_: Any) -> int:
    raw = ctypes.string_at(code, fatbin_bytes(ctypes.string_at(code, 16)))
    _store(library, ctypes.c_uint64, _new_handle(image_of(raw)))
    return SUCCESS


def _library_get_kernel(kernel: int, library: int, name: bytes) -> int:
    image = _lookup(library, Image)
    text = name.decode()
    if text not in image.parameters:
        raise DriverError(f"no kernel {text} in a library of {', '.join(image.parameters)}")
    _store(kernel, ctypes.c_uint64, _new_handle(Kernel(image, text)))
    return SUCCESS


def _kernel_get_attribute(out: int, attribute: int, kernel: int, device: int) -> int:
    # The host code asks for the static shared memory only, to add to it; the PTX has none (all of it is dynamic).
    _store(out, ctypes.c_int32, 0)
    return SUCCESS


def _device_get_attribute(out: int, attribute: int, device: int) -> int:
    if attribute != ATTRIBUTE_SHARED_OPTIN:
        raise DriverError(f"host code asks for device attribute {attribute}, which the emulator does not know")
    _store(out, ctypes.c_int32, MAX_SHARED_OPTIN)
    return SUCCESS


def _get_zero(out: int) -> int:
    _store(out, ctypes.c_int32, 0)
    return SUCCESS


def _get_one(out: int) -> int:
    _store(out, ctypes.c_int32, 1)
    return SUCCESS


def _nothing(*_: Any) -> int:
    return SUCCESS


def _launch_kernel(config: int, function: int, arguments: int) -> int:
    kernel = _lookup(function, Kernel)
    grid_block = (ctypes.c_uint32 * 6).from_address(config)
    shared_bytes, stream, attributes = (ctypes.c_uint64 * 3).from_address(config + 24)
    count = ctypes.c_uint32.from_address(config + 48).value
    cluster, cooperative, programmatic = _launch_attributes(attributes, count)
    sizes = kernel.image.parameters[kernel.name]
    pointers = (ctypes.c_uint64 * len(sizes)).from_address(arguments) if sizes else ()
    request = LaunchRequest(
        ptx=kernel.image.ptx,
        kernel=kernel.name,
        arch=kernel.image.arch,
        grid=(grid_block[0], grid_block[1], grid_block[2]),
        block=(grid_block[3], grid_block[4], grid_block[5]),
        cluster=cluster,
        shared_bytes=shared_bytes,
        params=tuple(ctypes.string_at(p, size) for p, size in zip(pointers, sizes)),
        stream=stream,
        programmatic=programmatic,
        cooperative=cooperative,
    )
    check_launch(request)
    assert _sink is not None  # _guarded looked
    _sink.capture(request)
    return SUCCESS


def _launch_attributes(address: int, count: int) -> tuple[Dim3, bool, bool]:
    """(cluster, cooperative, programmatic) from an array of CUlaunchAttribute."""
    cluster, cooperative, programmatic = (1, 1, 1), False, False
    for i in range(count):
        words = (ctypes.c_uint32 * (LAUNCH_ATTRIBUTE_BYTES // 4)).from_address(address + i * LAUNCH_ATTRIBUTE_BYTES)
        if words[0] == ATTRIBUTE_CLUSTER:
            cluster = (words[2], words[3], words[4])
        elif words[0] == ATTRIBUTE_COOPERATIVE:
            cooperative = bool(words[2])
        elif words[0] == ATTRIBUTE_PROGRAMMATIC:
            programmatic = bool(words[2])
        elif words[0] != ATTRIBUTE_IGNORE:
            raise DriverError(f"launch attribute {words[0]} is not known to the emulator")
    return cluster, cooperative, programmatic


def check_launch(request: LaunchRequest) -> None:
    """What cuLaunchKernelEx would refuse (CUDA programming guide, technical specifications of 9.0 and 10.0)."""
    where = f"launch of {request.kernel}: "
    if min(request.grid) < 1 or min(request.block) < 1 or min(request.cluster) < 1:
        raise DriverError(f"{where}grid {request.grid}, block {request.block} and cluster must be positive")
    if request.threads > 1024 or request.block[2] > 64:
        raise DriverError(f"{where}block {request.block} exceeds 1024 threads or 64 in z")
    if request.grid[0] >= 1 << 31 or max(request.grid[1:]) > 65535:
        raise DriverError(f"{where}grid {request.grid} exceeds (2^31 - 1, 65535, 65535)")
    size = request.cluster[0] * request.cluster[1] * request.cluster[2]
    if size > 16:
        raise DriverError(f"{where}cluster {request.cluster} has {size} CTAs; 16 are the most")
    if any(g % c for g, c in zip(request.grid, request.cluster)):
        raise DriverError(f"{where}grid {request.grid} is not a multiple of the cluster {request.cluster}")
    if request.shared_bytes > MAX_SHARED_OPTIN:
        raise DriverError(f"{where}{request.shared_bytes} bytes of shared memory; {MAX_SHARED_OPTIN} are the most")


def _init_library_once(state: int, init: int, load: int, set_error: int) -> int:
    """The TVM-FFI entry's lazy load: cuda_init(void**) then cuda_load_to_device(void**, device), once a module."""
    slot = ctypes.c_uint64.from_address(state)
    if slot.value:
        return SUCCESS
    library = ctypes.c_void_p()
    _handles.append(library)  # the module keeps its address
    status = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(init)(ctypes.addressof(library))
    if status == SUCCESS:
        entry = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32)(load)
        status = entry(ctypes.addressof(library), 0)
    if status == SUCCESS:
        slot.value = ctypes.addressof(library)
    else:
        raised = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(set_error)
        raised(b"RuntimeError", f"loading device code failed with CUDA error {status}".encode())
    return int(status)


def _guarded(name: str, function: Callable[..., int]) -> Callable[..., int]:
    """An exception cannot cross the host code: the sink keeps it, the host code gets an error code."""

    def call(*args: Any) -> int:
        if _sink is None:
            return NO_DEVICE
        try:
            return function(*args)
        except Exception as error:
            _sink.fail(error)
            return NOT_SUPPORTED

    call.__name__ = name
    return call


def _refuse(name: str) -> Callable[..., int]:
    def call(*_: Any) -> int:
        raise DriverError(f"host code calls {name[1:]}, which the emulator does not stand in for")

    return call


_P, _I, _U, _Z, _S = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_char_p
_SYMBOLS: dict[str, tuple[Callable[..., int], tuple[Any, ...]]] = {
    "_cudaLibraryLoadData": (_library_load_data, (_P, _P, _P, _P, _U, _P, _P, _U)),
    "_cudaLibraryGetKernel": (_library_get_kernel, (_P, _P, _S)),
    "_cuKernelGetAttribute": (_kernel_get_attribute, (_P, _I, _P, _I)),
    "_cudaDeviceGetAttribute": (_device_get_attribute, (_P, _I, _I)),
    "_cudaGetDevice": (_get_zero, (_P,)),
    "_cudaGetDeviceCount": (_get_one, (_P,)),
    "_cudaSetDevice": (_nothing, (_I,)),
    "_cudaKernelSetAttributeForDevice": (_nothing, (_P, _I, _I, _I)),
    "_cudaFuncSetAttribute": (_nothing, (_P, _I, _I)),
    "_cudaLaunchKernelEx": (_launch_kernel, (_P, _P, _P)),
    "_cudaDeviceSynchronize": (_nothing, ()),
    "_cudaStreamSynchronize": (_nothing, (_P,)),
    "cuda_dialect_init_library_once": (_init_library_once, (_P, _P, _P, _P)),
}
_REFUSED = (
    "_cudaLaunchKernel _cudaOccupancyMaxActiveBlocksPerMultiprocessor _cudaMalloc _cudaMallocAsync _cudaMallocHost "
    "_cudaMallocManaged _cudaFree _cudaFreeAsync _cudaFreeHost _cudaMemcpy _cudaMemcpyAsync _cudaMemset "
    "_cudaMemsetAsync _cudaStreamCreate _cudaStreamDestroy _cudaStreamWaitEvent _cudaStreamAddCallback "
    "_cudaStreamBeginCapture _cudaStreamEndCapture _cudaEventCreate _cudaEventDestroy _cudaEventRecord "
    "_cudaEventElapsedTime _cudaGraphInstantiate _cudaGraphLaunch _cudaGraphDestroy _cudaGraphExecDestroy "
    "_cudaGetDeviceProperties _cudaLibraryGetGlobal _cudaLibraryGetManaged _cudaLibraryGetUnifiedFunction "
    "_cudaLibraryGetKernelCount _cudaLibraryLoadFromFile _cuDeviceGet _cuLibraryGetGlobal _cuLibraryGetKernel "
    "_cuLibraryGetModule _cuLibraryLoadData _cuLibraryLoadFromFile _cuTensorMapEncodeTiled"
).split()


def _symbols() -> dict[str, Any]:
    """name -> ctypes callback. Made once: the host code of every compiled function points at them."""
    table: dict[str, Any] = {}
    for name, (function, types) in _SYMBOLS.items():
        table[name] = ctypes.CFUNCTYPE(_I, *types)(_guarded(name, function))
    for name in _REFUSED:
        table[name] = ctypes.CFUNCTYPE(_I)(_guarded(name, _refuse(name)))
    # A destructor may run it after Python has gone: a C function that does nothing with its argument.
    table["cuda_dialect_unload_library_once"] = ctypes.CDLL(None).abs
    return table


_callbacks: dict[str, Any] = {}


def callbacks() -> dict[str, Any]:
    """name -> stand-in for every function of the CUDA runtime that host code may call."""
    if not _callbacks:
        _callbacks.update(_symbols())
    return _callbacks


def register_symbols(engine: Any) -> None:
    """Make an MLIR execution engine resolve the CUDA runtime's symbols here (before its first lookup)."""
    for name, callback in callbacks().items():
        engine.raw_register_runtime(name, ctypes.cast(callback, ctypes.c_void_p))
