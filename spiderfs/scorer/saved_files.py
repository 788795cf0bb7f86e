"""The files in which scorings survive a remount: a file is written whole or not at all, and read only if unchanged.

hnswlib does not check the file that it loads, and a changed byte can end the process (SIGSEGV). So each file has a file
with its checksum beside it. After a crash between the two writes the checksum does not match, and the file is lost.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

_SUFFIX = ".crc32"
_PIECE_BYTES = 1 << 20


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` make a file, and rename it to `path` when it is complete; also writes its checksum."""
    unfinished, checksum = path.with_name(f".{path.name}"), path.with_name(path.name + _SUFFIX)
    write(unfinished)
    unfinished_checksum = checksum.with_name(f".{checksum.name}")
    unfinished_checksum.write_text(f"{_crc32(unfinished):08x}\n")
    os.replace(unfinished_checksum, checksum)
    os.replace(unfinished, path)


def check_whole(path: Path) -> None:
    """Raise ValueError or OSError unless the file is as `write_whole` wrote it."""
    if path.with_name(path.name + _SUFFIX).read_bytes() != f"{_crc32(path):08x}\n".encode():
        raise ValueError(f"{path} does not have the checksum with which it was written")


def save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write a file from which `saved_arrays` reads these arrays."""
    with path.open("wb") as file:
        np.savez(file, **arrays)


def saved_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays that `save_arrays` wrote; raises ValueError or OSError for any other file.

    The caller must have called `check_whole` for the file.
    """
    try:
        with np.load(path) as saved:
            return {name: saved[name] for name in saved.files}
    except (EOFError, BadZipFile, zlib.error) as exc:
        raise ValueError(f"{path} was cut short: {exc}") from exc


def _crc32(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            found = zlib.crc32(piece, found)
    return found
