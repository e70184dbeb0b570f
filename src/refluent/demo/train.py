"""Training, evaluation and sampling of the demo's model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import text
from .model import Config, Decoder


@dataclass(frozen=True)
class Settings:
    """How the models are trained."""

    steps: int = 250
    batch: int = 8  # pieces of text a step
    length: int = 256  # bytes a piece
    rate_matrices: float = 0.02
    rate_others: float = 0.006
    warmup: int = 20  # steps
    decay: float = 0.4  # the last part of the run, over which the rate falls to 0
    evaluate_every: int = 50  # steps
    seed: int = 0


@dataclass
class Run:
    """What one training produced. Losses are nats a byte."""

    model: Decoder
    losses: list[float] = field(default_factory=list)  # one a step
    held_out: list[tuple[int, float]] = field(default_factory=list)  # (step, loss)
    seconds: float = 0.0

    @property
    def final(self) -> float:
        return self.held_out[-1][1]


Progress = Callable[[Iterable[int], str], Any]


def train(data: text.Text, config: Config, settings: Settings, device: torch.device, progress: Progress) -> Run:
    """Train one model from a fixed seed; ``progress`` wraps the loop over steps (tqdm, for one)."""
    started = time.perf_counter()
    torch.manual_seed(settings.seed)
    model = Decoder(config).to(device)
    optimizers = _optimizers(model, settings)
    stream = text.batches(data.train, settings.batch, settings.length, torch.Generator().manual_seed(settings.seed))
    run = Run(model)
    steps = progress(range(1, settings.steps + 1), "with attention" if config.attend else "attention zeroed")
    for step in steps:
        x, target = (piece.to(device) for piece in next(stream))
        loss = model.loss(x, target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * _schedule(step, settings)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        run.losses.append(loss.item())
        if step % settings.evaluate_every == 0 or step == settings.steps:
            run.held_out.append((step, evaluate(model, data.held_out, settings)))
        if hasattr(steps, "set_postfix_str"):
            held_out = f", held out {run.held_out[-1][1]:.3f}" if run.held_out else ""
            steps.set_postfix_str(f"loss {run.losses[-1]:.3f}{held_out}", refresh=False)
    run.seconds = time.perf_counter() - started
    return run


def _optimizers(model: Decoder, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al., 2024) for the matrices inside the blocks, AdamW for everything else.

    The zeroed model never uses its attention's parameters: they get no gradient and stay where they are.
    """
    inner = [p for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim == 2]
    others = [p for name, p in model.named_parameters() if not (name.startswith("blocks.") and p.ndim == 2)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(inner, lr=settings.rate_matrices),
        torch.optim.AdamW(others, lr=settings.rate_others, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def _schedule(step: int, settings: Settings) -> float:
    """Linear warm-up, a plateau, linear decay to 0: the share of the peak rate at a step (from 1)."""
    up = step / max(1, settings.warmup)
    down = (settings.steps - step + 1) / max(1.0, settings.decay * settings.steps)
    return min(1.0, up, down)


@torch.no_grad()
def evaluate(model: Decoder, data: Tensor, settings: Settings) -> float:
    """Mean loss over the whole of ``data``, nats a byte."""
    device = next(model.parameters()).device
    total, count = 0.0, 0
    for x, target in text.windows(data, settings.batch, settings.length):
        total += float(model.loss(x.to(device), target.to(device))) * target.numel()
        count += target.numel()
    return total / count


@torch.no_grad()
def sample(model: Decoder, prompt: str, length: int, temperature: float, seed: int) -> str:
    """Continue ``prompt`` byte by byte until a line ends or ``length`` bytes are made; returns what was added."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    made: list[int] = []
    context = list(prompt.encode())
    while len(made) < length and not (made and made[-1] == ord("\n")):
        x = torch.tensor([context + made], device=device)
        weights = torch.softmax(model(x)[0, -1].float().cpu() / temperature, -1)
        made.append(int(torch.multinomial(weights, 1, generator=generator)))
    return text.show(torch.tensor(made)).rstrip("\n")
