"""The timeline: what every warp and every asynchronous unit did, as Perfetto JSON and as an SVG.

Time is logical: a warp's clock advances with the instructions it executes, a warp that waited goes on no earlier than
what it waited for, an operation ends some time after its issue that grows with its bytes and products. It shows order
and overlap, not speed.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from refluent.emulator.cta import CTA, MachineWarp
    from refluent.emulator.isa import AsyncOp, Blocked

_LATENCY = 100  # time an asynchronous operation takes at least
_BYTES_A_TICK, _FLOPS_A_TICK = 64, 16384
_WIDTH, _ROW, _LEFT, _TOP = 1400, 14, 190, 24
_COLOURS = {"run": "#4c9a5f", "wait": "#d9d9d9", "TMA": "#4878a8", "tensor": "#b3653a", "bulk": "#7f6aa8"}


def warp_row(index: int) -> str:
    """The name of a warp's row."""
    return f"warp {index:02d}"


@dataclass(frozen=True)
class Bar:
    """One stretch of a row."""

    row: tuple[str, str]  # CTA, row within it
    start: int
    end: int
    kind: str  # run, wait, or the operation's row
    text: str
    kernel: str = ""


class Trace:
    """Collects bars while the machine runs."""

    def __init__(self) -> None:
        self.bars: list[Bar] = []
        self._since: dict[MachineWarp, int] = {}
        self._waits: dict[MachineWarp, str] = {}

    def ran(self, warp: MachineWarp, instructions: int) -> None:
        """A warp has executed some instructions."""
        start = warp.time
        warp.time += max(1, instructions)
        self._add(warp.cta, warp_row(warp.index), start, warp.time, "run", "")

    def sleeps(self, warp: MachineWarp, outcome: Blocked) -> None:
        self._since[warp] = warp.time
        self._waits[warp] = f"{warp.kernel.instructions[warp.instr].name}: {outcome.reason()}"

    def rises(self, warp: MachineWarp, now: int) -> None:
        """A warp goes on because of something that happened at `now`."""
        start = self._since.pop(warp, warp.time)
        warp.time = max(warp.time, now)
        self._add(warp.cta, warp_row(warp.index), start, warp.time, "wait", self._waits.pop(warp, ""))

    def performed(self, op: AsyncOp) -> int:
        """An operation is done; the time of its end."""
        end = op.time + _LATENCY + op.nbytes // _BYTES_A_TICK + op.flops // _FLOPS_A_TICK
        self._add(op.cta, op.row, op.time, end, op.row, op.describe())
        return end

    def _add(self, cta: CTA, name: str, start: int, end: int, kind: str, text: str) -> None:
        if end <= start:
            return
        bar = Bar((cta.name, name), start, end, kind, text, cta.launch.name)
        last = self.bars[-1] if self.bars else None
        if last is not None and kind == "run" and last == replace(bar, start=last.start, end=start):
            self.bars[-1] = replace(bar, start=last.start)
        else:
            self.bars.append(bar)

    def longest(self, kernel: str) -> Trace:
        """The part of the CTA of a kernel that takes the longest, from time 0."""
        parts: dict[str, Trace] = {}
        for bar in self.bars:
            if bar.kernel == kernel:
                parts.setdefault(bar.row[0], Trace()).bars.append(bar)
        if not parts:
            raise LookupError(f"nothing of {kernel} was traced")
        part = max(parts.values(), key=Trace.span)
        first = min(bar.start for bar in part.bars)
        part.bars = [replace(bar, start=bar.start - first, end=bar.end - first) for bar in part.bars]
        return part

    def span(self) -> int:
        """Time from the first start to the last end."""
        return max(bar.end for bar in self.bars) - min(bar.start for bar in self.bars)

    def take(self) -> list[Bar]:
        """The bars so far, for somebody else to place."""
        bars, self.bars = self.bars, []
        return bars

    def place(self, bars: list[Bar], start: int) -> int:
        """Enter the bars of a cluster that had its own clock as if it had started at `start`; the time of its end."""
        self.bars += [replace(bar, start=bar.start + start, end=bar.end + start) for bar in bars]
        return max((bar.end for bar in bars), default=0) + start

    def rows(self) -> list[tuple[str, str]]:
        """Rows in the order they are shown: by CTA, warps first."""
        known = {bar.row for bar in self.bars}
        return sorted(known, key=lambda row: (row[0], not row[1].startswith("warp"), row[1]))

    def write(self, folder: Path | str) -> list[Path]:
        """Write timeline.json (open in Perfetto) and timeline.svg into a folder."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        as_json, as_svg = target / "timeline.json", target / "timeline.svg"
        as_json.write_text(json.dumps({"traceEvents": list(self._events())}))
        as_svg.write_text(self.svg())
        return [as_json, as_svg]

    def _events(self) -> Iterable[dict[str, object]]:
        rows = self.rows()
        processes = {name: i for i, name in enumerate(dict.fromkeys(row[0] for row in rows))}
        threads = {row: i for i, row in enumerate(rows)}
        for name, pid in processes.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        for row, tid in threads.items():
            yield {"ph": "M", "name": "thread_name", "pid": processes[row[0]], "tid": tid, "args": {"name": row[1]}}
        for bar in self.bars:
            yield {
                "ph": "X",
                "name": bar.text.split(":")[0] or bar.kind,
                "cat": bar.kind,
                "ts": bar.start,
                "dur": bar.end - bar.start,
                "pid": processes[bar.row[0]],
                "tid": threads[bar.row],
                "args": {"what": bar.text},
            }

    def svg(self, labels: Mapping[str, str] | None = None, across: int = _WIDTH) -> str:
        """The timeline as one picture: a row a warp and a row a unit of every CTA. `labels`: of rows of a single CTA,
        instead of its name and theirs; across: pixels that all of the time takes."""
        rows = self.rows()
        last = max((bar.end for bar in self.bars), default=1)
        scale = across / last
        width, height = _LEFT + across + 10, _TOP + _ROW * len(rows) + 8
        place = {row: _TOP + _ROW * i for i, row in enumerate(rows)}
        size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="10">',
            '<rect width="100%" height="100%" fill="white"/>',
        ]
        x = _LEFT
        for name, colour in _COLOURS.items():
            parts.append(
                f'<rect x="{x}" y="6" width="10" height="10" fill="{colour}"/><text x="{x + 14}" y="15">{name}</text>'
            )
            x += 80
        for row, y in place.items():
            label = " ".join(row) if labels is None else labels.get(row[1], row[1])
            parts.append(f'<text x="4" y="{y + 10}">{html.escape(label)}</text>')
        for bar in self.bars:
            left, wide = _LEFT + bar.start * scale, max(0.5, (bar.end - bar.start) * scale)
            parts.append(
                f'<rect x="{left:.1f}" y="{place[bar.row] + 1}" width="{wide:.1f}" height="{_ROW - 2}" '
                f'fill="{_COLOURS[bar.kind]}"><title>{html.escape(bar.text or bar.kind)}</title></rect>'
            )
        parts.append("</svg>")
        return "\n".join(parts)
