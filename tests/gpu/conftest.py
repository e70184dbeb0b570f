"""`pytest tests/gpu/test_emulator_agrees.py --chip-results FILE`: compare with what a chip gave elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--chip-results",
        type=Path,
        metavar="FILE",
        help="results that `python tests/gpu/agreement.py record FILE` wrote on a machine with the chip",
    )
