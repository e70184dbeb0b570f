"""Branches, exits, divergence, events: how a block's function ends."""

from __future__ import annotations

from refluent.emulator.codegen.emitter import Emitter
from refluent.emulator.codegen.flow import Block
from refluent.emulator.ptx import Instruction
from refluent.emulator.state import (
    BUDGET,
    EVENT,
    EXIT,
    FAULT,
    FAULT_BRANCH,
    FAULT_STACK,
    FAULT_TRAP,
    NO_BLOCK,
    STACK_DEPTH,
    offset_of,
)

NO_TARGET = NO_BLOCK - 1
FASTCC_TAIL = "musttail call fastcc i32"


def jump(e: Emitter, block: int) -> None:
    result = e.op(f"{FASTCC_TAIL} @b{block}(ptr %s)")
    e.line(f"ret i32 {result}")


def leave(e: Emitter, code: int) -> None:
    e.store_field("event", str(code))
    e.line(f"ret i32 {code}")


def fault(e: Emitter, instr: int, code: str) -> None:
    e.store_field("instr", str(instr))
    e.store_field("fault", code)
    leave(e, FAULT)


def fault_if(e: Emitter, condition: str, instr: int, code: int) -> None:
    """Go on only where an i1 is false."""
    n = e.name()[1:]
    e.line(f"br i1 {condition}, label %bad_{n}, label %good_{n}, !prof !0")
    e.label(f"bad_{n}")
    fault(e, instr, str(code))
    e.label(f"good_{n}")


def resume(e: Emitter) -> None:
    """Go on with the newest path on the divergence stack; without one the warp has exited."""
    e.line(f"{(r := e.name())} = {FASTCC_TAIL} @resume(ptr %s)")
    e.line(f"ret i32 {r}")


def finish(e: Emitter, block: Block, last: Instruction | None) -> None:
    """Everything after the block's registers have been stored."""
    if last is None or (last.opcode not in ("bra", "brx", "ret", "exit", "trap") and not block.event):
        _fall(e, block)
    elif block.event:
        _event(e, block, last)
    elif last.opcode in ("ret", "exit"):
        _exit(e, block)
    elif last.opcode == "trap":
        _trap(e, block, last)
    elif last.opcode == "brx":
        _indexed(e, block, last)
    else:
        _branch(e, block, last)


def _fall(e: Emitter, block: Block) -> None:
    if block.follows is None:
        _exit(e, block)
    else:
        jump(e, block.follows)


def _event(e: Emitter, block: Block, last: Instruction) -> None:
    assert block.follows is not None
    active = e.active()
    if e.guard is not None:
        none = e.op(f"icmp eq i32 {active}, 0")
        e.line(f"br i1 {none}, label %skip, label %event")
        e.label("skip")
        jump(e, block.follows)
        e.label("event")
    e.store_field("event_mask", active)
    e.store_field("instr", str(last.index))
    e.store_field("pc", str(block.follows))
    leave(e, EVENT)


def _exit(e: Emitter, block: Block) -> None:
    active = e.active()
    exited = e.op(f"or i32 {e.load_field('exited')}, {active}")
    e.store_field("exited", exited)
    rest = e.op(f"xor i32 %mask, {active}")
    if e.guard is None or block.follows is None:
        resume(e)
        return
    none = e.op(f"icmp eq i32 {rest}, 0")
    e.line(f"br i1 {none}, label %gone, label %stay")
    e.label("gone")
    resume(e)
    e.label("stay")
    e.store_field("mask", rest)
    jump(e, block.follows)


def _trap(e: Emitter, block: Block, last: Instruction) -> None:
    active = e.active()
    some = e.op(f"icmp ne i32 {active}, 0")
    e.line(f"br i1 {some}, label %bad, label %good")
    e.label("bad")
    fault(e, last.index, str(FAULT_TRAP))
    e.label("good")
    _fall(e, block)


def _branch(e: Emitter, block: Block, last: Instruction) -> None:
    target = block.targets[0]
    follows = block.follows
    if e.guard is None or follows is None:
        jump(e, target)
        return
    taken = e.active()
    none, every = e.op(f"icmp eq i32 {taken}, 0"), e.op(f"icmp eq i32 {taken}, %mask")
    e.line(f"br i1 {none}, label %fall, label %some")
    e.label("fall")
    jump(e, follows)
    e.label("some")
    e.line(f"br i1 {every}, label %all, label %split")
    e.label("all")
    jump(e, target)
    e.label("split")
    meet = NO_BLOCK if block.reconvergence is None else block.reconvergence
    error = e.op(f"call fastcc i32 @split(ptr %s, i32 {taken}, i32 {meet}, i32 {target}, i32 {follows})")
    failed = e.op(f"icmp ne i32 {error}, 0")
    fault_if(e, failed, last.index, FAULT_STACK)
    # The path that is not the meeting point goes first; split() has set its mask.
    jump(e, follows if target == meet else target)


def _indexed(e: Emitter, block: Block, last: Instruction) -> None:
    """brx.idx: peel the lanes off by the target of the lowest lane until all agree."""
    index = e.bits(e.value(last.operands[0], 32))
    if e.guard is not None:
        raise e.refuse("a guard")
    lowest = e.op("call i32 @llvm.cttz.i32(i32 %mask, i1 true)")
    e.library.declare("llvm.cttz.i32", "declare i32 @llvm.cttz.i32(i32, i1)")
    first = e.op(f"extractelement <32 x i32> {index}, i32 {lowest}")
    bad = e.op(f"icmp uge i32 {first}, {len(block.targets)}")
    fault_if(e, bad, last.index, FAULT_BRANCH)
    same = e.op(f"icmp eq <32 x i32> {index}, {e.splat(first, 'i32')}")
    taken = e.op(f"and i32 {e.op(f'bitcast <32 x i1> {same} to i32')}, %mask")
    table = "[" + ", ".join(f"i32 {t}" for t in block.targets) + "]"
    name = f"@targets{block.index}"
    e.library.add(name, f"{name} = internal constant [{len(block.targets)} x i32] {table}")
    at = e.op(f"getelementptr i32, ptr {name}, i32 {first}")
    target = e.op(f"load i32, ptr {at}, align 4")
    every = e.op(f"icmp eq i32 {taken}, %mask")
    e.line(f"br i1 {every}, label %all, label %split")
    e.label("split")
    meet = NO_BLOCK if block.reconvergence is None else block.reconvergence
    # The other lanes run this block again: it holds the index and nothing that may not be repeated.
    error = e.op(f"call fastcc i32 @split(ptr %s, i32 {taken}, i32 {meet}, i32 {NO_TARGET}, i32 {block.index})")
    fault_if(e, e.op(f"icmp ne i32 {error}, 0"), last.index, FAULT_STACK)
    e.line("br label %all")
    e.label("all")
    slot = e.op(f"getelementptr ptr, ptr @table, i64 {e.op(f'zext i32 {target} to i64')}")
    function = e.op(f"load ptr, ptr {slot}, align 8")
    result = e.op(f"{FASTCC_TAIL} {function}(ptr %s)")
    e.line(f"ret i32 {result}")


def head(e: Emitter, block: Block) -> None:
    """The start of a block's function: meet other paths, watch the budget, count, load what all need."""
    if block.is_reconvergence:
        _meeting(e, block.index)
    if block.is_loop_head:
        left = e.op(f"sub i64 {e.load_field('budget', 'i64')}, 1")
        e.store_field("budget", left, "i64")
        e.line(f"br i1 {e.op(f'icmp slt i64 {left}, 0')}, label %spent, label %enough, !prof !0")
        e.label("spent")
        e.store_field("pc", str(block.index))
        leave(e, BUDGET)
        e.label("enough")
    counters = e.load_field("counters", "ptr")
    at = e.op(f"getelementptr i64, ptr {counters}, i64 {block.index}")
    seen = e.op(f"load i64, ptr {at}, align 8")
    e.line(f"store i64 {e.op(f'add i64 {seen}, 1')}, ptr {at}, align 8")
    e.line(f"%regs = load ptr, ptr {e.field('regs')}, align 8")
    e.line(f"%mask = load i32, ptr {e.field('mask')}, align 4")
    e.line("%lanes = bitcast i32 %mask to <32 x i1>")
    e.line("%others = xor i32 %mask, -1")


def _meeting(e: Emitter, block: int) -> None:
    depth = e.load_field("stack_depth")
    e.line(f"br i1 {e.op(f'icmp eq i32 {depth}, 0')}, label %begin, label %meet")
    e.label("meet")
    top = e.op(f"sub i32 {depth}, 1")
    row = e.op(f"zext i32 {e.op(f'mul i32 {top}, 12')} to i64")
    at = e.op(f"getelementptr i8, ptr {e.field('stack')}, i64 {row}")
    where = e.op(f"load i32, ptr {at}, align 4")
    e.line(f"br i1 {e.op(f'icmp eq i32 {where}, {block}')}, label %arrived, label %begin")
    e.label("arrived")
    resume(e)
    e.label("begin")


def runtime_text(blocks: int) -> str:
    """The dispatcher, and what all branches share."""
    table = ", ".join(f"ptr @b{i}" for i in range(blocks))
    at = {name: offset_of(name) for name in ("pc", "mask", "exited", "event", "stack_depth", "stack")}
    numbers = {f"at_{name}": offset for name, offset in at.items()}
    return _RUNTIME.format(
        blocks=blocks, table=table, exit=EXIT, full=STACK_DEPTH - 2, none=NO_BLOCK - (1 << 32), **numbers
    )


_RUNTIME = """
@table = internal constant [{blocks} x ptr] [{table}]

define i32 @run(ptr %s) {{
  %at = getelementptr i8, ptr %s, i64 {at_pc}
  %pc = load i32, ptr %at, align 4
  %n = zext i32 %pc to i64
  %slot = getelementptr ptr, ptr @table, i64 %n
  %f = load ptr, ptr %slot, align 8
  %r = call fastcc i32 %f(ptr %s)
  ret i32 %r
}}

; Pop paths until one has lanes left.
define internal fastcc i32 @resume(ptr %s) noinline {{
  %depth_at = getelementptr i8, ptr %s, i64 {at_stack_depth}
  %exited_at = getelementptr i8, ptr %s, i64 {at_exited}
  %exited = load i32, ptr %exited_at, align 4
  %alive = xor i32 %exited, -1
  br label %pop
pop:
  %depth = load i32, ptr %depth_at, align 4
  %empty = icmp eq i32 %depth, 0
  br i1 %empty, label %over, label %take
take:
  %top = sub i32 %depth, 1
  store i32 %top, ptr %depth_at, align 4
  %row = mul i32 %top, 12
  %row64 = zext i32 %row to i64
  %stack = getelementptr i8, ptr %s, i64 {at_stack}
  %entry = getelementptr i8, ptr %stack, i64 %row64
  %block_at = getelementptr i8, ptr %entry, i64 4
  %mask_at = getelementptr i8, ptr %entry, i64 8
  %block = load i32, ptr %block_at, align 4
  %pushed = load i32, ptr %mask_at, align 4
  %mask = and i32 %pushed, %alive
  %gone = icmp eq i32 %mask, 0
  br i1 %gone, label %pop, label %go
go:
  %at = getelementptr i8, ptr %s, i64 {at_mask}
  store i32 %mask, ptr %at, align 4
  %n = zext i32 %block to i64
  %f_at = getelementptr ptr, ptr @table, i64 %n
  %f = load ptr, ptr %f_at, align 8
  %r = musttail call fastcc i32 %f(ptr %s)
  ret i32 %r
over:
  %mask0_at = getelementptr i8, ptr %s, i64 {at_mask}
  store i32 0, ptr %mask0_at, align 4
  %event_at = getelementptr i8, ptr %s, i64 {at_event}
  store i32 {exit}, ptr %event_at, align 4
  ret i32 {exit}
}}

; Push the meeting point and the path that goes second; the lanes of the first path become the mask.
define internal fastcc i32 @split(ptr %s, i32 %taken, i32 %meet, i32 %target, i32 %follows) noinline {{
  %depth_at = getelementptr i8, ptr %s, i64 {at_stack_depth}
  %mask_at = getelementptr i8, ptr %s, i64 {at_mask}
  %stack = getelementptr i8, ptr %s, i64 {at_stack}
  %depth = load i32, ptr %depth_at, align 4
  %mask = load i32, ptr %mask_at, align 4
  %not_taken = xor i32 %mask, %taken
  %full = icmp ugt i32 %depth, {full}
  br i1 %full, label %bad, label %meeting
meeting:
  %nowhere = icmp eq i32 %meet, {none}
  br i1 %nowhere, label %second, label %look
look:
  ; A loop that lanes leave one after another meets at one point: push it once.
  %shallow = icmp eq i32 %depth, 0
  br i1 %shallow, label %push, label %compare
compare:
  %top = sub i32 %depth, 1
  %row0 = mul i32 %top, 12
  %row064 = zext i32 %row0 to i64
  %entry0 = getelementptr i8, ptr %stack, i64 %row064
  %meet0 = load i32, ptr %entry0, align 4
  %block0_at = getelementptr i8, ptr %entry0, i64 4
  %block0 = load i32, ptr %block0_at, align 4
  %same_meet = icmp eq i32 %meet0, %meet
  %same_block = icmp eq i32 %block0, %meet
  %same = and i1 %same_meet, %same_block
  br i1 %same, label %second, label %push
push:
  %row1 = mul i32 %depth, 12
  %row164 = zext i32 %row1 to i64
  %entry1 = getelementptr i8, ptr %stack, i64 %row164
  store i32 %meet, ptr %entry1, align 4
  %block1_at = getelementptr i8, ptr %entry1, i64 4
  store i32 %meet, ptr %block1_at, align 4
  %mask1_at = getelementptr i8, ptr %entry1, i64 8
  store i32 %mask, ptr %mask1_at, align 4
  %deeper = add i32 %depth, 1
  br label %second
second:
  %depth2 = phi i32 [ %depth, %meeting ], [ %depth, %compare ], [ %deeper, %push ]
  %to_meet = icmp eq i32 %target, %meet
  %from_meet = icmp eq i32 %follows, %meet
  %known = icmp ne i32 %meet, {none}
  %t1 = and i1 %to_meet, %known
  %t2 = and i1 %from_meet, %known
  ; Lanes that go straight to the meeting point wait there already.
  %first = select i1 %t1, i32 %not_taken, i32 %taken
  store i32 %first, ptr %mask_at, align 4
  %waits = or i1 %t1, %t2
  br i1 %waits, label %done, label %push2
push2:
  %row2 = mul i32 %depth2, 12
  %row264 = zext i32 %row2 to i64
  %entry2 = getelementptr i8, ptr %stack, i64 %row264
  store i32 %meet, ptr %entry2, align 4
  %block2_at = getelementptr i8, ptr %entry2, i64 4
  store i32 %follows, ptr %block2_at, align 4
  %mask2_at = getelementptr i8, ptr %entry2, i64 8
  store i32 %not_taken, ptr %mask2_at, align 4
  %deepest = add i32 %depth2, 1
  br label %done
done:
  %depth3 = phi i32 [ %depth2, %second ], [ %deepest, %push2 ]
  store i32 %depth3, ptr %depth_at, align 4
  ret i32 0
bad:
  ret i32 1
}}
"""
