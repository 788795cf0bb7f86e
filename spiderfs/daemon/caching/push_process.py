"""The program of the process that pushes files ahead: it has the kernel read them, so that readers need not wait.

It opens a file by its path, asks for its pages with posix_fadvise(POSIX_FADV_WILLNEED), which waits for no answer, and
closes it. It is run with this file as the program (`python -I -S`), so it imports the standard library alone, and holds
nothing of the daemon's: no descriptor of /dev/fuse, no store, no lock. So no one else waits for what it waits for. The
kernel ends it with the thread that started it.

Its standard input is one end of a pair of SOCK_SEQPACKET sockets. First each thread sends a `HELLO`. Then each message
that comes holds some orders for one of the threads, whichever is free: a number and a path each (`packed_order`). An
order is answered with its number and an outcome (`ANSWER`), unless that is ASKED. An order without a path asks whether
a thread is free, which answers HERE. The process ends with the socket.

An open file keeps the mount in use. So files are open for some 50 us, and nothing is read through them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator

HELLO = struct.Struct("<I")
_ORDER = struct.Struct("<QH")
ANSWER = struct.Struct("<QI")
MOST_BYTES = 32768
# Outcomes: other numbers are those of errno. The process says nothing of ASKED, since the mount sees the READ.
ASKED, IN_MEMORY, HERE = 0, 1 << 16, 1 << 17

_PR_SET_PDEATHSIG = 1
_SYS_CACHESTAT = 451  # on all architectures; Linux 6.5
# The kernel's limit on what one call asks for, where no one has widened it.
_USUAL_READ_AHEAD_KIB = 128
# A thread whose order has failed after this time gives the same answer to the other orders of its message.
_HELD_UP_S = 1.0
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

_libc = ctypes.CDLL(None, use_errno=True)


def packed_order(number: int, path: bytes) -> bytes:
    return _ORDER.pack(number, len(path)) + path


def orders_of(message: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(message):
        number, length = _ORDER.unpack_from(message, at)
        at += _ORDER.size + length
        yield number, message[at - length : at]


class Push:
    """What one process pushes into one mount, which is on the device with this number."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._piece_bytes = 1024 * _read_ahead_kib(device)

    def push(self, path: bytes) -> int:
        """Have the kernel read a file unless it has it; returns the outcome, IN_MEMORY if it has the beginning.

        EXDEV: the file is not in the mount, for that is gone or something lies over it. ENOSYS, EPERM: the kernel does
        not say what it has in memory.
        """
        try:
            file = os.open(path, _OPEN)
        except OSError as exc:
            return exc.errno or errno.EIO
        try:
            found = os.fstat(file)
            if found.st_dev != self._device:
                return errno.EXDEV
            pages = _pages_in_memory(file)
            if pages * _PAGE_BYTES >= found.st_size:
                return IN_MEMORY
            # The mount reports the READ of the beginning, and no other.
            unreported = pages > 0 and _pages_in_memory(file, 1) > 0
            for offset in range(0, found.st_size, self._piece_bytes):
                os.posix_fadvise(file, offset, self._piece_bytes, os.POSIX_FADV_WILLNEED)
            return IN_MEMORY if unreported else ASKED
        except OSError as exc:
            return exc.errno or errno.EIO
        finally:
            os.close(file)


def _pages_in_memory(file: int, length: int = 0) -> int:
    """How many pages of the first bytes, or of all, the kernel has or is reading (cachestat(2)); raises OSError."""
    beginning = (ctypes.c_uint64 * 2)(0, length)
    counts = (ctypes.c_uint64 * 5)()
    if _libc.syscall(_SYS_CACHESTAT, file, beginning, counts, 0) != 0:
        raise OSError(ctypes.get_errno(), "cachestat")
    return counts[0]


def _read_ahead_kib(device: int) -> int:
    try:
        with open(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb") as setting:
            return int(setting.read()) or _USUAL_READ_AHEAD_KIB
    except (OSError, ValueError):
        return _USUAL_READ_AHEAD_KIB


def outcomes(message: bytes, push: Push) -> Iterator[tuple[int, int]]:
    """Carry out the orders of a message; gives the number and the outcome of each."""
    held_up = False
    outcome = ASKED
    for number, path in orders_of(message):
        # Where the source hangs, the others would each wait as long as the first.
        if not held_up:
            begin_s = time.monotonic()
            outcome = push.push(path) if path else HERE
            failed = outcome not in (ASKED, IN_MEMORY, HERE)
            held_up = failed and time.monotonic() - begin_s > _HELD_UP_S
        yield number, outcome


def _serve(orders: socket.socket, push: Push) -> None:
    try:
        orders.send(HELLO.pack(threading.get_native_id()))
        while message := orders.recv(MOST_BYTES):
            for number, outcome in outcomes(message, push):
                if outcome != ASKED:
                    orders.send(ANSWER.pack(number, outcome))
    finally:
        # Other threads may wait for the mount; at the end of the process they are killed.
        os._exit(0)


def main() -> None:
    """Push for the parent process; the arguments are its number, that of the mount's device, and how many threads."""
    parent, device, threads = map(int, sys.argv[1:])
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.chdir("/")
    orders = socket.socket(fileno=0)
    push = Push(device)
    for _ in range(threads):
        threading.Thread(target=_serve, args=(orders, push), daemon=True).start()
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
