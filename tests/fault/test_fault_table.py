"""The fault table: a covering choice of its cells holds, and docs/reference/faults.md shows it as it is.

With --all every cell holds; scripts/faults runs them with stops of 20 s.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fault_cells import QUICK, run_all
from fault_table import Cell, all_cells, as_markdown, covering

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "faults.md"
# Cells mostly wait: four of them keep two cores busy.
JOBS = 4
ALL = pytest.mark.thorough
# Four mounts beside other tests may be late by more than the stops of a quick cell. A reader that waits without a limit
# is found all the same.
SETTING = replace(QUICK, slack_s=30.0, end_s=60.0)


@pytest.mark.parametrize("cells", [pytest.param(covering, id="covering"), pytest.param(all_cells, id="all", marks=ALL)])
def test_the_cells_hold(cells: Callable[[], list[Cell]], tmp_path: Path) -> None:
    outcomes = list(run_all(cells(), tmp_path, SETTING, JOBS))
    assert {str(outcome.cell): outcome.problems for outcome in outcomes if outcome.problems} == {}


def test_the_choice_covers_every_two_values_of_different_kinds() -> None:
    def pairs(cells: list[Cell]) -> set[tuple[tuple[int, str], ...]]:
        return {pair for cell in cells for pair in itertools.combinations(enumerate(cell), 2)}

    assert pairs(covering()) == pairs(all_cells())
    assert len(all_cells()) == 225


def test_the_document_shows_the_table() -> None:
    assert as_markdown() in DOCUMENT.read_text(), f"put this into {DOCUMENT.name}:\n{as_markdown()}"
