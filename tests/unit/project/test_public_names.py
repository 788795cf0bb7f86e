"""Which names of the two packages are public: all others may change in any version.

Public are what `trainer_hook` and `spiderfs.client` list in `__all__`, the messages of the hook's protocol, and the
errors. Documents and their examples show users these alone.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType

import trainer_hook
from spiderfs import client, protocol

ROOT = Path(__file__).parents[3]
PUBLIC = {"trainer_hook", "spiderfs.client", "spiderfs.errors", "spiderfs.protocol"}
PUBLIC |= {f"{room.__name__}.{name}" for room in (trainer_hook, client) for name in room.__all__}
PUBLIC |= {f"spiderfs.protocol.{name}" for name, found in vars(protocol).items() if not isinstance(found, ModuleType)}
FOR_DEVELOPERS = ("docs/design/", "docs/reference/bindings.md", "CONTRIBUTING.md")


def test_documents_show_users_public_names_alone() -> None:
    shown: dict[str, set[str]] = {}
    for path in (*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "docs").rglob("*.py"))):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(FOR_DEVELOPERS):
            continue
        text = path.read_text()
        programs = (
            [text] if path.suffix == ".py" else re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        )
        for program in programs:
            for imported in imports_of(program):
                shown.setdefault(imported, set()).add(name)
    assert len(shown) > 5
    assert {imported: where for imported, where in shown.items() if imported not in PUBLIC} == {}


def imports_of(program: str) -> set[str]:
    """The names of our packages that a program imports, and the attributes of `trainer_hook` that it uses."""
    found = set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "trainer_hook":
            found.add(f"trainer_hook.{node.attr}")
    return {name for name in found if name.partition(".")[0] in ("spiderfs", "trainer_hook")}
