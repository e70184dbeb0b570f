"""What torch's transforms need to know about the operators: the vmap rules and the FLOP formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from refluent.mods.mod import Mod
from refluent.ops import Call, backward_op, forward_op, library
from refluent.problem import Options

# --- vmap -------------------------------------------------------------------------------------------------------------


def _select(value: Any, dim: Any, index: int) -> Any:
    """One sample of an argument: tensors along their mapped dimension, lists element by element, the rest as is."""
    if isinstance(value, (list, tuple)) and isinstance(dim, (list, tuple)):
        return [_select(item, item_dim, index) for item, item_dim in zip(value, dim)]
    return value if dim is None or not isinstance(value, Tensor) else value.select(dim, index)


def _fold(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """(..., size at dim, ...) -> (size * batch, ...); a tensor that is not mapped is repeated."""
    moved = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return moved.reshape(size * moved.shape[1], *moved.shape[2:])


def _foldable(call: Call) -> bool:
    """Whether the mapped dimension can become a part of the batch: nothing but q, k, v belongs to one sequence."""
    options = Options.from_key(call.options)
    reads_batch = any(isinstance(mod, Mod) and "b" in mod.depends_on for mod in (options.score_mod, options.mask_mod))
    lists = (*call.score_captured, *call.mask_captured, *call.block_captured, *call.blocks)
    single = all(tensor is None for tensor in (*call[3:8], call.philox))
    return single and not lists and not reads_batch


def _folded(call: Call, dims: Sequence[Any], size: int) -> Call:
    q, k, v = (_fold(tensor, dim, size) for tensor, dim in zip(call[:3], dims))
    return call._replace(q=q, k=k, v=v)


def _split(tensor: Tensor, size: int) -> Tensor:
    # batch may be 0, which -1 cannot stand for.
    return tensor.reshape(size, tensor.shape[0] // size, *tensor.shape[1:])


def _vmap_forward(info: Any, dims: Sequence[Any], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    call, size = Call(*args), info.batch_size
    if _foldable(call):
        o, lse, max_score = forward_op(*_folded(call, dims, size))
        asked = Options.from_key(call.options).return_max_score
        max_score = _split(max_score, size) if asked else max_score.new_empty((size, 0))
        return (_split(o, size), _split(lse, size), max_score), (0, 0, 0)
    samples = [forward_op(*_select(args, dims, index)) for index in range(size)]
    return tuple(torch.stack(parts) for parts in zip(*samples)), (0, 0, 0)


def _vmap_backward(info: Any, dims: Sequence[Any], *args: Any) -> tuple[list[Tensor], list[int]]:
    call, needs, size = Call(*args[4:-1]), args[-1], info.batch_size
    if _foldable(call):
        rows = [None if tensor is None else _fold(tensor, dim, size) for tensor, dim in zip(args[:4], dims)]
        made = backward_op(*rows, *_folded(call, dims[4:], size), needs)
        return [_split(gradient, size) for gradient in made], [0] * len(made)
    samples = [backward_op(*_select(args, dims, index)) for index in range(size)]
    return [torch.stack(parts) for parts in zip(*samples)], [0] * sum(needs)


torch.library.register_vmap("refluent::attention_forward", _vmap_forward, lib=library)
torch.library.register_vmap("refluent::attention_backward", _vmap_backward, lib=library)


# --- FLOPs ------------------------------------------------------------------------------------------------------------


def _band_area(sq: int, sk: int, options: Options) -> float:
    """Positions (i, j) that causal and window leave, as the area of the band: exactly half of a causal square."""
    left, right = options.window
    if options.causal:
        right = 0 if right is None else min(right, 0)
    below = 0.0 if left is None else _area_under(sq, sk, sk - sq - left)
    above = float(sq * sk) if right is None else _area_under(sq, sk, sk - sq + right)
    return max(0.0, above - below)


def _area_under(sq: int, sk: int, shift: int) -> float:
    """The area of {(x, y): 0 < x < sq, 0 < y < sk, y < x + shift}."""

    def triangle(length: int) -> float:
        return max(0, length) ** 2 / 2

    return triangle(sq + shift) - triangle(shift) - triangle(sq + shift - sk) + triangle(shift - sk)


def _matrix_flops(args: Sequence[Any]) -> tuple[float, int, int]:
    """(2 * heads * visible positions, head_dim, head_dim_v) of an operator call."""
    call = Call(*args)
    options = Options.from_key(call.options)
    heads = call.q.shape[-2]
    if call.cu_seqlens_q is None and call.cu_seqlens_k is None:
        area = call.q.shape[0] * _band_area(call.q.shape[1], call.k.shape[1], options)
    else:
        # Lengths are values; the bound they have is counted instead of reading them from a device.
        tokens = call.q.shape[0] if call.cu_seqlens_q is not None else call.q.shape[0] * call.q.shape[1]
        sq, sk = call.max_seqlen_q, call.max_seqlen_k
        area = tokens / max(sq, 1) * _band_area(sq, sk, options)
    return 2 * heads * area, call.q.shape[-1], call.v.shape[-1]


def forward_flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Two matrix products: q k' and p v. 4 * batch * heads * sq * sk * head_dim; masks other than bands count fully."""
    positions, d, dv = _matrix_flops(args)
    return int(positions * (d + dv))


def backward_flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Five products: q k', do v', p' do, ds k, ds' q; 2.5 times the forward."""
    positions, d, dv = _matrix_flops(args[4:-1])
    return int(positions * (3 * d + 2 * dv))


register_flop_formula(torch.ops.refluent.attention_forward, get_raw=True)(forward_flops)
register_flop_formula(torch.ops.refluent.attention_backward, get_raw=True)(backward_flops)
