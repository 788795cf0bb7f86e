"""Small files of a store that other processes write, for readers around FUSE."""

from __future__ import annotations

from pathlib import Path

import lmdb

from spiderfs.errors import StoreDamaged
from spiderfs.store.checksums import header, header_bytes
from spiderfs.store.environment import open_environment, translate, translated_errors
from spiderfs.store.rows import KEY, TABLES


class ContentReader:
    """Reads whole files from a store that others write; for any thread, and across a fork (`environment.py`)."""

    def __init__(self, path: Path) -> None:
        self._env = open_environment(path, TABLES, readonly=True)
        with translated_errors():
            self._content = self._env.open_db(b"content", create=False)

    def has(self, inode: int) -> bool:
        with translated_errors(), self._env.begin(self._content, buffers=True) as txn:
            return txn.get(KEY.pack(inode, 0)) is not None

    def copy(self, inode: int) -> bytes | None:
        """A copy of a file's bytes, verified; None if the store does not have them. Raises StoreDamaged, StoreError.

        The bytes are copied first and verified in the copy. So no later change of the map reaches the caller, and the
        copy lies in the processor's cache when it is verified.
        """
        try:
            txn = self._env.begin(self._content, buffers=True)
            try:
                found = txn.get(KEY.pack(inode, 0))
                if found is None:
                    return None
                value = memoryview(found)
                start = header_bytes(value)
                head, payload = bytes(value[:start]), bytes(value[start:])
            finally:
                txn.abort()
        except lmdb.Error as exc:
            raise translate(exc) from exc
        if head != header(payload):
            raise StoreDamaged("a record of the cache fails its checksum")
        return payload

    def close(self) -> None:
        self._env.close()
