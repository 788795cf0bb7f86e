"""Choices of many combinations that show nearly what all of them show."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def covering(values: Sequence[Iterable[Any]], together: int) -> list[tuple[Any, ...]]:
    """A few combinations of one value of each kind, chosen greedily and always the same.

    In them, each so many values of different kinds occur `together`.
    """
    combinations = [*itertools.product(*values)]

    def parts(combination: tuple[Any, ...]) -> set[tuple[tuple[int, Any], ...]]:
        return {*itertools.combinations(enumerate(combination), together)}

    missing = set().union(*map(parts, combinations))
    chosen = []
    while missing:
        best = max(combinations, key=lambda combination: len(parts(combination) & missing))
        missing -= parts(best)
        chosen.append(best)
    return chosen


def all_or_covering(*values: Iterable[Any], together: int = 1) -> list[Any]:
    """All combinations for `parametrize`, of which those that are not `covering` run with --all alone."""
    lists = [list(each) for each in values]
    chosen = covering(lists, together)
    return [
        pytest.param(*combination, marks=() if combination in chosen else pytest.mark.thorough)
        for combination in itertools.product(*lists)
    ]
