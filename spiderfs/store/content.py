"""File contents: whole files and all checksums in LMDB, large files' blocks beside it, the budget in each transaction.

Tables: `content` (inode, block) -> header and payload; `member` the same key -> size, sequence number, score, section;
`queue` landing's sequence number -> key; `meta` -> usage and capacity, and by inode how many blocks are there. A small
payload follows its checksums. A payload of more than a chunk lies in a file of its own, and where it lies follows its
checksums (`extents.py`). A block's record is the header alone; the block's bytes lie in a file too (`blocks.py`).
`holes` has the keys of blocks whose record was dropped and whose bytes may still take disk. These bytes are freed after
the transaction, by any process that gets to it, so that they are not lost with a process that dies.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import lmdb

from spiderfs.errors import StoreCorrupt, StoreError, StoreFull
from spiderfs.shared.layout import RESERVE_FILE
from spiderfs.store import checksums, rows
from spiderfs.store.blocks import BlockFiles
from spiderfs.store.disks import Disks
from spiderfs.store.environment import open_environment, translate, translated_errors
from spiderfs.store.extents import ExtentsOfDisks, Lease, is_chunked
from spiderfs.store.rows import KEY, MemberRow, blocks_of, is_block, sealed, unsealed
from spiderfs.store.store import BLOCK_BYTES, LANDING, ContentKey, Keep, Member, Usage

log = logging.getLogger(__name__)

# A process that drops blocks frees this many at once, at 50 us each. The manager's housekeeping frees the rest.
FREED_AT_ONCE = 32
# Members that are read in one transaction: 1 ms, in which LMDB cannot use freed pages again.
_MEMBERS_AT_A_TIME = 1000
_SWEEP_PAUSE_S = 0.001
# A transaction that drops records first writes new copies of the pages that list them; only then can the room that they
# took be used again. On a disk that is full to the last byte such a transaction fails. So a file of its own keeps some
# room for this purpose.
RESERVE_BYTES = 4 << 20
# This many dropped records touch 300 pages at most, some 1 MiB.
_DROPPED_AT_A_TIME = 100
# Evicted blocks of a plain file that was handed out keep their disk until all of the file is evicted. While such blocks
# take more than this share of the capacity (those that are about to be freed included), no further file is handed out.
MOST_KEPT_SHARE = 0.1


class _Change(NamedTuple):
    """A transaction that writes, with the usage that it commits, and the leases that its rows give up."""

    txn: lmdb.Transaction
    usage: list[int]
    freed: list[Lease]


class LmdbContent:
    """The store of one cache directory; see `Content` for the contract and `store.py` for the theory."""

    def __init__(self, path: Path, readonly: bool = False, disks: Disks | None = None) -> None:
        """`readonly` is for a disk that cannot be written to: then all calls that write raise StoreError.

        `disks` are those that all processes of a mount share, by default what the store's file says.
        """
        self._env = open_environment(path, rows.TABLES, readonly)
        with translated_errors():
            self._content, self._member, self._queue, self._meta, self._holes = (
                self._env.open_db(name, create=not readonly)
                for name in (b"content", b"member", b"queue", b"meta", b"holes")
            )
        self._reader: lmdb.Transaction | None = None
        self._disks = disks or Disks.of_store(path)
        self.extents = ExtentsOfDisks(self._disks, readonly)
        self._files = BlockFiles(self._disks)
        self._reserve = path / RESERVE_FILE
        self._can_free: bool | None = None  # None: it has not mattered yet
        self._told_too_far = False
        self._sound = checksums.SoundPieces()
        self.damaged = 0  # records whose checksum failed, since this process opened the store

    # -- reading, on the event loop's thread

    def end_read(self) -> None:
        if self._reader is not None:
            self._reader.abort()
            self._reader = None

    def _record(self, key: ContentKey) -> memoryview | None:
        try:
            if self._reader is None:
                self._reader = self._env.begin(self._content, buffers=True)
            found: memoryview | None = self._reader.get(KEY.pack(*key))  # type: ignore[assignment]
        except lmdb.Error as exc:
            raise translate(exc) from exc
        return found

    def has(self, key: ContentKey) -> bool:
        return self._record(key) is not None

    def read(self, key: ContentKey, offset: int = 0, size: int | None = None) -> memoryview | bytes | None:
        if (record := self._record(key)) is None:
            return None
        if key.block:
            return self._read_block(key, bytes(record), offset, size)
        piece = file_piece(key, record, self.extents, offset, size)
        if piece is None:
            # This transaction may be an old one: since it began, the chunks may have been freed and written again.
            self.end_read()
            if (record := self._record(key)) is None:
                return None
            piece = file_piece(key, record, self.extents, offset, size)
        if piece is None:
            self.damaged += 1
        return piece

    def _read_block(self, key: ContentKey, head: bytes, offset: int, size: int | None) -> memoryview | None:
        start = (key.block - 1) * BLOCK_BYTES

        def verified_block(head: bytes) -> memoryview | None:
            found = checksums.verified_by_another(
                head, lambda at, count: self._files.read(key.inode, start + at, count), offset, size
            )
            if found is None:
                return None
            self._sound.add(key, found.pieces)
            return found.payload

        piece = verified_block(head)
        if piece is not None:
            return piece
        # This transaction may be an old one: since it began, the block may have been dropped, or have landed again in
        # another file.
        self.end_read()
        self._files.forget(key.inode)
        if (record := self._record(key)) is None:
            return None
        piece = verified_block(bytes(record))
        if piece is None:
            self.damaged += 1
            self._sound.forget(key)
        return piece

    def blocks(self, inode: int) -> int:
        with translated_errors(), self._env.begin(self._meta) as txn:
            return rows.block_count(txn, rows.INODE.pack(inode), self._meta)

    def whole(self, inode: int, size: int) -> bool:
        return self._sound.whole(inode, size) and self.blocks(inode) == -(-size // BLOCK_BYTES)

    def plain_file(self, inode: int, size: int) -> int | None:
        if not self.whole(inode, size) or self._keeps_too_much() or (fd := self._files.hand_out(inode)) is None:
            return None
        with contextlib.ExitStack() as on_refusal:
            on_refusal.callback(os.close, fd)
            # Nothing of the file is freed from here on, so the blocks that are there now stay there.
            if not self.whole(inode, size) or os.fstat(fd).st_size != size:
                return None
            on_refusal.pop_all()
        return fd

    def _keeps_too_much(self) -> bool:
        with translated_errors(), self._env.begin(self._meta) as txn:
            kept_bytes = txn.stat(self._holes)["entries"] * BLOCK_BYTES
            return bool(kept_bytes > MOST_KEPT_SHARE * rows.read_usage(txn, self._meta)[4])

    def member(self, key: ContentKey) -> Member | None:
        packed = KEY.pack(*key)
        with translated_errors(), self._env.begin(self._member) as txn:
            record = txn.get(packed)
        return None if record is None else MemberRow.of(packed, record).member(packed)

    # -- writing, in any thread

    def land(self, key: ContentKey, payload: bytes) -> bool:
        return self.land_all([(key, payload)])[0]

    def land_all(self, records: Sequence[tuple[ContentKey, bytes]]) -> list[bool]:
        blocks = [record for record in records if record[0].block]
        takes_blocks = not blocks or self._takes_blocks()
        # Bytes are written and checksums made before the transaction begins, because others may wait for its end.
        of_files = iter(self.lease([len(payload) for key, payload in records if not key.block]))
        leases = [None if key.block else next(of_files) for key, _ in records]
        try:
            for (_, payload), lease in zip(records, leases, strict=True):
                if lease is not None:
                    self.extents.write(lease, payload)
            values = [_value(*record, lease) for record, lease in zip(records, leases, strict=True)]
            with self._files.writing(blocks if takes_blocks else ()) as too_far, self._changing() as change:
                landed = [
                    (takes_blocks or not key.block)
                    and key not in too_far
                    and self._land(change, KEY.pack(*key), len(payload), value, self._disk_of(key, value))
                    for (key, payload), value in zip(records, values, strict=True)
                ]
        except StoreError:
            self.extents.free(leases)
            self.free_unrecorded([key for key, _ in blocks])
            raise
        self.extents.free([lease for lease, taken in zip(leases, landed, strict=True) if lease and not taken])
        if too_far and not self._told_too_far:
            self._told_too_far = True
            log.warning(
                "some files of the source are larger than the cache's file system allows: their ends are not cached;"
                " choose a cache_dir on another file system (XFS) to cache them"
            )
        if blocks:
            outcomes = [(key, taken) for (key, _), taken in zip(records, landed, strict=True) if key.block]
            for key in (key for key, taken in outcomes if taken):
                self._sound.add(key, checksums.ALL_PIECES)
            self.free_unrecorded([key for key, taken in outcomes if not taken])
        self.free(FREED_AT_ONCE)
        return landed

    def land_kept(
        self,
        records: Sequence[tuple[ContentKey, int, bytes]],
        sections: Mapping[ContentKey, str],
        drop: Iterable[ContentKey],
    ) -> list[bool | None]:
        landed: list[bool | None] = []
        with self._changing() as change:
            for key in drop:
                self._remove(change, KEY.pack(*key))
            for key, size, record in records:
                packed = KEY.pack(*key)
                if change.txn.get(packed, db=self._member) is not None:
                    landed.append(None)
                else:
                    section, disk = sections.get(key, LANDING), self._disk_of(key, record)
                    landed.append(self._enter(change, packed, size, record, section, disk))
        unused = []
        for (key, _, record), taken in zip(records, landed, strict=True):
            if taken and key.block:
                self._sound.add(key, checksums.ALL_PIECES)
            if not taken and not key.block and not _is_inline(record):
                unused.append(_lease_of(KEY.pack(*key), record))
        self.extents.free(unused)
        self.free(FREED_AT_ONCE)
        return landed

    def hold_blocks(self, inode: int, first: int, count: int) -> int:
        """A descriptor that keeps what `RecordWriter` writes to these blocks until it is closed; raises StoreError."""
        if not self._takes_blocks():
            raise StoreError("the file system of the cache cannot free parts of a file")
        return self._files.hold(inode, first, count)

    def land_part(self, keys: Sequence[ContentKey], length: int, heads: bytes) -> bool:
        """Land consecutive blocks of `length` bytes in all that `write_part` has written; whether all were taken."""
        sizes = [min(BLOCK_BYTES, length - at) for at in range(0, length, BLOCK_BYTES)]
        width = checksums.BLOCK_HEADER_BYTES
        records = list(zip(keys, sizes, (heads[at : at + width] for at in range(0, len(heads), width)), strict=True))
        return False not in self.land_kept(records, {}, ())

    def lease(self, sizes: Sequence[int]) -> list[Lease | None]:
        """Chunks for whole files of these sizes, None for one that lies in its row; raises StoreFull, StoreError."""
        return self.extents.lease(sizes, self._used() if self._disks.several else {}) if sizes else []

    def _usage(self, txn: lmdb.Transaction) -> list[int]:
        return rows.read_usage(txn, self._meta, max(self._disks.places) + 1 if self._disks.several else 0)

    def _used(self) -> dict[int, int]:
        """The bytes on each disk that there is or was; empty if there was never more than one."""
        with translated_errors(), self._env.begin(self._meta) as txn:
            of_disks = self._usage(txn)[rows.DISKS_AT :]
        return dict(enumerate(map(sum, zip(of_disks[::2], of_disks[1::2], strict=True))))

    def _disk_of(self, key: ContentKey, record: bytes) -> int:
        """The disk on which a payload lies."""
        if not self._disks.several:
            return 0
        if key.block:
            return self._files.disk_of(key.inode)
        return 0 if _is_inline(record) else _lease_of(KEY.pack(*key), record).disk

    def free_unrecorded(self, keys: list[ContentKey]) -> None:
        """Free the bytes of those of these blocks that have no records and that no one holds."""
        for inode, group in itertools.groupby(sorted(keys), key=lambda key: key.inode):
            with contextlib.suppress(StoreError, OSError):
                self._free(inode, [key.block for key in group])

    def _takes_blocks(self) -> bool:
        """Whether this file system can free parts of a file; if it cannot, no block is taken."""
        if self._can_free is None:
            self._can_free = self._files.can_free()
            if not self._can_free:
                log.warning(
                    "the file system of the cache cannot free parts of a file (no fallocate with FALLOC_FL_PUNCH_HOLE):"
                    " large files are read from the source, choose another cache_dir for them"
                )
        return self._can_free

    def _land(self, change: _Change, packed: bytes, size: int, value: bytes, disk: int) -> bool:
        if (record := change.txn.get(packed, db=self._member)) is None:
            return self._enter(change, packed, size, value, LANDING, disk)
        # A version never changes, so this is a repair of damaged bytes of the same size.
        before = MemberRow.of(packed, bytes(record))
        if disk != before.disk:
            self._remove(change, packed)
            return self._enter(change, packed, size, value, before.section, disk)
        self._drop_chunks(change, packed, before)
        change.txn.put(packed, value, db=self._content)
        return True

    def _has_room(self, change: _Change, disk: int, size: int) -> bool:
        """Whether a disk's part of the capacity takes a record; what has landed there makes room for it."""
        txn, usage = change.txn, change.usage
        if not self._disks.several:
            return True
        landing, kept = rows.DISKS_AT + 2 * disk, rows.DISKS_AT + 2 * disk + 1
        room = self._disks.parts(usage[4]).get(disk, 0) - size
        if usage[kept] > room:
            return False
        excess, going = usage[landing] + usage[kept] - room, []
        with txn.cursor(self._queue) as cursor:
            for place, stored in cursor if excess > 0 else ():
                packed = unsealed(bytes(place), bytes(stored))
                # An absent row is as damaged as one that does not match its seal.
                row = MemberRow.of(packed, bytes(txn.get(packed, b"", db=self._member)))
                if row.disk == disk:
                    going.append(packed)
                    excess -= row.size
                    if excess <= 0:
                        break
        for packed in going:
            self._remove(change, packed)
        return True

    def _enter(self, change: _Change, packed: bytes, size: int, value: bytes, section: str, disk: int) -> bool:
        """Put a record that is not there into a section, unless there is no room beside what is kept."""
        txn, usage = change.txn, change.usage
        if usage[2] + size > usage[4] or not self._has_room(change, disk, size):
            return False
        self._shrink_landing(change, usage[4] - size)
        sequence = usage[5]
        row = MemberRow(size, sequence, 0.0, section, disk)
        rows.count(usage, row, 1)
        usage[5] += 1
        txn.put(packed, value, db=self._content)
        if is_block(packed):
            txn.delete(packed, db=self._holes)
            self._count_block(txn, packed, 1)
        txn.put(packed, row.stored(packed), db=self._member)
        place = rows.SEQUENCE.pack(sequence)
        if section == LANDING and not txn.put(place, sealed(place, packed), db=self._queue, append=True):
            raise StoreCorrupt("the cache is damaged (something has landed after what lands now)")
        return True

    def apply(self, drop: Iterable[ContentKey], keep: Iterable[Keep]) -> list[ContentKey]:
        drop, keep = list(drop), list(keep)
        try:
            return self._apply(drop, keep)
        except StoreFull:
            if not drop:
                raise
        # To make room takes room. The first step takes it from the reserve, each further step from what the one before
        # it has freed.
        self._spend_reserve()
        for first in range(0, len(drop), _DROPPED_AT_A_TIME):
            self._apply(drop[first : first + _DROPPED_AT_A_TIME], ())
        return self._apply((), keep)

    def _apply(self, drop: Iterable[ContentKey], keep: Iterable[Keep]) -> list[ContentKey]:
        missing = []
        with self._changing() as change:
            txn, usage = change.txn, change.usage
            for key in drop:
                self._remove(change, KEY.pack(*key))
            for key, section, score in keep:
                packed = KEY.pack(*key)
                record = txn.get(packed, db=self._member)
                if record is None:
                    missing.append(key)
                    continue
                before = MemberRow.of(packed, bytes(record))
                if before.section == LANDING:
                    txn.delete(rows.SEQUENCE.pack(before.sequence), db=self._queue)
                after = MemberRow(before.size, usage[5], score, section, before.disk)
                rows.count(usage, before, -1)
                rows.count(usage, after, 1)
                txn.put(packed, after.stored(packed), db=self._member)
                usage[5] += 1
        self.free(FREED_AT_ONCE)
        return missing

    def keys(self, inode: int) -> list[ContentKey]:
        with translated_errors(), self._env.begin(self._member) as txn:
            whole = [ContentKey(inode)] if txn.get(KEY.pack(inode, 0)) is not None else []
            return whole + [ContentKey(inode, block) for block in blocks_of(txn, inode)]

    @contextlib.contextmanager
    def _changing(self) -> Iterator[_Change]:
        """Commits what is done meanwhile; raises StoreFull, StoreCorrupt, StoreError."""
        with translated_errors(), self._env.begin(write=True) as txn:
            change = _Change(txn, self._usage(txn), [])
            yield change
            rows.write_usage(txn, change.usage, self._meta)
            self.extents.take_over(change.freed)
        self.extents.free(change.freed)

    def release(self, keys: Iterable[ContentKey]) -> None:
        with self._changing() as (txn, usage, _):
            for packed in (KEY.pack(*key) for key in keys):
                record = txn.get(packed, db=self._member)
                before = None if record is None else MemberRow.of(packed, bytes(record))
                if before is None or before.section == LANDING:
                    continue
                # The record keeps its sequence number, which is lower than those of all records that landed later.
                place = rows.SEQUENCE.pack(before.sequence)
                after = before._replace(score=0.0, section=LANDING)
                txn.put(packed, after.stored(packed), db=self._member)
                txn.put(place, sealed(place, packed), db=self._queue)
                rows.count(usage, before, -1)
                rows.count(usage, after, 1)

    def set_capacity(self, capacity_bytes: int) -> None:
        try:
            self._set_capacity(capacity_bytes)
        except StoreFull:
            self._spend_reserve()
            while not self._set_capacity(capacity_bytes, _DROPPED_AT_A_TIME):
                pass
        self.fit(capacity_bytes)
        with contextlib.suppress(StoreError):
            self.extents.trim()
        self.free(FREED_AT_ONCE)

    def fit(self, capacity_bytes: int) -> bool:
        """Drop what left-out disks have, or others beyond their parts; whether there was any. Raises StoreError."""
        parts, used = self._disks.parts(capacity_bytes), self._used()
        excess = {disk: size - parts.get(disk, 0) for disk, size in used.items() if size > parts.get(disk, 0)}
        for some in self._member_rows() if excess else ():
            going = []
            for packed, row in some:
                if excess.get(row.disk, 0) > 0:
                    excess[row.disk] -= row.size
                    going.append(rows.key_of(packed))
            if going:
                self.apply(going, ())
        if used and not self._disks.several:
            with self._changing() as (_, usage, _):
                del usage[rows.DISKS_AT :]
        return bool(excess)

    def _set_capacity(self, capacity_bytes: int, limit: int | None = None) -> bool:
        """Set the capacity and drop up to `limit` records of landing; returns whether that was enough."""
        with self._changing() as change:
            change.usage[4] = capacity_bytes
            return self._shrink_landing(change, capacity_bytes, limit)

    def _shrink_landing(self, change: _Change, room: int, limit: int | None = None) -> bool:
        """Drop the records that landed first, until landing and the kept records fit into `room` bytes.

        Returns whether they fit, or landing is empty, after at most `limit` records were dropped.
        """
        (txn, usage, _), dropped = change, 0
        while usage[1] and usage[0] + usage[2] > room:
            if dropped == limit:
                return False
            dropped += 1
            with txn.cursor(self._queue) as cursor:
                if not cursor.first():
                    raise StoreCorrupt("the cache is damaged (what has landed is not in its queue)")
                packed = unsealed(bytes(cursor.key()), bytes(cursor.value()))
            if not self._remove(change, packed):
                raise StoreCorrupt("the cache is damaged (something is in the queue that has not landed)")
        return True

    def _drop_chunks(self, change: _Change, packed: bytes, row: MemberRow) -> None:
        chunked = (row.disk or is_chunked(row.size)) and not is_block(packed)
        if chunked and (value := change.txn.get(packed, db=self._content)) is not None:
            with contextlib.suppress(StoreCorrupt):
                change.freed.append(_lease_of(packed, bytes(value)))

    def _remove(self, change: _Change, packed: bytes) -> bool:
        """Remove a record. Returns whether it was in landing, and in the queue of landing too."""
        txn = change.txn
        record = txn.get(packed, db=self._member)
        if record is None:
            return False
        row = MemberRow.of(packed, bytes(record))
        queued = row.section == LANDING and txn.delete(rows.SEQUENCE.pack(row.sequence), db=self._queue)
        self._drop_chunks(change, packed, row)
        txn.delete(packed, db=self._content)
        txn.delete(packed, db=self._member)
        if is_block(packed):
            txn.put(packed, sealed(packed, b""), db=self._holes)
            self._count_block(txn, packed, -1)
        rows.count(change.usage, row, -1)
        return bool(queued)

    def _count_block(self, txn: lmdb.Transaction, packed: bytes, change: int) -> None:
        """Add `change`, which is 1 or -1, to the number of a file's blocks."""
        inode = packed[: rows.INODE.size]
        # Blocks of an earlier version of spiderfs are not counted: a count may be too low, and is never too high.
        rows.write_block_count(txn, inode, rows.block_count(txn, inode, self._meta) + change, self._meta)

    # -- room for making room, in any thread

    def reserve(self) -> None:
        """Make the file that reserves room, if it does not exist; raises OSError if the disk has no room for it."""
        fd = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size < RESERVE_BYTES:
                os.posix_fallocate(fd, 0, RESERVE_BYTES)
        finally:
            os.close(fd)

    def _spend_reserve(self) -> None:
        with contextlib.suppress(OSError):
            self._reserve.unlink()

    # -- giving the space of blocks back, in any thread

    def free(self, limit: int | None = None) -> None:
        """Give the room of dropped blocks back to the disk, `limit` blocks of a file at most; never raises StoreFull.

        It passes over files that were handed out, and files that another process is writing to.
        """
        try:
            for inode, blocks in self._dropped(limit):
                self._free(inode, blocks)
        except (StoreError, OSError) as exc:
            log.debug("what dropped blocks took is freed later: %s", exc)

    def sweep(self) -> None:
        """Free the bytes that killed processes have written without committing a record; raises StoreError."""
        self._sweep_chunks()
        for inode in self._files.inodes():
            with translated_errors(), self._env.begin(self._content) as txn:
                recorded = set(blocks_of(txn, inode))
            stray = self._files.stray(inode, recorded)
            if stray:
                self._free(inode, stray)

    def _sweep_chunks(self) -> None:
        import numpy as np

        abandoned = self.extents.abandoned()
        if not abandoned:
            return
        # The processes are dead, so the rows that they have committed are there. Rows that others drop meanwhile do no
        # harm: their chunks are free then, and no longer a dead process's.
        is_named = {disk: np.zeros(int(chunks.max()) + 1, np.bool_) for disk, chunks in abandoned.items()}
        for some in self._pieces_of(self._content):
            for packed, value in some:
                if not is_block(packed) and not _is_inline(value):
                    with contextlib.suppress(StoreCorrupt):
                        lease = _lease_of(packed, value)
                        for first, length in lease.runs if lease.disk in is_named else ():
                            is_named[lease.disk][first : first + length] = True
            # A million rows must not hold up the event loop of this process, which wants the interpreter too.
            time.sleep(_SWEEP_PAUSE_S)
        for disk, chunks in abandoned.items():
            self.extents.files[disk].settle(chunks, np.flatnonzero(is_named[disk]))

    def _dropped(self, limit: int | None) -> list[tuple[int, list[int]]]:
        """The blocks in `holes`, by file; without the files that were handed out and still have records."""
        found = []
        with translated_errors(), self._env.begin(self._holes) as txn, txn.cursor() as cursor:
            more = cursor.first()
            while more:
                key = bytes(cursor.key())
                unsealed(key, bytes(cursor.value()))
                inode, _ = rows.key_of(key)
                if not (self._files.was_handed_out(inode) and blocks_of(txn, inode, 1, self._content)):
                    found.append((inode, blocks_of(txn, inode, limit)))
                more = cursor.set_range(KEY.pack(inode + 1, 0))
        return found

    def _free(self, inode: int, blocks: list[int]) -> None:
        with self._files.locked(inode, blocks) as held:
            if not held.blocks:
                return
            keys = [KEY.pack(inode, block) for block in held.blocks]
            with translated_errors(), self._env.begin(self._content) as txn:
                gone = [txn.get(key) is None for key in keys]
                if held.handed_out and blocks_of(txn, inode, 1):
                    return
            for block in itertools.compress(held.blocks, () if held.handed_out else gone):
                held.punch(block)
            with translated_errors(), self._env.begin(self._holes, write=True) as txn:
                for key in itertools.compress(keys, gone if held.is_current else ()):
                    txn.delete(key)
            held.unlink(partial(self._has_no_blocks, inode))

    def _has_no_blocks(self, inode: int) -> bool:
        with translated_errors(), self._env.begin() as txn:
            return not any(blocks_of(txn, inode, 1, table) for table in (self._content, self._holes))

    # -- bookkeeping

    def members(self) -> Iterator[Member]:
        with translated_errors(), self._env.begin(self._member) as txn:
            found = [(packed, MemberRow.of(packed, stored)) for packed, stored in txn.cursor()]
        found.sort(key=lambda row: row[1].sequence)
        for packed, row in found:
            yield row.member(packed)

    def each_member(self) -> Iterator[Member]:
        return (row.member(packed) for some in self._member_rows() for packed, row in some)

    def _member_rows(self) -> Iterator[list[tuple[bytes, MemberRow]]]:
        """The rows of all records in the order of their keys, read in pieces."""
        for some in self._pieces_of(self._member):
            yield [(packed, MemberRow.of(packed, stored)) for packed, stored in some]

    def _pieces_of(self, table: lmdb._Database) -> Iterator[list[tuple[bytes, bytes]]]:
        """The rows of a table, some at a time in a transaction of their own."""
        start = b""
        while True:
            with translated_errors(), self._env.begin(table) as txn, txn.cursor() as cursor:
                more = cursor.set_range(start) if start else cursor.first()
                some = list(itertools.islice(cursor, _MEMBERS_AT_A_TIME)) if more else []
            if not some:
                return
            yield some
            # The least key behind the last one.
            start = some[-1][0] + b"\0"

    def usage(self) -> Usage:
        with translated_errors(), self._env.begin(self._meta) as txn:
            return Usage(*rows.read_usage(txn, self._meta)[:5])

    def disks(self) -> list[dict[str, object]]:
        """The directories of the cache: the bytes and the part of the capacity of each, and whether it is left out."""
        usage, used, disks = self.usage(), self._used(), self._disks
        parts = disks.parts(usage.capacity_bytes)
        return [
            {
                "directory": str(disks.directory(number)),
                "used_bytes": used.get(number, usage.used_bytes),
                "capacity_bytes": parts.get(number, 0),
                "left_out": number not in parts,
            }
            for number in disks.places
        ]

    def file_bytes(self) -> int:
        """The bytes on disk of LMDB's pages, free pages included, and of all blocks."""
        return int((self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]) + sum(
            files.disk_bytes() for files in (self.extents, self._files)
        )

    def clear_dead_readers(self) -> int:
        """Free the slots of readers that were killed; returns the number of slots."""
        with translated_errors():
            return int(self._env.reader_check())

    def close(self) -> None:
        self.end_read()
        self._files.close()
        self.extents.close()
        self._env.close()


# -- records of whole files


class RecordWriter:
    """Makes records for a store whose rows another process writes; for any thread."""

    def __init__(self, path: Path, disks: Disks | None = None) -> None:
        """`disks`: see `LmdbContent`."""
        disks = disks or Disks.of_store(path)
        self._extents, self._blocks = ExtentsOfDisks(disks), BlockFiles(disks)

    def __call__(self, payload: bytes, lease: bytes) -> bytes:
        """A payload's header, the payload going into leased chunks or behind it; raises StoreFull, StoreError."""
        if not lease:
            return checksums.header(payload) + payload
        self._extents.write(Lease.unpacked(lease), payload)
        return checksums.header(payload)

    def write_part(self, pieces: Iterable[bytes], offset: int, place: bytes, came: Callable[[int], object]) -> bytes:
        """Write blocks of the file with the inode `place` as they come; returns their records, one after the other.

        Someone must hold them. `came` is called with the number written. Raises StoreFull, StoreError.
        """
        records = []
        for block in self._blocks.fill(int(place), offset, pieces):
            records.append(checksums.header(block))
            came(len(records))
        return b"".join(records)


def chunked_record(key: ContentKey, head: bytes, lease: Lease) -> bytes:
    """The record of a file whose payload lies in chunks; `head` is its header."""
    return sealed(KEY.pack(*key), head + lease.packed())


def _value(key: ContentKey, payload: bytes, lease: Lease | None) -> bytes:
    if lease is not None:
        return chunked_record(key, checksums.header(payload), lease)
    return checksums.header(payload) if key.block else checksums.header(payload) + payload


def _is_inline(record: bytes | memoryview) -> bool:
    if len(record) < checksums.LENGTH_BYTES:
        return True
    length = checksums.length_of(record)
    return length < len(record) and checksums.header_bytes(record) + length == len(record)


def _lease_of(packed: bytes, record: bytes) -> Lease:
    """The chunks of a file that does not lie in its row; raises StoreCorrupt."""
    row = unsealed(packed, record)
    return Lease.unpacked(row[checksums.header_bytes(row) :])


def file_piece(
    key: ContentKey, record: memoryview, extents: ExtentsOfDisks, offset: int = 0, size: int | None = None
) -> memoryview | None:
    """Bytes [offset, offset + size) of a whole file by its record; None if a piece fails its checksum."""
    if _is_inline(record):
        return checksums.verified(record, offset, size)
    try:
        row = unsealed(KEY.pack(*key), bytes(record))
        end = checksums.header_bytes(row)
        lease = Lease.unpacked(row[end:])
    except (StoreCorrupt, struct.error):
        return None
    found = checksums.verified_by_another(row[:end], partial(extents.read, lease), offset, size)
    return None if found is None else found.payload
