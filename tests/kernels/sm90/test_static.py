"""What ptxas made of the kernels: products that overlap, and few spills. No kernel runs here."""

from __future__ import annotations

import os
import re
import subprocess
from importlib import metadata

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from refluent import emulator
from refluent.emulator import objects
from refluent.gpu.launch import compiled
from refluent.gpu.launch.variant import Variant

pytestmark = pytest.mark.emulator
ARCH = "sm_90a"
SPILLED = 128  # bytes of stack a thread at most: facts of a tile, put away before its steps
FACTS = {
    "plain": {},
    "causal": {"has_right": True},
    "grouped": {"group": 4, "has_right": True},
    "deterministic": {"deterministic": True, "has_right": True},
    "packed": {"packed_q": True, "packed_k": True, "has_right": True},
    "softcap": {"softcap": True, "has_right": True},
    "dropout": {"dropout": True},
}
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
SAMPLE = ("128x128 causal", "64x64 plain")
VARIANTS = {
    f"{d}x{dv} {name}": Variant(ARCH, "bfloat16", d, dv, **facts) for d, dv in DIMS for name, facts in FACTS.items()
}


@pytest.fixture(scope="session")
def cuobjdump():
    """A function of arguments and a file: what the tool prints."""
    tools = {}
    for package, name in (("nvidia-cuda-cuobjdump", "cuobjdump"), ("triton", "nvdisasm")):
        try:
            files = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            pytest.skip(f"{package} is not installed")
        tools[name] = next(file.locate() for file in files if file.name == name)
    path = f"{tools['nvdisasm'].parent}{os.pathsep}{os.environ['PATH']}"

    def run(option, file):
        command = [tools["cuobjdump"], option, file]
        return subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": path}).stdout

    return run


def functions(text):
    """Kernel -> its part of the output."""
    parts = re.split(r"Function\s*:?\s+(\S+?):?\s", text)
    return dict(zip(parts[1::2], parts[2::2]))


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.full) for n in VARIANTS])
def test_products_overlap(name, cuobjdump, tmp_path):
    """Where ptxas cannot tell which products are under way, it waits for each wgmma: then all of them end a group."""
    with emulator.gpu(ARCH):
        artifact = compiled._build(VARIANTS[name], "emulated")
    file = tmp_path / "backward.fatbin"
    (fatbin,) = objects._fatbins(artifact.code)
    file.write_bytes(fatbin)
    (code,) = (part for kernel, part in functions(cuobjdump("-sass", file)).items() if "Backward" in kernel)
    products = re.findall(r"HGMMA[^;]*;", code)
    ends = [product for product in products if "gsb0" in product]
    assert products
    assert len(ends) <= len(products) // 2
    (usage,) = (part for kernel, part in functions(cuobjdump("-res-usage", file)).items() if "Backward" in kernel)
    assert int(re.search(r"STACK:(\d+)", usage)[1]) <= SPILLED
