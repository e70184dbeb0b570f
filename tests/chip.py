"""Runs the cases of ptx_lab on a real GPU through the CUDA driver, one small kernel a case."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from ptx_lab import OLD, STEM, Case

WORD = {1: np.uint32, 16: np.uint16, 32: np.uint32, 64: np.uint64}
BATCH = 32


def kernel(number: int, case: Case) -> str:
    """Load the inputs of one thread, run the case's text, store its results."""
    used: dict[int, int] = {}

    def new(bits: int) -> str:
        used[bits] = used.get(bits, 0) + 1
        return f"%{STEM[bits]}{used[bits] - 1}"

    regs, lines, names = {}, [], []
    for name, bits in zip("de", case.out):
        regs[name] = new(bits)
        if bits > 1:
            lines.append(f"  mov.b{bits} {regs[name]}, {OLD & ((1 << bits) - 1)};")
    for name, values in zip("abcgh", case.inputs):
        bits = 1 if values.dtype == bool else values.dtype.itemsize * 8
        regs[name] = new(bits)
        names.append(name)
        lines.append(f"  ld.param.u64 %d380, [{name}{number}];")
        lines.append(f"  mad.wide.u32 %d381, %r380, {max(1, bits // 8)}, %d380;")
        if bits == 1:
            lines.append(f"  ld.global.u8 %r381, [%d381];\n  setp.ne.u32 {regs[name]}, %r381, 0;")
        else:
            lines.append(f"  ld.global.b{bits} {regs[name]}, [%d381];")
    lines.append("  " + case.text.format(**regs) + ";")
    for name, bits in zip("de", case.out):
        names.append(name)
        value, width = (regs[name], bits) if bits > 1 else ("%r382", 32)
        if bits == 1:
            lines.append(f"  selp.b32 %r382, 1, 0, {regs[name]};")
        lines.append(f"  ld.param.u64 %d380, [{name}{number}];")
        lines.append(f"  mad.wide.u32 %d381, %r380, {width // 8}, %d380;\n  st.global.b{width} [%d381], {value};")
    declared = "".join(
        f"  .reg .{'pred' if bits == 1 else f'b{bits}'} %{stem}<400>;\n"
        for bits, stem in STEM.items()
        if bits in (1, 16, 32, 64) or f"%{stem}" in case.text
    )
    parameters = ", ".join(f".param .u64 {name}{number}" for name in names)
    head = "  mov.u32 %r390, %ctaid.x;\n  mov.u32 %r391, %tid.x;\n  mad.lo.u32 %r380, %r390, 32, %r391;\n"
    body = "\n".join(lines)
    return f".visible .entry k{number}({parameters})\n{{\n{declared}{head}{body}\n  ret;\n}}\n"


class Chip:
    """A CUDA context. Raises OSError where there is no driver, RuntimeError where there is no device."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        device, context, major = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuDeviceGetAttribute", ctypes.byref(major), 75, device)
        self.target = {9: "sm_90a", 10: "sm_100a"}.get(major.value, "")
        self.buffers: dict[int, tuple[ctypes.c_uint64, int]] = {}

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self.driver, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")

    def buffer(self, number: int, size: int) -> ctypes.c_uint64:
        if number not in self.buffers or self.buffers[number][1] < size:
            pointer = ctypes.c_uint64()
            self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
            self.buffers[number] = (pointer, size)
        return self.buffers[number][0]

    def run(self, cases: Sequence[Case]) -> list[list[np.ndarray] | None]:
        """Results of each case; None where the driver does not assemble it for this chip."""
        results: list[list[np.ndarray] | None] = [None] * len(cases)

        def attempt(numbers: list[int]) -> None:
            head = f".version 8.8\n.target {self.target}\n.address_size 64\n"
            text = head + "".join(kernel(i, cases[i]) for i in numbers)
            module = ctypes.c_void_p()
            if self.driver.cuModuleLoadData(ctypes.byref(module), text.encode()):
                if len(numbers) > 1:
                    attempt(numbers[: len(numbers) // 2])
                    attempt(numbers[len(numbers) // 2 :])
                return
            for i in numbers:
                results[i] = self._launch(module, i, cases[i])
            self.call("cuModuleUnload", module)

        for start in range(0, len(cases), BATCH):
            attempt(list(range(start, min(start + BATCH, len(cases)))))
        return results

    def _launch(self, module: ctypes.c_void_p, number: int, case: Case) -> list[np.ndarray]:
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), module, f"k{number}".encode())
        length = len(case.inputs[0]) if case.inputs else 32
        pointers = []
        for i, values in enumerate(case.inputs):
            raw = np.ascontiguousarray(values.view(np.uint8) if values.dtype == bool else values)
            pointers.append(self.buffer(i, raw.nbytes))
            self.call("cuMemcpyHtoD_v2", pointers[-1], raw.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(raw.nbytes))
        out = [np.zeros(length, WORD[bits]) for bits in case.out]
        pointers += [self.buffer(10 + i, array.nbytes) for i, array in enumerate(out)]
        arguments = (ctypes.c_void_p * len(pointers))(*(ctypes.addressof(p) for p in pointers))
        self.call("cuLaunchKernel", function, length // 32, 1, 1, 32, 1, 1, 0, None, arguments, None)
        self.call("cuCtxSynchronize")
        for array, pointer in zip(out, pointers[len(case.inputs) :]):
            self.call("cuMemcpyDtoH_v2", array.ctypes.data_as(ctypes.c_void_p), pointer, ctypes.c_size_t(array.nbytes))
        return out
