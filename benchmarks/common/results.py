"""How benchmarks show what they have measured, and keep it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table


def plain_table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE, show_edge=False, pad_edge=False)


def spread(values: Sequence[float], form: str, factor: float = 1.0) -> str:
    """Mean and standard deviation over seeds."""
    text = format(statistics.fmean(values) * factor, form)
    return text if len(values) < 2 else f"{text} ± {format(statistics.stdev(values) * factor, form.removeprefix('+'))}"


def machine() -> dict[str, Any]:
    """What was measured on, and when."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "load_average": os.getloadavg(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def save(path: Path, result: dict[str, Any]) -> None:
    """In one go, so that a measurement that is broken off leaves a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(json.dumps(result, indent=1) + "\n")
    unfinished.replace(path)
