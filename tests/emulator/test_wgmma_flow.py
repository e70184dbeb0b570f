"""The register rules of wgmma on short kernels: each fault is named, its mended twin is silent."""

import pytest

from refluent.emulator import ptx
from refluent.emulator.check.wgmma_flow import violations
from refluent.emulator.codegen.jit import compile_kernel

FENCE = "wgmma.fence.sync.aligned;"
COMMIT = "wgmma.commit_group.sync.aligned;"
D = "{%f0, %f1, %f2, %f3}"
OTHER = "{%f4, %f5, %f6, %f7}"


def wgmma(d=D, a="%rd0"):
    trans = "0" if a.startswith("{") else "0, 0"
    return f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {d}, {a}, %rd1, 1, 1, 1, {trans};"


def wait(newest):
    return f"wgmma.wait_group.sync.aligned {newest};"


def found(*lines):
    body = "\n".join(lines)
    text = f"""
.version 8.0
.target sm_90a
.address_size 64
.visible .entry k()
{{
.reg .pred %p<2>;
.reg .b32 %f<16>;
.reg .b32 %r<8>;
.reg .b64 %rd<4>;
{body}
ret;
}}
"""
    kernel = ptx.parse(text).kernels["k"]
    return [text for _, text in violations(kernel, compile_kernel(kernel).blocks)]


def test_fence_issue_commit_wait_use_is_silent():
    assert found(FENCE, wgmma(), wgmma(), COMMIT, wait(0), "add.f32 %f8, %f0, %f1;") == []


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ((wgmma(), COMMIT, wait(0)), "no wgmma.fence"),
        ((FENCE, "mov.b32 %f0, 0;", wgmma(), COMMIT, wait(0)), "written after the last wgmma.fence"),
        ((FENCE, wgmma(), COMMIT, "add.f32 %f8, %f0, %f0;", wait(0)), "touches %f0"),
        ((FENCE, wgmma(), wait(0), "add.f32 %f8, %f2, %f2;"), "touches %f2"),  # never committed: not waited for
        ((FENCE, wgmma(), COMMIT, wait(1), "add.f32 %f8, %f3, %f3;"), "touches %f3"),
        ((FENCE, wgmma(a="{%r0, %r1, %r2, %r3}"), COMMIT, "add.s32 %r2, %r2, 1;", wait(0)), "touches %r2, A register"),
        ((FENCE, wgmma(), COMMIT, "mov.b32 %f9, %f1;", "add.f32 %f8, %f9, %f9;", wait(0)), "touches %f9"),
    ],
)
def test_faults_are_named(lines, text):
    assert any(text in words for words in found(*lines))


@pytest.mark.parametrize(
    "lines",
    [
        ("mov.b32 %f0, 0;", FENCE, wgmma(), COMMIT, wait(0)),
        (FENCE, wgmma(), COMMIT, wgmma(OTHER), COMMIT, wait(1), "add.f32 %f8, %f0, %f1;", wait(0)),
        (FENCE, wgmma(a="{%r0, %r1, %r2, %r3}"), COMMIT, "add.s32 %r4, %r2, 1;", wait(0)),  # A may be read
        (FENCE, wgmma(), "mov.b32 %f4, %f0;", wgmma("{%f4, %f1, %f2, %f3}"), COMMIT, wait(0)),
    ],
)
def test_mended_twins_are_silent(lines):
    assert found(*lines) == []


def test_a_loop_is_followed_around():
    loop = ("$L:", wgmma(), COMMIT, wait(1), "setp.eq.s32 %p0, %r0, 0;", "@%p0 bra $L;")
    assert found(FENCE, *loop, wait(0), "add.f32 %f8, %f0, %f1;") == []
    assert any("in flight" in text for text in found(FENCE, *loop, "add.f32 %f8, %f0, %f1;"))
