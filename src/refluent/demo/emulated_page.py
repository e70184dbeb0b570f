"""An emulated step's figures as text and as HTML: a section of the demo's report, or a page of its own."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator
from typing import Any

from .folder import MARKER
from .style import STYLE

WHERE = "docs/kernels/sm100-backward.md"


def lines(figures: dict[str, Any]) -> Iterator[str]:
    """The step as text for a terminal."""
    yield f"inputs: {_inputs(figures)}"
    for layer in figures["layers"]:
        yield f"layer {layer['layer']}, {_mask(layer)}"
        for row in layer["gradients"]:
            yield (
                f"  {row['name']}  max error {row['max_error']:.2e}, allowed {row['max_bound']:.2e}; "
                f"Frobenius error {row['frobenius_error']:.2e}, allowed {row['frobenius_bound']:.2e}"
            )
        for role in layer["roles"]:
            yield f"  {role['role']:8} warps {_warps(role):5}  {role['instructions']:,} warp instructions"
            for what in _operations(role):
                yield f"    {what}"
        yield f"  {len(layer['findings'])} findings"
        yield from (f"  {finding}" for finding in layer["findings"])


def clock_lines(clocks: dict[str, Any] | None) -> Iterator[str]:
    """The table of clocks as text; nothing where nothing was counted."""
    if clocks is None:
        return
    yield "one step of 128 queries, 128 keys, 128 dimensions: clocks of each unit, and the design's"
    for row in clocks["rows"]:
        name = f"{row['unit']}: {row['what']}{' (extra)' if row['extra'] else ''}"
        yield f"  {name:52} {row['clocks']:6,.0f} {row['design']:6,}  {row['counted']}"
    for unit, (clocks_of, design) in clocks["sums"].items():
        yield f"  {unit + ', all but extras':52} {clocks_of:6,.0f} {design:6,}"
    for row in differing(clocks):
        yield f"  {row['what']}: {row['why']}"


def differing(clocks: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows in which the kernel and the design differ."""
    return [row for row in clocks["rows"] if row["clocks"] != row["design"]]


def page(figures: dict[str, Any]) -> str:
    """A step as an HTML page; it needs only the files beside it."""
    passed = figures["passed"]
    checks = _table(
        ("check", "figure", "passed"),
        (
            (check["what"], check["figure"], ("yes", "yes") if check["passed"] else ("no", "NO"))
            for check in figures["checks"]
        ),
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>refluent emulate backward</title><style>{STYLE}</style></head><body>
<h1>The Blackwell backward, emulated: <span class={"yes" if passed else "no"}>{"passed" if passed else "FAILED"}</span>
</h1>{checks}
{_layers(figures)}
{_clocks(figures["clocks"])}
<p>All figures: <a href="{MARKER}">{MARKER}</a>. How the kernel works: <code>{WHERE}</code> of the checkout.</p>
</body></html>
"""


def section(figures: dict[str, Any]) -> str:
    """A step as a part of the demo's report; figures of one that was left out say why as "skipped"."""
    head = "<h2>A step through the Blackwell kernel, emulated</h2>"
    if "skipped" in figures:
        return f"{head}<p>Skipped: {html.escape(figures['skipped'])}.</p>"
    return head + _layers(figures)


def _layers(figures: dict[str, Any]) -> str:
    what = (
        "<p>The attention backward of one training step of the demo's decoder (without its ALiBi slopes, which the "
        f"kernel does not take yet): {html.escape(_inputs(figures))}. The compiled kernel ran on the CPU, "
        "instruction by instruction.</p>"
    )
    return what + "".join(map(_layer, figures["layers"]))


def _inputs(figures: dict[str, Any]) -> str:
    made = figures["inputs"]
    return (
        f"{made['sequences']} x {made['length']} bytes of text, {made['heads_q']} query heads on {made['heads_kv']} "
        f"key heads of {made['head_dim']} dimensions, {made['dtype']}, after {made['steps']} steps of training"
    )


def _layer(layer: dict[str, Any]) -> str:
    parts = [f"<h3>Layer {layer['layer']}, {_mask(layer)}: errors against the float64 reference</h3>"]
    parts.append(
        _table(
            ("gradient", "#max error", "#allowed", "#Frobenius error", "#allowed"),
            (
                (row["name"], *(f"{row[key]:.2e}" for key in ("max_error", "max_bound")),
                 *(f"{row[key]:.2e}" for key in ("frobenius_error", "frobenius_bound")))
                for row in layer["gradients"]
            ),
        )
    )  # fmt: skip
    parts += [f"<p class=no>{html.escape(failure)}</p>" for failure in layer["failures"]]
    parts.append(f"<h3>Layer {layer['layer']}: what each role of the main kernel did</h3>")
    parts.append(
        _table(
            ("role", "warps", "#registers", "#warp instructions", "memory and products"),
            (
                (
                    role["role"],
                    _warps(role),
                    str(role["registers"]),
                    f"{role['instructions']:,}",
                    "\n".join(_operations(role)),
                )
                for role in layer["roles"]
            ),
        )
    )
    parts.append("<p>Bytes of ld and st are those of all lanes; what is broadcast counts for each.</p>")
    if layer["picture"]:
        parts.append(
            f"<h3>Layer {layer['layer']}: timeline of one CTA</h3>"
            f'<a href="{layer["picture"]}"><img src="{layer["picture"]}" '
            'alt="What each of the 16 warps and each unit did, from left to right"></a>'
            "<p>Time is logical: it shows order and overlap, not speed. Opened alone, the picture says under the "
            "pointer what a warp waits for and what an operation moves.</p>"
        )
    findings = layer["findings"]
    parts.append(f"<h3>Layer {layer['layer']}: findings of the checks</h3>")
    parts.append("".join(f"<pre>{html.escape(finding)}</pre>" for finding in findings) or "<p>None.</p>")
    return "".join(parts)


def _clocks(clocks: dict[str, Any] | None) -> str:
    if clocks is None:
        return ""
    rows: list[tuple[Any, ...]] = [
        (("unit", row["unit"]), row["what"], f"{row['clocks']:,.0f}", f"{row['design']:,}", row["counted"])
        for row in clocks["rows"]
    ]
    classes = ["extra" if row["extra"] else "" for row in clocks["rows"]]
    for unit, (total, design) in clocks["sums"].items():
        rows.append((("unit", unit), "sum", f"{total:,.0f}", f"{design:,}", ""))
        classes.append("sum")
    why = "".join(f"<li>{html.escape(row['what'])}: {html.escape(row['why'])}</li>" for row in differing(clocks))
    return (
        "<h2>A step in clocks, beside the design's</h2><p>One step of 128 queries by 128 keys of 128 dimensions, "
        "counted as the difference of two emulated runs. Clocks of each unit alone at its full rate: 8192 flops of "
        "products, 128 bytes of shared memory without bank conflicts, 16 exp2 a clock. Grey rows are extras.</p>"
        + _table(("unit", "for", "#clocks", "#design", "counted from"), rows, classes)
        + (f"<p>Where they differ:</p><ul>{why}</ul>" if why else "")
    )


def _mask(layer: dict[str, Any]) -> str:
    return f"causal, window of {layer['window'][0] + 1}" if layer["window"] else "causal"


def _warps(role: dict[str, Any]) -> str:
    first, last = role["warps"]
    return str(first) if first == last else f"{first}-{last}"


def _operations(role: dict[str, Any]) -> list[str]:
    made = []
    for kind, row in role["operations"].items():
        work = [f"{row['bytes']:,} bytes"] if row["bytes"] else []
        work += [f"{row['flops']:,} flops"] if row["flops"] else []
        made.append(f"{kind}: {row['count']:,}" + "".join(f", {part}" for part in work))
    return made


def _table(head: Iterable[str], rows: Iterable[tuple[Any, ...]], classes: Iterable[str] | None = None) -> str:
    """A table of texts; a heading that begins with # is a column of numbers, a cell (class, text) has a class."""
    head = list(head)
    numbers = [" class=number" if name.startswith("#") else "" for name in head]
    titles = "".join(f"<th{number}>{html.escape(name.lstrip('#'))}</th>" for number, name in zip(numbers, head))
    made, rows = [f"<tr>{titles}</tr>"], list(rows)
    for row, kind in zip(rows, classes or [""] * len(rows)):
        cells = []
        for number, cell in zip(numbers, row):
            style, words = (f" class={cell[0]}", cell[1]) if isinstance(cell, tuple) else (number, cell)
            cells.append(f"<td{style}>{html.escape(words).replace(chr(10), '<br>')}</td>")
        made.append(f"<tr{f' class={kind}' if kind else ''}>{''.join(cells)}</tr>")
    return f"<table class=figures>{''.join(made)}</table>"
