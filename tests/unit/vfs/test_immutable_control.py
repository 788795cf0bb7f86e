"""Control files where the kernel opens files without asking, with a manager that only remembers what it was asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from answering import Manager

from spiderfs.errors import Busy, ConfigError, ReadOnly, TryAgain
from spiderfs.shared.layout import RunLayout
from spiderfs.sources.source import FIRST_INODE
from spiderfs.vfs import snapshots as module
from spiderfs.vfs.control_files import CONTROL_INODE, FILES, ImmutableControl

OWNER, STRANGER = 1000, 1001


class Harness:
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
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def test_each_look_up_gives_an_inode_of_its_own(harness: Harness) -> None:
    control = harness.control
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


async def test_the_first_reader_makes_the_text_and_every_worker_finds_it(harness: Harness) -> None:
    first, second = harness.inode(b"cache"), harness.inode(b"cache")
    assert harness.manager.renders == 0, "a stat costs the manager nothing"
    assert (await harness.control.begin_reading(first, OWNER)).size == len(b"cache 1\n")
    assert harness.forgotten == [(CONTROL_INODE, b"cache")], "so that the kernel forgets the inode at the close"
    assert (await harness.other.begin_reading(second, OWNER)).size == len(b"cache 2\n")
    for control in (harness.control, harness.other):
        assert await control.read_inode(first, 0, 100) == b"cache 1\n"
        assert await control.read_inode(second, 6, 1) == b"2"
        assert (await control.begin_reading(first, OWNER)).size == control.getattr(first).size == 8
    assert harness.manager.renders == 2
    await harness.other.forget(first)
    await harness.control.forget(second)
    assert harness.snapshots() == 0


async def test_without_a_manager_the_reader_gets_the_error(harness: Harness) -> None:
    harness.manager.refuses = TryAgain("there is no manager")
    inode = harness.inode(b"cache")
    with pytest.raises(Busy):
        await harness.control.begin_reading(inode, OWNER)
    assert harness.snapshots() == 0
    assert (await harness.control.begin_reading(harness.inode(b"log"), OWNER)).size == 0, "the log is there without one"


async def test_the_log_is_live(harness: Harness) -> None:
    inode = harness.inode(b"log")
    assert (await harness.control.begin_reading(inode, OWNER)).size == 0
    harness.run.access_log.write_bytes(b"one\n")
    assert harness.control.getattr(inode).size == 4
    assert await harness.control.read_inode(inode, 0, 100) == b"one\n"
    assert harness.run.access_log_wanted.exists()
    assert harness.snapshots() == 0


async def test_what_is_written_is_acted_on_and_the_rest_when_it_is_closed(harness: Harness) -> None:
    inode = harness.inode(b"warm")
    assert await harness.control.write_inode(inode, b"a\nb\n") == 4
    assert harness.manager.applied == [("warm", b"a\nb\n")], "as a short write is a whole command"
    assert harness.forgotten == []
    line = b"x" * 5000
    assert await harness.control.write_inode(inode, b"c\n" + line) == 5002
    assert harness.manager.applied[1:] == [("warm", b"c")]
    assert harness.forgotten == [(CONTROL_INODE, b"warm")]
    await harness.other.forget(inode)
    assert harness.manager.applied[2:] == [("warm", line)]
    assert harness.snapshots() == 0


async def test_what_cannot_be_written_says_so(harness: Harness) -> None:
    with pytest.raises(ReadOnly, match="cache can only be read"):
        await harness.control.write_inode(harness.inode(b"cache"), b"x")
    with pytest.raises(ReadOnly):
        harness.control.check_writable(harness.inode(b"log"))
    harness.control.check_writable(harness.inode(b"config"))
    harness.manager.refuses = ConfigError("no")
    with pytest.raises(ConfigError):
        await harness.control.write_inode(harness.inode(b"config"), b"x=y\n")


async def test_a_stranger_has_a_share_and_cannot_keep_the_owner_from_reading(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SNAPSHOTS", 8)
    for _ in range(2):
        await harness.control.begin_reading(harness.inode(b"cache"), STRANGER)
    with pytest.raises(Busy, match="2 of them are open"):
        await harness.other.begin_reading(harness.inode(b"cache"), STRANGER)
    await harness.control.begin_reading(harness.inode(b"cache"), OWNER)
