"""What a source shows, as tests compare it."""

from __future__ import annotations

import os
import stat

from spiderfs.sources.source import Source


def listed(source: Source, path: bytes = b"") -> dict[str, str]:
    """The entries of a directory: `d` for directories, `f` for files."""
    (own, _), *entries = source.scan(path)
    assert own == b"."
    assert len(dict(entries)) == len(entries)
    return {os.fsdecode(name): "d" if stat.S_ISDIR(entry.mode) else "f" for name, entry in entries}


def whole(source: Source, path: bytes) -> bytes:
    version = source.stat(path).version
    return bytes(source.read(path, 0, version.size, version))
