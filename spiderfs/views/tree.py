"""Where a mount shows which form of a file: its root shows one, and directories in `.spiderfs/views` show the others.

The **forms** of a file are the original and its views. `.spiderfs/views/NAME/a/b` is the form NAME of the source's file
`a/b`; the name of the form that the root itself shows is a link to the root. So each file has one path, one inode and
one copy in the cache for each form. The root may also show some files as views and the others as originals, by a hash
of the path, the same for every process, mount and epoch. Then each form has a directory of its own.

**Makers** are processes that make views, so that no image can hurt or hold up a process of the mount. A process is
started when it is needed first. What becomes of an image:

    its maker does not answer in time, or dies    the maker is killed; a new one tries the image once more
    the same, and it used half of its time        no further try, and the image is remembered: it kept the maker busy
    the same, and others had the processor        no further try, but the time of both tries at once
    it is not made within a moment                it leaves its place to others, as many as there are makers at a time
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import xxhash

from spiderfs.errors import SourceNotFound, ViewFailed
from spiderfs.sources.source import FromPeer, Source, SourceStat, Version, streamed
from spiderfs.views.recipe import ANSWER, MADE, ORIGINAL, Recipe, Unmade, request

log = logging.getLogger(__name__)

_LENGTH = "its view would have as many bytes as the file, or more than sample_max_bytes"


def unknown_length(longest_bytes: int) -> int:
    """The length that a reader asks for if it does not know a view's length: more than any file with a view has."""
    return longest_bytes + 1


P = ParamSpec("P")
T = TypeVar("T")

VIEWS_DIRECTORY = b".spiderfs/views"
ROOT_LINK = b"../.."
"""What the name of the form that the root shows is a link to."""
_ABOVE = (b".spiderfs", VIEWS_DIRECTORY)
_BELOW = VIEWS_DIRECTORY + b"/"
_HASHES = 1 << 64


class ViewPlace(NamedTuple):
    """What lies at a path: the `form` of the source's `path`, below a directory `root`, empty for the mount's root."""

    form: str
    root: bytes
    path: bytes


class Forms:
    """The forms that a mount shows: the originals, and views by recipes."""

    def __init__(
        self,
        recipes: Mapping[str, Recipe] | None = None,
        shown: str = ORIGINAL,
        share: float = 1.0,
        fingerprint: Callable[[Recipe], bytes] = lambda recipe: str(recipe).encode(),
        mounted_at_s: float = 0.0,
    ) -> None:
        """`recipes`: those of all views; without any there is no directory of views. `shown`: what the root shows,
        of this `share` of the files; of the others the original.

        `fingerprint` says what a recipe's bytes depend on; it may take a tenth of a second. `mounted_at_s` tells the
        present mount from others.
        """
        self.recipes = recipes or {}
        self._below = round(share * _HASHES)
        self.shown = shown if self._below else ORIGINAL
        """The view that the root shows, or ORIGINAL."""
        self.mixed = self.shown != ORIGINAL and self._below < _HASHES
        """Whether the root shows that view of some files, and the others as originals."""
        self.linked = "" if self.mixed else self.shown
        """The form whose name is a link to the root; empty if there is none."""
        self.mounted_at_s, self._fingerprint_of = mounted_at_s, fingerprint
        self._fingerprints: dict[str, bytes] = {ORIGINAL: b""}

    @property
    def names(self) -> list[bytes]:
        """The names in the directory of views; none if there is no such directory."""
        return [os.fsencode(name) for name in (ORIGINAL, *self.recipes)] if self.recipes else []

    @property
    def roots(self) -> list[bytes]:
        """The directories below which files are shown: the root of the mount, and one for each other form."""
        others = [_BELOW + name for name in self.names if os.fsdecode(name) != self.linked]
        return [b"", *others]

    def place(self, path: bytes) -> ViewPlace:
        if not path.startswith(b".spiderfs"):
            return ViewPlace(self._form_at_root(path), b"", path)
        if path.startswith(_BELOW):
            name, _, below = path[len(_BELOW) :].partition(b"/")
            form = os.fsdecode(name)
            if form == self.linked:
                return ViewPlace(form, b"", below)
            if form == ORIGINAL or form in self.recipes:
                return ViewPlace(form, _BELOW + name, below)
        # The directories above show the attributes of the root. Nothing else of the source can be seen at such a path.
        return ViewPlace(self._form_at_root(path), b"", b"" if path in _ABOVE else path)

    def _form_at_root(self, path: bytes) -> str:
        if self.mixed and xxhash.xxh3_64_intdigest(path) >= self._below:
            return ORIGINAL
        return self.shown

    @property
    def of_root(self) -> bytes:
        """What the forms of the root's files depend on; empty for originals. It may take a tenth of a second."""
        fingerprint = self.fingerprint(self.shown)
        return b"%s %x" % (fingerprint, self._below) if self.mixed else fingerprint

    def known_fingerprint(self, form: str) -> bytes | None:
        """The fingerprint of a form, empty for originals; None if it has yet to be found out."""
        return self._fingerprints.get(form)

    def fingerprint(self, form: str, known: bytes | None = None) -> bytes:
        """The same, found out now unless it is `known` from another process."""
        if form not in self._fingerprints:
            self._fingerprints[form] = known or self._fingerprint_of(self.recipes[form])
        return self._fingerprints[form]


class TreeSource:
    """`inner` at each path that shows a form of it; `hidden` names of its root can be read, but are not shown."""

    def __init__(self, inner: Source, forms: Forms, hidden: Container[bytes] = ()) -> None:
        self._inner, self._forms, self._hidden = inner, forms, hidden
        self.undated_directories, self.statvfs = inner.undated_directories, inner.statvfs
        self.read_present, self.readlink = self._at_place(inner.read_present), self._at_place(inner.readlink)
        self.listxattr, self.getxattr = self._at_place(inner.listxattr), self._at_place(inner.getxattr)

    def _at_place(self, ask: Callable[Concatenate[bytes, P], T]) -> Callable[Concatenate[bytes, P], T]:
        def asked(path: bytes, /, *args: P.args, **kwargs: P.kwargs) -> T:
            return ask(self._forms.place(path).path, *args, **kwargs)

        return asked

    def stat(self, path: bytes) -> SourceStat:
        path = self._forms.place(path).path
        if path in self._hidden:
            raise SourceNotFound(f"{os.fsdecode(path)} is not shown")
        return self._inner.stat(path)

    def scan(self, path: bytes, known: Container[tuple[bytes, int]] = ()) -> Iterator[tuple[bytes, SourceStat]]:
        path = self._forms.place(path).path
        entries = self._inner.scan(path, known)
        return entries if path else (entry for entry in entries if entry[0] not in self._hidden)

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        return self._inner.read(self._forms.place(path).path, offset, length, version)

    def stream(self, path: bytes, offset: int, length: int, version: Version) -> Iterator[bytes]:
        return streamed(self._inner, self._forms.place(path).path, offset, length, version)

    def close(self) -> None:
        self._inner.close()


class ViewSource(TreeSource):
    """A `TreeSource` that gives the bytes of views where `forms` shows these; `makers` make them.

    A view's file is identified by the original's version. It is read as a whole. Its length is part of what it is: a
    reader who knows the length asks for that many bytes and gets exactly these, or ViewFailed. A reader who does not
    know it asks for `unknown_length`, and gets the view, or the original as it is where there is none. So where makers
    fail for a while, the first answer counts, and no reader gets bytes of two lengths for one version. A reader who
    asks for as many bytes as the original has gets the original: so there is no view of exactly that length, and such a
    file is shown as it is. So are files of more than `longest_bytes`; any piece of them may be read.
    """

    def __init__(
        self, inner: Source, forms: Forms, makers: MakerPool, longest_bytes: int, count: Callable[[str], None]
    ) -> None:
        """`count` gets the name of a counter, from one thread at a time."""
        super().__init__(inner, forms)
        self._makers, self._longest_bytes = makers, longest_bytes
        self._unknown_length = unknown_length(longest_bytes)
        self._count = count
        self._counting = threading.Lock()
        self._reported: set[str] = set()

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        """As `Source.read`; raises ViewFailed, too, if the view of this length cannot be made now."""
        form, _, path = self._forms.place(path)
        if form == ORIGINAL or length == version.size or version.size > self._longest_bytes:
            return self._inner.read(path, offset, length, version)
        original = self._inner.read(path, 0, version.size, version)
        try:
            view = self._makers.make(original, self._forms.recipes[form])
        except MakerLost as exc:
            self._report("view_makers_lost", path, str(exc), logging.WARNING)
            if length != self._unknown_length:
                raise ViewFailed(f"{os.fsdecode(path)}: the view cannot be made now: {exc}") from exc
            return original
        if isinstance(view, Unmade) or len(view) == version.size or len(view) > self._longest_bytes:
            reason = view.reason if isinstance(view, Unmade) else _LENGTH
            if length != self._unknown_length:
                raise ViewFailed(f"{os.fsdecode(path)}: there was a view, and now there is none: {reason}")
            self._report("views_as_they_are", path, reason, logging.INFO)
            return original
        if length not in (len(view), self._unknown_length):
            raise ViewFailed(f"{os.fsdecode(path)}: the view has {len(view)} bytes now, and had {length}")
        with self._counting:
            self._count("views_made")
        return (FromPeer if isinstance(original, FromPeer) else bytes)(view[offset:])

    def close(self) -> None:
        self._makers.close()
        self._inner.close()

    def _report(self, counter: str, path: bytes, reason: str, level: int) -> None:
        """Count a file that is shown as it is, and name the first one of each reason."""
        with self._counting:
            self._count(counter)
            first = reason not in self._reported
            self._reported.add(reason)
        if first:
            message = "%s is shown as it is: %s (said once; the metrics count the others)"
            log.log(level, message, os.fsdecode(path), reason)


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
        self._most_pixels, self._patience_s, self._makers = most_pixels, patience_s, makers
        self._free, self._slow = threading.Semaphore(makers), threading.Semaphore(makers)
        # The maker that worked last works next: its memory is in the processor's cache.
        self._idle: list[_Maker] = []
        # Images and recipes that take too long, and what was said of them.
        self._too_long: OrderedDict[tuple[bytes, Recipe], str] = OrderedDict()

    def make(self, original: bytes, recipe: Recipe) -> bytes | Unmade:
        """What `making.make` gives; raises MakerLost if that cannot be found out. Waits for a free maker."""
        self._refuse_too_long(original, recipe)
        held = self._free

        def give_way() -> None:
            """Go over to a place of those whose images take long, if one is free."""
            nonlocal held
            if held is not self._slow and self._slow.acquire(blocking=False):
                held.release()
                held = self._slow

        held.acquire()
        try:
            # Another thread may have found out meanwhile.
            self._refuse_too_long(original, recipe)
            for attempt in range(_ATTEMPTS):
                # A maker that has waited may have been killed meanwhile, which says nothing of this image.
                try:
                    maker = self._waiting() if attempt == 0 else None
                    maker = maker or _Maker(self._slot_bytes, self._most_pixels)
                except OSError as exc:
                    raise MakerLost(f"no maker can be started ({exc.strerror})") from exc
                try:
                    made = maker.make(original, recipe, self._patience_s, give_way)
                except BaseException as exc:
                    maker.end()
                    if isinstance(exc, TakesTooLong):
                        self._too_long[_digest(original), recipe] = str(exc)
                        if len(self._too_long) > _REMEMBERED:
                            self._too_long.popitem(last=False)
                    is_last = attempt == _ATTEMPTS - 1 or isinstance(exc, TakesTooLong | Starved)
                    if is_last or not isinstance(exc, MakerLost):
                        raise
                    continue
                if len(self._idle) < self._makers:
                    self._idle.append(maker)
                else:
                    maker.end()
                return made
        finally:
            held.release()
        raise AssertionError("the last attempt returns or raises")

    def _refuse_too_long(self, original: bytes, recipe: Recipe) -> None:
        said = self._too_long.get((_digest(original), recipe)) if self._too_long else None
        if said is not None:
            raise TakesTooLong(said)

    def close(self) -> None:
        while (maker := self._waiting()) is not None:
            maker.end()

    def _waiting(self) -> _Maker | None:
        """A maker that waits, taken from those that do; other threads take some too."""
        try:
            return self._idle.pop()
        except IndexError:
            return None


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
        """Seconds for which the maker had a processor, and waited for one; 0 if the kernel does not report them."""
        try:
            # The first two of three numbers, in nanoseconds (proc_pid_schedstat(5)).
            busy, waited, _ = Path(f"/proc/{self.pid}/schedstat").read_text("ascii").split()
            return int(busy) / 1e9, int(waited) / 1e9
        except (OSError, ValueError):
            return 0.0, 0.0

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._requests, self._answers):
            with contextlib.suppress(OSError):
                pipe.close()
        self._memory.close()
