"""PTX text -> kernels: variables, registers and instructions, with labels and scopes resolved.

Covers what the CuTe DSL's compiler and inline assembly emit (PTX ISA 9): kernels with parameters, module variables
with initial values, scoped registers and labels, vector registers, line information, calls of extern functions.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from refluent.emulator.ptx import (
    SHARED_START,
    Addr,
    Composite,
    Dual,
    Guard,
    Imm,
    Instruction,
    Kernel,
    Label,
    Module,
    Operand,
    Pred,
    Reg,
    Sink,
    Special,
    Symbol,
    UnsupportedPTX,
    Variable,
    Vec,
)

_TYPE_BYTES = {"pred": 0, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4}
_TYPE_BYTES |= {"u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "tf32": 4, "b64": 8, "u64": 8, "s64": 8}
_TYPE_BYTES |= {"f64": 8, "f32x2": 8, "b128": 16}

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r\f]+|//[^\n]*)|(?P<comment>/\*.*?\*/)|(?P<newline>\n)
    |(?P<number>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
      |\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+U?)
    |(?P<word>[.]?[A-Za-z_$%](?:[\w$.]|::)*)
    |(?P<string>"[^"]*")|(?P<punct>[][{}()<>,;:@!|+\-=*&~])""",
    re.VERBOSE | re.DOTALL,
)
_KERNEL_DIRECTIVES = frozenset(
    ["reqntid", "maxntid", "minnctapersm", "maxnctapersm", "maxnreg", "explicitcluster", "reqnctapercluster"]
    + ["maxclusterrank", "blocksareclusters", "noreturn"]
)
_COMPONENT = {"x": 0, "y": 1, "z": 2, "w": 3, "r": 0, "g": 1, "b": 2, "a": 3}


def tokenize(text: str) -> tuple[list[str], list[int]]:
    """Tokens and their PTX lines."""
    tokens: list[str] = []
    lines: list[int] = []
    line, at = 1, 0
    for match in _TOKEN.finditer(text):
        if match.start() != at:
            raise UnsupportedPTX(f"PTX line {line}: can't read {text[at : match.start()]!r}")
        at = match.end()
        kind = match.lastgroup
        if kind == "skip":
            continue
        if kind == "newline":
            line += 1
            continue
        value = match.group()
        if kind == "comment":
            line += value.count("\n")
            continue
        tokens.append(value)
        lines.append(line)
    if at != len(text):
        raise UnsupportedPTX(f"PTX line {line}: can't read {text[at : at + 20]!r}")
    return tokens, lines


def _number(token: str) -> Imm:
    lead = token[:2].lower()
    if lead == "0f":
        return Imm(int(token[2:], 16), 32)
    if lead == "0d":
        return Imm(int(token[2:], 16), 64)
    digits = token.rstrip("U")
    if lead == "0x":
        return Imm(int(digits, 16))
    if lead == "0b":
        return Imm(int(digits, 2))
    if "." in token or "e" in token or "E" in token:
        return Imm(struct.unpack("<Q", struct.pack("<d", float(token)))[0], 64)
    if len(digits) > 1 and digits[0] == "0":
        return Imm(int(digits, 8))
    return Imm(int(digits))


class _Scope:
    """Names declared between braces."""

    def __init__(self, parent: _Scope | None) -> None:
        self.parent = parent
        self.registers: dict[str, Reg | Vec] = {}
        self.labels: dict[str, int] = {}
        self.tables: dict[str, Vec] = {}
        self.pending: list[Label] = []

    def find(self, name: str) -> Reg | Vec | None:
        scope: _Scope | None = self
        while scope is not None:
            found = scope.registers.get(name)
            if found is not None:
                return found
            scope = scope.parent
        return None


_FILES = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.MULTILINE)


class Parser:
    """Recursive descent over the tokens of one file."""

    def __init__(self, text: str) -> None:
        self.tokens, self.lines = tokenize(text)
        self.tokens.append("")
        self.lines.append(self.lines[-1] if self.lines else 1)
        self.at = 0
        # Files are declared anywhere, often after the code that names them.
        self.files = {int(number): name for number, name in _FILES.findall(text)}
        self.globals: dict[str, Variable] = {}
        self.kernel: Kernel | None = None
        self.scope = _Scope(None)
        self.source: tuple[str, int] | None = None
        self.used: dict[str, None] = {}

    # tokens

    def error(self, what: str) -> UnsupportedPTX:
        where = f" in kernel {self.kernel.name}" if self.kernel else ""
        return UnsupportedPTX(f"PTX line {self.lines[self.at]}{where}: {what}")

    def next(self) -> str:
        token = self.tokens[self.at]
        self.at += 1
        return token

    def expect(self, token: str) -> None:
        if self.tokens[self.at] != token:
            raise self.error(f"expected {token!r}, found {self.tokens[self.at]!r}")
        self.at += 1

    def accept(self, token: str) -> bool:
        if self.tokens[self.at] == token:
            self.at += 1
            return True
        return False

    def integer(self) -> int:
        sign = -1 if self.accept("-") else 1
        token = self.next()
        if not token[:1].isdigit():
            self.at -= 1
            raise self.error(f"expected a number, found {token!r}")
        return sign * _number(token).value

    def rest_of_line(self) -> list[str]:
        line, start = self.lines[self.at - 1], self.at
        while self.at < len(self.tokens) - 1 and self.lines[self.at] == line:
            self.at += 1
        return self.tokens[start : self.at]

    # module

    def module(self) -> Module:
        version = target = ""
        entries: list[Kernel] = []
        while self.tokens[self.at]:
            token = self.next()
            if token == ".version":
                version = self.next()
            elif token == ".target":
                words = self.rest_of_line()
                target = words[0]
            elif token in (".address_size", ".globl"):
                self.rest_of_line()
            elif token in (".visible", ".extern", ".weak", ".common"):
                continue
            elif token == ".file":
                self.rest_of_line()
            elif token == ".entry":
                entries.append(self.entry())
            elif token == ".func":
                self.function()
            elif token in (".global", ".const", ".shared"):
                self.variable(token[1:])
            elif token == ".section":
                self.skip_section()
            elif token == ".alias" or token == ".pragma":
                self.skip_to(";")
            else:
                self.at -= 1
                raise self.error(f"unknown directive {token!r}")
        for kernel in entries:
            kernel.target = target
        return Module(version, target, {kernel.name: kernel for kernel in entries})

    def skip_to(self, end: str) -> None:
        while self.tokens[self.at] and self.next() != end:
            pass

    def skip_section(self) -> None:
        self.skip_to("{")
        depth = 1
        while depth and self.tokens[self.at]:
            token = self.next()
            depth += (token == "{") - (token == "}")

    def function(self) -> None:
        """Declarations of extern functions (vprintf, __assertfail) carry nothing; bodies are not supported."""
        start = self.at
        while self.tokens[self.at] not in (";", "{", ""):
            self.at += 1
        if self.tokens[self.at] != ";":
            self.at = start
            raise self.error(".func with a body: device functions are inlined by the compilers this emulator serves")
        self.at += 1

    def declaration(self, space: str) -> tuple[str, str, int, int, bool]:
        """`[.attributes] .type name[n]`: name, type, size in bytes, alignment, whether it is `name[]`."""
        align, kind, lanes = 0, "", 1
        while self.tokens[self.at].startswith("."):
            word = self.next()[1:]
            if word == "align":
                align = max(align, self.integer())
            elif word in ("v2", "v4"):
                lanes = int(word[1:])
            elif word in _TYPE_BYTES:
                kind = word
            elif word == "ptr":
                # `.ptr .space .align n` describes what the pointer points to, not the parameter.
                while self.tokens[self.at].startswith("."):
                    if self.next() == ".align":
                        self.integer()
            elif word != "attribute":
                self.at -= 1
                raise self.error(f"unknown word .{word} in a .{space} declaration")
        name = self.next()
        count, dynamic = lanes, False
        while self.accept("["):
            if self.accept("]"):
                count, dynamic = 0, True
            else:
                count *= self.integer()
                self.expect("]")
        size = count * _TYPE_BYTES[kind]
        return name, kind, size, align or lanes * _TYPE_BYTES[kind], dynamic

    def variable(self, space: str) -> None:
        name, kind, size, align, dynamic = self.declaration(space)
        data = None
        if self.accept("="):
            data = self.initial(_TYPE_BYTES[kind]).ljust(size, b"\0")
        self.expect(";")
        self.globals[name] = Variable(name, space, size, align, data=data, dynamic=dynamic)

    def initial(self, width: int) -> bytes:
        if self.accept("{"):
            parts = []
            while not self.accept("}"):
                parts.append(self.initial(width))
                self.accept(",")
            return b"".join(parts)
        negative = self.accept("-")
        token = self.next()
        if not token[:1].isdigit():
            self.at -= 1
            raise self.error(f"initial value {token!r}: only numbers are known")
        value = _number(token)
        bits = -value.value if negative else value.value
        return (bits & ((1 << 8 * width) - 1)).to_bytes(width, "little")

    # kernels

    def entry(self) -> Kernel:
        kernel = self.kernel = Kernel(self.next())
        start = self.at
        self.scope = _Scope(None)
        self.used = {}
        self.source = None
        if self.accept("("):
            while not self.accept(")"):
                self.expect(".param")
                name, _, size, align, _ = self.declaration("param")
                offset = (kernel.param_size + align - 1) // align * align
                kernel.params.append(Variable(name, "param", size, align, offset))
                kernel.variables[name] = kernel.params[-1]
                kernel.param_size = offset + size
                self.accept(",")
        self.entry_directives(kernel)
        self.expect("{")
        self.body()
        self.close_scope()
        kernel.labels = dict(self.scope.labels)
        self.place_variables(kernel)
        kernel.digest_text = " ".join(self.tokens[start : self.at])
        self.kernel = None
        return kernel

    def entry_directives(self, kernel: Kernel) -> None:
        while self.tokens[self.at] != "{":
            word = self.next()
            if word == ".pragma":
                self.skip_to(";")
                continue
            if word[1:] not in _KERNEL_DIRECTIVES:
                self.at -= 1
                raise self.error(f"unknown kernel directive {word}")
            values = []
            while self.tokens[self.at][:1].isdigit():
                values.append(self.integer())
                self.accept(",")
            kernel.directives[word[1:]] = tuple(values)

    def place_variables(self, kernel: Kernel) -> None:
        """Offsets of the shared variables a kernel names, in order of use; the dynamic one follows the static."""
        named = [self.globals[name] for name in self.used if name in self.globals]
        bodies = [v for v in kernel.variables.values() if v.space == "shared"]
        offset = SHARED_START
        for variable in [*bodies, *(v for v in named if v.space == "shared" and not v.dynamic)]:
            offset = (offset + variable.align - 1) // variable.align * variable.align
            kernel.variables[variable.name] = _placed(variable, offset)
            offset += variable.size
        kernel.static_shared = offset
        for variable in named:
            if variable.dynamic:
                aligned = (offset + variable.align - 1) // variable.align * variable.align
                kernel.variables[variable.name] = _placed(variable, aligned)
            elif variable.space in ("global", "const"):
                placed = Variable(
                    variable.name, variable.space, variable.size, variable.align, 0, len(kernel.symbols), variable.data
                )
                kernel.symbols.append(placed)
                kernel.variables[variable.name] = placed

    def body(self) -> None:
        while True:
            token = self.tokens[self.at]
            if token == "{":
                self.at += 1
                self.scope = _Scope(self.scope)
            elif token == "}":
                self.at += 1
                if self.scope.parent is None:
                    return
                self.close_scope()
                self.scope = self.scope.parent
            elif token[:1] == ".":
                self.body_directive()
            elif token == "@" or self.tokens[self.at + 1] != ":":
                self.instruction()
            else:
                self.label()
                if not token:
                    raise self.error("the kernel's body does not end")

    def label(self) -> None:
        assert self.kernel is not None
        name = self.next()
        self.expect(":")
        if self.tokens[self.at] == ".branchtargets":
            self.at += 1
            self.scope.tables[name] = Vec(tuple(self.branch_targets()))
            return
        if self.tokens[self.at] == ".callprototype":
            self.skip_to(";")
            return
        self.scope.labels[name] = len(self.kernel.instructions)

    def branch_targets(self) -> Iterator[Label]:
        while not self.accept(";"):
            label = Label(self.next())
            self.scope.pending.append(label)
            self.accept(",")
            yield label

    def close_scope(self) -> None:
        """Resolve the labels of the scope; what is not found belongs to the scope around it."""
        for label in self.scope.pending:
            if label.name in self.scope.labels:
                label.target = self.scope.labels[label.name]
            elif self.scope.parent is not None:
                self.scope.parent.pending.append(label)
            else:
                raise self.error(f"label {label.name} is not defined")

    def body_directive(self) -> None:
        word = self.next()
        if word == ".loc":
            words = self.rest_of_line()
            self.source = (self.files.get(int(words[0]), words[0]), int(words[1]))
        elif word == ".file":
            self.rest_of_line()
        elif word == ".reg":
            self.registers()
        elif word in (".pragma", ".callprototype"):
            self.skip_to(";")
        elif word in (".shared", ".local"):
            self.body_variable(word[1:])
        elif word == ".param":
            self.call_param()
        else:
            self.at -= 1
            raise self.error(f"unknown directive {word}")

    def new_register(self, name: str, bits: int) -> Reg:
        assert self.kernel is not None
        storage = 16 if bits == 8 else bits
        index = self.kernel.register_counts.get(storage, 0)
        self.kernel.register_counts[storage] = index + 1
        unique = name if name not in self.kernel.registers else f"{name}@{len(self.kernel.registers)}"
        reg = self.kernel.registers[unique] = Reg(unique, bits, index)
        return reg

    def registers(self) -> None:
        kind, lanes = self.next()[1:], 1
        if kind in ("v2", "v4"):
            lanes, kind = int(kind[1:]), self.next()[1:]
        if kind not in _TYPE_BYTES:
            self.at -= 1
            raise self.error(f"unknown register type .{kind}")
        bits = 8 * _TYPE_BYTES[kind] or 1
        while True:
            stem = self.next()
            names = [stem]
            if self.accept("<"):
                names = [f"{stem}{i}" for i in range(self.integer())]
                self.expect(">")
            for name in names:
                if lanes == 1:
                    self.scope.registers[name] = self.new_register(name, bits)
                else:
                    parts = tuple(self.new_register(f"{name}.{'xyzw'[i]}", bits) for i in range(lanes))
                    self.scope.registers[name] = Vec(parts)
            if self.accept(";"):
                return
            self.expect(",")

    def body_variable(self, space: str) -> None:
        assert self.kernel is not None
        name, _, size, align, dynamic = self.declaration(space)
        self.expect(";")
        offset = 0
        if space == "local":
            offset = (self.kernel.local_size + align - 1) // align * align
            self.kernel.local_size = offset + size
        self.kernel.variables[name] = Variable(name, space, size, align, offset, dynamic=dynamic)

    def call_param(self) -> None:
        """A `.param` inside a body passes one value to or from a call: a register will do."""
        assert self.kernel is not None
        name, _, size, _, _ = self.declaration("param")
        self.expect(";")
        if size not in (4, 8):
            raise self.error(f"call parameter {name} of {size} bytes: only 4 and 8 are known")
        reg = self.new_register(name, 8 * size)
        self.scope.registers[name] = reg
        self.kernel.call_params[reg.name] = reg

    # instructions

    def instruction(self) -> None:
        kernel = self.kernel
        assert kernel is not None
        line = self.lines[self.at]
        guard: Guard | None = None
        if self.accept("@"):
            negated = self.accept("!")
            reg = self.scope.find(self.next())
            if not isinstance(reg, Reg):
                raise self.error("a guard must be a predicate register")
            guard = (reg, negated)
        opcode, *modifiers = self.next().split(".")
        operands: list[Operand] = []
        labels = opcode in ("bra", "brx")
        while not self.accept(";"):
            operands.append(self.operand(labels))
            if not self.accept(","):
                self.expect(";")
                break
        kernel.instructions.append(
            Instruction(len(kernel.instructions), opcode, tuple(modifiers), tuple(operands), guard, line, self.source)
        )

    def operand(self, labels: bool = False) -> Operand:
        token = self.next()
        if token == "{" or token == "(":
            return Vec(self.operands("}" if token == "{" else ")"))
        if token == "[":
            return self.address()
        if token == "!":
            reg = self.scope.find(self.next())
            if not isinstance(reg, Reg):
                raise self.error("! wants a predicate register")
            return Pred(reg)
        if token == "-" or token[0].isdigit():
            return self.literal(token)
        first = self.name(token, labels)
        if self.accept("|"):
            return Dual(first, self.name(self.next(), False))
        if isinstance(first, Symbol) and self.tokens[self.at] in "+-":
            return Addr(first, self.offset())
        return first

    def literal(self, token: str) -> Imm:
        if token != "-":
            return _number(token)
        value = _number(self.next())
        if value.float_bits:
            return Imm(value.value ^ (1 << (value.float_bits - 1)), value.float_bits)
        return Imm(-value.value)

    def operands(self, end: str) -> tuple[Operand, ...]:
        items = []
        while not self.accept(end):
            items.append(self.operand())
            self.accept(",")
        return tuple(items)

    def name(self, token: str, label: bool) -> Operand:
        if token == "_":
            return Sink()
        found = self.scope.find(token)
        if found is not None:
            return found
        stem, _, part = token.rpartition(".")
        if part in _COMPONENT:
            vector = self.scope.find(stem)
            if isinstance(vector, Vec):
                return vector.items[_COMPONENT[part]]
        if token[0] == "%":
            return Special(token)
        if label:
            scope: _Scope | None = self.scope
            while scope is not None:
                if token in scope.tables:
                    return scope.tables[token]
                scope = scope.parent
            target = Label(token)
            self.scope.pending.append(target)
            return target
        self.used[token] = None
        return Symbol(token)

    def offset(self) -> int:
        total = 0
        while self.tokens[self.at] in ("+", "-"):
            sign = -1 if self.next() == "-" else 1
            total += sign * self.integer()
        return total

    def address(self) -> Operand:
        first = self.operand()
        if self.accept(","):
            return Composite((first, *self.operands("]")))
        offset = self.offset()
        self.expect("]")
        if isinstance(first, Addr):
            return Addr(first.base, first.offset + offset)
        if isinstance(first, Reg | Symbol | Imm):
            return Addr(first, offset)
        raise self.error(f"can't address {first}")


def _placed(variable: Variable, offset: int) -> Variable:
    return Variable(
        variable.name,
        variable.space,
        variable.size,
        variable.align,
        offset,
        variable.index,
        variable.data,
        variable.dynamic,
    )
