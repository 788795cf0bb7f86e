"""A source whose faults are set from outside while a mount uses it: it hangs, fails at random, or is unplugged.

A test or benchmark keeps the faults in memory that it shares with the mount's processes, and has the program `register`
them before it mounts. Then every source that is opened, of whatever scheme, has these faults. `python -m
benchmarks.fakes.faulty_source FAULTS COMMAND...` is `spiderfs COMMAND...` with such sources.
"""

from __future__ import annotations

import mmap
import os
import random
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from spiderfs.errors import SourceUnavailable
from spiderfs.sources import open as opening
from spiderfs.sources.source import Source, SourceStat, Version, streamed

P = ParamSpec("P")
T = TypeVar("T")

HANG, GONE, ERROR_RATE = "source.hang", "source.gone", "source.error_rate"
FAULTS = (HANG, GONE, ERROR_RATE)
"""How tests name the faults: no request returns; each fails at once; so large a share of them fails. 0 is none."""
_BYTES = 8 * len(FAULTS)
# How soon a call that hangs notices that it may go on.
_POLL_S = 0.02
# A hanging call gives up after this long, so that a forgotten `hang` cannot hold a thread for ever.
_LONGEST_HANG_S = 3600.0
_ENTRIES_PER_REQUEST = 1000
_WORDS = {"on": 1.0, "off": 0.0}


class Faults:
    """The faults of the sources of one mount; usable on both sides of a fork, and by `path` in other processes."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, _BYTES)
        self._values = memoryview(self._map).cast("d")
        self.path = f"/proc/{os.getpid()}/fd/{fd}"

    @classmethod
    def made(cls, settings: Mapping[str, object] | None = None) -> Faults:
        """New ones, for as long as this process lives; no damage to a disk can end who uses them (SIGBUS)."""
        fd = os.memfd_create("faults", 0)
        os.truncate(fd, _BYTES)
        faults = cls(fd)
        for name, value in (settings or {}).items():
            faults.set(name, value)
        return faults

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> Faults:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Let go of those that were `made` here: no process finds them at their path any more."""
        self._values.release()
        self._map.close()
        os.close(self._fd)

    def get(self, name: str) -> float:
        return self._values[FAULTS.index(name)]

    def set(self, name: str, value: object) -> None:
        """Change one, for all processes at once: a number, or on or off."""
        word = str(value)
        self._values[FAULTS.index(name)] = _WORDS[word] if word in _WORDS else float(word)


class FaultySource:
    """`inner`, with the faults of the moment of each call; the random draws are the same for the same seed."""

    def __init__(self, inner: Source, faults: Faults, seed: int = 0) -> None:
        self.faults = faults
        self._inner = inner
        self._random = random.Random(seed)
        self._closed = False
        self.stat, self.statvfs = self._faulty(inner.stat), self._faulty(inner.statvfs)
        self.readlink = self._faulty(inner.readlink)
        self.listxattr, self.getxattr = self._faulty(inner.listxattr), self._faulty(inner.getxattr)

    def __getattr__(self, name: str) -> Any:
        # What a source of its kind has beside the methods of all.
        return getattr(self._inner, name)

    def scan(self, path: bytes, known: Container[tuple[bytes, int]] = ()) -> Iterator[tuple[bytes, SourceStat]]:
        self._request()
        for count, entry in enumerate(self._inner.scan(path, known)):
            if count and count % _ENTRIES_PER_REQUEST == 0:
                self._request()
            yield entry

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        self._request()
        data = self._inner.read(path, offset, length, version)
        self._fail_if_gone()
        return data

    def stream(self, path: bytes, offset: int, length: int, version: Version) -> Iterator[bytes]:
        for piece in streamed(self._inner, path, offset, length, version):
            self._request()
            yield piece

    def read_present(self, path: bytes, most_bytes: int) -> tuple[SourceStat, bytes]:
        self._request()
        found = self._inner.read_present(path, most_bytes)
        self._fail_if_gone()
        return found

    def close(self) -> None:
        """Close the inner source and end the calls that hang."""
        self._closed = True
        self._inner.close()

    def _faulty(self, ask: Callable[P, T]) -> Callable[P, T]:
        def asked(*args: P.args, **kwargs: P.kwargs) -> T:
            self._request()
            return ask(*args, **kwargs)

        return asked

    def _request(self) -> None:
        until = time.monotonic() + _LONGEST_HANG_S
        while self.faults.get(HANG) and not self.faults.get(GONE):
            if self._closed or time.monotonic() > until:
                raise SourceUnavailable("the source hangs")
            time.sleep(_POLL_S)
        self._fail_if_gone()
        if self._random.random() < self.faults.get(ERROR_RATE):
            raise SourceUnavailable("the source failed")

    def _fail_if_gone(self) -> None:
        if self.faults.get(GONE):
            raise SourceUnavailable("the source is gone")


def register(path: str | os.PathLike[str]) -> None:
    """Give every source that this process and its forks open from now on the faults that lie at `path`."""
    faults = Faults.at(path)

    def with_faults(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: FaultySource(make(*given), faults)

    openers = cast(dict[str, opening.Opener], opening.OPENERS)
    openers.update({scheme: opener._replace(make=with_faults(opener.make)) for scheme, opener in openers.items()})


def registering(faults: Faults) -> str:
    """Python that registers these faults in the process that runs it."""
    root = Path(__file__).resolve().parents[2]
    return (
        f"import sys; sys.path.append({str(root)!r})\n"
        f"from benchmarks.fakes import faulty_source; faulty_source.register({faults.path!r})\n"
    )


def main() -> None:
    from spiderfs.cli.main import main as command

    register(sys.argv[1])
    sys.argv = ["spiderfs", *sys.argv[2:]]
    command()


if __name__ == "__main__":
    main()
