"""What the kernels of an architecture do not do yet, and what a machine needs to run them. Imports no CuTe DSL."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib import metadata

import torch

from refluent.mods.emit import refusal
from refluent.problem import Problem

DSL, DSL_VERSION = "nvidia-cutlass-dsl", "4.8.1"


@dataclass(frozen=True)
class Architecture:
    """A family of GPUs. `name` is its backend's, `target` what the emulator compiles for.

    mods: whether its kernels take score_mod, mask_mod and block_mask.
    """

    name: str
    target: str
    family: str
    capabilities: tuple[tuple[int, int], ...]
    mods: bool

    def unsupported(self, problem: Problem) -> str | None:
        """Why the kernels cannot serve the problem, wherever they run; None if they can."""
        options = problem.options
        if problem.dtype not in (torch.bfloat16, torch.float16):
            return f"its kernels take bfloat16 and float16, got {problem.dtype}; backend='torch' takes it"
        if not self.mods:
            for name in ("score_mod", "mask_mod", "block_mask"):
                if getattr(options, name) is not None:
                    return f"its kernels do not take a {name} yet; backend='torch' does"
        own = None if options.block_mask is None else options.block_mask.mask_mod
        for mod in (options.score_mod, options.mask_mod, own):
            reason = None if mod is None else refusal(mod)
            if reason is not None:
                return f"{reason}; backend='torch' takes it"
        return None

    def unsupported_device(self, device: torch.device) -> str | None:
        """Why tensors on this device are not its; None if they are."""
        if device.type != "cuda":
            return f"it needs tensors on a {self.family} GPU, got {device}; {self._emulated}"
        capability = torch.cuda.get_device_capability(device)
        if capability not in self.capabilities:
            got = f"{capability[0]}.{capability[1]}"
            return (
                f"it needs compute capability {self._capabilities}, got {got}; "
                "backend='torch' computes the same on any device"
            )
        return None

    def missing_device(self) -> str | None:
        """Why there is no such GPU to run on; None if there is one."""
        need = f"it needs a {self.family} GPU (compute capability {self._capabilities})"
        if not torch.cuda.is_available():
            return f"{need}, and torch sees no GPU; {self._emulated}"
        capability = torch.cuda.get_device_capability()
        if capability not in self.capabilities:
            return f"{need}, got {capability[0]}.{capability[1]}; {self._emulated}"
        return None

    @property
    def _capabilities(self) -> str:
        return " or ".join(f"{major}.{minor}" for major, minor in self.capabilities)

    @property
    def _emulated(self) -> str:
        return f"backend='emulate:{self.name}' runs its kernels on the CPU"


HOPPER = Architecture("sm90", "sm_90a", "Hopper", ((9, 0),), mods=False)
BLACKWELL = Architecture("sm100", "sm_100a", "Blackwell", ((10, 0), (10, 3)), mods=True)


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
