"""What host code sees of the emulated chip: torch's CPU tensors answer as tensors on cuda:0, and queries are answered.

Inside the context only. Tensors stay CPU tensors: every torch operation runs on the CPU as ever, a device argument
that says "cuda" is served by the CPU. torch.cuda and cuda.bindings answer what kernel launchers ask (capability,
number of multiprocessors, streams, occupancy); what they do not answer keeps failing as on a machine without a GPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from refluent.emulator import chips
from refluent.emulator.chips import Chip
from refluent.emulator.handed import HandedIn, true_device
from refluent.emulator.patches import Patches

_CUDA = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_base = torch._C.TensorBase
_aten = torch.ops.aten
_FRESH = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.empty_permuted.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_caches: dict[int, Any] = {}  # lru_caches that hold answers about an emulated chip


def remember_callers() -> None:
    """Find the functools caches that will keep the answer given now: they are cleared when the chip changes."""
    frame = sys._getframe(1)
    while frame is not None:
        cached = frame.f_globals.get(frame.f_code.co_name)
        wrapped = getattr(cached, "__wrapped__", None)
        if hasattr(cached, "cache_clear") and getattr(wrapped, "__code__", None) is frame.f_code:
            _caches[id(cached)] = cached
        frame = frame.f_back  # type: ignore[assignment]


def clear_caches() -> None:
    for cached in _caches.values():
        cached.cache_clear()


def _answer(value: Any) -> Callable[..., Any]:
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        remember_callers()
        return value

    return stand_in


def install(chip: Chip, handed: HandedIn, patches: Patches) -> TorchDispatchMode:
    """Put the answers in place. The returned mode is to be entered for as long as they stand."""
    clear_caches()
    _install_tensors(handed, patches)
    _install_constructors(patches)
    _install_torch_cuda(chip, patches)
    _install_bindings(chip, patches)
    return _OnCPU(handed)


def uninstall() -> None:
    clear_caches()


def _install_tensors(handed: HandedIn, patches: Patches) -> None:
    def device(self: torch.Tensor) -> torch.device:
        found = true_device(self)
        return _CUDA if found == _CPU else found

    def is_cuda(self: torch.Tensor) -> bool:
        return device(self).type == "cuda"

    def get_device(self: torch.Tensor) -> int:
        return device(self).index or 0

    def data_ptr(self: torch.Tensor) -> int:
        if true_device(self) == _CPU:
            handed.escape(self)
            handed.note(self)
        with torch._C.DisableTorchFunction():
            return int(_base.data_ptr(self))

    patches.set(torch.Tensor, "device", property(device))
    patches.set(torch.Tensor, "is_cuda", property(is_cuda))
    patches.set(torch.Tensor, "is_cpu", property(lambda self: False))
    patches.set(torch.Tensor, "get_device", get_device)
    patches.set(torch.Tensor, "data_ptr", data_ptr)
    patches.set(torch.Tensor, "pin_memory", lambda self, *args: self)
    patches.set(torch.Tensor, "numpy", _escaping(handed, _base.numpy))
    patches.set(torch.Tensor, "__array__", _escaping(handed, torch.Tensor.__array__))
    data: Any = _base.data  # a descriptor
    patches.set(torch.Tensor, "data", property(_escaping(handed, data.__get__), data.__set__))


def _escaping(handed: HandedIn, original: Callable[..., Any]) -> Callable[..., Any]:
    """Memory that others can write behind torch's back no longer counts as unwritten."""

    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        handed.escape(self)
        return original(self, *args, **kwargs)

    return call


class _OnCPU(TorchDispatchMode):
    """Serves every request for the CUDA device from the CPU; notes allocations that nothing has written."""

    def __init__(self, handed: HandedIn) -> None:
        super().__init__()
        self._handed = handed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = _as_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        if func.namespace != "aten":  # a custom operator: what it calls inside is to be served too
            with self:
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
        result = func(*args, **kwargs)
        if func in _FRESH:
            self._handed.allocated(result)
        return result


def _as_cpu(device: Any) -> torch.device:
    asked = torch.device(device)
    return _CPU if asked.type == "cuda" else asked


def _install_constructors(patches: Patches) -> None:
    """Functions from Python data look for the device before they dispatch."""

    def on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, device: Any = None, **kwargs: Any) -> Any:
            return original(*args, device=None if device is None else _as_cpu(device), **kwargs)

        return call

    real_to = _base.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.pop("device", None)
        if args and isinstance(args[0], (str, int, torch.device)):
            device, args = args[0], args[1:]
        elif args and isinstance(args[0], torch.Tensor):
            args = (args[0].dtype, *args[1:])
        if device is not None and torch.device(device).type == "cpu":
            kwargs["copy"] = True  # it answers as a tensor on cuda:0: what comes back is another one
        kwargs.pop("non_blocking", None)
        here = torch.device("meta") if self.is_meta else _CPU
        return real_to(self, here if device is None else _as_cpu(device), *args, **kwargs)

    patches.set(torch.Tensor, "to", to)
    patches.set(torch.Tensor, "cpu", lambda self, *args, **kwargs: to(self, "cpu"))
    patches.set(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
    for owner, name in ((torch, "tensor"), (torch, "as_tensor"), (torch, "asarray"), (torch.Tensor, "new_tensor")):
        patches.set(owner, name, on_cpu(getattr(owner, name)))


class Stream:
    """The stand-in for torch.cuda.Stream: launches run in the order of the host calls, on whatever stream."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0
    device = _CUDA

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.priority = priority

    def synchronize(self) -> None:
        """Every launch has run by the time its host call returns."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing is ever outstanding."""

    def wait_event(self, event: Any) -> None:
        """Nothing is ever outstanding."""

    def record_event(self, event: Any = None) -> Any:
        return event

    def query(self) -> bool:
        return True


@contextlib.contextmanager
def _in_place(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _install_torch_cuda(chip: Chip, patches: Patches) -> None:
    major, minor = chip.capability
    properties = SimpleNamespace(
        name=chip.name,
        major=major,
        minor=minor,
        multi_processor_count=chip.num_sms,
        total_memory=1 << 36,
        shared_memory_per_block=chips.SHARED_PER_BLOCK,
        shared_memory_per_block_optin=chips.SHARED_PER_BLOCK_OPTIN,
        shared_memory_per_multiprocessor=chips.SHARED_PER_SM,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        warp_size=32,
        L2_cache_size=50 << 20,
        is_integrated=0,
        is_multi_gpu_board=0,
    )
    stream = Stream()
    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": chip.capability,
        "get_device_properties": properties,
        "get_device_name": chip.name,
        "get_arch_list": [chip.arch],
        "current_stream": stream,
        "default_stream": stream,
        "is_current_stream_capturing": False,
        "synchronize": None,
        "set_device": None,
        "set_stream": None,
        "init": None,
        "_lazy_init": None,
        "empty_cache": None,
    }
    for name, value in answers.items():
        patches.set(torch.cuda, name, _answer(value))
    for name in ("device", "stream", "device_of"):
        patches.set(torch.cuda, name, _in_place)
    patches.set(torch.cuda, "Stream", Stream)


def _install_bindings(chip: Chip, patches: Patches) -> None:
    """cuda.bindings.driver and .runtime: the queries that HardwareInfo and kernel launchers make."""
    from cuda.bindings import driver, runtime

    attribute = driver.CUdevice_attribute
    known = {
        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: chip.capability[0],
        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: chip.capability[1],
        attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: chip.num_sms,
        attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: chips.SHARED_PER_BLOCK,
        attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: chips.SHARED_PER_BLOCK_OPTIN,
        attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: chips.SHARED_PER_SM,
        attribute.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: 1024,
        attribute.CU_DEVICE_ATTRIBUTE_WARP_SIZE: 32,
        attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: 50 << 20,
    }
    ok, unsupported = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_NOT_SUPPORTED

    def device_attribute(which: Any, *_: Any) -> tuple[Any, int]:
        remember_callers()
        return (ok, known[which]) if which in known else (unsupported, 0)

    def active_clusters(_: Any, config: Any) -> tuple[Any, int]:
        remember_callers()
        size = 1
        for item in config.attrs or []:
            if item.id == driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
                size = item.value.clusterDim.x * item.value.clusterDim.y * item.value.clusterDim.z
        return ok, chip.clusters(size)

    answers: dict[str, tuple[Any, ...]] = {
        "cuInit": (ok,),
        "cuDriverGetVersion": (ok, 13000),
        "cuDeviceGetCount": (ok, 1),
        "cuDeviceGet": (ok, driver.CUdevice(0)),
        "cuCtxGetCurrent": (ok, driver.CUcontext(1)),
        "cuCtxGetDevice": (ok, driver.CUdevice(0)),
        "cuCtxSynchronize": (ok,),
        "cuStreamSynchronize": (ok,),
        "cuFuncSetAttribute": (ok,),
        "cuLibraryLoadData": (ok, driver.CUlibrary(1)),
        "cuLibraryUnload": (ok,),
        "cuLibraryEnumerateKernels": (ok, [driver.CUkernel(1)]),
        "cuKernelGetFunction": (ok, driver.CUfunction(1)),
        "cuOccupancyAvailableDynamicSMemPerBlock": (ok, chips.SHARED_PER_BLOCK_OPTIN),
        "cuOccupancyMaxActiveBlocksPerMultiprocessor": (ok, 1),
        "cuGetErrorName": (ok, b"not answered by the emulator"),
    }
    for name, value in answers.items():
        patches.set(driver, name, _answer(value))
    patches.set(driver, "cuDeviceGetAttribute", device_attribute)
    patches.set(driver, "cuOccupancyMaxActiveClusters", active_clusters)
    fine = runtime.cudaError_t.cudaSuccess
    for name, value in {
        "cudaGetDeviceCount": (fine, 1),
        "cudaGetDevice": (fine, 0),
        "cudaSetDevice": (fine,),
        "cudaDeviceSynchronize": (fine,),
        "cudaStreamSynchronize": (fine,),
    }.items():
        patches.set(runtime, name, _answer(value))
