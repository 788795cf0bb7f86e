"""The indices of the archives of a source: where they lie, when one is made, and when it is deleted.

**Waiting for an index.** It is made in a thread of `Indexers`, and for each archive in one process of the mount. Who
asks meanwhile waits a moment, and is then told to ask again (SourceNotReady): so callers have the patience that they
have for any question, and the source counts as reachable. The index of an archive that has just changed is made when
that version has settled (`vfs/settling.py`).

**Files.** An index is written beside its place and renamed into it, so who has an older one mapped keeps that. It is
named by a hash of the archive's path, and holds the path, so that it can be deleted when the archive is gone.
"""

from __future__ import annotations

import logging
import os
import random
import resource
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path

import xxhash

from spiderfs.archives.index import Index, archive_of, write_failure
from spiderfs.archives.indexer_process import FORMATS, Indexers
from spiderfs.errors import (
    ArchiveDamaged,
    ArchiveFailed,
    SourceChanged,
    SourceError,
    SourceNotFound,
    SourceNotReady,
    SourceThrottled,
    SourceUnavailable,
)
from spiderfs.linux import steady_clock
from spiderfs.linux.range_lock import lock_shared, try_lock, unlock
from spiderfs.sources.client import pause_s
from spiderfs.sources.source import Source, Version
from spiderfs.vfs.settling import settles_at

log = logging.getLogger(__name__)

# Indices that a process has open; each is a map, which holds a descriptor, so they take an eighth of those at most (two
# sources may lie over each other). And versions of archives that have yet to settle.
_OPEN_INDICES, _UNSETTLED = 4096, 4096
_SHARE_OF_DESCRIPTORS = 8
_LOCK_OFFSETS = (1 << 62) - 1


class Indices:
    """Those of one process; threads may share it."""

    def __init__(self, inner: Source, directory: Path, indexers: Indexers) -> None:
        """Indices of archives of `inner`, in a directory that is for no other source."""
        self._inner, self._directory, self._indexers = inner, directory, indexers
        self._lock = threading.Lock()
        self._random = random.Random()
        self._open: OrderedDict[bytes, Index] = OrderedDict()
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_open = min(_OPEN_INDICES, descriptors // _SHARE_OF_DESCRIPTORS)
        self._coming: dict[tuple[bytes, Version], Future[Index]] = {}
        self._unsettled: dict[tuple[bytes, Version], float] = {}

    def close(self) -> None:
        self._indexers.close()

    def forget_failures(self) -> None:
        """Have archives that could not be shown be looked at again; call it when a mount begins. Raises OSError."""
        if self._directory.is_dir():
            for path in [*self._directory.glob("*.failed"), *self._directory.glob("*.new*")]:
                path.unlink(missing_ok=True)

    def forget_gone(self) -> None:
        """Delete the indices of archives that the source no longer has. Who has one mapped keeps it.

        It asks the source for each, and raises SourceUnavailable, and OSError.
        """
        for path in self._directory.glob("*.index"):
            try:
                self._inner.stat(archive_of(path))
            except (ValueError, SourceNotFound):
                # It may be of another revision of the format.
                path.unlink(missing_ok=True)
            except SourceUnavailable:
                raise
            except SourceError:
                pass

    def of(self, archive: bytes, version: Version) -> Index:
        """The index of this version of an archive; raises ArchiveDamaged, SourceNotReady while it is being made."""
        key = archive, version
        index = self.here(archive, version)
        if index is None:
            self._check_settled(key)
            with self._lock:
                coming = self._coming.get(key)
                if coming is None:
                    coming = self._coming[key] = self._indexers.threads.submit(self._made, *key)
                    coming.add_done_callback(lambda _: self._coming.pop(key, None))
            try:
                index = coming.result(self._indexers.moment_s)
            except TimeoutError:
                raise SourceNotReady(f"{os.fsdecode(archive)}: its members are being looked for") from None
        if index.failure:
            raise ArchiveDamaged(f"{os.fsdecode(archive)}: {index.failure}")
        return index

    def here(self, archive: bytes, version: Version | None = None, again: bool = False) -> Index | None:
        """The index of this version, or of any, if some process has made it. `again`: look at the file anew."""
        with self._lock:
            index = None if again else self._open.get(archive)
        if index is not None and version in (None, index.version):
            return index
        for path in self._files(archive):
            try:
                index = Index(path)
            except (OSError, ValueError):
                continue
            if version in (None, index.version):
                with self._lock:
                    self._open[archive] = index
                    self._open.move_to_end(archive)
                    while len(self._open) > self._most_open:
                        self._open.popitem(last=False)
                return index
        return None

    def _files(self, archive: bytes) -> tuple[Path, Path]:
        """The file of an index, and that of the note that there is none."""
        name = xxhash.xxh3_128_hexdigest(archive)
        return self._directory / f"{name}.index", self._directory / f"{name}.failed"

    def _check_settled(self, key: tuple[bytes, Version]) -> None:
        """Raises SourceNotReady while the bytes of this version may still change without a sign."""
        archive, version = key
        if version.tag:
            return
        now = steady_clock.now()
        at = settles_at(version.mtime_ns, version.size, now, now, 0.0, self._unsettled.get(key))
        if at <= now:
            return
        if len(self._unsettled) >= _UNSETTLED:
            self._unsettled.clear()
        self._unsettled[key] = at
        raise SourceNotReady(f"{os.fsdecode(archive)}: it has just changed, and is shown when it has settled")

    def _made(self, archive: bytes, version: Version) -> Index:
        """Make the index of this version, unless another process does; in a thread of this module's."""
        at = xxhash.xxh3_64_intdigest(archive) & _LOCK_OFFSETS
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(self._directory / "lock", "a+b") as lock:
                while not try_lock(lock.fileno(), at, 1):
                    lock_shared(lock.fileno(), at, 1)
                    unlock(lock.fileno(), at, 1)
                if self.here(archive, version) is None:
                    self._make(archive, version)
        except OSError as exc:
            raise ArchiveFailed(f"its index cannot be written ({exc.strerror or exc}): free the cache's disk") from exc
        index = self.here(archive, version)
        if index is None:
            raise SourceUnavailable(f"{os.fsdecode(archive)}: its index has been removed")
        return index

    def _read_patiently(self, archive: bytes, offset: int, length: int, version: Version) -> bytes:
        """Read for an index, again if the source fails: to begin anew would be to read all of the archive again."""
        limits, attempt, failures = self._indexers.limits, 0, 0
        until_s = time.monotonic() + limits.timeout_s
        while True:
            try:
                return self._inner.read(archive, offset, length, version)
            except SourceUnavailable as exc:
                failures += not isinstance(exc, SourceThrottled)
                if failures == limits.attempts or time.monotonic() > until_s:
                    raise
            attempt += 1
            time.sleep(pause_s(attempt, limits, self._random))

    def _make(self, archive: bytes, version: Version) -> None:
        to, failed = self._files(archive)

        def read(offset: int, length: int) -> bytes:
            return self._read_patiently(archive, offset, length, version)

        kind = next(kind for kind in FORMATS if archive.endswith(b"." + kind.encode()))
        try:
            left_out = self._indexers.index(kind, archive, version, read, to)
        except SourceChanged as exc:
            # Who asks again asks for its attributes first, and so for the new version.
            raise SourceNotReady(f"{os.fsdecode(archive)} changes while it is read") from exc
        except ArchiveFailed as exc:
            log.warning("%s cannot be shown as a directory: %s", os.fsdecode(archive), exc)
            write_failure(archive, version, failed, str(exc))
            return
        if left_out:
            told = "%s: %d members are not shown, such as devices or names that lead out of it"
            log.warning(told, os.fsdecode(archive), left_out)
