"""backend="torch": attention in tiles, in torch operations that every device has; tuned for the CPU.

Memory is O(S): a tile of scores at a time, never a matrix of all of them.
"""

from __future__ import annotations

from refluent.tiled.api import backward, forward, supports

__all__ = ["backward", "forward", "missing", "supports"]


def missing() -> str | None:
    """Nothing: it runs wherever torch does."""
    return None
