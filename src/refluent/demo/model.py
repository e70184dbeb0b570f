"""A byte-level decoder whose attention is refluent's: grouped heads, sliding windows, learned ALiBi slopes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import refluent as rf

from .text import VOCABULARY


@dataclass(frozen=True)
class Config:
    """Sizes of the model. Every second layer sees only the last ``window`` positions."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    heads_kv: int = 2
    window: int = 32
    attend: bool = True  # False: the attention's output is replaced by zeros
    slopes: bool = True  # False: no score function, positions enter through the masks alone

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


@dataclass
class Traced:
    """What one attention call of one layer saw: the operands and, after backward, their gradients."""

    layer: int
    window: tuple[int, int] | None
    q: Tensor  # (b, s, h, d)
    k: Tensor  # (b, s, h_kv, d)
    v: Tensor
    o: Tensor  # (b, s, h, d)
    lse: Tensor  # (b, h, s)
    slope: Tensor | None  # (h,)
    score_mod: rf.TracedMod | None


class Attention(nn.Module):
    """Causal self-attention with grouped heads; each head learns how fast it forgets (an ALiBi slope)."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.window = (config.window - 1, 0) if layer % 2 == 0 else None
        self.qkv = nn.Linear(config.width, (config.heads + 2 * config.heads_kv) * config.head_dim, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        # Press, Smith, Lewis, "Train Short, Test Long" (2022), section 3: a geometric series over the heads
        slope = nn.Parameter(2.0 ** (-8.0 * torch.arange(1, config.heads + 1) / config.heads))
        alibi = rf.score_mod(lambda score, b, h, i, j: score + slope[h] * (j - i))
        self.slope = slope if config.slopes else None
        self.score_mod = alibi if config.slopes else None

    def forward(self, x: Tensor, trace: list[Traced] | None = None) -> Tensor:  # (b, s, width)
        config = self.config
        if not config.attend:
            return torch.zeros_like(x)
        heads = self.qkv(x).unflatten(-1, (-1, config.head_dim))
        q, k, v = heads.split([config.heads, config.heads_kv, config.heads_kv], dim=2)
        o, lse = rf.attention(q, k, v, causal=True, window=self.window, score_mod=self.score_mod, return_lse=True)
        if trace is not None:
            trace.append(Traced(self.layer, self.window, q, k, v, o, lse, self.slope, self.score_mod))
        return self.out(o.flatten(2))


class Block(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(config.width)
        self.attention = Attention(config, layer)
        self.norm_mlp = nn.RMSNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width, bias=False),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * config.width, config.width, bias=False),
        )

    def forward(self, x: Tensor, trace: list[Traced] | None = None) -> Tensor:
        x = x + self.attention(self.norm_attention(x), trace)
        return x + self.mlp(self.norm_mlp(x))


class Decoder(nn.Module):
    """Bytes (b, s) in, logits of the next byte (b, s, 256) out. Positions enter through the ALiBi slopes alone."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                fan_in = parameter.shape[1]
                nn.init.normal_(parameter, std=fan_in**-0.5)
            if name.endswith(("out.weight", "mlp.2.weight", "head.weight")):
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor, trace: list[Traced] | None = None) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden, trace)
        return self.head(self.norm(hidden))

    def loss(self, x: Tensor, target: Tensor, trace: list[Traced] | None = None) -> Tensor:
        """Mean cross entropy, nats a byte."""
        return F.cross_entropy(self(x, trace).flatten(0, 1).float(), target.flatten())

    @property
    def parameters_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())
