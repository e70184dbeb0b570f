"""Attributes replaced for a while: every replacement is undone, in reverse order, whatever happened in between."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Patches:
    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace owner.name; on a class, only what the class itself defines counts as the old value."""
        namespace = vars(owner)
        self._undo.append((owner, name, namespace.get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        while self._undo:
            owner, name, old = self._undo.pop()
            if old is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
