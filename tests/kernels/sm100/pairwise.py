"""Covering arrays: rows in which every pair of levels of two factors meets somewhere, the same on every machine."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

Levels = Mapping[str, Sequence[Any]]
Pair = tuple[tuple[str, int], tuple[str, int]]  # factors in the order of their table, levels by position
CANDIDATES = 10  # rows that are tried for each one that is kept


def pairs_of(row: Mapping[str, int], names: Sequence[str]) -> Iterator[Pair]:
    """The pairs that a row covers."""
    yield from combinations([(name, row[name]) for name in names if name in row], 2)


def all_pairs(factors: Levels) -> set[Pair]:
    """Every pair of levels of two factors."""
    levels = [[(name, level) for level in range(len(values))] for name, values in factors.items()]
    return {(one, two) for a, b in combinations(levels, 2) for one in a for two in b}


def cover(factors: Levels, seed: int = 0) -> list[dict[str, int]]:
    """Few rows (level positions by factor) that cover every pair, greedily."""
    generator, missing, rows = random.Random(seed), all_pairs(factors), []
    while missing:
        opening = min(missing)
        made = [_complete(factors, dict(opening), missing, generator) for _ in range(CANDIDATES)]
        rows.append(max(made, key=lambda row: len(missing.intersection(pairs_of(row, list(factors))))))
        missing.difference_update(pairs_of(rows[-1], list(factors)))
    return rows


def extend(fixed: Sequence[Mapping[str, int]], factors: Levels, more: Levels, seed: int = 0) -> list[dict[str, int]]:
    """Each row of `factors` completed by levels of `more`, such that pairs with and among `more` are covered too where
    the rows suffice."""
    table = {**factors, **more}
    generator, names, rows = random.Random(seed), list(table), []
    missing = all_pairs(table)
    for start in fixed:
        made = [_complete(table, dict(start), missing, generator) for _ in range(CANDIDATES)]
        rows.append(max(made, key=lambda row: len(missing.intersection(pairs_of(row, names)))))
        missing.difference_update(pairs_of(rows[-1], names))
    return rows


def _complete(factors: Levels, row: dict[str, int], missing: set[Pair], generator: random.Random) -> dict[str, int]:
    """Fill in the other factors in a random order, each by a level that adds most of the missing pairs."""
    place = {name: i for i, name in enumerate(factors)}
    left = [name for name in factors if name not in row]
    generator.shuffle(left)
    for name in left:
        before = [(other, level) for other, level in row.items() if place[other] < place[name]]
        behind = [(other, level) for other, level in row.items() if place[other] > place[name]]
        gains = []
        for level in range(len(factors[name])):
            one = (name, level)
            gain = sum((other, one) in missing for other in before) + sum((one, other) in missing for other in behind)
            gains.append((gain, generator.random(), level))
        row[name] = max(gains)[2]
    return row
