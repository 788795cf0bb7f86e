"""Files of a scorer that outlive a mount: there as a whole, and read only if they are what was written.

hnswlib believes what a file of its says, and a changed byte can end the process that loads it (SIGSEGV). So each file
has its checksum beside it. After a crash between the two they do not agree, which costs the file.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

_SUFFIX = ".crc32"
_PIECE_BYTES = 1 << 20


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` make a file, and put it into its place once it is whole."""
    unfinished, checksum = path.with_name(f".{path.name}"), path.with_name(path.name + _SUFFIX)
    write(unfinished)
    unfinished_checksum = checksum.with_name(f".{checksum.name}")
    unfinished_checksum.write_text(f"{_crc32(unfinished):08x}\n")
    os.replace(unfinished_checksum, checksum)
    os.replace(unfinished, path)


def check_whole(path: Path) -> None:
    """Raises ValueError or OSError unless `write_whole` wrote the file as it is."""
    if path.with_name(path.name + _SUFFIX).read_bytes() != f"{_crc32(path):08x}\n".encode():
        raise ValueError(f"{path} does not have the checksum with which it was written")


def saved_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """What `numpy.savez` wrote; raises ValueError or OSError where it is not that. Of a file that was checked."""
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
