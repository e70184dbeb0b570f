"""A configuration's tensors, its run in the emulator under a schedule, and what it has to give."""

from __future__ import annotations

from dataclasses import dataclass, field
from unittest import mock

import torch

import refluent as rf
from kernels.layout import NAN, Rows
from kernels.sm100.configs import Config
from poison import poisoned_memory
from refluent import accuracy, emulator

ARCH, BACKEND = "sm_100a", "emulate:sm100"
ORDERED = ("all", "order")  # sums in one order alone


@dataclass
class Run:
    """Arguments of rf.attention_backward, and the judge of what it returns."""

    do: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dlse: torch.Tensor | None
    options: dict
    ctas: int = 0
    cluster: int = 1
    expected: accuracy.Expected = field(init=False)

    def __post_init__(self):
        self.expected = accuracy.expect(self.q, self.k, self.v, self.do, self.dlse, **self.options)
        self.o = self.expected.forward.o.to(self.q.dtype)
        self.lse = self.expected.forward.lse.float()

    def __call__(self, schedule="fair", seed=0, **gpu):
        """Gradients under a schedule, all checks on, to the letter of the manual; memory nobody wrote holds NaN."""
        from refluent.gpu import launch  # test_faults.py loads others

        main = launch.backward

        def backward(*arguments, **more):
            return main(*arguments, **more, ctas=self.ctas, cluster=self.cluster)

        gpu.setdefault("checks", ORDERED if self.options.get("deterministic") else "all")
        chip = emulator.gpu(ARCH, schedule=schedule, seed=seed, strict=True, **gpu)
        self.report = chip.report()
        with mock.patch.object(launch, "backward", backward), poisoned_memory(), chip:
            return rf.attention_backward(
                self.do, self.q, self.k, self.v, self.o, self.lse, dlse=self.dlse, backend=BACKEND, **self.options
            )

    def check(self, made) -> list[accuracy.Errors]:
        """By the accuracy rule, exact zeros included."""
        return self.expected.check_backward(made.dq, made.dk, made.dv, dsink=made.dsink, dcaptured=made.dcaptured)


def prepare(config: Config) -> Run:
    """Fresh inputs; what belongs to no sequence holds NaN."""
    torch.manual_seed(1000 + config.number)
    queries, keys = config.sides
    dtype, h, hkv = config["dtype"], config.heads, config.heads_kv
    q = view(config["qkv"], queries, h, config.head_dim, dtype)
    k = view(config["qkv"], keys, hkv, config.head_dim, dtype)
    v = view(config["qkv"], keys, hkv, config.head_dim_v, dtype)
    do = view(config["do"], queries, h, config.head_dim_v, dtype)
    dlse = queries.statistic(h) if config["dlse"] else None
    options = dict(config.options)
    if config["sink"] is not None:
        options["sink"] = torch.randn(h).to(config["sink"])
    for name, rows in (("q", queries), ("k", keys)):
        if rows.seqused() is not None:
            options[f"seqused_{name}"] = rows.seqused()
        if rows.packed:
            options |= {f"cu_seqlens_{name}": rows.cu_seqlens(), f"max_seqlen_{name}": rows.seqlen}
    return Run(do, q, k, v, dlse, options, config["ctas"], config["cluster"])


def view(kind: str, rows: Rows, heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows, laid out as the level says."""
    plain = rows.tensor(heads, width, dtype)
    if kind == "contiguous":
        return plain
    if kind == "one value":  # as o.sum().backward() gives it, but for its value
        return torch.full((1,), 0.375, dtype=dtype).expand(plain.shape)
    if kind == "expanded":  # one row for all positions
        return torch.randn(heads, width).to(dtype).expand(plain.shape)
    if kind == "heads first":
        return plain.transpose(-3, -2).contiguous().transpose(-3, -2)
    if kind in ("slice", "fused"):  # of the heads, of a row of a fused projection
        wide = torch.full((*plain.shape[:-1], 3 * width + 8), NAN, dtype=dtype)
        return wide[..., width : 2 * width].copy_(plain)
    assert kind == "odd rows"  # TMA cannot read these strides
    return torch.full((*plain.shape[:-1], width + 3), NAN, dtype=dtype)[..., :width].copy_(plain)
