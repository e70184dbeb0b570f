"""``refluent doctor``: what this machine has, which backends work on it, and what to install for the others."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib import metadata

import torch

import refluent as rf
from refluent import backends

DSL = "nvidia-cutlass-dsl"
DSL_TESTED = "4.8.1"
DSL_BROKEN = ("4.6.0", "4.6.1")  # kernels compiled by them can hang on Blackwell


COMPILING = "sm100", "emulate:sm100"  # backends whose first call takes many seconds


def run(compiling: bool = False) -> int:
    """Prints the findings, each as it is made; 0 if a backend works, else 1. compiling: try what has to be compiled."""
    for what, find in (
        ("refluent", lambda: rf.__version__),
        ("python", lambda: f"{platform.python_version()}, {platform.system()} {platform.machine()}"),
        ("torch", torch_build),
        ("gpu", gpu),
        ("cute dsl", cute_dsl),
    ):
        print(f"{what:9} {find()}", flush=True)
    works = False
    print("backends")
    for name in backends.names():
        print(f"  {name:15} ", end="", flush=True)
        state, words = finding(name, compiling)
        works = works or state == "works"
        print(f"{state}: {words}", flush=True)
    return 0 if works else 1


def torch_build() -> str:
    if torch.version.cuda:
        build = f"built for CUDA {torch.version.cuda}"
    elif torch.version.hip:
        build = f"built for ROCm {torch.version.hip}"
    else:
        build = "built for the CPU"
    return f"{torch.__version__}, {build}, {torch.get_num_threads()} threads"


def gpu() -> str:
    """What torch sees, and where it sees nothing, whether a driver does."""
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        found = driver() or "unknown"
        names = {torch.cuda.get_device_name(n) for n in range(count)}
        major, minor = torch.cuda.get_device_capability()
        return f"{count} x {', '.join(sorted(names))}, compute capability {major}.{minor}, driver {found}"
    found = driver()
    if found and torch.version.cuda is None:
        return (
            f"there is a driver ({found}), but this torch is built for the CPU: "
            "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
        )
    if found:
        return f"there is a driver ({found}), but torch sees no GPU: is the driver older than torch's CUDA?"
    return "none: everything runs on the CPU"


def driver() -> str:
    """The NVIDIA driver's version, or "" where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        asked = subprocess.run(
            [tool, "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = asked.stdout.split()
    return lines[0] if asked.returncode == 0 and lines else ""


def cute_dsl() -> str:
    """Whether the CuTe DSL, which GPU kernels are written in, is there and is one that was tested."""
    try:
        version = metadata.version(DSL)
    except metadata.PackageNotFoundError:
        if platform.system() != "Linux":
            return "not installed; it exists for Linux only"
        return "not installed; GPU kernels would need it: pip install 'refluent[gpu]'"
    if version in DSL_BROKEN:
        return f"{version}, which compiles kernels that can hang: pip install {DSL}=={DSL_TESTED}"
    if version != DSL_TESTED:
        return f"{version}; tested is {DSL_TESTED}: pip install {DSL}=={DSL_TESTED}"
    return version


def finding(name: str, compiling: bool) -> tuple[str, str]:
    """Of a backend: "works", "ready" (not tried), "fails" or "not here", and more words."""
    reason = backends.missing(name)
    if reason:
        return "not here", reason
    if name in COMPILING and not compiling:
        return "ready", "what it needs is there; `refluent doctor --run` also compiles and runs a small call"
    device = torch.device("cuda" if torch.cuda.is_available() and not name.startswith("emulate:") else "cpu")
    problem = try_backend(name, device)
    return ("fails", f"on {device}, {problem}") if problem else ("works", "forward and backward of a small call ran")


def try_backend(name: str, device: torch.device) -> str:
    """Run a small call, forward and backward; returns what went wrong, or ""."""
    q, k, v = (torch.randn(1, 16, 2, 64, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3))
    try:
        o = rf.attention(q, k, v, causal=True, backend=name)
        gradients = torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
    except (RuntimeError, ImportError, NotImplementedError) as error:
        return str(error)
    if not all(torch.isfinite(tensor).all() for tensor in (o, *gradients)):
        return f"the results are not finite; `refluent check --backend {name}` shows more"
    return ""
