"""What the kernel is told unasked, in the bytes of linux/fuse.h."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from spiderfs.fuse import wire
from spiderfs.fuse.bindings import KernelBinding


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, KernelBinding]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(10)
    kernel = KernelBinding(theirs.detach())
    yield ours, kernel
    kernel.leave()
    ours.close()


def heard(ours: socket.socket) -> tuple[int, bytes]:
    """Number of the notice and what follows; the header says how long it is, and names no request."""
    message = ours.recv(1 << 16)
    length, notice, unique = wire.OUT_HEADER.unpack_from(message)
    assert (length, unique) == (len(message), 0)
    return notice, message[wire.OUT_HEADER.size :]


def test_a_push_names_inode_offset_and_size(ends: tuple[socket.socket, KernelBinding]) -> None:
    ours, kernel = ends
    kernel.push(77, b"content")
    number = (77).to_bytes(8, "little")
    assert heard(ours) == (4, number + bytes(8) + (7).to_bytes(4, "little") + bytes(4) + b"content")


def test_a_name_that_is_to_be_forgotten_ends_with_a_zero(ends: tuple[socket.socket, KernelBinding]) -> None:
    ours, kernel = ends
    kernel.forget_name(1, b"cat.txt")
    assert heard(ours) == (3, (1).to_bytes(8, "little") + (7).to_bytes(4, "little") + bytes(4) + b"cat.txt\0")


def test_attributes_are_doubted_without_the_pages(ends: tuple[socket.socket, KernelBinding]) -> None:
    ours, kernel = ends
    number = (1 << 63 | 77).to_bytes(8, "little")
    kernel.doubt(1 << 63 | 77)
    assert heard(ours) == (2, number + b"\xff" * 8 + bytes(8))
    kernel.drop_pages(1 << 63 | 77, 4096, 8192)
    assert heard(ours) == (2, number + (4096).to_bytes(8, "little") + (8192).to_bytes(8, "little"))


def test_all_names_are_forgotten_by_one_word(ends: tuple[socket.socket, KernelBinding]) -> None:
    ours, kernel = ends
    assert kernel.forget_names()
    assert heard(ours) == (8, b"")
    ours.close()
    assert not kernel.forget_names()


def test_a_resend_says_nothing_more(ends: tuple[socket.socket, KernelBinding]) -> None:
    ours, kernel = ends
    assert kernel.resend()
    assert heard(ours) == (7, b"")


def test_who_has_left_keeps_nothing_open(ends: tuple[socket.socket, KernelBinding]) -> None:
    ours, kernel = ends
    descriptor = kernel.descriptor
    kernel.leave()
    kernel.leave()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert ours.recv(1) == b""
