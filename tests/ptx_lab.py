"""Runs single PTX instructions on one warp: tests give operand bits and compare result bits."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import numpy as np

from refluent.emulator import ptx, state
from refluent.emulator.codegen import jit
from refluent.emulator.codegen.emitter import Options

STEM = {1: "p", 16: "h", 32: "r", 64: "d", 128: "q", 8: "b"}
WORD = {8: np.uint16, 16: np.uint16, 32: np.uint32, 64: np.uint64}
OLD = 0xA5A5A5A5A5A5A5A5  # what destinations hold before: lanes that do not execute must keep it


def kernel(body: str, params: str = "", header: str = "") -> ptx.Kernel:
    """A kernel `k` with ten to the second registers of every width around `body`."""
    declared = "".join(f"  .reg .{'pred' if bits == 1 else f'b{bits}'} %{stem}<400>;\n" for bits, stem in STEM.items())
    start = f".version 9.0\n.target sm_100a\n.address_size 64\n{header}\n.visible .entry k({params})\n"
    text = f"{start}{{\n{declared}{body}\n}}\n"
    return ptx.parse(text).kernels["k"]


def compiled(body: str, params: str = "", header: str = "", approx: str = "exact") -> jit.CompiledKernel:
    return jit.compile_kernel(kernel(body, params, header), Options(approx), use_cache=False)


@dataclass
class Case:
    """One instruction: `{d}` (and `{e}`), `{a}`, `{b}`, `{c}`, `{g}` stand for its registers."""

    text: str
    out: tuple[int, ...]
    inputs: tuple[np.ndarray, ...]
    results: list[np.ndarray] = field(default_factory=list)
    regs: dict[str, str] = field(default_factory=dict)


class Lab:
    """Collects cases, compiles them as one kernel and runs them over all inputs, 32 lanes a run.

    `seen`, when it is a list, collects every case that ran under the full mask in the exact mode.
    """

    seen: list[Case] | None = None

    def __init__(self) -> None:
        self.cases: list[Case] = []
        self.used: dict[int, int] = {}

    def new(self, bits: int) -> str:
        n = self.used.get(bits, 0)
        self.used[bits] = n + 1
        return f"%{STEM[bits]}{n}"

    def add(self, text: str, out: int | tuple[int, ...], *inputs: np.ndarray) -> Case:
        """`out`: widths of the destinations. Inputs are raw bits as unsigned arrays, bool arrays for predicates."""
        case = Case(text, (out,) if isinstance(out, int) else out, inputs)
        for name, bits in zip("de", case.out):
            case.regs[name] = self.new(bits)
        for name, values in zip("abcgh", inputs):
            case.regs[name] = self.new(1 if values.dtype == bool else values.dtype.itemsize * 8)
        self.cases.append(case)
        return case

    def body(self, head: str = "", tail: str = "") -> str:
        lines = [head]
        lines += ["  " + case.text.format(**case.regs) + ";" for case in self.cases]
        lines.append(tail)
        # An event ends the run; what other events read later is in the register file by then.
        lines.append("  st.volatile.b32 [%d399], %r399;")
        for case in self.cases:
            for name, bits in zip("de", case.out):
                reg = case.regs[name]
                if bits == 1:
                    lines.append(f"  @{reg} nanosleep.u32 1;")
                elif bits == 128:
                    lines.append(
                        f"  mov.b128 {{%d397, %d396}}, {reg};\n  st.volatile.v2.b64 [%d399], {{%d397, %d396}};"
                    )
                else:
                    lines.append(f"  st.volatile.b{bits} [%d399], {reg};")
        return "\n".join([*lines, "  ret;"])

    def run(self, mask: int = state.FULL_MASK, head: str = "", tail: str = "", approx: str = "exact") -> None:
        """Fill every case's `results`. Lanes outside `mask` must hold OLD afterwards."""
        code = compiled("  st.volatile.b32 [%d399], %r399;\n" + self.body(head, tail), approx=approx)
        lengths = {len(values) for case in self.cases for values in case.inputs} or {32}
        (length,) = lengths
        for case in self.cases:
            case.results = [np.zeros(length, bool if bits == 1 else WORD[bits]) for bits in case.out]
        (warp,), _ = code.prepare(1)
        for start in range(0, length, 32):
            self._chunk(code, warp, slice(start, start + 32), mask)
        if Lab.seen is not None and mask == state.FULL_MASK and approx == "exact" and not head:
            Lab.seen += [replace(case, results=[r.copy() for r in case.results]) for case in self.cases]

    def _chunk(self, code: jit.CompiledKernel, warp: state.Warp, part: slice, mask: int) -> None:
        registers = code.kernel.registers
        state.reset([warp])
        warp.budget = 1 << 40
        warp.mask, warp.exited = mask, ~mask & state.FULL_MASK
        for case in self.cases:
            for name, values in zip("abcgh", case.inputs):
                put(warp, registers[case.regs[name]], values[part])
            for name, bits in zip("de", case.out):
                if bits == 1:
                    warp.set_predicate(registers[case.regs[name]], OLD & state.FULL_MASK)
                else:
                    warp.set(registers[case.regs[name]], OLD & ((1 << bits) - 1))
        # The first event comes before the cases, the second after the last one.
        for _ in range(2):
            assert code.run(warp.address) == state.EVENT, (warp.event, warp.fault, warp.instr)
        for case in self.cases:
            for name, values in zip("de", case.results):
                values[part] = get(warp, registers[case.regs[name]])


def put(warp: state.Warp, reg: ptx.Reg, values: np.ndarray) -> None:
    if reg.bits == 1:
        warp.set_predicate(reg, state.mask_of(values))
    else:
        warp.set(reg, values)


def get(warp: state.Warp, reg: ptx.Reg) -> np.ndarray:
    if reg.bits == 1:
        return state.lanes(warp.predicate(reg))
    return warp.get(reg).copy()


def run_until_event(code: jit.CompiledKernel, warp: state.Warp) -> int:
    warp.budget = 1 << 40
    return int(code.run(warp.address))


def register(code: jit.CompiledKernel, name: str) -> ptx.Reg:
    return code.kernel.registers[name]


def refusal(body: str) -> str:
    """The text of the refusal of a kernel."""
    try:
        compiled(body)
    except ptx.UnsupportedPTX as error:
        return re.sub(r"\s+", " ", str(error))
    raise AssertionError("not refused")
