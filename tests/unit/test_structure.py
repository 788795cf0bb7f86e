"""The rules of the house that a machine can check: who may import whom, what stays pure, how long a module may be."""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "spiderfs"

# Each row may import the rows above it, and each package itself. A new module or package needs a place here.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("spiderfs", "errors", "process_table", "published", "quantities", "range_lock", "threads"),
    ("core", "mount_words", "mountpoint", "metrics", "sources", "store", "traced_batch"),
    ("permissions",),
    ("policies", "scorer", "hook_messages", "trace", "places", "catalogue", "redirects", "client_terms", "fetch_lock"),
    ("option_types", "protocol", "lister", "landing", "packages"),
    ("fetcher", "control", "rescoring"),
    ("config", "read_ahead", "client"),
    ("filesystem",),
    ("fuse",),
    ("daemon",),
    ("cli",),
)
LAYER_OF = {unit: number for number, units in enumerate(LAYERS) for unit in units}

# Who alone may import a library; whatever else needs it asks them.
ONLY_IMPORTERS = {
    "lmdb": ("spiderfs/store/",),
    "prometheus_client": ("spiderfs/metrics.py",),
    "pydantic": ("spiderfs/config.py", "spiderfs/option_types.py"),
    "click": ("spiderfs/cli/",),
    "rich": ("spiderfs/cli/",),
    "hnswlib": ("spiderfs/scorer/graph.py",),
    "torch": ("trainer_hook/",),
    "fsspec": ("spiderfs/client/fsspec_files.py",),
}

# What decides has no clock, file, socket or task: time and chance come in as arguments.
IMPURE = {"os", "io", "time", "datetime", "random", "secrets", "socket", "pathlib", "tempfile", "threading", "logging"}
IMPURE |= {"asyncio", "subprocess", "multiprocessing", "signal", "mmap", "shutil"}

MAX_LINES = 400


class Import(NamedTuple):
    name: str  # the module's whole dotted name
    line: int
    for_types: bool  # below `if TYPE_CHECKING`


def modules() -> list[Path]:
    found = [path for top in ("spiderfs", "trainer_hook") for path in sorted((ROOT / top).rglob("*.py"))]
    assert found
    return found


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imports(path: Path) -> Iterator[Import]:
    tree = tree_of(path)
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, id(node) in guarded)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{short(path)}:{node.lineno}: imports are written from the root"
            assert node.module is not None
            for alias in node.names:
                # `from spiderfs import mountpoint` imports a module, `from spiderfs.errors import X` a name.
                inner = f"{node.module}.{alias.name}"
                module = inner if file_of(inner) else node.module
                yield Import(module, node.lineno, id(node) in guarded)


def file_of(module: str) -> Path | None:
    """Where a module of the project lies."""
    base = ROOT.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.exists():
            return path
    return None


def unit_of(module: str) -> str:
    """The row entry that a module belongs to: its first name below the package."""
    top, *inner = module.split(".")
    return inner[0] if inner else top


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SPIDERFS_MODULES = [path for path in modules() if path.is_relative_to(PACKAGE)]


def test_every_module_has_a_layer() -> None:
    assert {unit_of(module_of(path)) for path in SPIDERFS_MODULES} - set(LAYER_OF) == set()
    assert set(LAYER_OF) - {unit_of(module_of(path)) for path in SPIDERFS_MODULES} == set()


@pytest.mark.parametrize("path", SPIDERFS_MODULES, ids=short)
def test_imports_point_down(path: Path) -> None:
    own = unit_of(module_of(path))
    wrong = [
        f"line {found.line}: {found.name}"
        for found in imports(path)
        if found.name.split(".")[0] == "spiderfs"
        and unit_of(found.name) != own
        and LAYER_OF[unit_of(found.name)] >= LAYER_OF[own]
    ]
    assert wrong == []


def test_no_two_modules_need_each_other() -> None:
    needs = {
        module_of(path): {
            found.name for found in imports(path) if not found.for_types and found.name.split(".")[0] == "spiderfs"
        }
        for path in SPIDERFS_MODULES
    }
    # Raises CycleError, which names them.
    assert len(list(graphlib.TopologicalSorter(needs).static_order())) >= len(SPIDERFS_MODULES)


@pytest.mark.parametrize("path", modules(), ids=short)
def test_each_heavy_library_has_one_importer(path: Path) -> None:
    wrong = [
        f"line {found.line}: {found.name}"
        for found in imports(path)
        if not short(path).startswith(ONLY_IMPORTERS.get(found.name.split(".")[0], ("",)))
    ]
    assert wrong == []


def test_the_hook_needs_nothing_of_the_mount() -> None:
    wrong = [
        f"{short(path)}:{found.line}: {found.name}"
        for path in modules()
        if not path.is_relative_to(PACKAGE)
        for found in imports(path)
        if found.name.split(".")[0] == "spiderfs" and found.name != "spiderfs.protocol"
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "path", [path for path in SPIDERFS_MODULES if unit_of(module_of(path)) in ("core", "policies")], ids=short
)
def test_what_decides_is_pure(path: Path) -> None:
    own = unit_of(module_of(path))
    for found in imports(path):
        top = found.name.split(".")[0]
        if top == "spiderfs":
            assert unit_of(found.name) in ("core", own), found
        else:
            assert top == "numpy" or (top in sys.stdlib_module_names and top not in IMPURE), found
    for node in ast.walk(tree_of(path)):
        assert not isinstance(node, ast.AsyncFunctionDef | ast.Await), f"line {node.lineno}: a decision does not await"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("open", "print", "input"), f"line {node.lineno}: {node.func.id}()"


@pytest.mark.parametrize("path", modules(), ids=short)
def test_modules_say_what_they_are_and_why_they_are_long(path: Path) -> None:
    text = path.read_text()
    docstring = ast.get_docstring(tree_of(path)) or ""
    assert docstring or path.name == "__init__.py"
    lines = text.count("\n")
    if lines > MAX_LINES:
        assert " is long because " in docstring, f"{lines} lines: the docstring must say why the module is this long"


def test_no_module_is_named_for_nothing() -> None:
    names = {"utils", "util", "helpers", "helper", "common", "misc", "tools"}
    assert [short(path) for path in modules() if path.stem in names or path.parent.name in names] == []


@pytest.mark.parametrize("path", modules(), ids=short)
def test_no_error_is_swallowed_unnamed(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            )
            silent = all(isinstance(statement, ast.Pass) for statement in node.body)
            assert not (broad and silent), f"line {node.lineno}"
