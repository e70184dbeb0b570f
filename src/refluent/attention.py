"""attention, attention_varlen, attention_backward: arguments -> checked, normalised operator call -> backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

from torch import Tensor

from refluent import op_rules as op_rules  # registers the operators' vmap and FLOP rules
from refluent import ops
from refluent.binding import Bound, autocast, bind, describe_optional
from refluent.problem import check_layout, check_output_side, describe, refuse

Scalar = Callable[..., Tensor]
"""A user's score_mod(score, b, h, i, j) or mask_mod(b, h, i, j), or what rf.score_mod / rf.mask_mod made of it."""


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments that attention and attention_varlen share; see :func:`attention`."""

    scale: float | None
    causal: bool
    window: tuple[int | None, int | None] | None
    softcap: float | None
    score_mod: Scalar | None
    mask_mod: Scalar | None
    block_mask: Any
    sink: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    dropout_p: float
    dropout_seed: int | Tensor | None
    dropout_offset: int | Tensor | None
    deterministic: bool | None
    backend: str | None


class AttentionGradients(NamedTuple):
    """What :func:`attention_backward` returns, each in its tensor's own shape, layout and type."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None
    """(heads,), None without a sink."""
    dcaptured: dict[str, Tensor]
    """One gradient for each floating-point tensor that score_mod reads, whether it requires grad or not, by its name in
    the user's code."""


def swap_layout(tensor: Any, name: str, heads_first: bool) -> Any:
    """(b, h, s, d) <-> (b, s, h, d), as a view."""
    if not heads_first:
        return tensor
    shape = describe(name, tensor).shape
    if len(shape) != 4:
        refuse(name, f"shape {tuple(shape)}", "(batch, heads, seqlen, head_dim) with layout='bhsd'")
    return tensor.transpose(1, 2)


def _finish(bound: Bound, heads_first: bool, return_lse: Any, return_max_score: bool) -> Any:
    if not isinstance(return_lse, bool):
        refuse("return_lse", f"{type(return_lse).__name__} {return_lse!r}", "True or False", TypeError)
    o, lse, max_score = ops.forward(bound.call)
    if heads_first:
        o = o.transpose(1, 2)
    if not return_lse and not return_max_score:
        return o
    return (o, *([lse] if return_lse else []), *([max_score] if return_max_score else []))


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_max_score: Literal[False] = False,
    layout: str = "bshd",
    **options: Unpack[AttentionOptions],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    return_max_score: bool = False,
    layout: str = "bshd",
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, ...]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = 0.0,
    score_mod: Scalar | None = None,
    mask_mod: Scalar | None = None,
    block_mask: Any = None,
    sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    dropout_offset: int | Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_max_score: bool = False,
    layout: str = "bshd",
    backend: str | None = None,
) -> Any:
    """Softmax attention with any mask and score function, differentiable in q, k, v, sink and captured tensors.

    For row i of query head h, which reads key/value head h // (heads / heads_kv)::

        s_ij = score_mod(softcap(scale * <q_i, k_j>))      over the keys j that every mask allows
        lse_i = log(sum_j exp(s_ij) [+ exp(sink_h)]),      o_i = sum_j exp(s_ij - lse_i) v_j

    computed tile by tile with an online softmax (Milakov and Gimelshein 2018; Rabe and Staats 2021), and backwards by
    recomputing the weights from lse (Dao et al. 2022): memory grows with the length, not with its square.

    Under autocast q, k and v are cast to the autocast type. All masks are ANDed. A row that sees no key gets o = 0 and
    lse = -inf (the sink, where there is one) and passes no gradient on.

    Args:
        q: (batch, seqlen_q, heads, head_dim), last stride 1; bfloat16, float16, float32 or float64.
        k: (batch, seqlen_k, heads_kv, head_dim); heads must be a multiple of heads_kv.
        v: (batch, seqlen_k, heads_kv, head_dim_v). head_dim and head_dim_v are multiples of 8 up to 256.
        scale: Multiplies <q_i, k_j>; None is 1 / sqrt(head_dim).
        causal: Row i sees keys j <= i + seqlen_k - seqlen_q (aligned bottom-right).
        window: (left, right): row i sees i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right, in
            positions; None or -1 leaves a side open.
        softcap: s becomes softcap * tanh(s / softcap); 0 or None is off.
        score_mod: score_mod(score, b, h, i, j) -> score, plain torch code on scalars; it may read tensors that it
            captures, and these get gradients if they are of floating-point type and require them. i and j are
            positions inside the sequence. Or what rf.score_mod made of such a function.
        mask_mod: mask_mod(b, h, i, j) -> bool: True where row i may see key j. Or what rf.mask_mod made of it.
        block_mask: A torch.nn.attention.flex_attention.BlockMask, or what rf.create_block_mask returns.
        sink: (heads,): one more raw logit for each head that joins the softmax's denominator and has no value.
        seqused_q: int32 (batch,): only the first n query rows of each sequence count; others give exact zeros.
        seqused_k: int32 (batch,): the same for keys and values.
        dropout_p: Probability, in [0, 1), that a weight is zeroed after the softmax; the others are multiplied by
            1 / (1 - dropout_p). lse and max_score don't see it.
        dropout_seed: int64 key of the Philox4x32-10 bits (Salmon et al. 2011), an int or a tensor of one element on
            q's device; None draws seed and offset from torch's generator of that device.
        dropout_offset: int64, the stream under that key; None is 0 beside a given seed.
        deterministic: The same bits on every run; None is torch.are_deterministic_algorithms_enabled().
        return_lse: Also return lse, (batch, heads, seqlen_q) in float32 (float64 for float64), differentiable.
        return_max_score: Also return each row's largest allowed s_ij, shaped like lse, without gradient.
        layout: "bshd" as above, or "bhsd": q, k, v and o are (batch, heads, seqlen, head_dim).
        backend: A backend's name, or None for the best that fits.

    Returns:
        o (batch, seqlen_q, heads, head_dim_v) in the layout asked for; with return_lse and return_max_score a tuple
        (o, lse), (o, lse, max_score) or (o, max_score).

    Raises:
        ValueError: A wrong value, shape, type, device or stride.
        TypeError: An argument of the wrong kind.
        UnsupportedError: The backend cannot do it, or forward-mode or second derivatives are asked for.
    """
    heads_first = check_layout(layout)
    bound = bind(
        swap_layout(q, "q", heads_first),
        swap_layout(k, "k", heads_first),
        swap_layout(v, "v", heads_first),
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_mask=block_mask,
        sink=sink,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        dropout_offset=dropout_offset,
        deterministic=deterministic,
        return_max_score=return_max_score,
        backend=backend,
    )
    return _finish(bound, heads_first, return_lse, return_max_score)


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: Literal[False] = False,
    return_max_score: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    return_max_score: bool = False,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, ...]: ...
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = 0.0,
    score_mod: Scalar | None = None,
    mask_mod: Scalar | None = None,
    block_mask: Any = None,
    sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    dropout_offset: int | Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_max_score: bool = False,
    backend: str | None = None,
) -> Any:
    """:func:`attention` over packed sequences of different lengths.

    Sequence n owns tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1; masks and mods count positions inside it, b is its
    number. One side may stay padded (batch, seqlen, heads, head_dim): leave its cu_seqlens None. Tokens outside every
    sequence give exact zeros (lse = -inf), and nothing that they hold reaches a result.

    Args:
        q: (total_q, heads, head_dim), last stride 1.
        k: (total_k, heads_kv, head_dim).
        v: (total_k, heads_kv, head_dim_v).
        cu_seqlens_q: int32 (batch + 1,), first 0, never decreasing, last at most total_q, on q's device.
        cu_seqlens_k: The same for k and v.
        max_seqlen_q: At least the longest sequence, in tokens. None: read from cu_seqlens_q if that is on the CPU,
            else total_q, a bound that needs no wait for the device but makes more work; with block_mask it must be
            given there.
        max_seqlen_k: The same for k and v.
        scale, causal, window, softcap, score_mod, mask_mod, sink, seqused_q, seqused_k, dropout_p, dropout_seed,
        dropout_offset, deterministic, return_lse, return_max_score, backend: As in :func:`attention`.
        block_mask: As in :func:`attention`; its blocks divide max_seqlen_q by max_seqlen_k, positions inside the
            sequence.

    Returns:
        o (total_q, heads, head_dim_v), with lse and max_score (heads, total_q) where asked for; batch first where q
        is padded.

    Raises:
        ValueError: A wrong value, shape, type, device or stride. Values on a GPU are not read: see rf.validate.
        TypeError: An argument of the wrong kind.
        UnsupportedError: The backend cannot do it, or forward-mode or second derivatives are asked for.
    """
    if cu_seqlens_q is None and cu_seqlens_k is None:
        refuse("cu_seqlens_q", None, "a tensor for at least one of cu_seqlens_q and cu_seqlens_k (padded: attention)")
    bound = bind(
        q,
        k,
        v,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_mask=block_mask,
        sink=sink,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        dropout_offset=dropout_offset,
        deterministic=deterministic,
        return_max_score=return_max_score,
        backend=backend,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    return _finish(bound, False, return_lse, return_max_score)


def attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = 0.0,
    score_mod: Scalar | None = None,
    mask_mod: Scalar | None = None,
    block_mask: Any = None,
    sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    dropout_offset: int | Tensor | None = None,
    deterministic: bool | None = None,
    layout: str = "bshd",
    backend: str | None = None,
) -> AttentionGradients:
    """The raw backward operation of :func:`attention` and :func:`attention_varlen`.

    Its results cannot be differentiated: where autograd tracks an argument, trying to raises UnsupportedError.

    With delta_i = <do_i, o_i> - dlse_i, weights p_ij = exp(s_ij - lse_i) and dropout factors z_ij::

        dv_j = sum_i z_ij p_ij do_i,    ds_ij = p_ij (z_ij <do_i, v_j> - delta_i)
        dsink = -sum_i exp(sink - lse_i) delta_i

    and ds goes back through score_mod and softcap to dq, dk and captured tensors (Dao et al. 2022, appendix B).

    Args:
        do: The gradient of o, shaped and typed like o; any strides, zeros included.
        q, k, v: As in the forward.
        o, lse: What the forward returned (return_lse=True) for the same arguments.
        dlse: The gradient of lse, shaped and typed like lse; None is zero.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: As in :func:`attention_varlen`; None where padded.
        dropout_seed, dropout_offset: The forward's; needed with dropout_p, for the bits have to be the same.
        scale, causal, window, softcap, score_mod, mask_mod, block_mask, sink, seqused_q, seqused_k, dropout_p,
        deterministic, layout, backend: As in :func:`attention`, and as in the forward that made o and lse.

    Returns:
        An :class:`AttentionGradients`: dq, dk, dv, dsink (None without a sink) and dcaptured, a dict.

    Raises:
        ValueError: A wrong value, shape, type, device or stride.
        TypeError: An argument of the wrong kind.
        UnsupportedError: The backend cannot do it.
    """
    heads_first = check_layout(layout)
    if heads_first and (cu_seqlens_q is not None or cu_seqlens_k is not None):
        refuse("layout", "'bhsd' beside cu_seqlens", "'bshd' (packed tensors are (tokens, heads, head_dim))")
    if dropout_p != 0 and dropout_seed is None:
        refuse("dropout_seed", None, "the forward's seed while dropout_p is not 0")
    named = (("do", do), ("q", q), ("k", k), ("v", v), ("o", o))
    do, q, k, v, o = (swap_layout(tensor, name, heads_first) for name, tensor in named)
    call, score, _, _ = bind(
        q,
        k,
        v,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_mask=block_mask,
        sink=sink,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        dropout_offset=dropout_offset,
        deterministic=deterministic,
        backend=backend,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    for name, tensor in (("do", do), ("o", o), ("lse", lse)):
        describe(name, tensor)
    do, o = autocast((do, o), q.device)
    check_output_side(
        describe("q", call.q),
        describe("v", v),
        describe("do", do),
        describe("o", o),
        describe("lse", lse),
        describe_optional("dlse", dlse),
    )
    captured = [fact.differentiable for fact in score.mod.captured] if score is not None else []
    needs = [True, True, True, sink is not None, *captured]
    dq, dk, dv, dsink, *dcaptured = ops.backward(call, do, o, lse, dlse, needs)
    names = score.mod.captured_names if score is not None else ()
    return AttentionGradients(
        swap_layout(dq, "dq", heads_first),
        swap_layout(dk, "dk", heads_first),
        swap_layout(dv, "dv", heads_first),
        dsink,
        {name: gradient for name, gradient in zip(names, dcaptured) if gradient is not None},
    )
