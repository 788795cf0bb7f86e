"""docs/reference/security.md names a test for each of its lines, and each of these tests exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from for_all import for_all

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs/reference/security.md").read_text()


def rows() -> list[list[str]]:
    """The cells of each line of the tables that say who may do what."""
    found = []
    for block in re.findall(r"^\| who \| may .*\n\|[-|]+\|\n((?:\|.*\n)+)", TEXT, re.MULTILINE):
        found += [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
    return found


def named_tests(cell: str) -> list[str]:
    return re.findall(r"`(tests/[^`]+)`", cell)


def test_there_are_lines_in_every_table() -> None:
    assert len(rows()) >= 3 * len(re.findall(r"^\| who \| may ", TEXT, re.MULTILINE)) > 0


@for_all(rows(), lambda row: " ".join(row[:3]))
def test_every_line_names_a_test_that_exists(row: list[str]) -> None:
    assert len(row) == 4, row
    named = named_tests(row[3])
    assert named, f"no test is named for: {row}"
    for name in named:
        file, _, function = name.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert function in functions, name
