"""Rules that a machine can check: who may import whom, what stays pure, how many lines a room may have."""

from __future__ import annotations

import ast
import functools
import graphlib
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from for_all import for_all

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "spiderfs"

# Each row may import the rows above it, and each room itself. A new module or room needs a place here. An import for
# types alone counts: who names another's types knows of it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("spiderfs", "errors"),
    ("core", "linux", "metrics", "protocol", "scorer"),
    ("shared", "trace"),
    ("policies", "sources", "store"),
    ("cluster", "packages", "views"),
    ("forms",),
    ("options", "vfs"),
    ("archives", "client", "fuse", "simulation"),
    ("profiling", "serve"),
    ("daemon.background", "daemon.cache_directory", "daemon.guard", "daemon.restarts", "daemon.pipes"),
    ("daemon.published_options",),
    ("daemon.context",),
    ("daemon.caching",),
    ("daemon.training.trainer",),
    ("daemon.training.plans",),
    ("daemon.training.job_datasets",),
    ("daemon.training.service",),
    ("daemon.control", "daemon.training.connection"),
    ("daemon.manager", "daemon.worker"),
    ("daemon.supervisor",),
    ("cli",),
    ("__main__",),
)
HOOK_LAYERS: tuple[tuple[str, ...], ...] = (
    ("isolation", "ranges", "ranks"),
    ("connection", "model", "resuming"),
    ("refurbishing", "samplers"),
    ("loader",),
    ("planning",),
    ("hook",),
    ("callbacks",),
    ("trainer_hook",),
)
LAYER_OF = {
    (top, unit): number
    for top, layers in (("spiderfs", LAYERS), ("trainer_hook", HOOK_LAYERS))
    for number, units in enumerate(layers)
    for unit in units
}
# Folders whose modules have a layer each, or whose inner rooms have.
OPENED = ("daemon",)

# Who alone may import a library; whatever else needs it asks them.
ONLY_IMPORTERS = {
    "lmdb": ("spiderfs/store/",),
    "prometheus_client": ("spiderfs/metrics.py", "spiderfs/cli/metrics.py"),
    "pydantic": ("spiderfs/options/",),
    "click": ("spiderfs/cli/",),
    "rich": ("spiderfs/cli/",),
    "hnswlib": ("spiderfs/scorer/graph.py",),
    "threadpoolctl": ("spiderfs/scorer/cells.py",),
    "torch": ("trainer_hook/",),
    "fsspec": ("spiderfs/client/fsspec_files.py",),
    "obstore": ("spiderfs/sources/",),
    "botocore": ("spiderfs/sources/buckets/s3.py",),
    "google": ("spiderfs/sources/buckets/google.py",),
    "azure": ("spiderfs/sources/buckets/azure.py",),
    "redis": ("spiderfs/sources/redis_client.py",),
    "requests": ("spiderfs/sources/buckets/lists.py",),
    "PIL": ("spiderfs/views/making.py", "spiderfs/profiling/"),
    "pyfuse3": ("spiderfs/fuse/pyfuse3_binding.py",),
}

# What decides has no clock, file, socket or task: time and chance come in as arguments.
PURE = (
    "spiderfs/core/",
    "spiderfs/forms/partition.py",
    "spiderfs/policies/",
    "trainer_hook/loader/epoch_order.py",
    "trainer_hook/refurbishing/generations.py",
)
IMPURE = {"os", "io", "time", "datetime", "random", "secrets", "socket", "pathlib", "tempfile", "threading", "logging"}
IMPURE |= {"asyncio", "subprocess", "multiprocessing", "signal", "mmap", "shutil"}

# The most lines of each room, its inner rooms included. A capability that needs more takes them from another one: a
# room is raised together with what is lowered for it. Within a room files are cut by subject, however long they are.
BUDGETS = {
    "spiderfs": 2_600,
    "spiderfs/archives": 1_500,
    "spiderfs/cli": 3_400,
    "spiderfs/client": 1_350,
    "spiderfs/core": 4_300,
    "spiderfs/daemon": 10_100,
    "spiderfs/forms": 500,
    "spiderfs/fuse": 1_850,
    "spiderfs/linux": 800,
    "spiderfs/options": 1_250,
    "spiderfs/policies": 1_300,
    "spiderfs/profiling": 1_200,
    "spiderfs/protocol": 1_000,
    "spiderfs/scorer": 1_600,
    "spiderfs/serve": 400,
    "spiderfs/shared": 800,
    "spiderfs/sources": 5_950,
    "spiderfs/store": 2_800,
    "spiderfs/vfs": 5_050,
    "spiderfs/views": 800,
    "trainer_hook": 1_450,
    "trainer_hook/connection": 1_450,
    "trainer_hook/loader": 2_350,
    "trainer_hook/model": 1_100,
    "trainer_hook/ranges": 550,
    "trainer_hook/refurbishing": 1_750,
    "trainer_hook/samplers": 1_150,
}


class Import(NamedTuple):
    name: str  # the module's whole dotted name
    line: int


def modules() -> list[Path]:
    found = [path for top in ("spiderfs", "trainer_hook") for path in sorted((ROOT / top).rglob("*.py"))]
    assert found
    return found


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


# Five tests want them, and each would parse all modules again.
@functools.cache
def imports(path: Path) -> Sequence[Import]:
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.append(Import(alias.name, node.lineno))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{short(path)}:{node.lineno}: imports are written from the root"
            assert node.module is not None
            for alias in node.names:
                # `from spiderfs import mountpoint` imports a module, `from spiderfs.errors import X` a name.
                inner = f"{node.module}.{alias.name}"
                module = inner if file_of(inner) else node.module
                found.append(Import(module, node.lineno))
    return found


def file_of(module: str) -> Path | None:
    """Where a module of the project lies."""
    base = ROOT.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.exists():
            return path
    return None


def unit_of(module: str) -> tuple[str, str]:
    """The package and row entry that a module belongs to: the innermost room that has a layer of its own."""
    top, *inner = module.split(".")
    if not inner:
        return top, top
    if inner[0] in OPENED:
        for depth in (3, 2):
            opened = top, ".".join(inner[:depth])
            if opened in LAYER_OF:
                return opened
    return top, inner[0]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@for_all(modules(), short)
def test_imports_point_down(path: Path) -> None:
    own = unit_of(module_of(path))
    wrong = [
        f"line {found.line}: {found.name}"
        for found in imports(path)
        if found.name.split(".")[0] == own[0]
        and unit_of(found.name) != own
        and LAYER_OF[unit_of(found.name)] >= LAYER_OF[own]
    ]
    assert wrong == []


def test_every_module_has_a_layer_and_no_two_need_each_other() -> None:
    # The hook's own names are imported from it when they are first used.
    own = {
        module_of(path): {
            found.name for found in imports(path) if found.name.split(".")[0] in ("spiderfs", "trainer_hook")
        }
        for path in modules()
        if short(path) != "trainer_hook/__init__.py"
    }
    # The daemon as a whole is no room that someone could import.
    assert {unit_of(module) for module in own} - {("spiderfs", "daemon")} == set(LAYER_OF) - {("trainer_hook",) * 2}
    # Raises CycleError, which names them.
    assert len(list(graphlib.TopologicalSorter(own).static_order())) >= len(own)


# The one module of the hook that reads what it has put into a mount's cache, as every reader may.
READS_BY_THE_CLIENT = ("trainer_hook/refurbishing/stores.py", "spiderfs.client")


@for_all(modules(), short)
def test_imports_are_those_that_a_module_may_have(path: Path) -> None:
    """Each heavy library has one importer, and the hook needs the protocol alone of the mount."""
    for found in imports(path):
        where, top = f"line {found.line}: {found.name}", found.name.split(".")[0]
        assert short(path).startswith(ONLY_IMPORTERS.get(top, ("",))), where
        if top == "spiderfs" and not path.is_relative_to(PACKAGE):
            of_protocol = found.name.startswith("spiderfs.protocol")
            assert of_protocol or (short(path), found.name) == READS_BY_THE_CLIENT, where


@for_all([path for path in modules() if short(path).startswith(PURE)], short)
def test_what_decides_is_pure(path: Path) -> None:
    for found in imports(path):
        top = found.name.split(".")[0]
        if top in ("spiderfs", "trainer_hook"):
            module = file_of(found.name)
            assert found.name == "spiderfs.errors" or (module and short(module).startswith(PURE)), found
        else:
            assert top == "numpy" or (top in sys.stdlib_module_names and top not in IMPURE), found
    for node in ast.walk(tree_of(path)):
        assert not isinstance(node, ast.AsyncFunctionDef | ast.Await), f"line {node.lineno}: a decision does not await"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("open", "print", "input"), f"line {node.lineno}: {node.func.id}()"


def room_of(path: Path) -> str:
    """The room of a module: the folder below its package, or the package for a module on top."""
    top, *inner = path.relative_to(ROOT).parts
    return f"{top}/{inner[0]}" if len(inner) > 1 else top


def test_rooms_keep_to_their_budgets() -> None:
    lines = Counter[str]()
    for path in modules():
        lines[room_of(path)] += path.read_text().count("\n")
    assert set(lines) == set(BUDGETS)
    assert {room: (count, BUDGETS[room]) for room, count in lines.items() if count > BUDGETS[room]} == {}
    # A budget that is far from what there is holds nothing.
    assert {room: (count, BUDGETS[room]) for room, count in lines.items() if count < 0.9 * BUDGETS[room] - 50} == {}


@for_all(modules(), short)
def test_modules_keep_to_the_rules(path: Path) -> None:
    assert ast.get_docstring(tree_of(path)) or path.name == "__init__.py", "it says what it is"
    nothing = {"utils", "util", "helpers", "helper", "common", "misc", "tools"}
    assert not {path.stem, path.parent.name} & nothing, "it is named for something"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            )
            silent = all(isinstance(statement, ast.Pass) for statement in node.body)
            assert not (broad and silent), f"line {node.lineno}: an error is swallowed"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.walk":
            # Otherwise it passes over a directory that it cannot list.
            assert any(keyword.arg == "onerror" for keyword in node.keywords), f"line {node.lineno}: a walk in silence"
