"""The matrix: configurations in which every two levels of every two features meet.

Features that a compiled variant depends on are covered first, in few variants; each variant then gets a few
configurations whose run-time features are chosen to cover their pairs with everything else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from kernels.layout import Rows
from kernels.sm100.pairwise import cover, extend, pairs_of
from refluent.gpu.plans.sm100 import backward_plan

# Levels of what is compiled in. Head dimensions are those of plans; run-time levels trim them.
STATIC = {
    "dtype": (torch.bfloat16, torch.float16),
    "d": (64, 128, 32, 96, 192, 256),
    "dv": (64, 128, 96, 32, 256),
    "heads": ("mha", "group 2", "group 3", "mqa 4"),
    "sides": ("none", "right", "left", "both"),  # of the window that are closed
    "layout": ("dense", "used q", "used k", "used", "packed q", "packed k", "packed", "packed used"),
    "softcap": (False, True),
    "dropout": (False, True),
    "deterministic": (False, True),
    "dlse": (False, True),
    "sink": (None, torch.float32, torch.bfloat16),
    "cluster": (1, 2),
}
BIG = ("odd", "long q", "long k", "whole", "one over")  # three or more blocks of queries and of keys
RUNTIME = {
    "size": (*BIG, "few", "one row"),
    "trim": (0, 8, 24),
    "trim v": (8, 0, 16),
    "window": ("wide", "narrow", "tight"),
    "q lengths": ("all", "first and last empty", "middle empty", "one left"),
    "k lengths": ("all", "first and last empty", "middle empty", "one left"),
    "tail": (0, 9),
    "scale": (None, 0.21),
    "do": ("contiguous", "heads first", "one value", "slice", "expanded", "odd rows"),
    "qkv": ("contiguous", "fused", "heads first"),
    "ctas": (0, 1, 3),
    "kv heads": (1, 2),
}
EACH = 5  # configurations of a variant
GROUPS = {"mha": 1, "group 2": 2, "group 3": 3, "mqa 4": 4}


@dataclass(frozen=True)
class Config:
    """One call, as the tables' levels."""

    number: int
    levels: tuple[tuple[str, object], ...]

    def __getitem__(self, name: str):
        return dict(self.levels)[name]

    @property
    def head_dim(self) -> int:
        return self["d"] - self["trim"]

    @property
    def head_dim_v(self) -> int:
        return self["dv"] - self["trim v"]

    @property
    def plan(self):
        return backward_plan(self.head_dim, self.head_dim_v)

    @property
    def group(self) -> int:
        return GROUPS[self["heads"]]

    @property
    def heads_kv(self) -> int:
        if self["heads"] == "mqa 4":
            return 1
        return 2 if self.group == 1 else self["kv heads"]

    @property
    def heads(self) -> int:
        return self.heads_kv * self.group

    @property
    def big(self) -> bool:
        return self["size"] in BIG

    @property
    def features(self) -> tuple[str, ...]:
        """What is not as in the plainest call, beside types, sizes and head dimensions."""
        plain = {"heads": "mha", "sides": "none", "layout": "dense", "do": "contiguous", "qkv": "contiguous"}
        on = [n for n, value in plain.items() if self[n] != value]
        on += [n for n in ("softcap", "dropout", "deterministic", "dlse", "sink", "scale", "ctas") if self[n]]
        on += ["cluster"] if self["cluster"] > 1 else []
        return tuple(on)

    @property
    def options(self) -> dict:
        """Of rf.attention_backward, tensors aside."""
        left, right = self.window
        made = {"deterministic": self["deterministic"], "scale": self["scale"]}
        if right == 0 and self["window"] != "tight":
            made |= {"causal": True, "window": (left, None)}
        else:
            made |= {"window": (left, right)}
        if self["softcap"]:
            made["softcap"] = 1.7
        if self["dropout"]:
            made |= {"dropout_p": 0.2, "dropout_seed": 0x1234_5678_9ABC_DEF + self.number, "dropout_offset": 7 << 31}
        return made

    @property
    def window(self) -> tuple[int | None, int | None]:
        """wide: causal, or reaching over a block; narrow: within a block; tight: the diagonal and little more."""
        left = {"wide": 150, "narrow": 33, "tight": 0}[self["window"]]
        right = {"wide": 0, "narrow": 41, "tight": 1}[self["window"]]
        if self["sides"] == "both" and self["window"] == "tight":
            right = 0
        return left if self["sides"] in ("left", "both") else None, right if self["sides"] in (
            "right",
            "both",
        ) else None

    @property
    def seqlens(self) -> tuple[int, int]:
        """Of the longest sequence."""
        m, n = self.plan.tile_m, self.plan.tile_n
        return {
            "odd": (2 * m + 37, 2 * n + 61),
            "long q": (3 * m + 5, 2 * n + 1),
            "long k": (2 * m + 9, 3 * n + 3),
            "whole": (3 * m, 3 * n),
            "one over": (2 * m + 1, 2 * n + 127 % n),
            "few": (m + 1, 17),
            "one row": (1, n + 5),
        }[self["size"]]

    @property
    def sides(self) -> tuple[Rows, Rows]:
        """The sequences of queries and keys."""
        layout = self["layout"]
        ragged_q = layout in ("used q", "used", "packed q", "packed", "packed used")
        ragged_k = layout in ("used k", "used", "packed k", "packed", "packed used")
        batch = 4 if ragged_q or ragged_k else 2
        longest_q, longest_k = self.seqlens
        return (
            self._side(longest_q, ragged_q, batch, self["q lengths"]),
            self._side(longest_k, ragged_k, batch, self["k lengths"]),
        )

    def _side(self, longest: int, ragged: bool, batch: int, pattern: str) -> Rows:
        if not ragged:
            return Rows(longest, (longest,) * batch)
        some, few = max(1, longest // 2), min(longest, 3)
        lengths = {
            "all": (few, longest, some, longest // 3 + 1),
            "first and last empty": (0, longest, few, 0),
            "middle empty": (some, longest, 0, few),
            "one left": (0, longest, 0, 0),
        }[pattern]
        seqlen = longest + 5 * self["tail"]  # a bound that no sequence reaches
        if not self["layout"].startswith("packed"):
            return Rows(seqlen, lengths)
        owned = tuple(n + 2 * b for b, n in enumerate(lengths)) if self["layout"] == "packed used" else lengths
        return Rows(max(seqlen, *owned), lengths, owned, self["tail"])

    def __str__(self) -> str:
        """Its number and what is on, short enough for a test's name."""
        dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}[self["dtype"]]
        words = [f"{self.number:03}", dtype, f"{self.head_dim}x{self.head_dim_v}", self["size"], self["heads"]]
        words += [self["layout"]] if self["layout"] != "dense" else []
        words += [f"{self['sides']} {self['window']}"] if self["sides"] != "none" else []
        words += [name for name in ("softcap", "dropout", "deterministic", "dlse") if self[name]]
        words += ["sink"] if self["sink"] else []
        words += [f"ctas {self['ctas']}"] if self["ctas"] else []
        words += [f"cluster {self['cluster']}"] if self["cluster"] > 1 else []
        return "-".join(word.replace(" ", "_") for word in words)


def made(row: dict[str, int], number: int) -> Config:
    table = {**STATIC, **RUNTIME}
    return Config(number, tuple((name, values[row[name]]) for name, values in table.items()))


@cache
def rows() -> list[dict[str, int]]:
    """Level positions of every configuration, those of a variant side by side."""
    variants = cover(STATIC)
    return extend([variant for variant in variants for _ in range(EACH)], STATIC, RUNTIME)


@cache
def matrix() -> tuple[Config, ...]:
    return tuple(made(row, number) for number, row in enumerate(rows()))


def uncovered() -> set:
    """Pairs of levels that meet in no configuration."""
    from kernels.sm100.pairwise import all_pairs

    table = {**STATIC, **RUNTIME}
    return all_pairs(table) - {pair for row in rows() for pair in pairs_of(row, list(table))}


def cost(config: Config) -> float:
    """Tile steps, roughly."""
    q, k = config.sides
    tiles = zip(q.lengths, k.lengths)
    m, n = config.plan.tile_m, config.plan.tile_n
    return config.heads * sum(math.ceil(a / m) * math.ceil(b / n) for a, b in tiles)
