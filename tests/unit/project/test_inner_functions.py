"""What a test defines inside it is used: a coroutine that it forgets to run asserts nothing, and no one sees that."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def test_no_function_inside_another_is_forgotten() -> None:
    forgotten = []
    for path in sorted(TESTS.rglob("*.py")):
        for outer in ast.walk(ast.parse(path.read_text())):
            if isinstance(outer, FUNCTIONS):
                used = {node.id for node in ast.walk(outer) if isinstance(node, ast.Name)}
                inner = [node for node in outer.body if isinstance(node, FUNCTIONS) and not node.decorator_list]
                forgotten += [f"{path.name}: {outer.name}.{node.name}" for node in inner if node.name not in used]
    assert forgotten == []
