"""Which tensors and constants a function can see: closures, globals, defaults, partial arguments, attributes.

:func:`scan` walks them and gives a signature (hashable, without tensors' values) and the tensors in a fixed order.
Two functions with the same code and the same signature trace to the same graph, so a lambda that a training step
makes anew is not traced again.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

_PLAIN = (int, bool, str, type(None), bytes, complex, torch.dtype, torch.device, type(Ellipsis))
_LIBRARIES = frozenset(
    {"torch", "math", "builtins", "operator", "functools", "itertools", "numpy", "refluent", "typing"}
)
_BY_VALUE = (enum.Enum, fractions.Fraction, decimal.Decimal, datetime.date, datetime.timedelta, range, slice)
_BY_REPR = (float, int, str, complex, np.generic)  # subclasses of python's numbers: numpy's scalars, IntEnum
_BY_IDENTITY = (type, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Seen:
    """What a function can see: ``signature`` and, in a fixed order, ``tensors`` (each once) with their ``names``."""

    signature: tuple[Any, ...]
    tensors: list[Tensor]
    names: list[str]
    attributes: frozenset[str]


class _Scan:
    """One walk. ``attributes``: the names that are looked up on objects (all that the codes seen mention)."""

    def __init__(self, attributes: frozenset[str], root: types.CodeType | None) -> None:
        self.attributes = attributes
        self.root = root
        self.mentioned: set[str] = set()
        self.signature: list[Any] = []
        self.tensors: list[Tensor] = []
        self.names: list[str] = []
        self.visited: dict[int, int] = {}

    def value(self, name: str, value: Any) -> None:
        kind = type(value)
        note = self.signature.append
        if kind is float:
            note(value.hex())
        elif kind in _PLAIN:
            note(kind)
            note(value)
        elif isinstance(value, Tensor):
            self.tensor(name, value)
        elif isinstance(value, types.ModuleType):
            note(value)
            if value.__name__.partition(".")[0] not in _LIBRARIES and self.first(value):
                self.members(name, value, vars(value))
        elif isinstance(value, _BY_IDENTITY):
            note(value)
        elif isinstance(value, _BY_VALUE):
            note(kind)
            note((value.start, value.stop, value.step) if isinstance(value, slice) else value)
        elif isinstance(value, _BY_REPR):
            note(kind)
            note(repr(value))
        elif isinstance(value, np.ndarray):
            note((value.shape, value.dtype.str, value.tobytes()))
        elif self.first(value):
            note(kind)
            self.compound(name, value)

    def tensor(self, name: str, tensor: Tensor) -> None:
        number = self.visited.get(id(tensor))
        if number is None:
            number = self.visited[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            self.names.append(name)
        self.signature += (number, tensor.dtype, tensor.ndim)

    def first(self, value: Any) -> bool:
        number = self.visited.setdefault(id(value), len(self.signature))
        if number == len(self.signature):
            return True
        self.signature.append(number)
        return False

    def compound(self, name: str, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self.function(value)
        elif isinstance(value, types.MethodType):
            self.value("", value.__self__)
            self.value(name, value.__func__)
        elif isinstance(value, functools.partial):
            self.value(name, value.func)
            self.value(name or "args", value.args)
            for key, item in value.keywords.items():
                self.signature.append(key)
                self.value(key, item)
        elif isinstance(value, list | tuple | set | frozenset):
            self.signature.append(len(value))
            for position, item in enumerate(value):
                self.value(f"{name}[{position}]", item)
        elif isinstance(value, dict):
            for key, item in value.items():
                self.signature.append(key if isinstance(key, _PLAIN) else id(key))
                self.value(f"{name}[{key!r}]", item)
        else:
            self.instance(name, value)

    def function(self, fn: types.FunctionType) -> None:
        code = fn.__code__
        package = str(fn.__globals__.get("__name__")).partition(".")[0]
        if package in _LIBRARIES and package != "refluent":  # what torch's own functions see never changes
            self.signature.append(code)
            return
        # The root's code keys the cache weakly; its own entries must not keep it alive.
        self.signature.append(None if code is self.root else code)
        mentioned = _names_in(code)
        self.mentioned |= mentioned
        if fn.__closure__:
            for name, cell in zip(code.co_freevars, fn.__closure__):
                try:
                    self.value(name, cell.cell_contents)
                except ValueError:  # an empty cell: a name that is assigned later
                    self.signature.append(None)
        if fn.__defaults__:
            arguments = code.co_varnames[: code.co_argcount]
            for name, item in zip(arguments[-len(fn.__defaults__) :], fn.__defaults__):
                self.value(name, item)
        for name, item in (fn.__kwdefaults__ or {}).items():
            self.value(name, item)
        space = fn.__globals__
        for name in mentioned:
            if name in space:
                self.value(name, space[name])

    def instance(self, name: str, value: Any) -> None:
        """An object: what the attributes that the code mentions hold, found without running properties' code."""
        prefix = f"{name}." if name else ""
        self.mentioned |= _names_in_operators(type(value))
        self.members(name, value, getattr(value, "__dict__", {}))
        for table in ("_parameters", "_buffers", "_modules"):  # torch.nn.Module keeps its attributes in these
            entries = getattr(value, "__dict__", {}).get(table)
            if isinstance(entries, dict):
                self.members(name, value, entries)
        call = getattr(type(value), "forward" if isinstance(value, torch.nn.Module) else "__call__", None)
        if isinstance(call, types.FunctionType):
            self.function(call)
        for attribute in self.attributes:
            if attribute in getattr(value, "__dict__", {}):
                continue
            static = next((vars(base)[attribute] for base in type(value).__mro__ if attribute in vars(base)), None)
            if isinstance(static, property):
                static = static.fget
            if isinstance(static, types.MemberDescriptorType):  # a slot
                static = getattr(value, attribute, None)
            if static is not None:
                self.signature.append(attribute)
                self.value(prefix + attribute, static)

    def members(self, name: str, owner: Any, entries: dict[str, Any]) -> None:
        prefix = f"{name}." if name and not isinstance(owner, types.ModuleType) else ""
        for attribute in self.attributes:
            if attribute in entries:
                self.signature.append(attribute)
                self.value(prefix + attribute, entries[attribute])


_names: WeakKeyDictionary[types.CodeType, frozenset[str]] = WeakKeyDictionary()


def _names_in(code: types.CodeType) -> frozenset[str]:
    """Global and attribute names that a code object and those nested in it mention."""
    names = _names.get(code)
    if names is None:
        nested = (_names_in(c) for c in code.co_consts if isinstance(c, types.CodeType))
        names = _names[code] = frozenset(code.co_names).union(*nested)
    return names


_operator_names: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()
_LIFECYCLE = frozenset({"__init__", "__new__", "__post_init__", "__repr__", "__str__", "__del__", "__reduce__"})


def _names_in_operators(kind: type) -> frozenset[str]:
    """Names that a class's own operators (__float__, __getitem__, ...) mention: they run without being named."""
    names = _operator_names.get(kind)
    if names is None:
        methods = [
            method
            for base in kind.__mro__
            if base.__module__.partition(".")[0] not in _LIBRARIES
            for name, method in vars(base).items()
            if name.startswith("__") and name not in _LIFECYCLE and isinstance(method, types.FunctionType)
        ]
        names = _operator_names[kind] = frozenset().union(*(_names_in(m.__code__) for m in methods))
    return names


def scan(fn: Callable[..., Any], attributes: frozenset[str] | None = None) -> Seen:
    """What ``fn`` can see. ``attributes``: names to follow on objects; found by walking until no new one appears."""
    names: frozenset[str] = frozenset() if attributes is None else attributes
    while True:
        walk = _Scan(names, code_of(fn))
        walk.value("", fn)
        if attributes is not None or walk.mentioned <= names:
            return Seen(tuple(walk.signature), walk.tensors, walk.names, names)
        names |= walk.mentioned


def code_of(fn: Callable[..., Any]) -> types.CodeType | None:
    """The code object at the root of a callable; None for one that is not written in Python."""
    while isinstance(fn, functools.partial | types.MethodType):
        fn = fn.func if isinstance(fn, functools.partial) else fn.__func__
    if isinstance(fn, types.FunctionType):
        return fn.__code__
    method = getattr(type(fn), "forward" if isinstance(fn, torch.nn.Module) else "__call__", None)
    return method.__code__ if isinstance(method, types.FunctionType) else None


class TraceCache(Generic[Entry]):
    """Traces by code object and signature. Holds no tensor and no function; an entry goes when its code goes."""

    def __init__(self, limit: int = 64) -> None:
        self.limit = limit
        self._roots: WeakKeyDictionary[types.CodeType, tuple[frozenset[str], dict[Any, list[Entry]]]]
        self._roots = WeakKeyDictionary()

    def find(self, fn: Callable[..., Any]) -> tuple[Seen, list[Entry]]:
        """What ``fn`` sees and the entries stored for it (several may differ by shapes)."""
        code = code_of(fn)
        root = None if code is None else self._roots.get(code)
        if root is None:
            return scan(fn), []
        seen = scan(fn, root[0])
        entries = root[1].get(seen.signature)
        return (seen, entries) if entries else (scan(fn), [])

    def store(self, fn: Callable[..., Any], seen: Seen, entry: Entry) -> None:
        """Remember ``entry`` for functions with the code of ``fn`` that see the same."""
        code = code_of(fn)
        if code is None:
            return
        root = self._roots.get(code)
        if root is None or root[0] != seen.attributes:
            root = self._roots[code] = (seen.attributes, {})
        entries = root[1]
        same = entries.setdefault(seen.signature, [])
        same.append(entry)
        del same[: -self.limit]
        while len(entries) > self.limit:
            del entries[next(iter(entries))]

    def clear(self) -> None:
        self._roots.clear()
