"""Reader processes, which read files again and again, compare every byte with what it must be, and time every read."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from benchmarks.common.sources import make_older

# The program of a reader. It drops a file's pages before it reads the file, so that the bytes come from the daemon.
# After its standard input is closed, it finishes its round and writes what it saw to standard output.
_READER = r"""
import errno, hashlib, json, os, random, select, sys, time
order = random.Random(int(sys.argv[1]))
wanted = json.loads(sys.argv[2])
names = sorted(wanted)
rounds = int(sys.argv[3])
if sys.argv[4]:
    from spiderfs import client
reads, wrong, errors, longest = 0, [], [], 0.0
print("reading", flush=True)
while rounds and not select.select([0], [], [], 0)[0]:
    rounds -= 1
    order.shuffle(names)
    for name in names:
        began = time.monotonic()
        try:
            found = hashlib.blake2b(client.read_bytes(name) if sys.argv[4] else b"")
            fd = os.open(os.devnull if sys.argv[4] else name, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                while piece := os.read(fd, 1 << 17):
                    found.update(piece)
            finally:
                os.close(fd)
        except OSError as exc:
            if len(errors) < 100:  # what is printed must fit into the pipe
                errors.append([name, errno.errorcode[exc.errno], time.monotonic() - began])
            if exc.errno in (errno.ENOTCONN, errno.ECONNABORTED):
                rounds = 0
                break
        else:
            if found.hexdigest() != wanted[name] and len(wrong) < 100:
                wrong.append(name)
        longest = max(longest, time.monotonic() - began)
        reads += 1
print(json.dumps({"reads": reads, "wrong": wrong, "errors": errors, "longest_s": longest}), flush=True)
"""


class Report(NamedTuple):
    """What one or several readers saw; `errors` holds file name, errno name and seconds of each error."""

    reads: int
    wrong: list[str]
    errors: list[tuple[str, str, float]]
    longest_s: float


class Reader:
    def __init__(self, point: Path, wanted: Mapping[str, str], seed: int, rounds: int, around: bool) -> None:
        self._endless = rounds < 0
        texts = {os.fspath(point / name): digest for name, digest in wanted.items()}
        self.process = subprocess.Popen(
            [
                *(sys.executable, *([] if around else ["-I", "-S"]), "-c", _READER),
                *(str(seed), json.dumps(texts), str(rounds), "around" if around else ""),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_started(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "reading\n"

    def report(self, within_s: float = 60.0) -> Report:
        """What the reader saw, after its rounds or the round that it is in; raises TimeoutExpired if it hangs."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if self._endless:
            self.process.stdin.close()
        self.process.wait(within_s)
        # communicate() would miss what readline() has already read into its buffer.
        found = json.loads(self.process.stdout.read())
        errors = [(name, kind, seconds) for name, kind, seconds in found["errors"]]
        return Report(found["reads"], found["wrong"], errors, found["longest_s"])

    def kill(self) -> None:
        with self.process:
            self.process.kill()


@contextlib.contextmanager
def readers(
    count: int, point: Path, wanted: Mapping[str, str], rounds: int = -1, around: bool = False
) -> Iterator[list[Reader]]:
    """Start `count` readers and wait until all have begun; when the context ends, all are killed.

    They read `around` FUSE by `spiderfs.client`, or through the mount.
    """
    started: list[Reader] = []
    try:
        started += [Reader(point, wanted, seed, rounds, around) for seed in range(count)]
        for reader in started:
            reader.wait_started()
        yield started
    finally:
        for reader in started:
            reader.kill()


def together(all_readers: list[Reader], within_s: float = 60.0) -> Report:
    """End the readers; returns what all of them saw."""
    reports = [reader.report(within_s) for reader in all_readers]
    return Report(
        sum(report.reads for report in reports),
        [name for report in reports for name in report.wrong],
        [error for report in reports for error in report.errors],
        max(report.longest_s for report in reports),
    )


def read_through(point: Path, wanted: Mapping[str, str], count: int = 1, rounds: int = 1) -> Report:
    """Have `count` readers read all files so many times; fails if a read does, or has a wrong byte."""
    with readers(count, point, wanted, rounds) as some:
        seen = together(some)
    assert (seen.wrong, seen.errors, seen.reads) == ([], [], count * rounds * len(wanted))
    return seen


def read_afresh(path: Path) -> bytes:
    """Read a file past the kernel's pages, so that an immutable mount hears of it too."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file.read()


def error_of(call: Callable[..., object], *arguments: object) -> int:
    """The errno with which a call fails."""
    with pytest.raises(OSError) as caught:  # noqa: PT011
        call(*arguments)
    return caught.value.errno or 0


def error_within(limit_s: float, call: Callable[..., object], *arguments: object) -> int:
    """The errno with which a call fails, which must not take longer than the limit."""
    began = time.monotonic()
    error = error_of(call, *arguments)
    assert time.monotonic() - began < limit_s
    return error


def digest(content: bytes) -> str:
    return blake2b(content).hexdigest()


def write_files(source: Path, sizes: Mapping[str, int], seed: int = 0) -> dict[str, str]:
    """Make files of random bytes that are old enough to be cached; returns the digest of each file by its name."""
    random = Random(seed)
    wanted = {}
    for name, size in sizes.items():
        content = random.randbytes(size)
        write_contents(source, {name: content})
        make_older(source / name)
        wanted[name] = digest(content)
    return wanted


def source_of(files: Mapping[str, int] | Mapping[str, bytes], write: Callable[..., object] = write_files) -> Any:
    """A fixture: a source of these files, which `write` makes: of their sizes, or of their contents."""

    @pytest.fixture
    def source(tmp_path: Path) -> Path:
        write(tmp_path / "source", files)
        return tmp_path / "source"

    return source


def source_with(contents: Mapping[str, bytes]) -> Any:
    """A fixture: a source of files with these contents, which have just been written."""
    return source_of(contents, write_contents)


def lasting_source(sizes: Mapping[str, int]) -> Any:
    """A fixture: a source of these files for all tests of a module, which leave it as it is."""

    @pytest.fixture(scope="module")
    def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
        made = tmp_path_factory.mktemp("source")
        write_files(made, sizes)
        return made

    return source


def write_contents(source: Path, contents: Mapping[str, bytes]) -> None:
    """Make these files, by their names, and the directories above them."""
    for name, content in contents.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)


def write_numbered(source: Path, files: int, size: int) -> None:
    """Make files whose names are their numbers, in four directories; each begins with its number in eight digits."""
    for number in range(files):
        path = source / str(number % 4) / f"{number:08d}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(path.name.encode().ljust(size, b"."))
        make_older(path)


def cached_pages(fd: int) -> int:
    """How many pages of an open file the kernel has; cachestat(2)."""
    found = (ctypes.c_uint64 * 5)()
    number = 451  # on every architecture; struct cachestat_range is offset and length, 0: to the end
    assert ctypes.CDLL(None).syscall(number, fd, (ctypes.c_uint64 * 2)(0, 0), found, 0) == 0
    return int(found[0])


def files_below(point: Path, prefix: str = "") -> dict[str, bytes]:
    """All that a walk finds, by its path; `prefix` is put before each."""
    found = {}
    for directory, _, names in os.walk(point):
        for name in names:
            path = Path(directory, name)
            found[f"{prefix}{path.relative_to(point)}"] = path.read_bytes()
    return found
