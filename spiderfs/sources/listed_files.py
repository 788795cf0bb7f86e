"""Files named by a list: a manifest, or the output of other programs about a bucket or a directory.

A manifest has a line `PATH<tab>SIZE<tab>TAG` for each file, see `web/manifest.py`. `as_manifest` makes one of the lists
that these write, which it tells apart by their first line:

- `aws s3 ls --recursive`: whole keys, and times of the time zone of this machine, in seconds;
- `rclone lsjson -R`: paths below what was listed, and times;
- S3 Inventory, as CSV: whole keys, and ETags, or times where it has no ETags.

Directories, versions of objects that are not the latest, and keys that are not below the prefix are left out.

`ListedSource` shows what a list names, and takes the bytes from the source. A name that the list has not is absent. A
file that turns out to differ from its line has the attributes that the source gives, from then on; so has a file that
is listed as empty, for an empty file is never read.
"""

from __future__ import annotations

import codecs
import gzip
import json
import logging
import mmap
import os
import re
import stat
import zlib
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote_plus

import xxhash

from spiderfs.errors import ConfigError, SourceChanged, SourceError, SourceNotFound, SourceUnavailable
from spiderfs.sources.object_source import DIRECTORY, ObjectSource, file_stat, is_name, tag_of
from spiderfs.sources.source import MAX_SIZE, UNKNOWN, Source, SourceStat, Version, joined_time, streamed

log = logging.getLogger(__name__)

_LINE = re.compile(rb"([^\t\n]*/)?([^/\t\n]+)\t\d{1,19}\t[^\t\r\n]+\n")
_SECONDS = re.compile(r"(\d{1,12})(?:\.(\d*))?")
_NGINX = re.compile(r'(?:W/)?"?([0-9a-f]{1,10})-([0-9a-f]{1,16})"?')
_AWS = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) +(\d{1,19}) (.+)")
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)")
# Bucket, key, perhaps version with is-latest and is-delete-marker, size, and a time, an ETag, or both.
_INVENTORY = re.compile(
    r'"[^"]*","([^"]+)"(?:,"[^"]*","(true|false)","(true|false)")?,"(\d*)"(?:,"(\d{4}-[^"]*)")?'
    r'(?:,"([0-9a-f]{32}(?:-\d+)?)")?(?:,.*)?'
)
# A path, a size, and an ETag or seconds since 1970; None for what is no file of the tree.
_Row = tuple[str, int, str]
_decode = json.JSONDecoder().raw_decode
# A manifest's sizes have at most 19 digits.
_SIZES = range(10**19)
# A byte for each hash of a path marks files that differ from their lines. A file that shares a marked byte is looked up
# at the source, too.
_MARKS = 1 << 20
# How many files of a directory a scan looks up at the source: some seconds of an object store.
_ASKED_PER_SCAN = 256


class ListedFiles:
    """What a manifest lists. Of each directory it keeps the lines as they are, which objects would be many times of."""

    def __init__(self, text: bytes, whole_seconds: bool = True) -> None:
        """`whole_seconds`: fractions of times do not count. Raises ValueError, which says what is wrong."""
        self._whole_seconds = whole_seconds
        if not text:
            # Whoever wrote it has failed, more likely than that all files are gone.
            raise ValueError("it lists no files")
        if text.startswith(codecs.BOM_UTF8):
            raise ValueError("it begins with a byte order mark: save it without one")
        lines: defaultdict[bytes, list[bytes]] = defaultdict(list)
        end = 0
        while found := _LINE.match(text, end):
            end = found.end()
            above = (found[1] or b"").removeprefix(b"./")
            # A path that begins with a slash is none of those below the manifest's directory.
            lines[above[:-1] or above].append(text[found.start(2) : end - 1])
        if end != len(text):
            number = text.count(b"\n", 0, end) + 1
            raise ValueError(
                f"line {number} is not PATH, SIZE and TAG, with a tab after the first two and a line feed behind them"
            )
        self.left_out: list[str] = []
        self._lines: dict[bytes, bytes] = {}
        self._below: dict[bytes, set[bytes]] = {b"": set()}
        for directory, its in lines.items():
            if directory and not all(map(is_name, os.fsdecode(directory).split("/"))):
                self.left_out.append(os.fsdecode(directory))
                continue
            self._lines[directory] = b"\n%b\n" % b"\n".join(its)
            self._add(directory)

    def _add(self, directory: bytes) -> None:
        """Have a directory, and those above it."""
        known = directory in self._below
        while not known:
            self._below.setdefault(directory, set())
            above, _, name = directory.rpartition(b"/")
            known = above in self._below
            self._below.setdefault(above, set()).add(name)
            directory = above

    def files(self, directory: bytes) -> dict[bytes, SourceStat]:
        """The files in a directory, also those that cannot be shown; of one listed twice the last line counts."""
        lines = self._lines.get(directory)
        return dict(map(self._row, lines[1:-1].split(b"\n"))) if lines else {}

    def file(self, path: bytes) -> SourceStat | None:
        directory, _, name = path.rpartition(b"/")
        lines = self._lines.get(directory, b"")
        at = lines.rfind(b"\n%b\t" % name)
        return self._row(lines[at + 1 : lines.index(b"\n", at + 1)])[1] if at >= 0 else None

    def stat(self, path: bytes) -> SourceStat:
        """As `Source.stat`."""
        if path in self._below:
            return DIRECTORY
        found = self.file(path) if is_name(os.fsdecode(path.rpartition(b"/")[2])) else None
        if found is None:
            raise SourceNotFound(f"{os.fsdecode(path)}: the list has no such file")
        return found

    def scan(self, path: bytes, report: Callable[[bytes, list[str]], None]) -> Iterator[tuple[bytes, SourceStat]]:
        """As `Source.scan`; names that cannot be shown are reported."""
        directories = self._below.get(path)
        if directories is None:
            raise SourceNotFound(f"{os.fsdecode(path)}: the list has nothing below it")
        yield b".", DIRECTORY
        found = self.files(path)
        left_out = [os.fsdecode(name) for name in found if not is_name(os.fsdecode(name))]
        left_out += self.left_out if not path else []
        if left_out:
            report(path, left_out)
        yield from ((name, DIRECTORY) for name in directories)
        yield from (
            (name, its) for name, its in found.items() if name not in directories and is_name(os.fsdecode(name))
        )

    def _row(self, line: bytes) -> tuple[bytes, SourceStat]:
        name, size, tag = line.split(b"\t")
        return name, self._described(min(int(size), MAX_SIZE), tag.decode(errors="replace"))

    def _described(self, size: int, tag: str) -> SourceStat:
        """A file of which there is a time, or an ETag."""
        nginx = _NGINX.fullmatch(tag)
        if nginx and int(nginx[2], 16) == size:
            return file_stat(size, int(nginx[1], 16), 0)
        found = _SECONDS.fullmatch(tag)
        if found is None:
            return file_stat(size, 0, tag_of(tag.removeprefix("W/")))
        nanoseconds = 0 if self._whole_seconds else int(f"{found[2] or '':0<9.9}")
        return file_stat(size, 0, 0)._replace(mtime_ns=joined_time(int(found[1]), nanoseconds))


@lru_cache(1 << 16)
def _seconds(text: str) -> int:
    """Seconds since 1970; without a zone it is a time of this machine's."""
    return max(0, int(datetime.fromisoformat(text).timestamp()))


def _unix(text: str) -> str:
    """Seconds since 1970 of a time in ISO 8601, with its fraction."""
    found = _TIME.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no time")
    return f"{_seconds(found[1] + found[3])}{found[2] or ''}"


def _aws_rows(line: str) -> Iterable[_Row]:
    found = _AWS.fullmatch(line)
    if found is None:
        raise ValueError("not DATE TIME SIZE KEY")
    return ((found[3], int(found[2]), str(_seconds(found[1]))),)


def _rclone_rows(line: str) -> Iterable[_Row]:
    if line.strip() in ("[", "]", ""):
        return
    found, end = _decode(line)
    if line[end:].strip() not in ("", ","):
        raise ValueError("not one object")
    for row in found if isinstance(found, list) else (found,):
        if not row["IsDir"]:
            if not isinstance(row["Path"], str) or type(row["Size"]) is not int:
                raise ValueError("no path, or no size")
            # JSON can have what is no text.
            row["Path"].encode(errors="surrogateescape")
            yield row["Path"], row["Size"], _unix(row["ModTime"])


def _inventory_rows(line: str) -> Iterable[_Row]:
    found = _INVENTORY.fullmatch(line)
    if found is None or not (found[5] or found[6]):
        raise ValueError("not bucket, key, size, and a time or an ETag")
    if found[2] == "false" or found[3] == "true":
        return ()
    return ((unquote_plus(found[1]), int(found[4]), found[6] or _unix(found[5])),)


def as_manifest(text: bytes, prefix: str, left_out: list[str]) -> bytes:
    """The manifest that a list means; `prefix` is that of the keys. Raises ValueError, which names a wrong line.

    Keys with a tab or a line feed are added to `left_out`.
    """
    rows: Callable[[str], Iterable[_Row]]
    first = text[:4096].decode(errors="replace").lstrip()
    if first.startswith(("[", "{")):
        rows, prefix, kind = _rclone_rows, "", "rclone lsjson"
    elif first.startswith('"'):
        rows, kind = _inventory_rows, "an S3 Inventory"
    elif _AWS.match(first):
        rows, kind = _aws_rows, "aws s3 ls --recursive"
    else:
        return text
    lines, cut = [], len(prefix)
    for number, line in enumerate(text.decode(errors="surrogateescape").split("\n"), 1):
        files, why = 0, ""
        try:
            for path, size, tag in rows(line.rstrip("\r")) if line else ():
                if not path or size not in _SIZES:
                    why = f", as a file has the size {size}" if path else ", as a file has no path"
                    raise ValueError(why)
                if not path.startswith(prefix) or path.endswith("/"):
                    pass
                elif "\t" in path or "\n" in path:
                    left_out.append(path[cut:])
                else:
                    lines.append(f"{path[cut:]}\t{size}\t{tag}\n")
                files += 1
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            which = f"file {files + 1} in line {number}" if files else f"line {number}"
            raise ValueError(f"{which} is none of {kind}{why}: correct it, or make the list again") from None
    return "".join(lines).encode(errors="surrogateescape")


def read_list(path: Path, prefix: str) -> ListedFiles:
    """The files that a list names, which may be packed by gzip; raises ConfigError."""
    left_out: list[str] = []
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            files = ListedFiles(as_manifest(file.read(), prefix, left_out), whole_seconds=False)
    except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
        raise ConfigError(f"names={path} cannot be read as gzip ({exc}): make or copy the list again") from exc
    except OSError as exc:
        raise ConfigError(f"names={path} cannot be read ({exc.strerror or exc})") from exc
    except ValueError as exc:
        raise ConfigError(f"names={path}: {exc}") from exc
    files.left_out += left_out
    return files


class ListedSource(ObjectSource):
    """`inner`, with the names of a list; neither links nor extended attributes are shown."""

    def __init__(self, inner: Source, files: ListedFiles) -> None:
        super().__init__()
        self._inner, self._files = inner, files
        # Only the owner reads what may be private at the source, unless file_mode and dir_mode say so.
        self._mask = ~0 if inner.undated_directories else ~0o077
        # Of files that differ from their lines. It is made before the forks, so that all processes of a mount share it.
        self._marks = mmap.mmap(-1, _MARKS)

    def _shown(self, found: SourceStat) -> SourceStat:
        return found._replace(mode=found.mode & self._mask)

    def stat(self, path: bytes) -> SourceStat:
        if not path:
            self._inner.stat(path)
        listed = self._files.stat(path)
        return self._present(path, listed) if self._is_doubtful(path, listed) else self._shown(listed)

    def scan(self, path: bytes, known: Container[tuple[bytes, int]] = ()) -> Iterator[tuple[bytes, SourceStat]]:
        left = _ASKED_PER_SCAN
        above = path and path + b"/"
        for name, listed in self._files.scan(path, self.report):
            its = above + name
            if not self._is_doubtful(its, listed):
                yield name, self._shown(listed)
                continue
            found, left = UNKNOWN, left - 1
            try:
                if left >= 0:
                    found = self._present(its, listed)
            except SourceUnavailable:
                # The others would wait in vain, too.
                left = 0
            except SourceError as exc:
                log.debug("%s", exc)
            yield name, found

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        with self._listed(path):
            return self._inner.read(path, offset, length, version)

    def stream(self, path: bytes, offset: int, length: int, version: Version) -> Iterator[bytes]:
        with self._listed(path):
            yield from streamed(self._inner, path, offset, length, version)

    def read_present(self, path: bytes, most_bytes: int) -> tuple[SourceStat, bytes]:
        listed = self._files.stat(path)
        with self._listed(path):
            found, content = self._inner.read_present(path, most_bytes)
        return self._compared(path, listed, found), content

    def _is_doubtful(self, path: bytes, listed: SourceStat) -> bool:
        """Whether the source says what a listed file is, and not its line."""
        return stat.S_ISREG(listed.mode) and (not listed.size or bool(self._marks[_mark_of(path)]))

    def _present(self, path: bytes, listed: SourceStat) -> SourceStat:
        """The attributes that the source gives of a listed file."""
        with self._listed(path):
            found = self._inner.stat(path)
        if not stat.S_ISREG(found.mode):
            raise SourceError(f"{os.fsdecode(path)} is in the list of names and no file at the source")
        return self._compared(path, listed, found)

    def _compared(self, path: bytes, listed: SourceStat, found: SourceStat) -> SourceStat:
        """What is shown of a file that the source describes, which is marked if its line is wrong."""
        # A store has ETags for what a list may have times of.
        if listed.version in (found.version, found._replace(tag=0).version):
            return self._shown(listed)
        if listed.size or found.size:
            self._mark(path)
        return self._shown(listed._replace(size=found.size, mtime_ns=found.mtime_ns, tag=found.tag))

    def _mark(self, path: bytes) -> None:
        """Look this file up at the source from now on."""
        self._marks[_mark_of(path)] = 1
        self.warn_once(
            "the list of names is out of date, for example about %r: such files are looked up at the source; make the"
            " list again, and mount again",
            os.fsdecode(path),
        )

    @contextmanager
    def _listed(self, path: bytes) -> Iterator[None]:
        try:
            yield
        except SourceNotFound as exc:
            raise SourceError(f"{os.fsdecode(path)} is in the list of names and not at the source") from exc
        except SourceChanged:
            self._mark(path)
            raise

    def statvfs(self) -> os.statvfs_result:
        return self._inner.statvfs()

    def close(self) -> None:
        self._inner.close()


def _mark_of(path: bytes) -> int:
    return xxhash.xxh3_64_intdigest(path) % _MARKS
