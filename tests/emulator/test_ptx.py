"""The PTX parser: operands, scopes, variables, lines, directives, and what it refuses."""

from __future__ import annotations

import pytest

from refluent.emulator import ptx
from refluent.emulator.codegen import flow, registry
from refluent.emulator.ptx import Addr, Composite, Dual, Imm, Kernel, Pred, Reg, Sink, Special, Symbol, Vec, show

HEADER = ".version 9.0\n.target sm_100a\n.address_size 64\n"


def kernel(body: str, params: str = "", directives: str = "", before: str = "") -> Kernel:
    text = f"{HEADER}{before}\n.visible .entry k({params})\n{directives}\n{{\n{body}\n}}\n"
    return ptx.parse(text).kernels["k"]


REGISTERS = ".reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<99>; .reg .b64 %d<9>; .reg .f32 %f<9>;"


def test_operands_of_every_kind() -> None:
    k = kernel(
        f"""{REGISTERS}
  add.s32 %r1, %r2, -5;
  mov.b64 %d1, {{%r1, %r2}};
  setp.lt.and.f32 %p1|%p2, %f1, 0f3F800000, !%p3;
  @!%p1 ld.global.v2.b32 {{%r1, _}}, [%d1+-8];
  @%p2 st.shared.b32 [%r5], 0x1F;
  mov.u32 %r1, %tid.x;
  shfl.sync.idx.b32 %r1|%p1, %r2, 0, 31, -1;
  cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%d1, {{%r2, %r3}}], [%r4+16];
  mov.b64 %d2, name+12;
  mov.f64 %d3, 0d3FF0000000000000;
  add.f32 %f1, %f2, -0f40000000;
  mul.f32 %f1, %f2, 1.5;
  mov.u32 %r1, 0b101;
  mov.u32 %r1, 017;
  mov.u32 %r1, 4294967295U;
  ret;"""
    )
    code = k.instructions
    r = {name: k.registers[name] for name in ("%r1", "%r2", "%r3", "%r4", "%r5", "%d1", "%p1", "%p2", "%p3")}
    assert code[0].operands == (r["%r1"], r["%r2"], Imm(-5))
    assert code[1].operands == (r["%d1"], Vec((r["%r1"], r["%r2"])))
    assert code[2].operands[0] == Dual(r["%p1"], r["%p2"])
    assert code[2].operands[2:] == (Imm(0x3F800000, 32), Pred(r["%p3"]))
    assert code[3].guard == (r["%p1"], True)
    assert code[3].operands == (Vec((r["%r1"], Sink())), Addr(r["%d1"], -8))
    assert code[4].guard == (r["%p2"], False)
    assert code[4].operands == (Addr(r["%r5"], 0), Imm(31))
    assert code[5].operands[1] == Special("%tid.x")
    assert code[6].modifiers == ("sync", "idx", "b32")
    assert code[7].opcode == "cp"
    assert "mbarrier::complete_tx::bytes" in code[7].modifiers
    assert code[7].operands == (Addr(r["%r1"], 0), Composite((r["%d1"], Vec((r["%r2"], r["%r3"])))), Addr(r["%r4"], 16))
    assert code[8].operands[1] == Addr(Symbol("name"), 12)
    assert code[9].operands[1] == Imm(0x3FF0000000000000, 64)
    assert code[10].operands[2] == Imm(0xC0000000, 32)
    assert code[10].operands[2].as_float() == -2.0
    assert code[11].operands[2].as_float() == 1.5
    assert [code[i].operands[1].value for i in (12, 13, 14)] == [5, 15, 0xFFFFFFFF]


def test_scopes_keep_registers_and_labels_apart() -> None:
    k = kernel(
        f"""{REGISTERS}
  {{ .reg .pred P1;
  WAIT:
  mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2;
  @P1 bra DONE;
  bra WAIT;
  DONE: }}
  {{ .reg .pred P1; .reg .b64 %d<2>;
  WAIT: mov.u64 %d1, 0;
  @P1 bra WAIT;
  bra OUT; }}
OUT:
  mov.u64 %d1, 1;
  ret;"""
    )
    code = k.instructions
    assert [o.target for ins in code for o in ins.operands if isinstance(o, ptx.Label)] == [3, 0, 3, 6]
    assert code[0].operands[0] != code[4].guard[0]
    assert code[3].operands[0] != code[6].operands[0]
    assert k.labels == {"OUT": 6}
    assert k.register_counts[1] == 11
    assert len({(reg.storage, reg.index) for reg in k.registers.values()}) == len(k.registers)


def test_vector_registers() -> None:
    k = kernel(".reg .v4 .b32 %v; .reg .b32 %r<3>;\n  ld.global.v4.b32 %v, [%r1];\n  mov.b32 %r1, %v.y;\n  ret;")
    parts = k.instructions[0].operands[0]
    assert isinstance(parts, Vec)
    assert [p.name for p in parts.items] == ["%v.x", "%v.y", "%v.z", "%v.w"]
    assert k.instructions[1].operands[1] == parts.items[1]


@pytest.mark.parametrize("late", [False, True])
def test_lines_and_sources(late: bool) -> None:
    """The files are declared before the code, or after it."""
    declared = '.file 1 "/somewhere/kernel.py"'
    text = f"""{HEADER}{"" if late else declared}
.visible .entry k()
{{
  .reg .b32 %r<3>; // a comment; with a semicolon
  .loc 1 12 7
  mov.u32 %r1, 1; /* a comment
  over lines */
  .loc 1 20 3, function_name $L__info0, inlined_at 1 12 7
  mov.u32 %r2,
    %r1;
  ret;
}}
{declared if late else ""}
.section .debug_str {{ .b8 0, 1; }}
"""
    module = ptx.parse(text)
    k = module.kernels["k"]
    assert (module.version, module.target, k.target) == ("9.0", "sm_100a", "sm_100a")
    assert [ins.line for ins in k.instructions] == [9, 12, 14]
    file = "/somewhere/kernel.py"
    assert [ins.source for ins in k.instructions] == [(file, 12), (file, 20), (file, 20)]


def test_directives_and_several_kernels() -> None:
    body = "{\n  ret;\n}\n"
    text = f"""{HEADER}
.visible .entry a() .reqntid 128, 2, 1 .minnctapersm 2 .explicitcluster .reqnctapercluster 2, 1, 1 {body}
.entry b(.param .u32 n) .maxntid 64 .maxnreg 168 .pragma "nounroll"; {body}"""
    kernels = ptx.parse(text).kernels
    assert kernels["a"].reqntid == (128, 2, 1)
    assert kernels["a"].directives["reqnctapercluster"] == (2, 1, 1)
    assert kernels["a"].directives["explicitcluster"] == ()
    assert kernels["b"].directives == {"maxntid": (64,), "maxnreg": (168,)}
    assert kernels["b"].reqntid is None


def test_variables_are_laid_out_per_kernel() -> None:
    before = """.extern .shared .align 1024 .b8 dyn[];
.shared .align 8 .b8 one[12];
.shared .align 16 .b32 two[4];
.shared .b8 unused[4096];
.global .align 1 .b8 $str[6] = {104, 105, 0x21, 10};
.global .b32 lone = -2;"""
    k = kernel(
        f"""{REGISTERS}
  .local .align 8 .b8 a[12];
  .local .align 16 .b8 b[16];
  mov.b32 %r1, two;
  mov.b32 %r1, one;
  mov.b32 %r1, dyn;
  mov.b64 %d1, $str;
  mov.b64 %d1, lone;
  mov.b64 %d1, b;
  ret;""",
        before=before,
    )
    start = ptx.SHARED_START
    assert (k.variables["two"].offset, k.variables["one"].offset) == (start, start + 16)
    assert k.static_shared == start + 28
    assert k.variables["dyn"].offset == 2048
    assert "unused" not in k.variables
    assert (k.variables["a"].offset, k.variables["b"].offset, k.local_size) == (0, 16, 32)
    assert [(s.name, s.index, s.data) for s in k.symbols] == [
        ("$str", 0, b"hi!\n\0\0"),
        ("lone", 1, b"\xfe\xff\xff\xff"),
    ]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("  bra NOWHERE;\n  ret;", "label NOWHERE is not defined"),
        ("  .weird x;", "unknown directive .weird"),
        ("  .reg .b48 %x;", "unknown register type .b48"),
        ("  @%q ret;", "a guard must be a predicate register"),
        ("  mov.u32 %r1, 1", "expected ';'"),
        ("  mov.u32 %r1, `;", "can't read '`"),
        ("  .param .b8 block[16];\n  ret;", "call parameter block of 16 bytes"),
    ],
)
def test_what_is_not_understood_is_refused(body: str, text: str) -> None:
    with pytest.raises(ptx.UnsupportedPTX, match="PTX line") as caught:
        kernel(REGISTERS + "\n" + body)
    assert text in str(caught.value)


def test_instructions_print_as_ptx_and_parse_again() -> None:
    """A round trip through text, over one instruction of every shape."""
    lines = [
        "@!%p1 add.s32 %r1, %r2, -5;",
        "mov.b64 {%r1, _}, %d1;",
        "setp.eq.or.b32 %p1|%p2, %r1, %r2, !%p3;",
        "ld.global.v2.b32 {%r1, %r2}, [%d1-8];",
        "fma.rn.f32 %f1, %f2, 0f3F800000, %f3;",
        "mov.f64 %d1, 0d3FF0000000000000;",
        "elect.sync _|%p1, -1;",
        "tensor.load [%r1], [%d1, {%r2, %r3}];",
        "mov.u32 %r1, %ctaid.y;",
    ]
    first = kernel(REGISTERS + "\n" + "\n".join(lines))
    assert [str(ins) for ins in first.instructions] == lines
    again = kernel(REGISTERS + "\n" + "\n".join(str(ins) for ins in first.instructions))
    assert [ins.operands for ins in again.instructions] == [ins.operands for ins in first.instructions]
    assert show(Reg("%x", 32, 0)) == "%x"


# blocks


def built(body: str) -> tuple[Kernel, flow.Flow]:
    k = kernel(REGISTERS + "\n" + body)
    return k, flow.build(k, registry.is_event, registry.writes)


def test_blocks_end_at_branches_labels_and_events() -> None:
    _, f = built(
        """
  setp.eq.u32 %p1, %r1, 0;
  @%p1 bra ELSE;
  mov.u32 %r2, 1;
  bar.sync 0;
  bra JOIN;
ELSE:
  mov.u32 %r2, 2;
JOIN:
  st.volatile.b32 [%d1], %r2;
  ret;"""
    )
    assert [(b.start, b.end, b.event) for b in f.blocks] == [
        (0, 2, False),
        (2, 4, True),
        (4, 5, False),
        (5, 6, False),
        (6, 7, True),
        (7, 8, False),
        (8, 8, False),
    ]
    assert [b.successors for b in f.blocks] == [[3, 1], [2], [4], [4], [5], [], []]
    assert f.blocks[0].reconvergence == 4
    assert [b.index for b in f.blocks if b.is_reconvergence] == [4]


def test_only_registers_that_live_on_are_kept() -> None:
    k, f = built(
        """
  add.u32 %r1, %r2, 1;
  add.u32 %r3, %r1, 1;
  @%p1 mov.u32 %r4, %r3;
  bar.sync 0;
  mov.u32 %r3, %r4;
  st.volatile.b32 [%d1], %r3;
  ret;"""
    )
    kept = {name for name, reg in k.registers.items() if f.blocks[0].live_out >> f.bit[reg] & 1}
    assert kept == {"%r4", "%d1"}


def test_loops_have_heads_and_endless_ones_no_meeting_point() -> None:
    _, f = built("A:\n  add.u32 %r1, %r1, 1;\nB:\n  setp.eq.u32 %p1, %r1, 5;\n  @%p1 bra A;\n  bra B;")
    assert [b.is_loop_head for b in f.blocks[:3]] == [True, True, False]
    assert all(b.reconvergence is None for b in f.blocks[1:])
