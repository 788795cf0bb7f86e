"""Loaders that put partial samples into the cache over real Unix sockets, and what is refused of them."""

from __future__ import annotations

import array
import fcntl
import os
import resource
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import trio
from mounting import eventually

from benchmarks.fakes import MemoryContent, RecordingSink
from spiderfs.core.partials import PARTIALS
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.training.connection.hook_server import HookServer, listen
from spiderfs.daemon.training.connection.partial_connection import PartialKeeper
from spiderfs.metrics import COUNTERS, SharedCounters
from spiderfs.protocol import (
    Decoder,
    EpochEnd,
    Error,
    Goodbye,
    Hello,
    Keep,
    Message,
    Ok,
    PartialSamples,
    Room,
    Turn,
    Turns,
    encode,
)
from spiderfs.protocol.partials import FIRST_PARTIAL, sealed_file
from spiderfs.store.store import ContentKey

PATIENCE_S = 60.0
CAPACITY, MOST = 20_000, 4_000
FIRST = FIRST_PARTIAL + 7
# Samples that jobs share.
SHARED = 10
OPENED: list[socket.socket] = []


def passing(*descriptors: int) -> list[tuple[int, int, array.array[int]]]:
    """What `sendmsg` takes to pass these along."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []


class Loader:
    def __init__(self, path: Path, wanted_bytes: float = 1e9, store: str = "store", job: str | None = None) -> None:
        self.stream = socket.socket(socket.AF_UNIX)
        OPENED.append(self.stream)
        self.stream.settimeout(PATIENCE_S)
        self.stream.connect(str(path))
        self._decoder, self._waiting = Decoder(), []
        self.stream.sendall(encode(PartialSamples("test", store, wanted_bytes, job, SHARED if job else None)))

    def answer(self) -> Message | None:
        while not self._waiting:
            data = self.stream.recv(1 << 16)
            if not data:
                return None
            self._waiting += self._decoder.feed(data)
        return self._waiting.pop(0)

    def send(self, message: Message, descriptors: Sequence[int]) -> None:
        self.stream.sendmsg([encode(message)], passing(*descriptors))

    def keep(self, payload: bytes, *inodes: int) -> Message | None:
        fd = sealed_file(payload)
        try:
            self.send(keep(len(payload), *inodes), [fd])
        finally:
            os.close(fd)
        return self.answer()

    def turn(self, generation: int, *indices: int) -> list[tuple[int, int]]:
        self.send(turn(generation, *indices), [])
        answer = self.answer()
        assert isinstance(answer, Turns), answer
        return list(zip(answer.generations.tolist(), answer.replaces.tolist(), strict=True))

    def refused(self, words: str) -> None:
        answer = self.answer()
        assert isinstance(answer, Error), answer
        assert words in answer.text


def keep(size: int, *inodes: int) -> Keep:
    return Keep(size, np.array(inodes or [FIRST], np.uint64))


def turn(generation: int, *indices: int) -> Turn:
    return Turn(np.array([generation], np.uint64), np.array(indices, np.uint32))


class Daemon:
    """A hook server in this process, run by trio in a thread, over a store in memory."""

    def __init__(self, path: Path, knows_partials: bool = True) -> None:
        self.path = path
        self.content = MemoryContent()
        self.cache = CacheControl(self.content, "lru", 0.5, SharedCounters(1).row(0))
        self.cache.restore(CAPACITY, None)
        self.counted: Counter[str] = Counter()
        self.keeper = keeper = PartialKeeper(self.content, self.cache, MOST) if knows_partials else None
        self._server = HookServer(RecordingSink(), self._count, partials=keeper)

    def _count(self, name: str, amount: int) -> None:
        assert name in {definition.name for definition in COUNTERS}
        self.counted[name] += amount

    def kept(self) -> dict[int, int]:
        return {member.key.inode: member.size for member in self.content.members() if member.section == PARTIALS}

    def loader(self, wanted_bytes: float = 1e9, store: str = "store", job: str | None = None) -> Loader:
        loader = Loader(self.path, wanted_bytes, store, job)
        answer = loader.answer()
        assert isinstance(answer, Room), answer
        loader.room_bytes = answer.room_bytes  # type: ignore[attr-defined]
        assert answer.most_bytes == MOST
        return loader


@contextmanager
def running(daemon: Daemon) -> Iterator[Daemon]:
    began = threading.Event()
    box: list[tuple[trio.lowlevel.TrioToken, trio.CancelScope]] = []

    async def main() -> None:
        with trio.CancelScope() as scope:
            box.append((trio.lowlevel.current_trio_token(), scope))
            listener = listen(daemon.path)
            began.set()
            await daemon._server.serve(listener, daemon.path)

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    try:
        assert began.wait(PATIENCE_S)
        yield daemon
    finally:
        trio.from_thread.run_sync(box[0][1].cancel, trio_token=box[0][0])
        thread.join(PATIENCE_S)
        while OPENED:
            OPENED.pop().close()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    # tmp_path may be too long for a socket.
    with tempfile.TemporaryDirectory() as directory, running(Daemon(Path(directory) / "hook.sock")) as daemon:
        yield daemon


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_samples_leave_by_age_and_the_budget_holds(daemon: Daemon):
    loader = daemon.loader()
    for number in range(20):
        assert isinstance(loader.keep(bytes(1000), FIRST + number), Ok)
        assert daemon.content.usage().used_bytes <= CAPACITY
    assert list(daemon.kept()) == [FIRST + number for number in range(10, 20)]
    assert daemon.cache.status()["sections"][PARTIALS]["bytes"] == 10_000


def test_a_sample_that_is_pushed_out_of_landing_lands_again(daemon: Daemon, monkeypatch: pytest.MonkeyPatch):
    land, pushed = daemon.content.land, []

    def land_and_lose(key: ContentKey, payload: bytes) -> bool:
        landed = land(key, payload)
        if not pushed:
            pushed.append(key)
            daemon.content.apply([key], [])
        return landed

    monkeypatch.setattr(daemon.content, "land", land_and_lose)
    assert isinstance(daemon.loader().keep(bytes(900), FIRST), Ok)
    assert daemon.kept() == {FIRST: 900}
    assert pushed == [ContentKey(FIRST)]


def test_loaders_get_the_room_that_others_leave(daemon: Daemon):
    first = daemon.loader(7_000, "one")
    also = daemon.loader(7_000, "one")
    assert (first.room_bytes, also.room_bytes) == (7_000, 7_000)
    assert daemon.loader(7_000, "two").room_bytes == 3_000
    also.stream.close()
    assert daemon.loader(7_000, "three").room_bytes == 0
    first.stream.close()

    eventually(lambda: daemon.loader(7_000, "four").room_bytes == 7_000)


def end_of_a_pipe() -> int:
    read, write = os.pipe()
    os.close(write)
    return read


def memory_file(*seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(fd, bytes(100))
    for seal in seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seal)
    return fd


# Descriptors that are no sealed memory file of 100 bytes, and what the daemon says of them.
BAD_DESCRIPTORS = {
    "none": (list, "0 descriptors"),
    "two": (lambda: [sealed_file(bytes(100)), sealed_file(bytes(100))], "2 descriptors"),
    "pipe": (lambda: [end_of_a_pipe()], "no memory file"),
    "device": (lambda: [os.open("/dev/zero", os.O_RDONLY)], "no memory file"),
    "directory": (lambda: [os.open("/", os.O_RDONLY | os.O_DIRECTORY)], "no memory file"),
    "path": (lambda: [os.open("/dev/zero", os.O_PATH)], "no memory file"),
    "socket": (lambda: [socket.socket(socket.AF_UNIX).detach()], "no memory file"),
    "short": (lambda: [sealed_file(bytes(99))], "99 bytes, not 100"),
    "long": (lambda: [sealed_file(bytes(101))], "101 bytes, not 100"),
    "unsealed": (lambda: [memory_file()], "not sealed"),
    "half sealed": (lambda: [memory_file(fcntl.F_SEAL_WRITE)], "not sealed"),
}


@pytest.mark.parametrize("kind", BAD_DESCRIPTORS)
def test_bad_descriptors_are_refused_with_a_reason_and_closed(daemon: Daemon, kind: str):
    loader = daemon.loader()
    make, words = BAD_DESCRIPTORS[kind]
    descriptors = make()
    before = open_descriptors()
    loader.send(keep(100), descriptors)
    loader.refused(words)
    assert open_descriptors() == before
    for fd in descriptors:
        os.close(fd)
    # The connection goes on.
    assert isinstance(loader.keep(bytes(100), FIRST), Ok)
    assert daemon.counted["hook_malformed"] == 1


def test_bad_sizes_and_inodes_are_refused(daemon: Daemon):
    loader = daemon.loader()
    for payload, inode, words in (
        (bytes(MOST + 1), FIRST, f"1 to {MOST}"),
        (b"", FIRST, f"1 to {MOST}"),
        (bytes(10), 5, "inode of a sample"),
    ):
        answer = loader.keep(payload, inode)
        assert isinstance(answer, Error)
        assert words in answer.text
    assert daemon.kept() == {}


def test_a_samples_bytes_cannot_be_replaced(daemon: Daemon):
    daemon.content.land(ContentKey(5), b"sample")
    loader = daemon.loader()
    assert isinstance(loader.keep(b"forged", 5), Error)
    assert isinstance(loader.keep(b"partial", FIRST, 5), Ok)
    assert daemon.content.read(ContentKey(5)) == b"sample"


def test_thousands_of_descriptors_harm_no_one(daemon: Daemon):
    before = open_descriptors()
    fd = os.open("/dev/null", os.O_RDONLY)
    loader = daemon.loader()
    for _ in range(5):
        loader.send(keep(100), [fd] * 250)
        loader.refused("descriptors")
    # With a frame that does not end, so that they belong to it.
    frame = encode(keep(100))
    for byte in frame[:2]:
        loader.stream.sendmsg([bytes([byte])], passing(*[fd] * 250))
    loader.refused("more descriptors")
    assert loader.answer() is None
    # To a trainer's connection, in which none are expected, too.
    trainer = socket.socket(socket.AF_UNIX)
    trainer.connect(str(daemon.path))
    trainer.sendmsg([encode(Hello("test", "test"))], passing(*[fd] * 250))
    assert Decoder().feed(trainer.recv(1000))[0].TYPE == "ok"
    assert isinstance(daemon.loader().keep(bytes(10), FIRST), Ok)
    os.close(fd)
    trainer.close()
    loader.stream.close()
    eventually(lambda: open_descriptors() <= before + 2)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > before


def test_a_stream_that_cannot_be_read_ends_its_connection_and_mistakes_end_none(daemon: Daemon):
    loader, other = daemon.loader(), daemon.loader()
    for _ in range(200):
        loader.send(EpochEnd(0), [])
        loader.refused("not for a loader")
    assert isinstance(loader.keep(bytes(10), FIRST), Ok)
    loader.stream.sendall(b"nonsense" * 10)
    loader.refused("not a frame")
    assert loader.answer() is None
    assert isinstance(other.keep(bytes(10), FIRST), Ok)


def test_a_loader_that_dies_between_leaves_nothing_behind(daemon: Daemon):
    loader = daemon.loader(10_000, "dies")
    before = open_descriptors()
    fd = sealed_file(bytes(100))
    # Half of a frame, with its descriptor.
    frame = encode(keep(100))
    loader.stream.sendmsg([frame[:20]], passing(fd))
    os.close(fd)
    loader.stream.close()
    eventually(lambda: open_descriptors() < before)
    eventually(lambda: daemon.loader(10_000, "next").room_bytes == 10_000)
    assert daemon.kept() == {}


def test_a_loader_that_leaves_is_let_go(daemon: Daemon):
    loader = daemon.loader(10_000, "polite")
    loader.send(Goodbye(), [])
    assert loader.answer() is None
    loader = daemon.loader(10_000, "hasty")
    fd = sealed_file(bytes(100))
    loader.send(keep(100), [fd])
    os.close(fd)
    eventually(lambda: daemon.counted["partials_kept"] == 1)
    # The answer is not read.
    loader.stream.close()
    eventually(lambda: daemon.loader(10_000, "next").room_bytes == 10_000)
    assert not daemon.counted["internal_errors"]


def test_a_daemon_that_knows_nothing_of_partial_samples_says_so():
    with tempfile.TemporaryDirectory() as directory, running(Daemon(Path(directory) / "s", False)) as daemon:
        answer = Loader(daemon.path).answer()
        assert isinstance(answer, Error)
        assert answer.code == "unknown"


def test_jobs_that_share_samples_know_which_generation_is_next(daemon: Daemon):
    one, also_one, two = (daemon.loader(job=job) for job in ("one", "one", "two"))
    assert one.turn(5, 0, 9) == [(5, 0), (5, 0)]
    assert isinstance(one.keep(bytes(100), FIRST), Ok)
    assert two.turn(6, 9, 8) == [(5, 0), (6, 0)]
    assert also_one.turn(7, 9) == [(7, 5)]
    # A job has gone with its last process.
    also_one.stream.close()
    assert one.turn(8, 9) == [(8, 7)]
    other = daemon.loader(store="other", job="one")
    assert other.turn(5, 9) == [(5, 0)]
    for loader in (one, two):
        loader.stream.close()
    eventually(lambda: "store" not in daemon.keeper._turns)
    assert daemon.loader(job="three").turn(9, 8) == [(9, 0)]


def test_turns_that_make_no_sense_are_refused(daemon: Daemon):
    alone, shares = daemon.loader(), daemon.loader(store="shared", job="one")
    alone.send(turn(1, 0), [])
    alone.refused("named its job")
    shares.send(turn(1, 0, SHARED), [])
    shares.refused(f"sample {SHARED} of {SHARED}")
    fd = os.open("/dev/null", os.O_RDONLY)
    shares.send(turn(1, 0), [fd])
    shares.refused("not for a loader")
    os.close(fd)
    assert shares.turn(1, 0) == [(1, 0)]
    # As many jobs as there is place for, and one of another list.
    others = [daemon.loader(store="shared", job=str(number)) for number in range(63)]
    Loader(daemon.path, 1, "shared", "another").refused("64 jobs share these")
    other = socket.socket(socket.AF_UNIX)
    OPENED.append(other)
    other.connect(str(daemon.path))
    other.sendall(encode(PartialSamples("test", "shared", 1, "one", SHARED + 1)))
    assert f"{SHARED} of the other jobs" in Decoder().feed(other.recv(1000))[0].text  # type: ignore[union-attr]
    assert others[0].turn(2, 0) == [(1, 0)]
    assert daemon.counted["hook_malformed"] == 5
