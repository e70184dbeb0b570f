"""Which memory a call may touch: the storages behind the tensors, arrays and pointers that were handed to it.

CPU tensors stand for GPU tensors: a DLPack capsule is re-labelled as CUDA memory, so that the DSL compiles pointers to
global memory; the address stays that of the host. A pointer is accepted if it lies in a storage that the context has
seen: one of a tensor handed in earlier, whose data_ptr() was asked, or that was named with `add`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from refluent.emulator.errors import DriverError
from refluent.emulator.launch import Allocation

DEVICE_CPU, DEVICE_CUDA = 1, 2
_MANY = 4096  # storages remembered before those that are gone are dropped
_CAPSULE_NAMES = {b"dltensor": 0, b"dltensor_versioned": 32}  # where the DLTensor starts in the managed structure
_DEVICE_TYPE, _DEVICE_ID = 8, 12  # in DLTensor

_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype, _capsule_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

_device = torch._C.TensorBase.device.__get__


def true_device(tensor: torch.Tensor) -> torch.device:
    """Where a tensor really is: inside the context its attributes say otherwise."""
    with torch._C.DisableTorchFunction():
        return _device(tensor)


def _refuse_real_gpu(tensor: torch.Tensor) -> None:
    if true_device(tensor).type != "cpu":
        raise DriverError(f"a tensor on {true_device(tensor)}: inside emulator.gpu(...) give CPU tensors")


def relabel(capsule: Any) -> Any:
    """The same capsule, its device changed from CPU to CUDA device 0."""
    name = _capsule_name(capsule)
    if name not in _CAPSULE_NAMES:
        raise DriverError(f"a DLPack capsule named {name!r} is not known to the emulator")
    tensor = _capsule_pointer(capsule, name) + _CAPSULE_NAMES[name]
    device = ctypes.c_int32.from_address(tensor + _DEVICE_TYPE)
    if device.value not in (DEVICE_CPU, DEVICE_CUDA):
        raise DriverError(f"a tensor on DLPack device {device.value}: the emulator takes CPU tensors")
    device.value = DEVICE_CUDA
    ctypes.c_int32.from_address(tensor + _DEVICE_ID).value = 0
    return capsule


class Relabelled:
    """A CPU tensor or array that exports itself through DLPack as CUDA memory."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        if isinstance(self.source, torch.Tensor):
            return relabel(torch.utils.dlpack.to_dlpack(self.source))
        return relabel(self.source.__dlpack__(**options))

    def __dlpack_device__(self) -> tuple[int, int]:
        return DEVICE_CUDA, 0


def is_array(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray)) or (
        hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")
    )


class HandedIn:
    """The storages of the present call, and those the context has seen."""

    def __init__(self) -> None:
        self._call: dict[int, Allocation] = {}
        self._seen: dict[int, Allocation] = {}  # by address; kept alive only where nothing weaker is possible
        self._fresh: dict[int, Any] = {}  # address of a storage from torch.empty -> weak reference

    def clear(self) -> None:
        """A call begins, or has ended."""
        self._call.clear()
        if len(self._seen) + len(self._fresh) > _MANY:
            self._seen = {at: seen for at, seen in self._seen.items() if seen.alive is None or seen.alive()}
            self._fresh = {at: reference for at, reference in self._fresh.items() if not reference.expired()}

    def forget(self) -> None:
        """The context ends."""
        for table in (self._call, self._seen, self._fresh):
            table.clear()

    def allocations(self) -> tuple[Allocation, ...]:
        return tuple(self._call.values())

    def add(self, value: Any) -> None:
        """A tensor or array is an argument: its whole storage may be touched."""
        allocation = self.note(value)
        if allocation.nbytes:
            self._call[allocation.address] = allocation

    def note(self, value: Any) -> Allocation:
        """Remember a storage for pointers into it; it is not kept alive by that where that can be avoided."""
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            allocation = _torch_storage(value, storage, self._is_fresh(value, storage))
        else:
            allocation = _numpy_storage(value) if isinstance(value, np.ndarray) else _dlpack_extent(value)
        weak = allocation.alive is not _always
        self._seen[allocation.address] = dataclasses.replace(allocation, owner=None) if weak else allocation
        return allocation

    def allocated(self, tensor: torch.Tensor) -> None:
        """torch has just allocated this: nothing has written it."""
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta and not tensor.is_inference():
            storage = tensor.untyped_storage()
            self._fresh[storage.data_ptr()] = StorageWeakRef(storage)

    def escape(self, tensor: torch.Tensor) -> None:
        """Its memory can be written from now on without torch knowing."""
        if isinstance(tensor, torch.Tensor) and self._fresh:
            self._fresh.pop(tensor.untyped_storage().data_ptr(), None)

    def _is_fresh(self, tensor: torch.Tensor, storage: Any) -> bool:
        """Allocated by torch.empty, the same storage still, and never the target of an in-place operation."""
        reference = self._fresh.get(storage.data_ptr())
        if reference is None or reference.expired() or tensor.is_inference():
            return False
        return tensor._version == 0

    def add_runtime_tensor(self, tensor: Any) -> None:
        """A cute.runtime tensor is an argument."""
        source = getattr(tensor, "_emulated_source", None)
        if source is not None:
            self.add(source)
            return
        bits = tensor.element_type.width
        extent = 1 + sum((n - 1) * s for n, s in zip(_flat(tensor.shape), _flat(tensor.stride)) if n)
        allocation = Allocation(
            int(tensor.data_ptr), math.ceil(extent * bits / 8), "tensor", owner=tensor, alive=_always
        )
        self._call[allocation.address] = allocation

    def add_pointer(self, address: int) -> None:
        """A raw pointer is an argument; null is allowed."""
        if not address:
            return
        allocation = self.find(address)
        if allocation is None:
            raise DriverError(
                f"pointer 0x{address:x} is an argument, but no tensor that holds it was seen in this context; "
                "take it with tensor.data_ptr() inside the context, or name its memory with gpu.hand_in(tensor)"
            )
        self._call[allocation.address] = allocation

    def find(self, address: int) -> Allocation | None:
        """The living storage that holds an address."""
        for start, allocation in list(self._seen.items()):
            if allocation.alive is not None and not allocation.alive():
                del self._seen[start]
            elif allocation.address <= address < allocation.end:
                return allocation
        return None

    def relabelled(self, value: Any) -> Any:
        """What to give to the DSL in place of a CPU tensor or array."""
        if isinstance(value, Relabelled) or not is_array(value):
            return value
        if isinstance(value, torch.Tensor):
            _refuse_real_gpu(value)
            return Relabelled(value)
        if value.__dlpack_device__()[0] == DEVICE_CPU:
            return Relabelled(value)
        return value

    def converted(self, value: Any) -> Any:
        """An argument of a TVM-FFI function, tensors in it handed in and re-labelled (containers are followed)."""
        import tvm_ffi
        from cutlass.cute import runtime

        if isinstance(value, (bool, float, str, type(None))):
            return value
        if isinstance(value, int):
            if self.find(value) is not None:
                self.add_pointer(value)
            return value
        if type(value) is runtime._Tensor or hasattr(value, "_dltensor_wrapper"):
            self.add_runtime_tensor(value)
            return value
        if hasattr(value, "__tvm_ffi_opaque_ptr__"):
            self.add_pointer(int(value.__tvm_ffi_opaque_ptr__()))
            return value
        if is_array(value):
            self.add(value)
            return tvm_ffi.from_dlpack(self.relabelled(value))
        return _rebuilt(value, self.converted)


def _rebuilt(value: Any, convert: Any) -> Any:
    """A container with every element converted; anything else unchanged."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(convert(item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(convert(item) for item in value)
    if isinstance(value, dict):
        return {key: convert(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: convert(getattr(value, f.name)) for f in dataclasses.fields(value)}
        copy = object.__new__(type(value))
        for name, item in fields.items():
            object.__setattr__(copy, name, item)
        return copy
    return value


def _torch_storage(value: torch.Tensor, storage: Any, fresh: bool) -> Allocation:
    reference = StorageWeakRef(storage)
    _refuse_real_gpu(value)
    name = f"{str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}"
    return Allocation(storage.data_ptr(), storage.nbytes(), name, fresh, storage, lambda: not reference.expired())


def _always() -> bool:
    """The context keeps it alive."""
    return True


def _living(owner: Any) -> Callable[[], bool]:
    try:
        reference = weakref.ref(owner)
    except TypeError:
        return _always
    return lambda: reference() is not None


def _numpy_storage(value: np.ndarray) -> Allocation:
    base: Any = value
    while isinstance(base.base, np.ndarray):
        base = base.base
    low, high = np.lib.array_utils.byte_bounds(base)
    return Allocation(low, high - low, f"{value.dtype} array {value.shape}", owner=base, alive=_living(base))


def _dlpack_extent(value: Any) -> Allocation:
    """Any other exporter: the bytes between its first and last element."""
    capsule = value.__dlpack__()
    tensor = _capsule_pointer(capsule, _capsule_name(capsule)) + _CAPSULE_NAMES[_capsule_name(capsule)]
    data, ndim = ctypes.c_uint64.from_address(tensor).value, ctypes.c_int32.from_address(tensor + 16).value
    bits = ctypes.c_uint8.from_address(tensor + 21).value * ctypes.c_uint16.from_address(tensor + 22).value
    shape_at, strides_at, offset = (ctypes.c_uint64 * 3).from_address(tensor + 24)
    shape = list((ctypes.c_int64 * ndim).from_address(shape_at)) if ndim else []
    if strides_at and ndim:
        strides = list((ctypes.c_int64 * ndim).from_address(strides_at))
    else:
        strides = [math.prod(shape[i + 1 :]) for i in range(ndim)]
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides)) if all(shape) else 0
    return Allocation(
        data + offset, math.ceil(extent * bits / 8), f"array {tuple(shape)}", owner=value, alive=_living(value)
    )


def _flat(value: Any) -> list[int]:
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _flat(item)]
    return [int(value)]
