"""Files that a writer replaces by rename all the time, and readers that compare what they get.

Each content says of which file and generation it is, so bytes of two generations in one read show.
"""

from __future__ import annotations

import collections
import json
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from programs import program

PAGE = mmap.PAGESIZE


def content_of(name: str, generation: int, most_bytes: int) -> bytes:
    """The content of a generation: its size says which one, and each of its pieces does."""
    piece = b"%s %d|" % (name.encode(), generation)
    size = len(piece) + generation * 7919 % most_bytes
    return (piece * (size // len(piece) + 1))[:size]


def is_whole(name: str, content: bytes, most_bytes: int) -> bool:
    """Whether this is one generation of this file, from its first byte to its last."""
    head, _, number = content.partition(b"|")[0].rpartition(b" ")
    return head == name.encode() and number.isdigit() and content == content_of(name, int(number), most_bytes)


def _plain(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def _in_pieces(path: str) -> bytes:
    os.stat(path)
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        # From the end to the beginning, so that read-ahead does not bring all of it at once.
        pieces = [os.pread(fd, PAGE, at) for at in reversed(range(0, size, PAGE))]
        return b"".join(reversed(pieces))
    finally:
        os.close(fd)


def _mapped(path: str) -> bytes:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        return bytes(mapped)


WAYS: dict[str, Callable[[str], bytes]] = {"read": _plain, "stat, open, pread": _in_pieces, "mmap": _mapped}


class Outcome:
    """What the readers have met: reads that were right, errors by kind, and reads of no single generation."""

    def __init__(self) -> None:
        self.right = 0
        self.errors: collections.Counter[str] = collections.Counter()
        self.mixed: list[str] = []

    def __str__(self) -> str:
        return f"{self.right} reads were right, {dict(self.errors)}, {len(self.mixed)} were mixed: {self.mixed[:3]}"


@contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a thread, which is to return when the event is set: when the context ends."""
    ended = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work, ended)
        try:
            yield
        finally:
            ended.set()
        working.result()


@contextmanager
def replaced(source: Path, names: list[str], most_bytes: int, pause_s: float) -> Iterator[None]:
    """Replace these files by rename, one after the other, until the context ends."""

    def replace(generation: int, ended: threading.Event) -> None:
        for name in names:
            (source / f".{name}.new").write_bytes(content_of(name, generation, most_bytes))
            os.rename(source / f".{name}.new", source / name)
            if ended.wait(pause_s):
                return

    def replace_on(ended: threading.Event) -> None:
        generation = 0
        while not ended.is_set():
            generation += 1
            replace(generation, ended)

    replace(0, threading.Event())
    with beside(replace_on):
        yield


def read_on(point: Path, names: list[str], most_bytes: int, readers: int, reads: int) -> Outcome:
    """Have so many processes read these files in all ways, each so many times.

    They are processes because one that meets an error in what it has mapped is killed.
    """
    given = json.dumps([os.fspath(point), names, most_bytes, reads])
    command = [sys.executable, "-S", __file__, given]
    outcome = Outcome()
    with ExitStack() as stack:
        starting = (program(*command, str(number), stdout=subprocess.PIPE) for number in range(readers))
        for process in [stack.enter_context(one) for one in starting]:
            said, _ = process.communicate()
            if process.returncode:
                outcome.errors[f"a reader ended with {process.returncode}"] += 1
                continue
            right, errors, mixed = json.loads(said)
            outcome.right += right
            outcome.errors.update(errors)
            outcome.mixed += mixed
    return outcome


def _read_them(point: str, names: list[str], most_bytes: int, reads: int, reader: int) -> Outcome:
    outcome, ways = Outcome(), list(WAYS.items())
    for turn in range(reads):
        name = names[(turn * 7 + reader * 3) % len(names)]
        way, function = ways[(turn + reader) % len(ways)]
        try:
            content = function(os.path.join(point, name))
        except OSError as exc:
            outcome.errors[f"{way}: {exc.strerror}"] += 1
            continue
        if is_whole(name, content, most_bytes):
            outcome.right += 1
        else:
            outcome.mixed.append(f"{way} of {name}: {content[:40]!r} and {content[-40:]!r}")
    return outcome


if __name__ == "__main__":
    done = _read_them(*json.loads(sys.argv[1]), int(sys.argv[2]))
    print(json.dumps([done.right, done.errors, done.mixed]))
