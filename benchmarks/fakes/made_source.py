"""A source of any size that takes no room: `made://FILES/BYTES` has so many files of so many bytes, made when read.

`python -m benchmarks.fakes.made_source COMMAND...` is `spiderfs COMMAND...` with such sources.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Container, Iterator
from typing import cast

from benchmarks.common.sources import patterned
from spiderfs.errors import SourceChanged, SourceNotFound
from spiderfs.sources import open as opening
from spiderfs.sources.source import SourceStat, Version

SCHEME = "made://"
PER_DIRECTORY = 1000
_MTIME_NS = 1_700_000_000_000_000_000
# Each file begins elsewhere in the pattern.
_APART = 4099


def name_of(number: int) -> str:
    return f"{number // PER_DIRECTORY:06d}/{number:09d}"


def content_of(number: int, size: int) -> bytes:
    return patterned(number * _APART, number * _APART + size)


class MadeSource:
    undated_directories = False
    root_fd = None

    def __init__(self, url: str) -> None:
        self.identity = url
        self._files, self._bytes = map(int, url.removeprefix(SCHEME).split("/"))
        self._directories = -(-self._files // PER_DIRECTORY)

    def stat(self, path: bytes) -> SourceStat:
        directory, _, name = path.rpartition(b"/")
        if not directory and (not name or (name.isdigit() and int(name) < self._directories)):
            return SourceStat(stat.S_IFDIR | 0o755, 0, 0, 0, _MTIME_NS)
        self._number(path)
        return SourceStat(stat.S_IFREG | 0o644, 0, 0, self._bytes, _MTIME_NS)

    def scan(self, path: bytes, known: Container[tuple[bytes, int]] = ()) -> Iterator[tuple[bytes, SourceStat]]:
        directory = self.stat(path)
        yield b".", directory
        if path:
            first = int(path) * PER_DIRECTORY
            for number in range(first, min(first + PER_DIRECTORY, self._files)):
                yield b"%09d" % number, SourceStat(stat.S_IFREG | 0o644, 0, 0, self._bytes, _MTIME_NS)
        else:
            yield from ((b"%06d" % number, directory) for number in range(self._directories))

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        if version != Version(self._bytes, _MTIME_NS):
            raise SourceChanged(f"{os.fsdecode(path)}: there is no such version")
        return content_of(self._number(path), self._bytes)[offset : offset + length]

    def read_present(self, path: bytes, most_bytes: int) -> tuple[SourceStat, bytes]:
        if self._bytes > most_bytes:
            raise SourceChanged(f"{os.fsdecode(path)}: no file of up to {most_bytes} bytes")
        return self.stat(path), content_of(self._number(path), self._bytes)

    def readlink(self, path: bytes) -> bytes:
        raise SourceChanged(f"{os.fsdecode(path)}: no symbolic link")

    def listxattr(self, path: bytes) -> list[str]:
        return []

    def getxattr(self, path: bytes, name: str) -> bytes | None:
        return None

    def statvfs(self) -> os.statvfs_result:
        return os.statvfs("/")

    def close(self) -> None:
        """Nothing is held open."""

    def _number(self, path: bytes) -> int:
        name = path.rpartition(b"/")[2]
        number = int(name) if name.isdigit() else self._files
        if number >= self._files or path != name_of(number).encode():
            raise SourceNotFound(f"{os.fsdecode(path)}: No such file or directory")
        return number


def main() -> None:
    from spiderfs.cli.main import main as command

    openers = cast(dict[str, opening.Opener], opening.OPENERS)
    openers["made"] = opening.Opener(lambda url, _: MadeSource(url))
    sys.argv[0] = "spiderfs"
    command()


if __name__ == "__main__":
    main()
