"""The demo's report: two plots, the figures as JSON and a page that shows them, in one folder."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import emulated_page, folder
from .folder import MARKER
from .style import STYLE

OPTION = "--out"
ACCENT, QUIET, LINE = "#1a4f8b", "#9a9a9a", "#b5532a"


def check_target(target: Path) -> None:
    """Refuse a target that holds something else than a report, before any work is done."""
    folder.check_target(target, OPTION)


def write(target: Path, figures: dict[str, Any], pictures: dict[str, str]) -> None:
    """Write the report: an interrupt leaves the old one or the new one. ``pictures``: SVGs by file name."""

    def fill(new: Path) -> None:
        (new / "loss.png").write_bytes(_png(_draw_losses, figures))
        (new / "gradients.png").write_bytes(_png(_draw_gradients, figures))
        for name, picture in pictures.items():
            (new / name).write_text(picture)
        (new / MARKER).write_text(json.dumps(figures, indent=2) + "\n")
        (new / "index.html").write_text(page(figures))

    folder.write(target, OPTION, fill)


def _png(draw: Callable[[Any, dict[str, Any]], None], figures: dict[str, Any]) -> bytes:
    import io

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.0), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes, figures)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_losses(axes: Any, figures: dict[str, Any]) -> None:
    curves = (("attention", "with attention", ACCENT), ("zeroed", "attention zeroed", QUIET))
    for key, label, color in curves:
        run = figures["runs"][key]
        axes.plot(range(1, len(run["losses"]) + 1), run["losses"], color=color, alpha=0.35, linewidth=1)
        steps, losses = zip(*run["held_out"], strict=True)
        axes.plot(steps, losses, color=color, marker="o", markersize=4, label=f"{label}, held out")
    bigram = figures["bigram_entropy"]
    axes.axhline(bigram, color=LINE, linestyle="--", linewidth=1, label=f"bigram entropy of the text, {bigram:.2f}")
    axes.set_ylim(0, 4)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a byte")
    axes.set_title("Faint: training batches")
    axes.legend(frameon=False)


def _draw_gradients(axes: Any, figures: dict[str, Any]) -> None:
    """Each gradient's largest error as a share of what the accuracy rule allows; 1 is the limit."""
    layers = figures["gradients"]
    names = [row["name"] for row in layers[0]["gradients"]]
    width = 0.8 / max(1, len(layers))
    for number, layer in enumerate(layers):
        window = f", window {layer['window'][0] + 1}" if layer["window"] else ""
        shares = [row["max_error"] / row["max_bound"] if row["max_bound"] else 0.0 for row in layer["gradients"]]
        places = [n + (number - (len(layers) - 1) / 2) * width for n in range(len(shares))]
        axes.bar(places, shares, width * 0.9, label=f"layer {layer['layer']}{window}")
    axes.axhline(1.0, color=LINE, linestyle="--", linewidth=1)
    axes.annotate("allowed", (len(names) - 0.5, 1.0), ha="right", va="bottom", color=LINE)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("largest error / allowed error")
    axes.set_ylim(0, max(1.15, axes.get_ylim()[1]))
    axes.set_title("One step's gradients against the float64 reference")
    axes.legend(frameon=False, ncols=2, loc="upper left", bbox_to_anchor=(0, 0.86))


def page(figures: dict[str, Any]) -> str:
    """The report as one HTML page; it needs only the files beside it."""
    passed = figures["passed"]
    checks = "".join(
        f"<tr><td>{html.escape(check['what'])}</td><td class=number>{html.escape(check['figure'])}</td>"
        f"<td class={'yes' if check['passed'] else 'no'}>{'yes' if check['passed'] else 'NO'}</td></tr>"
        for check in figures["checks"]
    )
    facts = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(value))}</td></tr>"
        for name, value in (figures["machine"] | figures["model"] | figures["settings"]).items()
    )
    sample = figures["sample"]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>refluent demo</title><style>{STYLE}</style></head><body>
<h1>refluent demo: <span class={"yes" if passed else "no"}>{"passed" if passed else "FAILED"}</span></h1>
<p>A byte-level decoder with grouped heads, sliding windows in half of its layers and a learned ALiBi slope per head,
trained on the text behind Python's <code>help()</code> ({figures["text_bytes"]:,} bytes), and the same model
with its attention's output replaced by zeros.</p>
<table><tr><th>check<th class=number>figure<th>passed</tr>{checks}</table>
<h2>Loss</h2><img src="loss.png" alt="Loss against step: both models and the bigram entropy">
<h2>Gradients</h2><img src="gradients.png" alt="Gradient errors per layer as a share of what is allowed">
{emulated_page.section(figures["emulated"])}
<h2>A sampled line</h2><pre>{html.escape(sample["prompt"])}<b>{html.escape(sample["text"])}</b></pre>
<h2>Machine and settings</h2><table>{facts}</table>
<p>All figures: <a href="{MARKER}">{MARKER}</a></p>
</body></html>
"""
