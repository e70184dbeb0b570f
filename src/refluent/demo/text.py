"""The demo's text: real English prose that every CPython carries, so that nothing has to be downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor

VOCABULARY = 256  # one symbol a byte
HELD_OUT_EVERY = 10  # each tenth topic is held out


@dataclass(frozen=True)
class Text:
    """The documentation behind Python's ``help()``, as bytes; whole topics are held out."""

    train: Tensor  # (n,) uint8
    held_out: Tensor  # (m,) uint8

    @property
    def size(self) -> int:
        return len(self.train) + len(self.held_out)


def load() -> Text:
    """Read the topics in alphabetical order and hold out every tenth."""
    documents = [topics[name].encode() for name in sorted(topics)]
    held_out = b"\n".join(documents[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY])
    train = b"\n".join(d for n, d in enumerate(documents) if n % HELD_OUT_EVERY != HELD_OUT_EVERY // 2)
    return Text(train=_bytes(train), held_out=_bytes(held_out))


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def bigram_entropy(*parts: Tensor) -> float:
    """Nats a byte of the next byte given the current one, counted over all parts: H(x[t+1] | x[t]).

    It is the best loss that any model can reach on this text if it looks at one byte only.
    """
    pairs = torch.cat([part[:-1].long() * VOCABULARY + part[1:].long() for part in parts])
    counts = torch.bincount(pairs, minlength=VOCABULARY**2).view(VOCABULARY, VOCABULARY).double()
    given = counts.sum(1, keepdim=True).expand_as(counts)
    seen = counts > 0
    surprise = torch.log(given[seen] / counts[seen])
    return float((counts[seen] * surprise).sum() / counts.sum())


def batches(data: Tensor, batch: int, length: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random pieces of the text: inputs and next bytes, both (batch, length) int64."""
    offsets = torch.arange(length + 1)
    while True:
        start = torch.randint(len(data) - length, (batch, 1), generator=generator)
        piece = data[start + offsets].long()
        yield piece[:, :-1], piece[:, 1:]


def windows(data: Tensor, batch: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The whole text once, in consecutive pieces; the last incomplete piece is left out."""
    count = (len(data) - 1) // length
    inputs = data[: count * length].view(count, length).long()
    targets = data[1 : count * length + 1].view(count, length).long()
    for start in range(0, count, batch):
        yield inputs[start : start + batch], targets[start : start + batch]


def show(data: Tensor) -> str:
    """Bytes as text; what is no UTF-8 becomes a replacement mark."""
    return bytes(data.to(torch.uint8).tolist()).decode(errors="replace")
