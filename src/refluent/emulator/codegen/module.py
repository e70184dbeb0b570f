"""A kernel as an LLVM module: one function a basic block, tail calls between them, `run` on top."""

from __future__ import annotations

from refluent.emulator.codegen import control
from refluent.emulator.codegen.emitter import Emitter, Library, Options
from refluent.emulator.codegen.flow import Block, Flow, build
from refluent.emulator.codegen.registry import emit, event_writes, is_event, writes
from refluent.emulator.ptx import Kernel, Reg
from refluent.emulator.state import RegisterLayout

# Instructions that finish() emits instead of an emitter.
ENDS = ("bra", "brx", "ret", "exit", "trap")


def add_carry(kernel: Kernel) -> None:
    """The condition code register of add.cc and its kind, where a kernel uses it."""
    if "%cc" in kernel.registers:
        return
    if any("cc" in ins.modifiers or ins.opcode in ("addc", "subc", "madc") for ins in kernel.instructions):
        index = kernel.register_counts.get(1, 0)
        kernel.register_counts[1] = index + 1
        kernel.registers["%cc"] = Reg("%cc", 1, index)


def analyse(kernel: Kernel) -> Flow:
    add_carry(kernel)
    return build(kernel, is_event, writes)


def generate(kernel: Kernel, flow: Flow, options: Options) -> str:
    """LLVM IR of `kernel`. Raises UnsupportedPTX for what no emitter knows."""
    layout = RegisterLayout.of(kernel)
    library = Library()
    functions = [_block(kernel, flow, block, layout, library, options) for block in flow.blocks]
    parts = [*library.text.values(), control.runtime_text(len(flow.blocks)), *functions]
    return "\n".join(parts) + '\n!0 = !{!"branch_weights", i32 1, i32 100000}\n' + ATTRIBUTES


WIDE = '"min-legal-vector-width"="512" "prefer-vector-width"="512"'
ATTRIBUTES = f"attributes #0 = {{ nounwind {WIDE} }}\nattributes #1 = {{ nounwind noinline strictfp {WIDE} }}\n"
ATTRIBUTES += "attributes #2 = { strictfp }\n"


def _block(kernel: Kernel, flow: Flow, block: Block, layout: RegisterLayout, library: Library, options: Options) -> str:
    e = Emitter(kernel, layout, library, options)
    control.head(e, block)
    code = kernel.instructions[block.start : block.end]
    last = code[-1] if code else None
    ends = last is not None and (block.event or last.opcode in ENDS)
    for ins in code[:-1] if ends else code:
        emit(e, ins)
    keep = [reg for reg in e.dirty if block.live_out >> flow.bit[reg] & 1]
    if ends and last is not None:
        e.ins = last
        if last.guard is not None:
            guard = e.read(last.guard[0])
            e.guard = e.invert(guard) if last.guard[1] else guard
            e.mask(e.guard)
    e.store_registers(keep)
    control.finish(e, block, last)
    body = "\n".join(e.lines)
    return f"define internal fastcc i32 @b{block.index}(ptr %s) #0 {{\n{body}\n}}\n"


__all__ = ["analyse", "event_writes", "generate"]
