"""The program that pushes files ahead, without a mount: any file system can be asked for pages."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from reading import cached_pages

from spiderfs.daemon.caching import push_process
from spiderfs.daemon.caching.push_process import (
    ANSWER,
    ASKED,
    HELLO,
    HERE,
    IN_MEMORY,
    MOST_BYTES,
    Push,
    outcomes,
    packed_order,
)

THREADS = 3
PATIENCE_S = 30


class Started:
    """The process, whose parent this one is."""

    def __init__(self, device: int) -> None:
        self.socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(PATIENCE_S)
        numbers = map(str, (os.getpid(), device, THREADS))
        program = (sys.executable, "-I", "-S", push_process.__file__)
        with its:
            self.process = subprocess.Popen([*program, *numbers], stdin=its.fileno(), stdout=subprocess.DEVNULL)

    def order(self, number: int, path: Path) -> None:
        self.socket.send(packed_order(number, os.fsencode(path)))

    def answer(self) -> tuple[int, int]:
        number, outcome = ANSWER.unpack(self.socket.recv(MOST_BYTES))
        return number, outcome

    def end(self) -> int:
        self.socket.close()
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    started = Started(tmp_path.stat().st_dev)
    try:
        yield started
    finally:
        started.process.kill()
        started.end()


def test_each_thread_says_its_number_and_the_process_ends_with_its_socket(started: Started) -> None:
    numbers = {HELLO.unpack(started.socket.recv(MOST_BYTES))[0] for _ in range(THREADS)}
    assert len(numbers) == THREADS
    assert numbers <= {int(name) for name in os.listdir(f"/proc/{started.process.pid}/task")}
    assert started.end() == 0


def test_it_says_what_became_of_each_order(started: Started, tmp_path: Path) -> None:
    for _ in range(THREADS):
        started.socket.recv(MOST_BYTES)
    (tmp_path / "file").write_bytes(bytes(10_000))
    (tmp_path / "link").symlink_to("file")
    remote = Path("/proc/self/status")
    for number, path in enumerate((tmp_path / "file", tmp_path / "link", tmp_path / "none", remote)):
        started.order(number, path)
    answers = dict(started.answer() for _ in range(4))
    assert answers == {0: IN_MEMORY, 1: errno.ELOOP, 2: errno.ENOENT, 3: errno.EXDEV}


def test_a_free_thread_says_that_it_is_there(started: Started) -> None:
    for _ in range(THREADS):
        started.socket.recv(MOST_BYTES)
    started.socket.send(packed_order(7, b""))
    assert started.answer() == (7, HERE)


def test_it_holds_its_socket_and_nothing_else(started: Started) -> None:
    started.socket.recv(MOST_BYTES)
    held = {os.readlink(f"/proc/{started.process.pid}/fd/{fd}") for fd in (0, 1)}
    assert {name.split(":")[0] for name in held} == {"socket", "/dev/null"}
    assert set(os.listdir(f"/proc/{started.process.pid}/fd")) == {"0", "1", "2"}


@pytest.mark.parametrize(
    ("took_s", "left"), [(0.0, []), (2.0, [(3, errno.EIO), (4, errno.EIO)])], ids=["at once", "after a while"]
)
def test_an_order_that_hung_and_failed_holds_up_no_other_of_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, took_s: float, left: list[tuple[int, int]]
) -> None:
    now_s = 0.0
    monkeypatch.setattr(push_process.time, "monotonic", lambda: now_s)
    push = Push(tmp_path.stat().st_dev)

    def opened(path: bytes) -> int:
        nonlocal now_s
        now_s += took_s
        return errno.EIO if path == b"hangs" else IN_MEMORY

    monkeypatch.setattr(push, "push", opened)
    message = b"".join(packed_order(*order) for order in enumerate([b"well", b"hangs", b"well", b"well"], start=1))
    assert [*outcomes(message, push)] == [(1, IN_MEMORY), (2, errno.EIO), *(left or [(3, IN_MEMORY), (4, IN_MEMORY)])]


def test_it_ends_at_once_where_its_parent_has_ended(tmp_path: Path) -> None:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, its:
        not_the_parent = [str(os.getppid()), "0", "1"]
        program = (sys.executable, "-I", "-S", push_process.__file__)
        assert subprocess.run([*program, *not_the_parent], stdin=its.fileno(), timeout=PATIENCE_S).returncode == 0


def test_pages_that_are_not_in_memory_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    push = Push(path.stat().st_dev)
    assert push.push(os.fsencode(path)) == IN_MEMORY
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_pages(file.fileno()):
            pytest.skip("this file system keeps what it was told to forget")
        assert push.push(os.fsencode(path)) == ASKED
        assert cached_pages(file.fileno()) == (1 << 20) // os.sysconf("SC_PAGESIZE")


def test_what_the_mount_will_not_tell_of_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    page = os.sysconf("SC_PAGESIZE")
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file.fileno(), 1, 0)
        if not 0 < cached_pages(file.fileno()) < (1 << 20) // page:
            pytest.skip("this file system does not keep the first page alone")
        # The READ of the beginning, by which orders are known to be done, does not come.
        assert Push(path.stat().st_dev).push(os.fsencode(path)) == IN_MEMORY
        assert cached_pages(file.fileno()) == (1 << 20) // page
