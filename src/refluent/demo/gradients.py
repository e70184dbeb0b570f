"""Checks the attention gradients of one training step, layer by layer, against the float64 reference."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from refluent import accuracy

from . import text
from .model import Decoder, Traced
from .train import Settings


@dataclass(frozen=True)
class LayerErrors:
    """The errors of one layer's gradients; ``failures`` holds what the accuracy rule says against them."""

    layer: int
    window: tuple[int, int] | None
    errors: list[accuracy.Errors]
    failures: list[str]

    def figures(self) -> dict[str, Any]:
        rows = [asdict(error) | {"ratio_to_eager": error.ratio} for error in self.errors]
        return {"layer": self.layer, "window": self.window, "gradients": rows, "failures": self.failures}


def check_step(model: Decoder, data: text.Text, settings: Settings, sequences: int = 2) -> list[LayerErrors]:
    """Run one forward and backward of the trained model and judge dq, dk, dv and dslope of every layer."""
    return [_check_layer(seen) for seen in traced_step(model, data, settings, sequences)]


def traced_step(model: Decoder, data: text.Text, settings: Settings, sequences: int) -> list[Traced]:
    """One forward and backward of the model; every layer's attention with its operands' gradients."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(settings.seed + 1)
    x, target = next(text.batches(data.train, sequences, settings.length, generator))
    trace: list[Traced] = []
    model.zero_grad(set_to_none=True)
    loss = model.loss(x.to(device), target.to(device), trace)
    for seen in trace:
        for tensor in (seen.q, seen.k, seen.v, seen.o):
            tensor.retain_grad()
    loss.backward()
    return trace


def _check_layer(seen: Traced) -> LayerErrors:
    q, k, v = (tensor.detach() for tensor in (seen.q, seen.k, seen.v))
    expected = accuracy.expect(q, k, v, _grad(seen.o), causal=True, window=seen.window, score_mod=seen.score_mod)
    made = {"dq": _grad(seen.q), "dk": _grad(seen.k), "dv": _grad(seen.v), "slope": _grad(seen.slope)}
    return judge(seen, expected, made)


def judge(seen: Traced, expected: accuracy.Expected, made: dict[str, Tensor]) -> LayerErrors:
    """The errors of a layer's gradients: dq, dk, dv and captured tensors by name."""
    reference = expected.backward
    if reference is None:
        raise RuntimeError("the reference made no gradients")
    right = {"dq": reference.dq, "dk": reference.dk, "dv": reference.dv} | reference.dcaptured
    errors = [expected.measure(name, got, right[name]) for name, got in made.items()]
    return LayerErrors(seen.layer, seen.window, errors, [str(error) for error in errors if not error.passed])


def _grad(tensor: Tensor | None) -> Tensor:
    if tensor is None or tensor.grad is None:
        raise RuntimeError("a traced tensor got no gradient")
    return tensor.grad
