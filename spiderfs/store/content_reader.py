"""Small files of a store that other processes write, for readers around FUSE."""

from __future__ import annotations

from pathlib import Path

import lmdb

from spiderfs.errors import StoreDamaged
from spiderfs.store.content import file_piece
from spiderfs.store.disks import Disks
from spiderfs.store.environment import open_environment, translate, translated_errors
from spiderfs.store.extents import ExtentsOfDisks
from spiderfs.store.rows import KEY, TABLES
from spiderfs.store.store import ContentKey

# Between a look at the row and one at the bytes, the file may have left the cache and come back.
_TRIES = 3


class ContentReader:
    """Reads whole files from a store that others write; for any thread, and across a fork (`environment.py`)."""

    def __init__(self, path: Path) -> None:
        self._env = open_environment(path, TABLES, readonly=True)
        with translated_errors():
            self._content = self._env.open_db(b"content", create=False)
        self._extents = ExtentsOfDisks(Disks.of_store(path), readonly=True)

    def has(self, inode: int) -> bool:
        with translated_errors(), self._env.begin(self._content, buffers=True) as txn:
            return txn.get(KEY.pack(inode, 0)) is not None

    def copy(self, inode: int) -> bytes | None:
        """A copy of a file's bytes, verified; None if the store does not have them. Raises StoreDamaged, StoreError.

        The bytes are copied first and verified in the copy. So no later change of the store reaches the caller, and the
        copy lies in the processor's cache when it is verified.
        """
        for _ in range(_TRIES):
            record = self._record(inode)
            if record is None:
                return None
            payload = file_piece(ContentKey(inode), memoryview(record), self._extents)
            if payload is not None:
                # What was read from the chunks is the caller's own already.
                read = payload.obj
                return read if isinstance(read, bytes) and len(read) == len(payload) else bytes(payload)
        raise StoreDamaged("a record of the cache fails its checksum")

    def _record(self, inode: int) -> bytes | None:
        try:
            txn = self._env.begin(self._content, buffers=True)
            try:
                found = txn.get(KEY.pack(inode, 0))
                return None if found is None else bytes(found)
            finally:
                txn.abort()
        except lmdb.Error as exc:
            raise translate(exc) from exc

    def close(self) -> None:
        self._extents.close()
        self._env.close()
