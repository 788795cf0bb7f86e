"""Which code decides a kept result, and whether it has changed since the result was measured.

A result names the commit and a hash of the modules that decide it. The hash leaves out comments, docstrings and
imports, and how a module is called: none of them changes what is measured.
"""

from __future__ import annotations

import ast
import hashlib
import json
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

_SERVING = ("spiderfs/fuse", "spiderfs/vfs", "spiderfs/store", "spiderfs/shared")
_FETCHING = (*_SERVING, "spiderfs/sources", "spiderfs/daemon/caching")
_DECIDING = ("spiderfs/core", "spiderfs/policies")
TRAINED = (*_DECIDING, "spiderfs/scorer", "trainer_hook/samplers")
_PLANNING = ("spiderfs/core", "spiderfs/policies", "spiderfs/daemon/caching", "trainer_hook/loader")
_REFURBISHING = ("trainer_hook/refurbishing",)

DECIDED_BY: dict[str, tuple[str, ...]] = {
    "accuracy-short": TRAINED,
    "client": ("spiderfs/client", "spiderfs/store", "spiderfs/shared"),
    "archives": (*_FETCHING, *_PLANNING, "spiderfs/archives", "trainer_hook/samplers/pool.py"),
    "cluster": (*_FETCHING, *_DECIDING),
    "cpu_split": _SERVING,
    "decoding": (*_SERVING, "spiderfs/views"),
    "embedding_width": ("spiderfs/scorer", "trainer_hook/model/capture.py"),
    "epoch": _SERVING,
    "equivalence": TRAINED,
    "exchanged_orders": ("spiderfs/core/plans", "trainer_hook/loader"),
    "far": _FETCHING,
    "folders": ("spiderfs/vfs", "spiderfs/sources"),
    "full_size": TRAINED,
    "fuse_library": ("spiderfs/fuse",),
    "hit_ratio": TRAINED,
    "idle": ("spiderfs/daemon", "spiderfs/fuse", "spiderfs/sources", "spiderfs/store", "spiderfs/vfs"),
    "image_loader": _SERVING,
    "jobs": _DECIDING,
    "jobs_mount": _PLANNING,
    "large": _FETCHING,
    "loader_workers": _PLANNING,
    "long_training": TRAINED,
    "lookahead": _DECIDING,
    "missing_hits": TRAINED,
    "nfs-default": _FETCHING,
    "nfs-faults": _FETCHING,
    "nfs-short": _FETCHING,
    "nfs-soft": _FETCHING,
    "nodes": _DECIDING,
    "object_store": (*_FETCHING, *_PLANNING),
    "packages": (*_DECIDING, "spiderfs/packages"),
    "partition": ("spiderfs/forms", "spiderfs/views", "spiderfs/profiling"),
    "pool_sampler": TRAINED,
    "pushed": (*_SERVING, "spiderfs/daemon/caching"),
    "refurbish_accuracy": _REFURBISHING,
    "refurbish_speed": _REFURBISHING,
    "saturation": ("spiderfs/scorer", "spiderfs/daemon/training"),
    "scan": _FETCHING,
    "scorer": ("spiderfs/scorer",),
    "serve": _SERVING,
    "serve-immutable": _SERVING,
    "shared_scores": ("spiderfs/cluster", "spiderfs/scorer", "spiderfs/daemon/training/courses"),
    "soak": ("spiderfs", "trainer_hook"),
    "stall": _PLANNING,
    "stall-immutable": _PLANNING,
    "streaming_formats": (*_FETCHING, *_PLANNING),
    "start": (*_FETCHING, "spiderfs/core/plans"),
    "systems": TRAINED,
    "train": (*TRAINED, *_PLANNING),
    "two_jobs": TRAINED,
    "view_bytes": ("spiderfs/views",),
    "workers": _SERVING,
}
"""For each kept result the directories, or files, whose code decides it."""


def hash_of(places: Iterable[str], root: Path = ROOT) -> str:
    """A hash of the code of these files, and below these directories."""
    # Below a file there is nothing.
    files = {file for place in places for file in (list((root / place).rglob("*.py")) or [root / place])}
    codes = sorted(_code_of(file.read_text()) for file in files)
    return hashlib.sha256("\0".join(codes).encode()).hexdigest()[:16]


@cache
def _code_of(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not _says_nothing(one)]  # type: ignore[attr-defined]
    return _dumped(tree)


def _dumped(part: Any) -> str:
    """The tree as text, without empty fields: versions of Python differ in which of them they have."""
    if isinstance(part, list):
        return f"[{','.join(map(_dumped, part))}]"
    if not isinstance(part, ast.AST):
        return repr(part)
    fields = (f"{name}={_dumped(field)}" for name, field in ast.iter_fields(part) if field is not None and field != [])
    return f"{type(part).__name__}({','.join(fields)})"


def _says_nothing(node: ast.stmt) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return is_text or isinstance(node, ast.Import | ast.ImportFrom)


def named(path: Path, result: dict[str, Any]) -> dict[str, Any]:
    """The result with the code behind it, if it is one that is kept.

    If `path` has runs of the same result already, the code behind these is named too.
    """
    places = DECIDED_BY.get(path.stem)
    if places is None:
        return result
    known: list[dict[str, str]] = []
    same: dict[str, str] = {}
    now = {"commit": _commit(), "hash": hash_of(places)}
    if path.exists():
        before = json.loads(path.read_text())
        if _runs(before) & _runs(result):
            known = before.get("code", [UNKNOWN])
            same = {name: part for name, part in before.items() if name == SAME and part == now["hash"]}
    others = [code for code in known if code["hash"] != now["hash"]]
    return {name: part for name, part in result.items() if name != "code"} | {"code": [*others, now]} | same


SAME = "trains_the_same"
"""The part of a result with the hash of code of another shape that was shown to give the same figures."""
UNKNOWN = {"commit": "", "hash": ""}
"""The code of a run that was measured before results named it."""


def _runs(result: dict[str, Any]) -> set[str]:
    """The runs that a result consists of, as text: all parts of its lists."""
    found: set[str] = set()
    parts: list[Any] = [part for name, part in result.items() if name not in ("code", "machine", SAME)]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            found.update(json.dumps(one) for one in part if isinstance(one, dict | list))
        parts += part.values() if isinstance(part, dict) else []
    return found


def _commit() -> str:
    described = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"],
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip()


def state_of(path: Path) -> str:
    """What a reader must know of a kept result: whether the code that decides it is still the same."""
    result, now = json.loads(path.read_text()), hash_of(DECIDED_BY[path.stem])
    codes = result.get("code", [UNKNOWN])
    if UNKNOWN in codes:
        return "not known: it was measured before results named their code"
    if result.get(SAME) == now:
        return "of another shape since, with the same figures"
    return "current" if all(code["hash"] == now for code in codes) else "**out of date**: the code has changed since"
