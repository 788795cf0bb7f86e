"""A reader of a soak: it reads files in all ways that programs do, and writes a line about each read.

The reader ends when its standard input does. It names the call that it waits for in a file that the soak looks at
(`Waits`), so that the soak sees a reader that hangs while it hangs.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import random
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.soak.contents import Key, Range, Seen, parsed
from benchmarks.soak.schedule import PHOTOS
from spiderfs.client import read_bytes

T = TypeVar("T")

_SLOT = struct.Struct("<dd")  # since when the process waits (0: it does not wait), and how many calls it has made
# A reader holds a file open for at most so long.
HELD_S = 2.0
# A reader that finds no daemon pauses for so long.
UNMOUNTED_PAUSE_S = 0.1
_READ_BYTES = 1 << 20
_PAGE = 4096
# A reader draws files by rank: it reads the first files most.
_SKEW = 1.1


class Waits:
    """Since when each process of a soak waits: a file with a slot for each process, which all processes map."""

    def __init__(self, path: Path, slots: int) -> None:
        with path.open("a+b") as file:
            if file.seek(0, os.SEEK_END) < slots * _SLOT.size:
                file.truncate(slots * _SLOT.size)
            self._map = mmap.mmap(file.fileno(), slots * _SLOT.size)

    def put(self, slot: int, since_s: float, calls: int) -> None:
        _SLOT.pack_into(self._map, slot * _SLOT.size, since_s, calls)

    def get(self, slot: int) -> tuple[float, int]:
        since_s, calls = _SLOT.unpack_from(self._map, slot * _SLOT.size)
        return since_s, int(calls)


@dataclass
class Timed:
    """Makes system calls, notes in a slot that it waits for them, and remembers how long the longest took."""

    waits: Waits
    slot: int
    longest_s: float = 0.0
    calls: int = 0

    def __call__(self, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        began = time.monotonic()
        self.calls += 1
        self.waits.put(self.slot, began, self.calls)
        try:
            return call(*arguments, **named)
        finally:
            self.waits.put(self.slot, 0.0, self.calls)
            self.longest_s = max(self.longest_s, time.monotonic() - began)


def report(row: dict[str, Any]) -> None:
    """Write a line to standard output."""
    text = (json.dumps(row) + "\n").encode()
    while text:
        text = text[os.write(1, text) :]


class Reader:
    def __init__(
        self,
        mount: str,
        files: list[tuple[int, str]],
        timed: Timed,
        rng: random.Random,
        report: Callable[[dict[str, Any]], None] = report,
    ) -> None:
        self._report = report
        self._mount = mount
        self._files = files
        self._timed = timed
        self._rng = rng
        self._ways: dict[str, tuple[int, Callable[[str], tuple[Key | None, list[Range]]]]] = {
            "read": (30, self._whole),
            "pread": (15, self._pieces),
            "mmap": (8, self._mapped),
            "sendfile": (8, self._sent),
            "O_DIRECT": (8, self._direct),
            "held": (3, self._held),
            "client": (15, self._around),
            "stat": (10, self._stat),
            "xattr": (3, self._xattr),
        }

    def step(self) -> None:
        """Do one thing that is drawn by chance, and report what was seen."""
        if self._rng.random() < 0.04:
            self.look_at_directory(self._rng.choice(self._files)[1].partition("/")[0])
            return
        if self._rng.random() < 0.02:
            self.look_at_photo(self._rng.choice(PHOTOS))
            return
        rank = min(int(self._rng.paretovariate(_SKEW)) - 1, len(self._files) - 1)
        number, path = self._files[rank] if self._rng.random() < 0.6 else self._rng.choice(self._files)
        names = list(self._ways)
        self.see(number, path, self._rng.choices(names, [self._ways[name][0] for name in names])[0])

    def see(self, number: int, path: str, way: str, by_trainer: bool = False) -> None:
        self._timed.longest_s = 0.0
        began = time.monotonic()
        key: Key | None = None
        ranges: list[Range] = []
        error = 0
        try:
            key, ranges = self._ways[way][1](f"{self._mount}/{path}")
        except OSError as exc:
            error = exc.errno or errno.EIO
            if error in (errno.ENOTCONN, errno.ECONNABORTED):
                time.sleep(UNMOUNTED_PAUSE_S)
        self._report(
            Seen(number, way, began, time.monotonic(), self._timed.longest_s, key, ranges, error, by_trainer).as_row()
        )

    def look_at_directory(self, name: str) -> None:
        self._timed.longest_s = 0.0
        began = time.monotonic()
        names: list[str] = []
        error = 0
        try:
            names = self._timed(os.listdir, f"{self._mount}/{name}")
        except OSError as exc:
            error = exc.errno or errno.EIO
        row = {"directory": name, "names": names, "error": error, "began_s": began, "ended_s": time.monotonic()}
        self._report(row | {"waited_s": self._timed.longest_s})

    def look_at_photo(self, name: str) -> None:
        self._timed.longest_s = 0.0
        began = time.monotonic()
        digest, error = "", 0
        try:
            with open(self._timed(os.open, f"{self._mount}/{name}", os.O_RDONLY), "rb", buffering=0) as file:
                digest = hashlib.sha1(self._timed(file.readall)).hexdigest()
        except OSError as exc:
            error = exc.errno or errno.EIO
        row = {"photo": name, "digest": digest, "error": error, "began_s": began, "ended_s": time.monotonic()}
        self._report(row | {"waited_s": self._timed.longest_s})

    # -- the ways

    @contextmanager
    def _opened(self, path: str, flags: int = 0) -> Iterator[int]:
        descriptor = self._timed(os.open, path, os.O_RDONLY | os.O_CLOEXEC | flags)
        try:
            if self._rng.random() < 0.5:
                # Without its pages in the page cache, the bytes come from the daemon.
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            yield descriptor
        finally:
            os.close(descriptor)

    def _key(self, descriptor: int) -> Key:
        found = self._timed(os.fstat, descriptor)
        return Key(found.st_size, found.st_mtime_ns)

    def _pread(self, descriptor: int, offset: int, size: int) -> Range:
        """Read up to the end of the file or of the range; one call may return less."""
        data = bytearray()
        while piece := self._timed(os.pread, descriptor, size - len(data), offset + len(data)):
            data += piece
        return parsed(offset, size, data)

    def _whole(self, path: str) -> tuple[Key, list[Range]]:
        with self._opened(path) as descriptor:
            key = self._key(descriptor)
            data = bytearray()
            while piece := self._timed(os.read, descriptor, _READ_BYTES):
                data += piece
            return key, [parsed(0, key.size, data)]

    def _pieces(self, path: str) -> tuple[Key, list[Range]]:
        with self._opened(path) as descriptor:
            key = self._key(descriptor)
            offsets = [self._rng.randrange(key.size + 100) for _ in range(self._rng.randrange(1, 4))]
            return key, [self._pread(descriptor, at, self._rng.choice((1, 100, _PAGE, 70_000))) for at in offsets]

    def _held(self, path: str) -> tuple[Key, list[Range]]:
        with self._opened(path) as descriptor:
            key = self._key(descriptor)
            half = key.size // 2
            first = self._pread(descriptor, 0, half)
            time.sleep(self._rng.uniform(0, HELD_S))
            return key, [first, self._pread(descriptor, half, key.size)]

    def _sent(self, path: str) -> tuple[Key, list[Range]]:
        with self._opened(path) as descriptor, open(os.memfd_create("sent"), "r+b", buffering=0) as out:
            key = self._key(descriptor)
            offset = 0
            while count := self._timed(os.sendfile, out.fileno(), descriptor, offset, _READ_BYTES):
                offset += count
            return key, [parsed(0, key.size, os.pread(out.fileno(), max(offset, 1), 0))]

    def _direct(self, path: str) -> tuple[Key, list[Range]]:
        with self._opened(path, os.O_DIRECT) as descriptor, mmap.mmap(-1, 1 << 20) as aligned:
            key = self._key(descriptor)
            data = bytearray()
            while count := self._timed(os.preadv, descriptor, [aligned], len(data)):
                data += aligned[:count]
                if count % _PAGE:
                    break
            return key, [parsed(0, key.size, data)]

    def _mapped(self, path: str) -> tuple[Key, list[Range]]:
        """Read through mmap in a child process, which a SIGBUS ends if a page cannot be read."""
        with self._opened(path) as descriptor:
            key = self._key(descriptor)
            if not key.size:
                return key, [parsed(0, 0, b"")]
            with open(os.memfd_create("mapped"), "r+b", buffering=0) as out:
                child = os.fork()
                if not child:
                    status = 1
                    try:
                        with mmap.mmap(descriptor, key.size, prot=mmap.PROT_READ) as mapped:
                            # The child touches the pages itself, because write(2) would only write less.
                            out.write(mapped[:])
                        status = 0
                    except OSError:
                        status = 2
                    finally:
                        os._exit(status)
                _, ended = self._timed(os.waitpid, child, 0)
                if code := os.waitstatus_to_exitcode(ended):
                    raise OSError(errno.EIO, f"SIGBUS in a mapping: {signal.Signals(-code).name if code < 0 else code}")
                return key, [parsed(0, key.size, os.pread(out.fileno(), key.size, 0))]

    def _around(self, path: str) -> tuple[None, list[Range]]:
        data = self._timed(read_bytes, path)
        return None, [parsed(0, max(len(data), 1 << 40), data)]

    def _stat(self, path: str) -> tuple[Key, list[Range]]:
        found = self._timed(os.stat, path)
        return Key(found.st_size, found.st_mtime_ns), []

    def _xattr(self, path: str) -> tuple[None, list[Range]]:
        for name in self._timed(os.listxattr, path):
            self._timed(os.getxattr, path, name)
        return None, []


def main() -> None:
    """Arguments: a JSON object."""
    given = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the soak handles Ctrl-C and ends its readers
    rng = random.Random(given["seed"])
    timed = Timed(Waits(Path(given["waits"]), given["slots"]), given["slot"])
    reader = Reader(given["mount"], [(number, path) for number, path in given["files"]], timed, rng)
    while not select.select([0], [], [], 0)[0]:
        reader.step()
        # The pause leaves time on the cores to the processes of the daemon.
        time.sleep(rng.expovariate(1 / given["pause_s"]))


if __name__ == "__main__":
    main()
