"""Run a function once on stand-ins for scalars and write down what it does: score_mod and mask_mod as graphs.

The function runs on 0-d meta tensors (no values), so a branch on a score or a position cannot be taken silently.
Two modes watch it. The function mode sees torch's public calls: it swaps captured tensors for stand-ins and turns
``tensor[index]`` into a read. The dispatch mode sees the aten operations that follow and records the pointwise ones.
What the function computes from python numbers alone is computed for real, and becomes a constant.
"""

from __future__ import annotations

import linecache
import os
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from refluent.mods.graph import IDENTITIES, POSITIONS, constant, read

aten = torch.ops.aten

_EXTRA_POINTWISE = frozenset(
    getattr(getattr(aten, name), overload)
    for name, overload in (
        ("rsub", "Tensor"),
        ("floor_divide", "default"),
        ("floor_divide", "Scalar"),
        ("where", "ScalarOther"),
        ("where", "ScalarSelf"),
        ("where", "Scalar"),
        ("masked_fill", "Tensor"),
        ("__and__", "Scalar"),
        ("__or__", "Scalar"),
        ("__xor__", "Scalar"),
        ("__and__", "Tensor"),
        ("__or__", "Tensor"),
        ("__xor__", "Tensor"),
        ("hardswish", "default"),
    )
    if hasattr(aten, name) and hasattr(getattr(aten, name), overload)
)


def is_pointwise(func: Any) -> bool:
    """Whether an aten operation works on each element by itself (torch tags most of them)."""
    if torch.Tag.pointwise in func.tags or func in _EXTRA_POINTWISE or func in IDENTITIES:
        return True
    return bool(func._schema.name.endswith("_backward"))  # of a pointwise operation: a graph holds no other


_RESHAPES = frozenset({"view", "_unsafe_view", "reshape", "expand", "squeeze", "contiguous", "view_as", "expand_as"})
_TO_PYTHON = frozenset(
    "__bool__ __int__ __float__ __index__ __complex__ __array__ __contains__ __format__ item tolist numpy "
    "is_nonzero __iter__ __reversed__".split()
)
_METADATA = frozenset({"dtype", "device", "ndim", "dim", "requires_grad", "is_floating_point", "is_cuda", "layout"})
SIGNATURES = {"score": "(score, b, h, i, j)", "mask": "(b, h, i, j)"}


class Refusal(Exception):
    """Why a function cannot be traced; raised where it happened, so that the traceback holds the user's line."""


@dataclass
class _Partial:
    """A captured tensor that is not (fully) indexed yet. ``index``: per dimension a number, a node or None (open)."""

    captured: int
    index: list[fx.Node | int | None]
    dtype: torch.dtype
    detached: bool


@dataclass
class Trace:
    """What a recording made: the graph, and the captured tensors in the order in which they were first used."""

    graph: fx.Graph
    tensors: list[Tensor] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)
    shapes_used: set[int] = field(default_factory=set)


class Recorder:
    """Turns operations on tracked scalars into graph nodes. Every tensor that user code meets is a meta tensor."""

    def __init__(self, trace: Trace, known: dict[int, str], accum_dtype: torch.dtype, widen: bool) -> None:
        self.trace = trace
        self.known = known  # id of a tensor that the function can see -> its name
        self.accum_dtype = accum_dtype
        self.widen = widen  # whether float64 stays float64 in reads (a mask_mod has no accumulate type)
        self.nodes: dict[int, fx.Node] = {}
        self.partials: dict[int, _Partial] = {}
        self.constants: dict[int, Tensor] = {}
        self.stand_ins: dict[int, Tensor] = {}
        self.from_score: set[fx.Node] = set()
        self.alive: list[Tensor] = []  # keeps ids from being reused

    def track(self, node: fx.Node, dtype: torch.dtype) -> Tensor:
        node.meta.setdefault("dtype", dtype)
        if node.op == "placeholder" and node.name == "score":
            self.from_score.add(node)
        return self.track_tensor(node, _blank((), dtype))

    def track_tensor(self, node: fx.Node, tensor: Tensor) -> Tensor:
        self.alive.append(tensor)
        self.nodes[id(tensor)] = node
        return tensor

    def emit(
        self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
    ) -> fx.Node:
        node = self.trace.graph.call_function(target, args, kwargs)
        if any(n in self.from_score for n in node.all_input_nodes):
            self.from_score.add(node)
        node.meta["dtype"] = dtype
        node.meta["line"] = _user_line()
        return node

    # --- captured tensors

    def stand_in(self, tensor: Tensor) -> Tensor:
        """The meta tensor that the function gets to see in place of a captured one."""
        found = self.stand_ins.get(id(tensor))
        if found is not None:
            return found
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype.is_complex:
            raise Refusal(f"it reads a tensor of layout {tensor.layout} and type {tensor.dtype}: only dense real ones")
        number = self.number_of(tensor)
        if tensor.ndim == 0:
            node = self.read_node(_Partial(number, [], self.read_dtype(tensor.dtype), False))
            made = self.track(node, node.meta["dtype"])
        else:
            made = _blank(tensor.shape, tensor.dtype)
            self.partials[id(made)] = _Partial(number, [None] * tensor.ndim, self.read_dtype(tensor.dtype), False)
            self.alive.append(made)
        self.stand_ins[id(tensor)] = made
        self.alive.append(tensor)
        return made

    def number_of(self, tensor: Tensor) -> int:
        for number, other in enumerate(self.trace.tensors):
            if other is tensor:
                return number
        if tensor.ndim > 4:
            raise Refusal(f"it reads a tensor of {tensor.ndim} dimensions; a captured tensor has at most 4")
        self.trace.tensors.append(tensor)
        self.trace.names.append(self.known.get(id(tensor)))
        return len(self.trace.tensors) - 1

    def read_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Floating point reads are widened to the type in which scores are computed."""
        if not dtype.is_floating_point:
            return dtype
        return torch.float64 if self.widen and dtype == torch.float64 else self.accum_dtype

    def captured_node(self, number: int) -> fx.Node:
        name = f"c{number}"
        for node in self.trace.graph.nodes:
            if node.op == "placeholder" and node.name == name:
                return node
        last = [n for n in self.trace.graph.nodes if n.op == "placeholder"][-1]
        with self.trace.graph.inserting_after(last):
            return self.trace.graph.placeholder(name)

    def read_node(self, partial: _Partial) -> fx.Node:
        own = self.read_dtype(self.trace.tensors[partial.captured].dtype)
        node = self.emit(read, (self.captured_node(partial.captured), own, *partial.index), {}, own)
        if partial.detached:
            node = self.emit(aten.detach.default, (node,), {}, own)
        if partial.dtype != own:
            node = self.emit(aten._to_copy.default, (node,), {"dtype": partial.dtype}, partial.dtype)
        return node

    def index(self, tensor: Tensor, index: Any) -> Tensor:
        """``tensor[index]`` of a stand-in, a step towards a read or a whole one."""
        partial = self.partials[id(tensor)]
        items = list(index) if isinstance(index, tuple) else [index]
        still_open = [d for d, known in enumerate(partial.index) if known is None]
        if sum(item is Ellipsis for item in items) == 1:
            at = next(p for p, item in enumerate(items) if item is Ellipsis)
            items[at : at + 1] = [slice(None)] * (len(still_open) - len(items) + 1)
        name = self.name_of(partial.captured)
        if len(items) > len(still_open):
            raise Refusal(f"it indexes {name} with {len(items)} indices, more than its {len(still_open)} dimensions")
        fixed = list(partial.index)
        for dim, item in zip(still_open, items):
            fixed[dim] = self.index_item(name, item)
        done = _Partial(partial.captured, fixed, partial.dtype, partial.detached)
        if None not in fixed:
            node = self.read_node(done)
            return self.track(node, node.meta["dtype"])
        shape = [s for s, known in zip(self.trace.tensors[partial.captured].shape, fixed) if known is None]
        made = _blank(shape, tensor.dtype)
        self.partials[id(made)] = done
        self.alive.append(made)
        return made

    def index_item(self, name: str, item: Any) -> fx.Node | int | None:
        if isinstance(item, slice) and item == slice(None):
            return None
        if isinstance(item, bool) or not isinstance(item, int | Tensor):
            raise Refusal(f"it indexes {name} with {item!r}; an index is one whole number per dimension")
        if isinstance(item, int):
            return item
        if id(item) in self.constants:
            value = self.constants[id(item)]
            if value.ndim == 0 and not value.dtype.is_floating_point and value.dtype != torch.bool:
                return int(value)
        node = self.nodes.get(id(item))
        if node is None or item.dtype.is_floating_point or item.dtype == torch.bool:
            raise Refusal(f"it indexes {name} with a tensor of type {item.dtype}; an index is one whole number")
        if node in self.from_score:
            raise Refusal(f"it indexes {name} with a number that depends on the score; an index may not")
        return node

    def name_of(self, number: int) -> str:
        return self.trace.names[number] or f"captured_{number}"

    # --- operations

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Refusal(f"{func} draws random numbers")
        if func._schema.is_mutable:
            return self.mutate(func, args, kwargs)
        if any(id(t) in self.partials for t in tensors):
            return self.on_partial(func, args, kwargs)
        if not any(id(t) in self.nodes for t in tensors):
            return self.compute(func, args, kwargs)
        if func in (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default):
            raise Refusal(_NEEDS_VALUE)
        base = func.name().partition("::")[2].partition(".")[0]
        if base.endswith("_like") or base.startswith("new_"):
            return self.compute(func, self.with_values(args), kwargs)
        if base in _RESHAPES and isinstance(args[0], Tensor) and self.meta_call(func, args, kwargs).ndim == 0:
            return self.track_tensor(self.nodes[id(args[0])], self.meta_call(func, args, kwargs))
        if func is aten.log_sigmoid_forward.default:
            raise _Rewrite(lambda x: -torch.nn.functional.softplus(-x), args[0])
        return self.record(func, args, kwargs)

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if func is aten._to_copy.default:
            kwargs = {"dtype": kwargs.get("dtype") or args[0].dtype}
        elif not is_pointwise(func):
            raise Refusal(f"{func} is not an operation on single numbers")
        out = self.meta_call(func, args, kwargs)
        if not isinstance(out, Tensor) or out.ndim != 0:
            raise Refusal(f"{func} gives {_shape_of(out)}; a score and a position are single numbers")
        node = self.emit(func, self.to_nodes(args), self.to_nodes(kwargs), out.dtype)
        return self.track_tensor(node, out)

    def meta_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def to_nodes(self, args: Any) -> Any:
        return tree_map(lambda a: self.node_of(a) if isinstance(a, Tensor) else a, args)

    def node_of(self, tensor: Tensor) -> fx.Node:
        node = self.nodes.get(id(tensor))
        if node is not None:
            return node
        value = self.constants.get(id(tensor), tensor)
        if value.ndim != 0 or value.device.type == "meta":
            raise Refusal(
                f"it mixes a tensor of shape {tuple(value.shape)} made inside the function with single numbers; "
                "make it outside and index it"
            )
        return self.emit(constant, (value.item(), value.dtype), {}, value.dtype)

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation on constants alone: its value, on the CPU, with a meta tensor for user code to hold."""
        if func is aten._efficientzerotensor.default:  # has no memory, and some operations look for it
            func = aten.zeros.default
        real_args, real_kwargs = self.with_values(args), dict(self.with_values(kwargs))
        if any(a.name == "device" for a in func._schema.arguments):
            real_kwargs["device"] = torch.device("cpu")
            real_kwargs.pop("pin_memory", None)
        out = func(*real_args, **real_kwargs)
        return tree_map(lambda t: self.hold(t) if isinstance(t, Tensor) else t, out)

    def hold(self, value: Tensor) -> Tensor:
        made = _blank(value.shape, value.dtype)
        self.constants[id(made)] = value
        self.alive.append(made)
        return made

    def with_values(self, args: Any) -> Any:
        """Constants by their values; tracked scalars, whose value must not matter, by zeros of the same type."""

        def value(a: Any) -> Any:
            if not isinstance(a, Tensor):
                return a
            if id(a) in self.nodes:
                return torch.zeros((), dtype=a.dtype)
            return self.constants.get(id(a), a)

        return tree_map(value, args)

    def on_partial(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        source = args[0] if isinstance(args[0], Tensor) else None
        partial = self.partials.get(id(source))
        if partial is not None and source is not None:
            if func is aten.select.int and isinstance(args[2], int):
                items: list[Any] = [slice(None)] * source.ndim
                items[args[1]] = args[2]
                return self.index(source, tuple(items))
            if func in IDENTITIES or func is aten._to_copy.default:
                dtype = kwargs.get("dtype") or source.dtype
                made = _blank(source.shape, dtype)
                wanted = partial.dtype if dtype == source.dtype else dtype
                detached = partial.detached or func is aten.detach.default
                self.partials[id(made)] = _Partial(partial.captured, list(partial.index), wanted, detached)
                self.alive.append(made)
                return made
        number = next(self.partials[id(t)].captured for t in tree_leaves((args, kwargs)) if id(t) in self.partials)
        name = self.name_of(number)
        raise Refusal(
            f"{func} works on the whole tensor {name}; index it down to one number first ({name}[h], {name}[i, j]), "
            "or compute it outside the function and capture the result"
        )

    def mutate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An in-place operation: refused on captured tensors, otherwise recorded as its out-of-place form."""
        target = args[0] if args and isinstance(args[0], Tensor) else None
        base, _, overload = func.name().partition("::")[2].partition(".")
        if target is None or id(target) in self.partials or self.is_read(target):
            raise Refusal(f"{func} writes to a captured tensor; a mod only reads")
        pure = getattr(getattr(aten, base[:-1], None), overload or "default", None) if base.endswith("_") else None
        if func is aten.copy_.default:
            out = self.dispatch(aten._to_copy.default, (args[1],), {"dtype": target.dtype})
        elif pure is None or pure._schema.is_mutable:
            raise Refusal(f"{func} writes in place and has no other form here")
        else:
            out = self.dispatch(pure, args, kwargs)
        if out.dtype != target.dtype:
            out = self.dispatch(aten._to_copy.default, (out,), {"dtype": target.dtype})
        if id(out) in self.nodes:
            self.constants.pop(id(target), None)
            self.track_tensor(self.nodes[id(out)], target)
        else:
            self.nodes.pop(id(target), None)
            self.constants[id(target)] = self.constants[id(out)]
        return target

    def is_read(self, tensor: Tensor) -> bool:
        """Whether a scalar is (a view of) an element of a captured tensor."""
        node = self.nodes.get(id(tensor))
        while node is not None and node.target in (aten.detach.default, aten.alias.default):
            node = node.args[0] if isinstance(node.args[0], fx.Node) else None
        return node is not None and node.target is read


def _blank(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A meta tensor, made behind the recorder's back."""
    with torch._C._DisableTorchDispatch():
        return torch.empty(tuple(shape), dtype=dtype, device="meta")


class _Rewrite(Exception):
    """Asks the dispatch mode to run other operations in place of one."""

    def __init__(self, fn: Callable[[Tensor], Tensor], argument: Tensor) -> None:
        super().__init__()
        self.fn = fn
        self.argument = argument


class RecordOperations(TorchDispatchMode):
    """Feeds every aten operation to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self.recorder.dispatch(func, args, kwargs or {})
        except _Rewrite as rewrite:
            with self:
                return rewrite.fn(rewrite.argument), torch.empty(0)


class _SwapCaptured(TorchFunctionMode):
    """Swaps captured tensors for stand-ins and turns indexing into reads."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def swap(self, value: Any) -> Any:
        rec = self.recorder
        if not isinstance(value, Tensor):
            return value
        if id(value) in rec.nodes or id(value) in rec.constants or id(value) in rec.partials:
            return value
        return rec.stand_in(value)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rec = self.recorder
        args, kwargs = tree_map(self.swap, args), tree_map(self.swap, kwargs or {})
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        if "device" in kwargs:  # a constant's value is needed, and it is computed on the CPU
            kwargs["device"] = torch.device("cpu")
        if name == "new_tensor":
            func, args, kwargs = torch.tensor, args[1:], {"dtype": args[0].dtype, **kwargs}
        subject = args[0] if args and isinstance(args[0], Tensor) else None
        if "set_grad_enabled" in name:
            raise Refusal("it switches gradients off or on; use .detach() on the numbers that are to be held fixed")
        if name == "__getitem__" and id(subject) in rec.partials:
            return rec.index(args[0], args[1])
        if name == "__setitem__":
            raise Refusal("it assigns to an element of a tensor; a mod only reads (use torch.where)")
        if name in _TO_PYTHON and subject is not None:
            if id(subject) in rec.constants:
                return func(rec.constants[id(subject)], *args[1:], **kwargs)
            raise Refusal(_NEEDS_VALUE)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            if not (id(out) in rec.nodes or id(out) in rec.constants or id(out) in rec.partials):
                rec.constants[id(out)] = out
                rec.alive.append(out)
        elif id(subject) in rec.partials and name not in _METADATA:
            rec.trace.shapes_used.add(rec.partials[id(subject)].captured)
        return out


_NEEDS_VALUE = (
    "it needs the value of a score, a position or a captured tensor in Python (if, and, or, not, min, max, int, float, "
    ".item(), math.*), but it runs once for all of them; use torch.where, &, |, ~, torch.minimum, torch.maximum"
)


def _shape_of(out: object) -> str:
    return f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"


_OWN = os.path.dirname(__file__)
_TORCH = os.path.dirname(torch.__file__)


def _is_user_file(filename: str) -> bool:
    own = filename.startswith(_OWN) and os.path.basename(filename) != "library.py"
    return not own and not filename.startswith((_TORCH, "<frozen"))


def _user_line() -> str:
    """file:line of the innermost frame that is neither torch's nor ours."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not _is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def _where(error: BaseException, fn: Callable[..., Any]) -> str:
    """The user's source line that an error came through, as a traceback prints it."""
    found: tuple[str, int] | None = None
    step = error.__traceback__
    while step is not None:
        filename = step.tb_frame.f_code.co_filename
        if _is_user_file(filename):
            found = (filename, step.tb_lineno)
        step = step.tb_next
    if found is None:
        code = getattr(fn, "__code__", None)
        if code is None:
            return ""
        found = (code.co_filename, code.co_firstlineno)
    source = linecache.getline(*found).strip()
    return f'\n  File "{found[0]}", line {found[1]}' + (f"\n    {source}" if source else "")


def name_of_function(fn: Callable[..., Any]) -> str:
    """How messages call the function."""
    name = getattr(fn, "__name__", None) or getattr(getattr(fn, "func", None), "__name__", None) or type(fn).__name__
    return "lambda" if name == "<lambda>" else str(name)


def placeholders(graph: fx.Graph, kind: str, dtype: torch.dtype) -> list[fx.Node]:
    """The position inputs of a new graph, and the score of a score_mod."""
    nodes = []
    for name in (("score",) if kind == "score" else ()) + POSITIONS:
        node = graph.placeholder(name)
        node.meta["dtype"] = dtype if name == "score" else torch.int64
        nodes.append(node)
    return nodes


def record(
    fn: Callable[..., Any], kind: str, dtype: torch.dtype, known: dict[int, str], seen_before: Sequence[Tensor] = ()
) -> Trace:
    """Trace ``fn``. ``known`` names the tensors it can see, by id; ``seen_before`` fixes the order of captured ones.

    Raises ValueError, with the offending line, where the function cannot be one graph for every position.
    """
    trace = Trace(fx.Graph(), list(seen_before), [known.get(id(t)) for t in seen_before])
    recorder = Recorder(trace, known, dtype, widen=kind == "mask")
    args = [recorder.track(node, node.meta["dtype"]) for node in placeholders(trace.graph, kind, dtype)]
    try:
        with torch.no_grad(), outside_transforms(), RecordOperations(recorder), _SwapCaptured(recorder) as swap:
            result = swap.swap(fn(*args))
        trace.graph.output(_result_node(recorder, result, kind, dtype))
    except Exception as error:
        what = str(error) if isinstance(error, Refusal) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{kind}_mod {name_of_function(fn)!r} cannot be traced: {what}{_where(error, fn)}") from (
            None if isinstance(error, Refusal) else error
        )
    return trace


def _result_node(recorder: Recorder, result: Any, kind: str, dtype: torch.dtype) -> fx.Node:
    """The node of what the function returned, as a bool (mask_mod) or in the accumulate type (score_mod)."""
    with RecordOperations(recorder):
        if isinstance(result, bool | int | float):
            node = recorder.emit(constant, (result, torch.tensor(result).dtype), {}, torch.tensor(result).dtype)
        elif not isinstance(result, Tensor) or result.ndim != 0:
            raise Refusal(f"it returns {_shape_of(result)}, not one number")
        else:
            node = recorder.node_of(result)
    got = node.meta["dtype"]
    if kind == "mask" and got != torch.bool:
        raise Refusal(f"it returns {got}, but a mask_mod returns a bool (True where the key is seen)")
    if kind == "score" and got == torch.bool:
        raise Refusal("it returns a bool, but a score_mod returns a score (give a mask as mask_mod)")
    if got.is_complex:
        raise Refusal(f"it returns {got}, not a real number")
    if node.target is constant and got != torch.bool:
        node = recorder.emit(constant, (float(node.args[0]), dtype), {}, dtype)  # type: ignore[arg-type]
    elif kind == "score" and got != dtype:
        node = recorder.emit(aten._to_copy.default, (node,), {"dtype": dtype}, dtype)
    return node


def outside_transforms() -> Any:
    """Keeps torch.func's transforms and autocast, which may be active around the caller, out of the recording."""
    stack = ExitStack()
    stack.enter_context(temporarily_clear_interpreter_stack())
    for device_type in ("cpu", "cuda"):
        stack.enter_context(torch.autocast(device_type, enabled=False))
    return stack
