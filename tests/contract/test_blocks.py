"""Blocks of large files in LMDB's store: where their bytes lie, when the disk gets them back, and who may rely on them.

What every store does with a block as with any other record is in test_store.py.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import lmdb
import pytest
from test_store import PATIENCE_S, forked, held

from spiderfs.errors import StoreError, StoreFull
from spiderfs.linux.range_lock import try_lock
from spiderfs.store import blocks as block_files
from spiderfs.store.blocks import BlockFiles
from spiderfs.store.checksums import PIECE_BYTES, header
from spiderfs.store.content import FREED_AT_ONCE, LmdbContent, RecordWriter
from spiderfs.store.disks import Disks
from spiderfs.store.store import BLOCK_BYTES, ContentKey, Keep

FILE = 7
LAST_BYTES = BLOCK_BYTES // 2 + 5
SIZE = 2 * BLOCK_BYTES + LAST_BYTES


def payload(block: int, size: int = BLOCK_BYTES) -> bytes:
    return Random(block).randbytes(size)


PAYLOADS = {1: payload(1), 2: payload(2), 3: payload(3, LAST_BYTES)}


@pytest.fixture
def content(tmp_path: Path) -> Iterator[LmdbContent]:
    content = LmdbContent(made(tmp_path))
    content.set_capacity(64 << 20)
    yield content
    content.close()


def made(tmp_path: Path) -> Path:
    path = tmp_path / "content"
    path.mkdir(exist_ok=True)
    return path


def land_all_of_it(content: LmdbContent, inode: int = FILE) -> Path:
    assert content.land_all([(ContentKey(inode, block), bytes_) for block, bytes_ in PAYLOADS.items()]) == [True] * 3
    return plain(content, inode)


def plain(content: LmdbContent, inode: int = FILE) -> Path:
    return content._files._path(inode)


def disk_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512 if path.exists() else 0


def drop(content: LmdbContent, *blocks: int, inode: int = FILE) -> None:
    content.apply([ContentKey(inode, block) for block in blocks], ())


def test_a_file_whose_blocks_are_all_there_is_a_plain_file(content: LmdbContent) -> None:
    before = content.file_bytes()
    path = land_all_of_it(content)
    assert path.read_bytes() == b"".join(PAYLOADS.values())
    assert held(content, ContentKey(FILE, 2)) == PAYLOADS[2]
    assert content.read(ContentKey(FILE, 3), 5, 7) == PAYLOADS[3][5:12]
    assert content.read(ContentKey(FILE, 3), LAST_BYTES - 3, 100) == PAYLOADS[3][-3:]
    assert content.read(ContentKey(FILE, 3), LAST_BYTES + BLOCK_BYTES, 5) == b""
    content.end_read()
    assert SIZE <= content.file_bytes() - before < SIZE + BLOCK_BYTES // 2
    assert content.usage().used_bytes == SIZE


def test_the_disk_gets_back_what_dropped_blocks_took(content: LmdbContent) -> None:
    path = land_all_of_it(content)
    drop(content, 2)
    assert disk_bytes(path) < SIZE - BLOCK_BYTES + 65536
    assert held(content, ContentKey(FILE, 2)) is None
    assert held(content, ContentKey(FILE, 1)) == PAYLOADS[1]
    assert content.land(ContentKey(FILE, 2), PAYLOADS[2])
    assert held(content, ContentKey(FILE, 2)) == PAYLOADS[2]
    drop(content, 1, 2, 3)
    assert not path.exists()
    land_all_of_it(content)
    assert held(content, ContentKey(FILE, 3)) == PAYLOADS[3]
    content.set_capacity(0)
    assert not path.exists()
    assert content.damaged == 0


def test_many_blocks_dropped_at_once_are_freed_in_time(content: LmdbContent) -> None:
    blocks = range(1, 3 * FREED_AT_ONCE)
    content.land_all([(ContentKey(FILE, block), b"x" * 5000) for block in blocks])
    drop(content, *blocks)
    assert disk_bytes(plain(content)) > 0
    content.free()
    assert not plain(content).exists()


def test_a_part_is_written_piece_by_piece_while_its_blocks_are_held(content: LmdbContent, tmp_path: Path) -> None:
    whole, keys = b"".join(PAYLOADS.values()), [ContentKey(FILE, block) for block in PAYLOADS]
    fd, came = content.hold_blocks(FILE, 1, 3), []
    pieces = (whole[at : at + 700_001] for at in range(0, SIZE, 700_001))
    heads = RecordWriter(tmp_path / "content").write_part(pieces, 0, b"%d" % FILE, came.append)
    assert came == [1, 2, 3]
    content.free_unrecorded(keys)
    assert plain(content).read_bytes() == whole, "it is held"
    assert content.land_part(keys, SIZE, heads)
    assert [held(content, key) for key in keys] == list(PAYLOADS.values())
    drop(content, 2, 3)
    content.free_unrecorded(keys)
    assert plain(content).read_bytes() == whole, "it is held still"
    os.close(fd)
    with content._files.locked(FILE, [2]), pytest.raises(StoreError, match="being freed"):
        content.hold_blocks(FILE, 1, 3)
    content.free()
    assert disk_bytes(plain(content)) < BLOCK_BYTES + 65536
    assert held(content, keys[0]) == PAYLOADS[1]


def test_what_lies_behind_a_block_in_use_is_freed(content: LmdbContent, tmp_path: Path) -> None:
    """Nothing would free it later: a part that has failed has no records."""
    keys = [ContentKey(FILE, block) for block in PAYLOADS]
    fd = content.hold_blocks(FILE, 1, 3)
    RecordWriter(tmp_path / "content").write_part(PAYLOADS.values(), 0, b"%d" % FILE, lambda blocks: None)
    os.close(fd)
    fd = content.hold_blocks(FILE, 2, 1)
    content.free_unrecorded(keys)
    assert BLOCK_BYTES <= disk_bytes(plain(content)) < BLOCK_BYTES + 65536
    os.close(fd)
    content.free_unrecorded(keys)
    assert not plain(content).exists()


def test_a_refused_block_leaves_nothing(content: LmdbContent) -> None:
    land_all_of_it(content)
    content.apply((), [Keep(ContentKey(FILE, block), "blocks") for block in PAYLOADS])
    content.set_capacity(SIZE + 10)
    assert content.land_all([(ContentKey(8, 1), payload(9)), (ContentKey(9), b"small")]) == [False, True]
    assert not plain(content, 8).exists()
    assert content.land(ContentKey(FILE, 2), PAYLOADS[2]), "what is kept is repaired, not refused"
    assert held(content, ContentKey(FILE, 2)) == PAYLOADS[2]


def overwrite(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(BLOCK_BYTES + 3 * PIECE_BYTES + 17)
        file.write(b"damage")


def truncate(path: Path) -> None:
    os.truncate(path, BLOCK_BYTES + 3 * PIECE_BYTES + 17)


def test_a_damaged_piece_is_not_served_and_the_others_are(content: LmdbContent) -> None:
    overwrite(land_all_of_it(content))
    key = ContentKey(FILE, 2)
    assert content.read(key, 0, 3 * PIECE_BYTES) == PAYLOADS[2][: 3 * PIECE_BYTES]
    assert content.damaged == 0
    assert content.read(key, 3 * PIECE_BYTES - 1, 2) is None
    assert content.damaged == 1
    assert content.read(key, 4 * PIECE_BYTES) == PAYLOADS[2][4 * PIECE_BYTES :]
    assert content.plain_file(FILE, SIZE) is None
    content.end_read()
    assert content.land(key, PAYLOADS[2])
    assert held(content, key) == PAYLOADS[2]


@pytest.mark.parametrize("damage", [overwrite, truncate, Path.unlink])
def test_damage_to_the_plain_file_is_repaired(content: LmdbContent, damage: Callable[[Path], None]) -> None:
    damage(land_all_of_it(content))
    key = ContentKey(FILE, 2)
    assert held(content, key) is None
    assert content.damaged == 1
    assert content.land(key, PAYLOADS[2])
    assert held(content, key) == PAYLOADS[2]


def test_a_block_of_an_earlier_version_is_fetched_again(content: LmdbContent, tmp_path: Path) -> None:
    """It had its bytes in LMDB too."""
    key = ContentKey(FILE, 1)
    content.land(key, PAYLOADS[1])
    content.close()
    plain(content).unlink()
    with lmdb.open(str(tmp_path / "content"), max_dbs=5) as env, env.begin(env.open_db(b"content"), write=True) as txn:
        ((packed, _),) = list(txn.cursor())
        txn.put(packed, header(PAYLOADS[1]) + PAYLOADS[1])
    content = LmdbContent(tmp_path / "content")
    assert held(content, key) is None
    assert content.land(key, PAYLOADS[1])
    assert held(content, key) == PAYLOADS[1]
    drop(content, 1)
    assert not plain(content).exists()
    content.close()


def test_an_earlier_look_finds_nothing_wrong(content: LmdbContent) -> None:
    land_all_of_it(content)
    key = ContentKey(FILE, 1)
    assert content.has(key)
    drop(content, 1)
    assert content.has(key), "this look is the old one"
    assert content.read(key) is None
    assert not content.has(key)
    content.end_read()
    assert held(content, ContentKey(FILE, 2)) == PAYLOADS[2]
    assert content.has(key) is False
    drop(content, 2, 3)
    land_all_of_it(content)
    assert held(content, ContentKey(FILE, 2)) == PAYLOADS[2], "it lies in another file now"
    assert content.damaged == 0


# -- handing out plain files


def test_a_plain_file_is_handed_out_whole_and_verified_here(content: LmdbContent, tmp_path: Path) -> None:
    assert content.plain_file(FILE, SIZE) is None
    path = land_all_of_it(content)
    fd = content.plain_file(FILE, SIZE)
    assert fd is not None
    assert os.pread(fd, SIZE + 1, 0) == path.read_bytes()
    os.close(fd)
    assert content.plain_file(FILE, SIZE - 1) is None
    assert content.plain_file(FILE, SIZE + BLOCK_BYTES) is None
    content.close()
    # Another process has to verify each piece first.
    content = LmdbContent(tmp_path / "content")
    assert content.plain_file(FILE, SIZE) is None
    for block in (1, 2):
        assert held(content, ContentKey(FILE, block)) == PAYLOADS[block]
    assert content.read(ContentKey(FILE, 3), 0, LAST_BYTES - 1) is not None
    fd = content.plain_file(FILE, SIZE)
    assert fd is not None, "verified by the piece"
    os.close(fd)
    drop(content, 2)
    assert content.plain_file(FILE, SIZE) is None
    content.close()


def test_a_plain_file_that_was_handed_out_keeps_its_bytes(content: LmdbContent) -> None:
    path = land_all_of_it(content)
    fd = content.plain_file(FILE, SIZE)
    assert fd is not None
    drop(content, 1, 2, 3)
    assert content.usage().used_bytes == 0
    content.free()
    content.sweep()
    assert os.pread(fd, SIZE, 0) == b"".join(PAYLOADS.values())
    # Landed again meanwhile, and dropped again.
    assert content.land(ContentKey(FILE, 2), PAYLOADS[2])
    assert content._dropped(None) == []  # as long as there is a record
    drop(content, 2)
    assert os.pread(fd, SIZE, 0) == b"".join(PAYLOADS.values())
    assert disk_bytes(path) >= SIZE
    os.close(fd)
    content.free()
    assert not path.exists()


def test_no_plain_file_is_handed_out_while_earlier_ones_keep_much_disk(content: LmdbContent) -> None:
    content.set_capacity(20 * BLOCK_BYTES)
    for inode in (1, 2, 3):
        land_all_of_it(content, inode)

    def has_plain_file(inode: int) -> bool:
        fd = content.plain_file(inode, SIZE)
        if fd is not None:
            os.close(fd)
        return fd is not None

    assert has_plain_file(1)
    drop(content, 1, 2, inode=1)
    content.free()
    assert has_plain_file(2), "two of 20 blocks are kept, a tenth"
    drop(content, 1, inode=2)
    content.free()
    assert not has_plain_file(3)
    drop(content, 3, inode=1)
    content.free()
    assert has_plain_file(3), "the first has left the disk"


def test_a_mapping_that_outlives_its_plain_file_keeps_its_bytes(content: LmdbContent) -> None:
    payloads = [os.urandom(BLOCK_BYTES) for _ in range(3)]
    keys = [ContentKey(7, number) for number in (1, 2, 3)]
    assert content.land_all(list(zip(keys, payloads, strict=True))) == [True] * 3
    given = content.plain_file(7, 3 * BLOCK_BYTES)
    assert given is not None
    path = Path(os.readlink(f"/proc/self/fd/{given}"))
    reader = os.open(path, os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, ctypes.c_size_t(3 * BLOCK_BYTES), mmap.PROT_READ, mmap.MAP_SHARED, reader, 0)
    os.close(reader)
    os.close(given)
    try:
        content.apply([keys[1]], [])
        content.free()
        assert content.read(keys[1]) is None
        assert ctypes.string_at(address, 3 * BLOCK_BYTES) == b"".join(payloads)
        assert content.land(keys[1], payloads[1])
        content.apply(keys, [])
        content.free()
        assert not path.exists()
        assert content.land(keys[0], os.urandom(BLOCK_BYTES))
        assert ctypes.string_at(address, 3 * BLOCK_BYTES) == b"".join(payloads)
    finally:
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(3 * BLOCK_BYTES))


def test_freeing_too_late_leaves_the_next_file_of_that_name(tmp_path: Path) -> None:
    files = BlockFiles(Disks(tmp_path))
    key = ContentKey(7, 1)
    assert files.can_free()
    with files.writing([(key, b"x" * BLOCK_BYTES)]):
        pass
    with files.locked(7, [1]) as first, files.locked(7, [1]) as second:
        assert (first.blocks, second.blocks) == ([1], [])
        first.punch(1)
        first.unlink(lambda: True)
        with files.writing([(key, b"y" * BLOCK_BYTES)]):
            second.unlink(lambda: True)
            first.unlink(lambda: True)
            assert files.read(7, 0, 1) == b"y"
    files.close()


# -- other processes


def test_what_a_killed_process_had_written_is_swept(content: LmdbContent) -> None:
    path = land_all_of_it(content)
    reader, writer = os.pipe()

    def write_and_wait() -> None:
        files = BlockFiles(Disks(path.parent.parent))
        with files.writing([(ContentKey(FILE, 5), payload(5)), (ContentKey(8, 1), payload(6))]):
            os.write(writer, b"x")
            signal.pause()

    child = forked(write_and_wait)
    try:
        assert os.read(reader, 1) == b"x"
        content.sweep()
        assert disk_bytes(path) >= SIZE + BLOCK_BYTES, "it may be about to record it"
        assert disk_bytes(plain(content, 8)) >= BLOCK_BYTES
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    content.sweep()
    assert disk_bytes(path) < SIZE + BLOCK_BYTES // 2
    assert not plain(content, 8).exists()
    for block, wanted in PAYLOADS.items():
        assert held(content, ContentKey(FILE, block)) == wanted
    os.close(reader)
    os.close(writer)


def test_nothing_is_freed_that_has_landed_again(tmp_path: Path) -> None:
    """Two processes land and drop the same blocks, a third frees, and this one reads."""
    content = LmdbContent(made(tmp_path))
    content.set_capacity(64 << 20)
    keys = [ContentKey(inode, block) for inode in (1, 2) for block in (1, 2, 3)]
    wanted = {key: Random(key.inode * 10 + key.block).randbytes(PIECE_BYTES + 100) for key in keys}
    content.close()
    end = time.monotonic() + 2.0

    def land_and_drop(seed: int) -> None:
        store, random = LmdbContent(made(tmp_path)), Random(seed)
        while time.monotonic() < end:
            some = random.sample(keys, random.randint(1, 4))
            store.land_all([(key, wanted[key]) for key in some])
            store.apply(random.sample(keys, random.randint(0, 4)), ())

    def free() -> None:
        store = LmdbContent(made(tmp_path))
        while time.monotonic() < end:
            store.free()
            store.sweep()

    children = [forked(lambda seed=seed: land_and_drop(seed)) for seed in (1, 2)] + [forked(free)]  # type: ignore[misc]
    content = LmdbContent(made(tmp_path))
    reads = 0
    while time.monotonic() < end:
        for key in keys:
            found = held(content, key)
            assert found in (None, wanted[key])
            reads += found is not None
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert reads > 100
    content.free()
    for key in keys:
        assert held(content, key) == (wanted[key] if content.member(key) else None)
    assert_no_stray_bytes(content)
    content.close()


def assert_no_stray_bytes(content: LmdbContent) -> None:
    assert content._dropped(None) == []
    recorded: dict[int, set[int]] = {}
    for member in content.members():
        if member.key.block:
            recorded.setdefault(member.key.inode, set()).add(member.key.block)
    assert set(content._files.inodes()) == set(recorded)
    assert not any(content._files.stray(inode, blocks) for inode, blocks in recorded.items())


def test_a_file_that_is_removed_while_a_process_waits_for_it(content: LmdbContent) -> None:
    content._takes_blocks()
    path, key = plain(content), ContentKey(FILE, 1)
    with open(path, "wb") as taken:
        assert try_lock(taken.fileno(), 0, 0)
        landing = threading.Thread(target=content.land, args=(key, PAYLOADS[1]), daemon=True)
        landing.start()
        waiting = f":{path.stat().st_ino} "
        deadline = time.monotonic() + PATIENCE_S
        while not any("->" in line and waiting in line for line in Path("/proc/locks").read_text().splitlines()):
            assert time.monotonic() < deadline
        path.unlink()
    landing.join(PATIENCE_S)
    assert not landing.is_alive()
    assert held(content, key) == PAYLOADS[1]
    assert path.exists()


# -- disks


def test_blocks_beyond_the_largest_file_are_not_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The end of what files may be lies in the middle of the second block; there is room for everything else."""

    def run() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        content = LmdbContent(made(tmp_path))
        content.set_capacity(64 << 20)
        resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES * 3 // 2, resource.RLIM_INFINITY))
        keys = [
            ContentKey(FILE, 1),
            ContentKey(FILE, 2),
            ContentKey(FILE, (1 << 32) - 1),
            ContentKey(9, 1),
            ContentKey(8),
        ]
        landed = content.land_all([(key, PAYLOADS[1]) for key in keys[:-1]] + [(keys[-1], b"small")])
        assert landed == [True, False, False, True, True]
        assert [content.has(key) for key in keys] == landed
        content.end_read()
        assert held(content, keys[0]) == PAYLOADS[1]
        assert_no_stray_bytes(content)
        assert content.usage().used_bytes == 2 * BLOCK_BYTES + 5
        assert not content.land(keys[1], PAYLOADS[2])
        assert len(caplog.records) == 1

    assert os.waitpid(forked(run), 0)[1] == 0


def test_a_disk_that_is_full_in_the_middle_of_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = LmdbContent(made(tmp_path))
    content.set_capacity(64 << 20)
    assert content.land(ContentKey(FILE, 1), PAYLOADS[1])
    write, room = os.pwrite, BLOCK_BYTES // 2

    def full(fd: int, rest: bytes, offset: int) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(fd, rest[:room], offset)
        room -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StoreFull):
            content.land_all([(ContentKey(FILE, 2), PAYLOADS[2]), (ContentKey(9, 1), payload(9))])
    assert not content.has(ContentKey(FILE, 2))
    assert held(content, ContentKey(FILE, 1)) == PAYLOADS[1]
    assert_no_stray_bytes(content)
    assert content.land(ContentKey(FILE, 2), PAYLOADS[2])
    assert held(content, ContentKey(FILE, 2)) == PAYLOADS[2]
    content.close()


def test_blocks_are_left_to_the_source_where_they_could_not_be_freed(
    content: LmdbContent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(fd: int, block: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(block_files, "_punch", refuse)
    with caplog.at_level(logging.WARNING):
        assert content.land_all([(ContentKey(FILE, 1), PAYLOADS[1]), (ContentKey(8), b"small")]) == [False, True]
        assert not content.land(ContentKey(FILE, 2), PAYLOADS[2])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert held(content, ContentKey(8)) == b"small"
