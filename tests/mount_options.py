"""The options of a mount that a test does not make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spiderfs.options.model import Options


def options_in(directory: Path, **chosen: Any) -> Options:
    """Options with a source, a mount point and a cache directory below this directory; the first two are made."""
    paths: dict[str, Any] = {
        "source": directory / "source",
        "mountpoint": directory / "point",
        "cache_dir": directory / "cache",
    }
    for name in ("source", "mountpoint"):
        paths[name].mkdir()
    return Options(**paths, **chosen)
