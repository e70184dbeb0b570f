"""What the Blackwell kernels do not do yet, and what a machine needs to run them. Does not import the CuTe DSL."""

from __future__ import annotations

import importlib.util
from importlib import metadata

import torch

from refluent.mods.emit import refusal
from refluent.problem import Problem

DSL, DSL_VERSION = "nvidia-cutlass-dsl", "4.8.1"
CAPABILITIES = ((10, 0), (10, 3))


def unsupported(problem: Problem) -> str | None:
    """Why the kernels cannot serve the problem, wherever they run; None if they can."""
    options = problem.options
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"its kernels take bfloat16 and float16, got {problem.dtype}; backend='torch' takes it"
    own = None if options.block_mask is None else options.block_mask.mask_mod
    for mod in (options.score_mod, options.mask_mod, own):
        reason = None if mod is None else refusal(mod)
        if reason is not None:
            return f"{reason}; backend='torch' takes it"
    return None


def missing_packages(emulated: bool) -> str | None:
    """What has to be installed first, in words; None if everything is there."""
    extra = "emulator" if emulated else "gpu"
    try:
        version = metadata.version(DSL)
    except metadata.PackageNotFoundError:
        return f"it needs the CuTe DSL, which is not installed: pip install 'refluent[{extra}]' (Linux only)"
    if version != DSL_VERSION:
        return f"it needs {DSL} {DSL_VERSION}, got {version}: pip install {DSL}=={DSL_VERSION}"
    for module in ("tvm_ffi", *(("numba", "llvmlite") if emulated else ())):
        if importlib.util.find_spec(module) is None:
            return f"it needs {module}, which is not installed: pip install 'refluent[{extra}]'"
    return None


def missing_device() -> str | None:
    """Why there is no Blackwell GPU to run on; None if there is one."""
    need = "it needs a Blackwell GPU (compute capability 10.0 or 10.3)"
    instead = "backend='emulate:sm100' runs its kernels on the CPU"
    if not torch.cuda.is_available():
        return f"{need}, and torch sees no GPU; {instead}"
    capability = torch.cuda.get_device_capability()
    if capability not in CAPABILITIES:
        return f"{need}, got {capability[0]}.{capability[1]}; {instead}"
    return None
