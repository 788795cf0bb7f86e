"""Extents of large files as members: a source that shows each extent of a file as a small file of its own.

A sample may be a range of a large file. The ranges of a list are cut into **extents**: whole pages of the file, each
page in at most one of them, so that a page fault names one extent. The extent of `a/b.bin` from byte 4096 to byte 8192
is the file `a/b.bin.@ranges/4096-8192`, which no listing shows. It has the attributes of the large file and its own
size, so plans, the engine, the store and prefetches treat it as any small file, and it settles when the file does.

The extents of a list are the file's **grid**. The manager publishes the grids of each file (`Grids.publish`), and
workers find the extents of a READ in them (`vfs/small_files.py`).
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Container, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from spiderfs.errors import SourceChanged, SourceNotFound
from spiderfs.protocol.extents import Extent, extent_of
from spiderfs.sources.source import Source, SourceStat, Version, streamed

# Attributes of large files that are remembered, for reads of their extents.
_FILES = 4096
# Grids of one file, of which the newest are kept: training and validation, and jobs that cut it differently.
_GRIDS = 8


def stat_of(extent: Extent, file: SourceStat) -> SourceStat | None:
    """The attributes of an extent as a file; None if the large file ends before it does."""
    size = extent.end - extent.begin
    return file._replace(size=size) if extent.begin < extent.end <= file.size else None


class RangeSource:
    def __init__(self, inner: Source) -> None:
        self._inner = inner
        self._found: dict[bytes, SourceStat] = {}
        self.undated_directories = inner.undated_directories
        self.read_present, self.readlink = inner.read_present, inner.readlink
        self.listxattr, self.getxattr = inner.listxattr, inner.getxattr
        self.statvfs, self.close = inner.statvfs, inner.close

    def stat(self, path: bytes) -> SourceStat:
        extent = extent_of(path)
        if extent is None:
            return self._inner.stat(path)
        found = stat_of(extent, self._inner.stat(extent.file))
        if found is None:
            raise SourceNotFound(f"{os.fsdecode(extent.file)} has no such extent")
        return found

    def scan(self, path: bytes, known: Container[tuple[bytes, int]] = ()) -> Iterator[tuple[bytes, SourceStat]]:
        return self._inner.scan(path, known)

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        extent = extent_of(path)
        if extent is None:
            return self._inner.read(path, offset, length, version)
        file = self._file(extent, version)
        try:
            return self._inner.read(
                extent.file, extent.begin + offset, max(0, min(length, version.size - offset)), file.version
            )
        except SourceChanged:
            self._found.pop(extent.file, None)
            raise

    def stream(self, path: bytes, offset: int, length: int, version: Version) -> Iterator[bytes]:
        if extent_of(path) is None:
            return streamed(self._inner, path, offset, length, version)
        return iter((self.read(path, offset, length, version),))

    def _file(self, extent: Extent, version: Version) -> SourceStat:
        """The file as it is while its extent has this version; raises SourceChanged."""
        for found in (self._found.get(extent.file), None):
            file = self._inner.stat(extent.file) if found is None else found
            shown = stat_of(extent, file)
            if shown is not None and shown.version == version:
                if len(self._found) >= _FILES:
                    self._found.clear()
                self._found[extent.file] = file
                return file
        raise SourceChanged(f"{os.fsdecode(extent.file)} has changed since its extents were listed")


class Grid:
    """The extents of one file that one list has, in the order of the file."""

    def __init__(self, extents: npt.NDArray[np.int64]) -> None:
        """`extents` has two columns: where each begins and ends."""
        self.extents = extents
        self._begins = np.ascontiguousarray(extents[:, 0])

    def at(self, number: int) -> tuple[int, int] | None:
        if not 0 <= number < len(self._begins):
            return None
        begin, end = self.extents[number].tolist()
        return begin, end

    def number_of(self, offset: int) -> int:
        """The number of the last extent that begins at or before `offset`; -1 if there is none."""
        return int(np.searchsorted(self._begins, offset, "right")) - 1

    def covering(self, offset: int, end: int) -> list[tuple[int, int]] | None:
        """The extents that hold these bytes, in order; None if one of the bytes lies in none."""
        number, found = self.number_of(offset), []
        while offset < end:
            extent = self.at(number)
            if extent is None or not extent[0] <= offset < extent[1]:
                return None
            found.append(extent)
            offset, number = extent[1], number + 1
        return found


class Grids:
    """The grids of all files, as files that `path_of` names: the manager writes them, all processes read them."""

    def __init__(self, path_of: Callable[[str], Path] = Path(os.devnull).joinpath) -> None:
        self._path_of = path_of
        self._known: dict[bytes, tuple[str, tuple[int, int], tuple[Grid, ...]]] = {}

    def publish(self, file: bytes, extents: npt.NDArray[np.int64]) -> None:
        """Add a grid to those of a file, unless it is one of them; raises OSError."""
        grids = [grid.extents for grid in self.of(file) if not np.array_equal(grid.extents, extents)]
        grids = [*grids[1 - _GRIDS :], extents]
        path = self._path(file)
        new = f"{path}.new"
        with open(new, "wb") as out:
            np.savez(out, *grids)
        os.replace(new, path)

    def of(self, file: bytes) -> tuple[Grid, ...]:
        """The grids of a file, the newest last."""
        if (known := self._known.get(file)) is None:
            if len(self._known) >= _FILES:
                self._known.clear()
            known = self._known[file] = self._path(file), (0, 0), ()
        path, stamp, grids = known
        try:
            found = os.stat(path)
            # Each version is a new file: two may have one mtime.
            if (now := (found.st_ino, found.st_mtime_ns)) == stamp:
                return grids
            # np.load would leave a torn file open.
            with open(path, "rb") as file_of_grids, np.load(file_of_grids) as saved:
                grids = tuple(Grid(saved[f"arr_{number}"]) for number in range(len(saved.files)))
        except (OSError, EOFError, ValueError, zipfile.BadZipFile):
            # There is none, or what a full or failing disk has left of one.
            return ()
        self._known[file] = path, now, grids
        return grids

    def _path(self, file: bytes) -> str:
        return os.fspath(self._path_of(f"{xxhash.xxh3_64_intdigest(file):016x}"))
