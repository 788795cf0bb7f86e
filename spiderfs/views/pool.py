"""A pool of makers: processes that make views, so that no image can hurt or hold up a process of the mount.

Threads call `make` and wait there. A maker that does not answer within its time is killed, and one that dies (of an
image, or because someone killed it) is replaced; both times the image is tried once more by a new maker. It is not if
the maker had the processor for half of its time: then it was busy with the image, which is remembered. Nor is it if the
maker could have run and others had the processor: then it gets the time of both tries at once. An image that is not
made within a moment leaves its place to others; as many images again as there are makers may do so at a time. Processes
are started when they are needed first. The pool may be made before a fork and used behind it.
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
from collections.abc import Callable
from pathlib import Path

from spiderfs.views.recipe import ANSWER, MADE, Recipe, Unmade, request

# 50 megapixels take 200 MB decoded, and as much again while they are turned into rows; Python and Pillow take 0.2 GB.
_MEMORY_BYTES = 1 << 30
# Decoding 50 megapixels takes a second of a free core.
PATIENCE_S = 10.0
_ATTEMPTS = 2
# An image that takes no longer holds up no other: most take 10 ms.
_MOMENT_S = 1.0
# The images that take too long are remembered by their content, the last ones of them.
_BUSY_SHARE, _REMEMBERED = 0.5, 1024
# What a maker has to map at least, so that a view of a small original has room to be larger than the original.
_LEAST_SLOT_BYTES = 1 << 20


class MakerLost(Exception):
    """The makers of one image died, or did not answer; the text says which."""


class TakesTooLong(MakerLost):
    """A maker was busy with the image for all of its time."""


class Starved(MakerLost):
    """Others had the processor for nearly all of a maker's time."""


class MakerPool:
    """At most `makers` processes, and as many again for slow images; no original or view is over `longest_bytes`."""

    def __init__(self, makers: int, longest_bytes: int, most_pixels: int, patience_s: float = PATIENCE_S) -> None:
        self._slot_bytes = max(longest_bytes, _LEAST_SLOT_BYTES)
        self._most_pixels = most_pixels
        self._patience_s = patience_s
        self._makers = makers
        self._free, self._slow = threading.Semaphore(makers), threading.Semaphore(makers)
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
        with _MakerSlot(self._free, self._slow) as place:
            # Another thread may have found out meanwhile.
            self._refuse_too_long(original, recipe)
            for attempt in range(_ATTEMPTS):
                # A maker that has waited may have been killed meanwhile, which says nothing of this image.
                maker = (self._waiting() if attempt == 0 else None) or self._new()
                try:
                    made = maker.make(original, recipe, self._patience_s, place.give_way)
                except TakesTooLong as exc:
                    maker.end()
                    self._too_long[_digest(original), recipe] = str(exc)
                    if len(self._too_long) > _REMEMBERED:
                        self._too_long.popitem(last=False)
                    raise
                except MakerLost as exc:
                    maker.end()
                    if attempt == _ATTEMPTS - 1 or isinstance(exc, Starved):
                        raise
                except BaseException:
                    maker.end()
                    raise
                else:
                    if len(self._idle) < self._makers:
                        self._idle.append(maker)
                    else:
                        maker.end()
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


class _MakerSlot:
    """The place of a thread that has a view made: one of the `free` ones, until it gives way to another thread."""

    def __init__(self, free: threading.Semaphore, slow: threading.Semaphore) -> None:
        self._held, self._slow = free, slow

    def give_way(self) -> None:
        """Go over to a place of those whose images take long, if one is free."""
        if self._held is not self._slow and self._slow.acquire(blocking=False):
            self._held.release()
            self._held = self._slow

    def __enter__(self) -> _MakerSlot:
        self._held.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.release()


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
                [sys.executable, "-P", "-m", "spiderfs.views.making", *numbers],
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

    def make(self, original: bytes, recipe: Recipe, patience_s: float, give_way: Callable[[], None]) -> bytes | Unmade:
        """As `MakerPool.make`; calls `give_way` now and then while the image takes long."""
        self._memory[: len(original)] = original
        before = self._times()
        try:
            self._requests.write(request(len(original), recipe))
        except BrokenPipeError as exc:
            raise MakerLost("its maker had died") from exc
        answers = select.poll()
        answers.register(self._answers, select.POLLIN)
        began = time.monotonic()
        while not answers.poll(1000 * min(_MOMENT_S, patience_s)):
            give_way()
            self._check_time(time.monotonic() - began, patience_s, before)
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

    def _check_time(self, passed_s: float, patience_s: float, before: tuple[float, float]) -> None:
        """Raise MakerLost if the maker has had its time; `before` is what `_times` said when it began."""
        if passed_s < patience_s:
            return
        busy_s, waited_s = (now - then for now, then in zip(self._times(), before, strict=True))
        late, share_s = f"its maker did not answer within {passed_s:.1f} s", _BUSY_SHARE * patience_s
        if busy_s > share_s > 0:
            raise TakesTooLong(f"{late}, {busy_s:.1f} of them busy")
        if busy_s + waited_s <= share_s:
            raise MakerLost(late)
        if passed_s >= _ATTEMPTS * patience_s:
            raise Starved(f"{late}, for {waited_s:.1f} of which others had the processor")

    def _times(self) -> tuple[float, float]:
        """For how many seconds the maker has had a processor, and waited for one; 0 if the kernel does not report
        it."""
        try:
            # The first two of three numbers, in nanoseconds (proc_pid_schedstat(5)).
            busy, waited, _ = Path(f"/proc/{self.pid}/schedstat").read_text("ascii").split()
            return int(busy) / 1e9, int(waited) / 1e9
        except (OSError, ValueError):
            return 0.0, 0.0

    def end(self) -> None:
        """Kill the process and wait until it is gone."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._requests, self._answers):
            with contextlib.suppress(OSError):
                pipe.close()
        self._memory.close()
