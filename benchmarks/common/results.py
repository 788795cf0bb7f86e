"""How benchmarks show their measurements, and how they keep them in files."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
WIDE = 180
LONGEST_LINE = 800
"""So many characters of a result, which is kept as JSON, need no lines of their own."""


def wide_console() -> Console:
    """A console with room for wide tables, which most terminals do not have."""
    return Console(width=max(WIDE, shutil.get_terminal_size().columns))


def plain_table(title: str, *headings: str, words: Collection[str] = ("",)) -> Table:
    """A table without lines around it: columns whose heading is in `words` hold words, all others hold numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_edge=False, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in words else "right", no_wrap=True)
    return table


def turns(systems: Iterable[T], rounds: int) -> Iterator[tuple[int, T]]:
    """The number of a round, and a system: each round has all of them, and begins with another one."""
    systems = list(systems)
    for number in range(rounds):
        first = number % len(systems)
        yield from ((number, system) for system in systems[first:] + systems[:first])


def spread(values: Sequence[float], form: str, factor: float = 1.0) -> str:
    """The mean of the values and, if there are several, their standard deviation."""
    text = format(statistics.fmean(values) * factor, form)
    return text if len(values) < 2 else f"{text} ± {format(statistics.stdev(values) * factor, form.removeprefix('+'))}"


def machine() -> dict[str, Any]:
    """The machine, the time and the commit: kept with every result."""
    torch: Any = sys.modules.get("torch")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        # None, too, if the benchmark has not imported torch.
        "gpu": torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else None,
        "load_average": os.getloadavg(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": commit(),
    }


def commit() -> str:
    """The commit of this checkout, with "-dirty" if other files than documents have changed since."""

    def git(*words: str) -> str:
        run = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
        return run.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs", ":!*.md")
    return git("describe", "--always", "--abbrev=10") + ("-dirty" if changed else "")


def save(path: Path | None, result: dict[str, Any]) -> None:
    """Write the result as JSON in one go, so that a measurement that is interrupted leaves a whole file.

    Does nothing without a path: the user did not ask for a file.
    """
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(one_run_a_line(result) + "\n")
    unfinished.replace(path)


def one_run_a_line(value: Any, indent: str = "") -> str:
    """JSON in which each run of a list has a line, so that a comparison of two results shows the runs that differ.

    What is short within the result is a line too.
    """
    inner = indent + " "
    text = json.dumps(value)
    if indent and len(text) <= LONGEST_LINE and isinstance(value, dict):
        return text
    if isinstance(value, dict) and any(_has_parts(part) for part in value.values()):
        parts = [f"{inner}{json.dumps(name)}: {one_run_a_line(part, inner)}" for name, part in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    if isinstance(value, list) and _has_parts(value):
        return "[\n" + ",\n".join(inner + json.dumps(part) for part in value) + f"\n{indent}]"
    return text


def _has_parts(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(one, dict | list) for one in value))
