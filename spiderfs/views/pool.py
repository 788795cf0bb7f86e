"""A pool of makers: processes that make views, so that no image can hurt or hold up a process of the mount.

Threads call `make` and wait there. A maker that does not answer within its time is killed, and one that dies (of an
image, or because somebody killed it) is replaced; both times the image is tried once more by a new maker. It is not if
the maker had the processor for half of its time: then it was busy with the image, which is remembered, so that such an
image holds up the others once. Processes are started when they are needed first. The pool may be made before a fork and
used behind it.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path

from spiderfs.views.messages import ANSWER, MADE, request
from spiderfs.views.recipe import Recipe
from spiderfs.views.unmade import Unmade

# 50 megapixels take 200 MB decoded, and as much again while they are turned into rows; Python and Pillow take 0.2 GB.
_MEMORY_BYTES = 1 << 30
# Decoding 50 megapixels takes a second of a free core.
PATIENCE_S = 10.0
_ATTEMPTS = 2
# The images that take too long are remembered by their content, the last ones of them.
_BUSY_SHARE, _REMEMBERED = 0.5, 1024
# What a maker has to map at least, so that a view of a small original has room to be larger than the original.
_LEAST_SLOT_BYTES = 1 << 20


class MakerLost(Exception):
    """The makers of one image died, or did not answer; the text says which."""


class TakesTooLong(MakerLost):
    """A maker was busy with the image for all of its time."""


class MakerPool:
    """At most `makers` processes that make views of originals of at most `longest_bytes`, and views no longer."""

    def __init__(self, makers: int, longest_bytes: int, most_pixels: int, patience_s: float = PATIENCE_S) -> None:
        self._slot_bytes = max(longest_bytes, _LEAST_SLOT_BYTES)
        self._most_pixels = most_pixels
        self._patience_s = patience_s
        self._free = threading.Semaphore(makers)
        # The maker that worked last works next: its memory is in the processor's cache.
        self._idle: list[_Maker] = []
        # Images and recipes that take too long, and what was said of them.
        self._too_long: OrderedDict[tuple[bytes, Recipe], str] = OrderedDict()

    @property
    def pids(self) -> list[int]:
        """The makers that wait for work."""
        return [maker.pid for maker in self._idle]

    def make(self, original: bytes, recipe: Recipe) -> bytes | Unmade:
        """What `making.make` gives; raises MakerLost if that cannot be found out. Waits for a free maker."""
        self._refuse_too_long(original, recipe)
        with self._free:
            # Another thread may have found out meanwhile.
            self._refuse_too_long(original, recipe)
            for attempt in range(_ATTEMPTS):
                # A maker that has waited may have been killed meanwhile, which says nothing of this image.
                maker = (self._waiting() if attempt == 0 else None) or self._new()
                try:
                    made = maker.make(original, recipe, self._patience_s)
                except TakesTooLong as exc:
                    maker.end()
                    self._too_long[_digest(original), recipe] = str(exc)
                    if len(self._too_long) > _REMEMBERED:
                        self._too_long.popitem(last=False)
                    raise
                except MakerLost:
                    maker.end()
                    if attempt == _ATTEMPTS - 1:
                        raise
                except BaseException:
                    maker.end()
                    raise
                else:
                    self._idle.append(maker)
                    return made
        raise AssertionError("the last attempt returns or raises")

    def _refuse_too_long(self, original: bytes, recipe: Recipe) -> None:
        said = self._too_long.get((_digest(original), recipe)) if self._too_long else None
        if said is not None:
            raise TakesTooLong(said)

    def close(self) -> None:
        """End all makers that wait."""
        while (maker := self._waiting()) is not None:
            maker.end()

    def _waiting(self) -> _Maker | None:
        """A maker that waits, taken from those that do; other threads take some too."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _new(self) -> _Maker:
        try:
            return _Maker(self._slot_bytes, self._most_pixels)
        except OSError as exc:
            raise MakerLost(f"no maker can be started ({exc.strerror})") from exc


def _digest(original: bytes) -> bytes:
    return hashlib.blake2b(original, digest_size=16).digest()


class _Maker:
    def __init__(self, slot_bytes: int, most_pixels: int) -> None:
        fd = os.memfd_create("spiderfs-view")
        try:
            os.ftruncate(fd, slot_bytes)
            self._memory = mmap.mmap(fd, slot_bytes)
            numbers = map(str, (fd, slot_bytes, _MEMORY_BYTES + slot_bytes, most_pixels, os.getpid()))
            # -P: whatever lies in the working directory is not imported.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "spiderfs.views.maker_process", *numbers],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                pass_fds=(fd,),
            )
        finally:
            os.close(fd)
        self.pid = self._process.pid
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def make(self, original: bytes, recipe: Recipe, patience_s: float) -> bytes | Unmade:
        self._memory[: len(original)] = original
        busy_before_s = self._busy_s()
        try:
            self._requests.write(request(len(original), recipe))
        except BrokenPipeError as exc:
            raise MakerLost("its maker had died") from exc
        answers = select.poll()
        answers.register(self._answers, select.POLLIN)
        until = time.monotonic() + patience_s
        while not answers.poll(max(0.0, until - time.monotonic()) * 1000):
            if time.monotonic() >= until:
                busy_s = self._busy_s() - busy_before_s
                if busy_s > _BUSY_SHARE * patience_s > 0:
                    raise TakesTooLong(f"its maker did not answer within {patience_s:g} s, {busy_s:.1f} of them busy")
                raise MakerLost(f"its maker did not answer within {patience_s:g} s")
        # A pipe gives these few bytes whole (pipe(7)).
        answer = self._answers.read(ANSWER.size)
        if len(answer) != ANSWER.size:
            raise MakerLost("its maker died")
        reason, length = ANSWER.unpack(answer)
        made = self._memory[:length] if reason == MADE else Unmade(reason)
        if len(original) > _LEAST_SLOT_BYTES or length > _LEAST_SLOT_BYTES:
            # Give the memory of a long file back.
            self._memory.madvise(mmap.MADV_REMOVE)
        return made

    def _busy_s(self) -> float:
        """For how long the maker has had a processor; 0 if the kernel does not tell."""
        try:
            # The first of three numbers is in nanoseconds (proc_pid_schedstat(5)).
            return int(Path(f"/proc/{self.pid}/schedstat").read_text("ascii").split()[0]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0

    def end(self) -> None:
        """Kill the process and wait until it is gone."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._requests, self._answers):
            with contextlib.suppress(OSError):
                pipe.close()
        self._memory.close()
