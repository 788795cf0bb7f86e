"""Control files as a worker shows them, with a manager that only remembers what it was asked."""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from spiderfs.errors import (
    AccessDenied,
    Busy,
    ConfigError,
    InvalidArgument,
    IsADirectory,
    NoRoom,
    NotFound,
    ReadOnly,
    TryAgain,
)
from spiderfs.shared.layout import RunLayout
from spiderfs.sources.source import FIRST_INODE
from spiderfs.vfs import control_files as module
from spiderfs.vfs.control_files import (
    CONTROL_DIRECTORY,
    CONTROL_INODE,
    FILES,
    Control,
    ImmutableControl,
    is_control_handle,
)

OWNER, STRANGER = 1000, 1001


class Manager:
    """The other end of the channel."""

    def __init__(self) -> None:
        self.applied: list[tuple[str, bytes]] = []
        self.refuses: Exception | None = None
        self.renders = 0
        self.more: list[bytes] = []

    async def render(self, name: str, take: Callable[[bytes], None]) -> None:
        self.renders += 1
        take(f"{name} {self.renders}\n".encode())
        for piece in self.more:
            take(piece)
        if self.refuses:
            raise self.refuses

    async def apply(self, name: str, text: bytes) -> None:
        if self.refuses:
            raise self.refuses
        self.applied.append((name, text))


class Harness:
    def __init__(self, directory: Path) -> None:
        self.run = RunLayout(directory)
        self.manager = Manager()
        self.control = Control(self.manager, self.run, OWNER, worker=0)
        # Another worker of the same mount.
        self.other = Control(self.manager, self.run, OWNER, worker=1)

    async def open(self, name: bytes, flags: int = os.O_RDONLY, uid: int = OWNER) -> int:
        return await self.control.open(self.control.lookup(name).inode, flags, uid)

    def snapshots(self) -> list[str]:
        return [path.name for path in self.run.directory.iterdir() if not path.name.startswith("access.log")]


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def test_the_directory_is_found_by_name_and_lists_all_files(harness: Harness) -> None:
    control = harness.control
    found = control.getattr(CONTROL_INODE)
    assert found.inode == CONTROL_INODE
    assert stat.S_ISDIR(found.mode)
    listed = control.readdir()
    assert [name for name, _ in listed] == [file.name for file in FILES]
    for name, attributes in listed:
        assert control.lookup(name) == attributes
        assert control.owns(attributes.inode)
        assert attributes.inode < FIRST_INODE
        assert stat.S_ISREG(attributes.mode)
    assert len({attributes.inode for _, attributes in listed}) == len(FILES)
    for name in (b"nothing", CONTROL_DIRECTORY):
        with pytest.raises(NotFound):
            control.lookup(name)
    assert not control.owns(1)
    assert not control.owns(CONTROL_INODE + len(FILES) + 1)


async def test_a_reader_sees_one_state_whichever_worker_answers(harness: Harness) -> None:
    first, second = await harness.open(b"cache"), await harness.open(b"cache")
    assert first != second
    assert is_control_handle(first)
    assert not is_control_handle((1 << 63) - 1), "inodes are handles too"
    assert await harness.control.read(first, 0, 100) == b"cache 1\n"
    assert await harness.other.read(first, 6, 1) == b"1"
    assert await harness.other.read(first, 100, 10) == b""
    assert await harness.control.read(second, 0, 100) == b"cache 2\n"
    assert len(harness.snapshots()) == 2
    await harness.other.release(first)
    await harness.control.release(second)
    assert harness.snapshots() == []


async def test_without_room_for_a_snapshot_the_manager_is_asked_again(harness: Harness, tmp_path: Path) -> None:
    handle = await harness.open(b"cache")
    (name,) = harness.snapshots()
    (tmp_path / name).unlink()
    assert await harness.control.read(handle, 0, 100) == b"cache 2\n"
    await harness.control.release(handle)


async def test_a_long_list_is_kept_piece_by_piece(harness: Harness) -> None:
    harness.manager.more = [bytes([number]) * 300_000 for number in range(10)]
    handle = await harness.open(b"cache")
    assert await harness.other.read(handle, 8, 300_001) == bytes(300_000) + b"\1"
    assert await harness.control.read(handle, 8 + 2_999_999, 10) == b"\x09"
    await harness.control.release(handle)
    assert harness.snapshots() == []


async def test_without_room_for_it_a_long_list_is_an_error_and_a_short_one_is_not(harness: Harness) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        harness.manager.more = [bytes(100_000)]
        handle = await harness.open(b"cache")
        assert harness.snapshots() == []
        harness.manager.more = [b"what is said by now"]
        assert await harness.control.read(handle, 99_999, 100_000) == bytes(9), "one reader sees one state"
        harness.manager.more = [bytes(100_000)] * 11
        with pytest.raises(NoRoom):
            await harness.open(b"cache")
        assert harness.snapshots() == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_all_workers_snapshots_together_are_limited_in_number(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_SNAPSHOTS", 6)
    inode = harness.control.lookup(b"cache").inode
    workers = harness.control, harness.other
    handles = [await workers[number % 2].open(inode, os.O_RDONLY, OWNER) for number in range(6)]
    for worker in workers:
        for _ in range(3):
            with pytest.raises(TryAgain, match="6 of them are open: close some"):
                await worker.open(inode, os.O_RDONLY, OWNER)
    assert len(harness.snapshots()) == 6
    # The owner can still make the mount do something, and the log can be followed.
    assert await written(harness, b"evict", b"/\n", kept=6) == [b"/\n"]
    await harness.control.release(await harness.open(b"log"))
    await harness.other.release(handles[0])
    handles[0] = await harness.open(b"cache")
    for handle in handles:
        await harness.control.release(handle)
    assert [record.getMessage() for record in caplog.records] == [
        "a control file cannot be opened, for 6 of them are open: close some, and try again"
    ] * 2, "once for each worker"


@pytest.mark.parametrize("limit", ["MAX_SNAPSHOTS", "MAX_BYTES"])
async def test_strangers_cannot_keep_others_out(harness: Harness, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    text_bytes = len(b"cache 1\n")
    monkeypatch.setattr(module, limit, 16 * (text_bytes if limit == "MAX_BYTES" else 1))
    inode = harness.control.lookup(b"cache").inode

    async def taken_by(uid: int) -> int:
        for taken in range(16):
            try:
                await (harness.control, harness.other)[taken % 2].open(inode, os.O_RDONLY, uid)
            except (NoRoom, TryAgain):
                return taken
        return 16

    assert [await taken_by(STRANGER + number) for number in range(4)] == [4, 4, 4, 0]
    assert await taken_by(OWNER) == 4
    assert await taken_by(0) == 0


async def test_all_workers_snapshots_together_are_limited_in_bytes(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 3_000_000)
    monkeypatch.setattr(module, "_LOOK_AGAIN_BYTES", 100_000)
    inode = harness.control.lookup(b"cache").inode
    harness.manager.more = [bytes(100_000)] * 15
    first = await harness.open(b"cache")
    # With the first one this is too long, which is noticed while it is written.
    with pytest.raises(NoRoom, match="bytes of the cache's disk: close some"):
        await harness.other.open(inode, os.O_RDONLY, STRANGER)
    assert len(harness.snapshots()) == 1
    assert sum((tmp_path / name).stat().st_size for name in harness.snapshots()) < 3_000_000
    harness.manager.more = [bytes(100_000)] * 14
    second = await harness.open(b"cache")
    # This one ends before it is compared with the limit again, and reaches the limit.
    harness.manager.more = [bytes(99_980)]
    third = await harness.open(b"cache")
    with pytest.raises(NoRoom):
        await harness.open(b"cache")
    await harness.control.release(second)
    fourth = await harness.other.open(inode, os.O_RDONLY, STRANGER)
    for handle in (first, third, fourth):
        await harness.control.release(handle)
    assert harness.snapshots() == []
    assert len(caplog.records) == 2


async def test_a_manager_that_ends_in_the_middle_leaves_no_snapshot(harness: Harness) -> None:
    harness.manager.refuses = TryAgain("it has ended")
    with pytest.raises(TryAgain):
        await harness.open(b"cache")
    assert harness.snapshots() == []


class OnABrokenDisk(RunLayout):
    def unfinished_snapshots(self, worker: int) -> Iterable[Path]:
        raise OSError(errno.EBADMSG, os.strerror(errno.EBADMSG))


def test_a_worker_starts_where_unfinished_snapshots_cannot_be_listed(tmp_path: Path) -> None:
    module.Snapshots(OnABrokenDisk(tmp_path), OWNER, 0)


async def test_a_worker_that_is_killed_in_the_middle_leaves_its_snapshot_to_its_successor(harness: Harness) -> None:
    kept = await harness.open(b"cache")
    killed: list[module.Snapshot] = []
    for number, worker in enumerate((0, 0, 1)):
        # Not left, as by a process that was killed.
        snapshot = module.Snapshots(harness.run, OWNER, worker).begin((1 << 63) + number, OWNER).__enter__()
        snapshot.write(b"the beginning")
        killed.append(snapshot)
        assert len(harness.snapshots()) == (2 if number < 2 else 3)
    Control(harness.manager, harness.run, OWNER, worker=0)
    assert len(harness.snapshots()) == 2, "the other worker goes on with its own"
    Control(harness.manager, harness.run, OWNER, worker=1)
    assert await harness.control.read(kept, 0, 100) == b"cache 1\n"
    await harness.control.release(kept)
    assert harness.snapshots() == []
    for snapshot in killed:
        snapshot.__exit__(TryAgain)


async def test_the_directory_cannot_be_opened_as_a_file(harness: Harness) -> None:
    with pytest.raises(IsADirectory):
        await harness.control.open(CONTROL_INODE, os.O_RDONLY, OWNER)


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR])
async def test_what_can_only_be_read_cannot_be_opened_to_write(harness: Harness, flags: int) -> None:
    for file in FILES:
        if not file.mode & 0o200:
            with pytest.raises(ReadOnly):
                await harness.open(file.name, flags, uid=0)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY])
async def test_what_can_be_written_belongs_to_the_owner(harness: Harness, flags: int) -> None:
    for name in (b"config", b"warm", b"evict"):
        with pytest.raises(AccessDenied):
            await harness.open(name, flags, STRANGER)
        for uid in (OWNER, 0):
            await harness.control.release(await harness.open(name, flags, uid))
    await harness.control.release(await harness.open(b"cache", uid=STRANGER))


# -- writing


async def written(harness: Harness, name: bytes, *pieces: bytes, kept: int = 0) -> list[bytes]:
    """What the manager is asked to do when a program writes these pieces and closes the file; `kept` is of others."""
    harness.manager.applied.clear()
    handle = await harness.open(name, os.O_WRONLY)
    for piece in pieces:
        # Any worker may get any of them.
        assert await harness.other.write(handle, piece) == len(piece)
    await harness.control.release(handle)
    assert len(harness.snapshots()) == kept
    assert all(file == os.fsdecode(name) for file, _ in harness.manager.applied)
    return [text for _, text in harness.manager.applied]


async def test_a_command_is_acted_on_at_once(harness: Harness) -> None:
    handle = await harness.open(b"config", os.O_WRONLY)
    await harness.control.write(handle, b"policy=lru\n")
    assert harness.manager.applied == [("config", b"policy=lru\n")]
    await harness.control.write(handle, b"capacity=1GiB")
    assert harness.manager.applied[1:] == [("config", b"capacity=1GiB")], "echo -n"
    await harness.control.release(handle)
    assert len(harness.manager.applied) == 2


async def test_opening_and_closing_does_nothing(harness: Harness) -> None:
    assert await written(harness, b"warm") == []
    assert await written(harness, b"warm", b"") == []


@pytest.mark.parametrize("piece_bytes", [4096, 8192, 128 << 10])
async def test_a_long_list_is_never_torn_within_a_line(harness: Harness, piece_bytes: int) -> None:
    # 4096 is what find(1) and awk(1) write at a time, 8192 what Python does, 128 KiB what cp(1) and the kernel do.
    lines = [b"train/class-%03d/%0*d.png" % (number % 100, number % 60 + 1, number) for number in range(5000)]
    text = b"\n".join(lines) + b"\n"
    pieces = [text[start : start + piece_bytes] for start in range(0, len(text), piece_bytes)]
    for all_pieces, expected in ((pieces, lines), ([*pieces[:-1], pieces[-1].rstrip(b"\n")], lines)):
        applied = await written(harness, b"warm", *all_pieces)
        assert [line for part in applied for line in part.splitlines()] == expected
        assert len(applied) > 1, "the first files are warmed while the list is still being written"


async def test_a_line_longer_than_a_piece_waits_for_its_end(harness: Harness) -> None:
    assert await written(harness, b"warm", b"x" * 5000, b"y" * 5000) == [b"x" * 5000 + b"y" * 5000]
    assert await written(harness, b"warm", b"x" * 5000, b"y\n") == [b"x" * 5000 + b"y\n"]


async def test_a_line_without_end_is_refused_and_forgotten(harness: Harness) -> None:
    handle = await harness.open(b"warm", os.O_WRONLY)
    for _ in range(10):
        await harness.other.write(handle, bytes(100_000))
    with pytest.raises(InvalidArgument, match="write one path, glob or option a line"):
        await harness.other.write(handle, bytes(100_000))
    assert harness.snapshots() == []
    await harness.control.write(handle, b"train\n")
    await harness.control.release(handle)
    assert harness.manager.applied == [("warm", b"train\n")]


async def test_a_refusal_reaches_the_writer_and_is_not_repeated(harness: Harness) -> None:
    handle = await harness.open(b"config", os.O_WRONLY)
    harness.manager.refuses = ConfigError("workers cannot be changed while mounted")
    with pytest.raises(ConfigError, match="workers cannot"):
        await harness.control.write(handle, b"workers=4\n")
    harness.manager.refuses = None
    await harness.control.write(handle, b"policy=lru\n")
    await harness.control.release(handle)
    assert harness.manager.applied == [("config", b"policy=lru\n")]


async def test_a_refusal_at_the_end_leaves_nothing_behind(harness: Harness) -> None:
    handle = await harness.open(b"warm", os.O_WRONLY)
    await harness.control.write(handle, b"x" * 5000)
    harness.manager.refuses = ConfigError("no")
    with pytest.raises(ConfigError):
        await harness.control.release(handle)
    assert harness.snapshots() == []


# -- the log


async def test_the_log_is_live_and_asking_for_it_makes_it_wanted(harness: Harness, tmp_path: Path) -> None:
    wanted = RunLayout(tmp_path).access_log_wanted
    assert harness.control.lookup(b"log").size == 0
    assert wanted.exists()
    wanted.unlink()
    handle = await harness.open(b"log", uid=STRANGER)
    assert wanted.exists()
    assert harness.manager.renders == 1, "the manager writes down what it remembers"
    assert await harness.control.read(handle, 0, 100) == b""
    RunLayout(tmp_path).access_log.write_bytes(b"one\n")
    assert await harness.control.read(handle, 0, 100) == b"one\n"
    with open(RunLayout(tmp_path).access_log, "ab") as file:
        file.write(b"two\n")
    assert await harness.other.read(handle, 4, 100) == b"two\n"
    assert harness.control.lookup(b"log").size == 8
    await harness.control.release(handle)
    assert RunLayout(tmp_path).access_log.exists()
    assert harness.snapshots() == []


# -- where the kernel opens files without asking


class ImmutableHarness:
    def __init__(self, directory: Path) -> None:
        self.run = RunLayout(directory)
        self.manager = Manager()
        self.forgotten: list[tuple[int, bytes]] = []
        self.control, self.other = (
            ImmutableControl(self.manager, self.run, OWNER, worker, lambda *name: self.forgotten.append(name))
            for worker in range(2)
        )

    def inode(self, name: bytes) -> int:
        return self.control.lookup(name).inode

    def snapshots(self) -> int:
        return len(list(self.run.snapshots()))


@pytest.fixture
def immutable(tmp_path: Path) -> ImmutableHarness:
    return ImmutableHarness(tmp_path)


def test_each_look_up_gives_an_inode_of_its_own(immutable: ImmutableHarness) -> None:
    control = immutable.control
    assert control.getattr(CONTROL_INODE).inode == CONTROL_INODE
    inodes = {file.name: {control.lookup(file.name).inode for _ in range(50)} for file in FILES}
    assert all(len(found) > 40 for found in inodes.values())
    assert len(set().union(*inodes.values())) == sum(map(len, inodes.values())), "no two files have one"
    for file in FILES:
        for inode in inodes[file.name]:
            assert control.owns(inode)
            assert inode < FIRST_INODE
            assert control.getattr(inode).mode & 0o777 == file.mode
            assert control.first_inode(inode) == CONTROL_INODE + 1 + FILES.index(file)
            assert control.getattr(inode).size == 0
    assert not control.owns(FIRST_INODE)
    assert not control.owns(1 << 63 | FIRST_INODE)


async def test_the_first_reader_makes_the_text_and_every_worker_finds_it(immutable: ImmutableHarness) -> None:
    first, second = immutable.inode(b"cache"), immutable.inode(b"cache")
    assert immutable.manager.renders == 0, "a stat costs the manager nothing"
    assert (await immutable.control.begin_reading(first, OWNER)).size == len(b"cache 1\n")
    assert immutable.forgotten == [(CONTROL_INODE, b"cache")], "so that the kernel forgets the inode at the close"
    assert (await immutable.other.begin_reading(second, OWNER)).size == len(b"cache 2\n")
    for control in (immutable.control, immutable.other):
        assert await control.read_inode(first, 0, 100) == b"cache 1\n"
        assert await control.read_inode(second, 6, 1) == b"2"
        assert (await control.begin_reading(first, OWNER)).size == control.getattr(first).size == 8
    assert immutable.manager.renders == 2
    await immutable.other.forget(first)
    await immutable.control.forget(second)
    assert immutable.snapshots() == 0


async def test_without_a_manager_the_reader_gets_the_error(immutable: ImmutableHarness) -> None:
    immutable.manager.refuses = TryAgain("there is no manager")
    inode = immutable.inode(b"cache")
    with pytest.raises(Busy):
        await immutable.control.begin_reading(inode, OWNER)
    assert immutable.snapshots() == 0
    assert (await immutable.control.begin_reading(immutable.inode(b"log"), OWNER)).size == 0, (
        "the log is there without one"
    )


async def test_the_log_is_live_there_too(immutable: ImmutableHarness) -> None:
    inode = immutable.inode(b"log")
    assert (await immutable.control.begin_reading(inode, OWNER)).size == 0
    immutable.run.access_log.write_bytes(b"one\n")
    assert immutable.control.getattr(inode).size == 4
    assert await immutable.control.read_inode(inode, 0, 100) == b"one\n"
    assert immutable.run.access_log_wanted.exists()
    assert immutable.snapshots() == 0


async def test_what_is_written_is_acted_on_and_the_rest_when_it_is_closed(immutable: ImmutableHarness) -> None:
    inode = immutable.inode(b"warm")
    assert await immutable.control.write_inode(inode, b"a\nb\n") == 4
    assert immutable.manager.applied == [("warm", b"a\nb\n")], "as a short write is a whole command"
    assert immutable.forgotten == []
    line = b"x" * 5000
    assert await immutable.control.write_inode(inode, b"c\n" + line) == 5002
    assert immutable.manager.applied[1:] == [("warm", b"c")]
    assert immutable.forgotten == [(CONTROL_INODE, b"warm")]
    await immutable.other.forget(inode)
    assert immutable.manager.applied[2:] == [("warm", line)]
    assert immutable.snapshots() == 0


async def test_what_cannot_be_written_says_so(immutable: ImmutableHarness) -> None:
    with pytest.raises(ReadOnly, match="cache can only be read"):
        await immutable.control.write_inode(immutable.inode(b"cache"), b"x")
    with pytest.raises(ReadOnly):
        immutable.control.check_writable(immutable.inode(b"log"))
    immutable.control.check_writable(immutable.inode(b"config"))
    immutable.manager.refuses = ConfigError("no")
    with pytest.raises(ConfigError):
        await immutable.control.write_inode(immutable.inode(b"config"), b"x=y\n")


async def test_a_stranger_has_a_share_and_cannot_keep_the_owner_from_reading(
    immutable: ImmutableHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SNAPSHOTS", 8)
    for _ in range(2):
        await immutable.control.begin_reading(immutable.inode(b"cache"), STRANGER)
    with pytest.raises(Busy, match="2 of them are open"):
        await immutable.other.begin_reading(immutable.inode(b"cache"), STRANGER)
    await immutable.control.begin_reading(immutable.inode(b"cache"), OWNER)
