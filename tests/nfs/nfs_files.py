"""Files of the cases, whose contents say which file and which generation of it they are."""

from __future__ import annotations

import os
import time
from pathlib import Path

SIZE = 20_000


def content_of(name: str, generation: int) -> bytes:
    return (f"{name} {generation}|".encode() * SIZE)[:SIZE]


def write(directory: Path, names: list[str], generation: int = 0, age_s: float = 3600.0) -> None:
    """Write files as if the server had them for long, so that the mount keeps them."""
    for name in names:
        (directory / name).write_bytes(content_of(name, generation))
        os.utime(directory / name, (time.time() - age_s + generation,) * 2)


def read(path: Path) -> bytes | None:
    """The file's content; None if there is no such name."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def drop_page_cache() -> None:
    """Have the kernel forget what it has read, so that the mount is asked."""
    Path("/proc/sys/vm/drop_caches").write_text("1\n")
