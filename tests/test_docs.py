"""Every Python block of the README and of docs/ runs as it is written; every link between them leads somewhere."""

from __future__ import annotations

import importlib.util
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("**/*.md"))]
COMPILER, EMULATOR = "<!-- needs a C++ compiler -->", "<!-- needs the emulator -->"


@dataclass(frozen=True)
class Block:
    line: int  # of its first line of code, from 1
    code: str
    needs: str  # COMPILER, EMULATOR or what else stands above it


def blocks(page: Path) -> list[Block]:
    found, start, lines = [], None, page.read_text().splitlines()
    for number, line in enumerate(lines):
        if start is None and line.rstrip() == "```python":
            start = number + 1
        elif start is not None and line.rstrip() == "```":
            code = "\n".join(lines[start:number])
            found.append(Block(start + 1, code, lines[max(0, start - 2)].strip()))
            start = None
    assert start is None, f"{page.name}: the block at line {start} has no end"
    return found


def run(block: Block, page: Path, names: dict[str, object]) -> None:
    code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
    exec(code, names)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_blocks_run_as_written(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "__docs__"}
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    lacking = {COMPILER: not compiler, EMULATOR: importlib.util.find_spec("cutlass") is None}
    for block in blocks(page):
        if lacking.get(block.needs):
            continue
        run(block, page, names)


def test_a_broken_block_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    names: dict[str, object] = {}
    first, second = blocks(page)
    run(first, page, names)
    with pytest.raises(AssertionError) as failure:
        run(second, page, names)
    assert failure.traceback[-1].lineno == 7  # from 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing, f"{page.name} links to what is not there: {missing}"
