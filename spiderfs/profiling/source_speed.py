"""How fast a source gives files through a mount: how long one takes, and how many at a time bring more bytes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from spiderfs.forms.profile import Reads, SourceSpeed

# Files of one look at the source, for each reader; the more readers, the more files.
_FILES_EACH = 12
# More readers count only if they bring so many times the bytes.
_GREW = 1.15
_FIRST_FILES = 16


def files_below(root: Path, most: int) -> list[Path]:
    """The first regular files that are listed, which makes their names known to the mount."""
    return list(islice(_walk(root), most))


def count_files(root: Path) -> int:
    """How many regular files there are; this lists all of them."""
    return sum(1 for _ in _walk(root))


def _walk(directory: Path) -> Iterator[Path]:
    with os.scandir(directory) as entries:
        listed = sorted(entries, key=lambda entry: entry.name)
    for entry in listed:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path))
        elif entry.is_file(follow_symlinks=False):
            yield Path(entry.path)


def source_speed(files: list[Path], most_readers: int) -> SourceSpeed:
    """Read files that are not cached, each once: by one reader, by two, by four, and so on.

    There must be a file at least. Where there are few, there is less to see: a look with fewer than two files for each
    reader is left out.
    """
    left = iter(files)
    first = list(islice(left, _FIRST_FILES))
    took_s = [_read_all([path], 1).seconds for path in first]
    rates = {1: sum(path.stat().st_size for path in first) / sum(took_s)}
    readers = 2
    while readers <= most_readers and len(chosen := list(islice(left, _FILES_EACH * readers))) >= 2 * readers:
        rates[readers] = _read_all(chosen, readers).bytes_per_s
        readers *= 2
    most = max(rates.values())
    useful = next(readers for readers, rate in rates.items() if rate * _GREW >= most)
    return SourceSpeed(statistics.median(took_s), useful, most)


def cached_reads(files: list[Path], readers: int) -> Reads:
    """How fast cached files are read."""
    _read_all(files, readers)  # now they are cached
    return _read_all(files, readers)


def _read_all(files: list[Path], readers: int) -> Reads:
    begin_s = time.perf_counter()
    with ThreadPoolExecutor(readers) as pool:
        total = sum(pool.map(lambda path: len(path.read_bytes()), files))
    return Reads(len(files), total, time.perf_counter() - begin_s)
