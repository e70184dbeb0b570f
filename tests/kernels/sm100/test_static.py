"""Figures of the compiled code: registers, spills, shared and tensor memory, and how long it takes to compile."""

from __future__ import annotations

import re
import subprocess
import time
from functools import cache
from importlib import metadata

import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

import refluent as rf
from emulator.recorder import recording
from kernels.sm100.runs import ARCH, BACKEND
from refluent import emulator
from refluent.emulator import objects
from refluent.emulator.ptx import Imm, Kernel, Reg, parse
from refluent.gpu.launch import compiled
from refluent.gpu.launch.variant import Variant
from refluent.gpu.plans.sm100 import REGISTERS, SHARED_BYTES, TENSOR_COLUMNS, THREADS

pytestmark = pytest.mark.emulator
LIMIT = 15.0  # seconds of one core
FEATURES = {
    "plain": {},
    "causal": {"has_right": True},
    "window": {"has_left": True, "has_right": True},
    "grouped": {"group": 2, "deterministic": True},
    "packed": {"packed_q": True, "packed_k": True, "used_q": True, "used_k": True, "sink": "float32", "dlse": True},
    "softcap": {"softcap": True},
    "dropout": {"dropout": True},
    "cluster": {"cluster": 2},
    "all": {
        "group": 4, "has_left": True, "has_right": True, "packed_q": True, "packed_k": True, "softcap": True,
        "dropout": True, "deterministic": True, "dlse": True, "sink": "bfloat16",
    },
}  # fmt: skip
DIMS = ((128, 128), (64, 64), (192, 128), (256, 256))
SAMPLE = {"plain", "all"}
# A few registers a compute thread too many, most of them addresses that do not change from step to step. To be mended.
SPILLING = {
    "128x128 causal", "128x128 grouped", "128x128 softcap", "128x128 dropout", "128x128 all", "64x64 softcap",
    "64x64 dropout", "64x64 all", "192x128 softcap",
}  # fmt: skip
VARIANTS = {
    f"{d}x{dv} {name}": Variant(ARCH, "bfloat16", d, dv, **facts) for d, dv in DIMS for name, facts in FEATURES.items()
}


def variants():
    """Of 128 the sample is in CI, the rest is not."""
    return [
        pytest.param(name, marks=() if name.split()[1] in SAMPLE and name.startswith("128") else pytest.mark.full)
        for name in VARIANTS
    ]


@cache
def built(name):
    """Device code, PTX and the seconds that it took, whatever the caches hold."""
    with emulator.gpu(ARCH):
        start = time.process_time()
        artifact = compiled._build(VARIANTS[name], "emulated")
        seconds = time.process_time() - start
    (fatbin,) = objects._fatbins(artifact.code)
    return fatbin, artifact.ptx, seconds


def main_kernel(ptx) -> Kernel:
    (kernel,) = (k for name, k in parse(ptx).kernels.items() if "Backward" in name and k.reqntid == (THREADS, 1, 1))
    return kernel


def number(kernel: Kernel, operand) -> int:
    """An immediate, or what was moved into the register."""
    if isinstance(operand, Imm):
        return operand.value
    assert isinstance(operand, Reg)
    moved = {i.operands[1].value for i in kernel.instructions if i.opcode == "mov" and i.operands[0] == operand}
    (value,) = moved
    return value


@pytest.fixture(scope="session")
def cuobjdump():
    try:
        files = metadata.files("nvidia-cuda-cuobjdump") or []
    except metadata.PackageNotFoundError:
        pytest.skip("nvidia-cuda-cuobjdump is not installed")
    (tool,) = (file.locate() for file in files if file.name == "cuobjdump")
    return tool


def usage(tool, fatbin, folder):
    """Kernel -> registers, stack, local memory, as ptxas left them."""
    path = folder / "backward.fatbin"
    path.write_bytes(fatbin)
    run = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True)
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", run.stdout)
    return {name: tuple(map(int, numbers)) for name, *numbers in found}


@pytest.mark.parametrize("name", variants())
def test_spills(name, cuobjdump, tmp_path, request):
    if name in SPILLING:
        request.applymarker(pytest.mark.xfail(reason="spills", strict=True))
    fatbin, ptx, _ = built(name)
    found = usage(cuobjdump, fatbin, tmp_path)
    assert set(found) == set(parse(ptx).kernels)
    assert found[main_kernel(ptx).name][0] * THREADS <= REGISTERS
    assert not {kernel: numbers for kernel, numbers in found.items() if numbers[1:] != (0, 0)}


@pytest.mark.parametrize("name", variants())
def test_registers_tensor_memory_and_compile_time(name):
    _, ptx, seconds = built(name)
    plan, kernel = VARIANTS[name].plan, main_kernel(ptx)
    changes = [number(kernel, i.operands[0]) for i in kernel.instructions if i.opcode == "setmaxnreg"]
    assert changes == [plan.reduce_registers, plan.compute_registers, plan.other_registers]
    assert plan.registers <= REGISTERS
    (alloc,) = (i for i in kernel.instructions if (i.opcode, *i.modifiers[:1]) == ("tcgen05", "alloc"))
    (dealloc,) = (i for i in kernel.instructions if (i.opcode, *i.modifiers[:1]) == ("tcgen05", "dealloc"))
    columns = number(kernel, alloc.operands[1])
    assert columns == number(kernel, dealloc.operands[1]) == plan.tmem_columns <= TENSOR_COLUMNS
    assert seconds < LIMIT


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_shared_memory_of_the_launch(dims):
    q, k, do = (torch.zeros(1, 9, 1, width, dtype=torch.bfloat16) for width in (dims[0], dims[0], dims[1]))
    with recording(ARCH) as gpu:
        rf.attention_backward(do, q, k, do, do, torch.zeros(1, 1, 9), backend=BACKEND)
    (main,) = (launched for launched in gpu.recorder.launches if launched.block == (THREADS, 1, 1))
    kernel = parse(main.ptx).kernels[main.kernel]
    static = sum(symbol.size for symbol in kernel.symbols if symbol.space == "shared")
    assert main.shared_bytes + static <= SHARED_BYTES
