"""Tensors of a call of the backward from a few sizes; rows that do not count are NaN."""

from __future__ import annotations

import torch


def offsets(*lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def call(head_dim, head_dim_v, sizes, options):
    """(q, k, v, do, options): rows that don't count are NaN."""
    batch, seqlen_q, seqlen_k, heads, heads_kv = sizes
    options = dict(options)
    dtype = torch.float16 if "softcap" in options else torch.bfloat16
    leading = () if batch is None else (batch,)
    q, k = torch.randn(*leading, seqlen_q, heads, head_dim), torch.randn(*leading, seqlen_k, heads_kv, head_dim)
    v, do = torch.randn(*leading, seqlen_k, heads_kv, head_dim_v), torch.randn(*leading, seqlen_q, heads, head_dim_v)
    for name, tensors in (("q", (q, do)), ("k", (k, v))):
        if f"seqused_{name}" in options:
            used = options[f"seqused_{name}"]
            options[f"seqused_{name}"] = torch.tensor(used, dtype=torch.int32)
            for b, length in enumerate(used):
                for tensor in tensors:
                    tensor[b, length:] = float("nan")
        if batch is None:
            lengths = options.pop(name)
            options |= {f"cu_seqlens_{name}": offsets(*lengths), f"max_seqlen_{name}": max(lengths)}
            for tensor in tensors:
                tensor[sum(lengths) :] = float("nan")
    if "dropout_p" in options:
        options |= {"dropout_seed": 11, "dropout_offset": 5}
    return *(x.to(dtype) for x in (q, k, v, do)), options
