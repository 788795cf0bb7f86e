"""A trainer that publishes a plan over the socket, and the process that pushes for it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from mounting import Mounted, children, eventually

from spiderfs.protocol import Decoder, Hello, Message, Ok, Plan, Samples, encode


@contextlib.contextmanager
def planned(
    mount: Mounted, names: Sequence[str], before: Callable[[], None] = lambda: None, sends_batches: bool = False
) -> Iterator[Callable[[Message], None]]:
    """Be a trainer that says that it will read these files, in this order, and reads none; yields how it says more.

    `before` is called when the mount knows the list, and not yet the plan. `sends_batches`: it will send batches.
    """
    decoder = Decoder()
    with socket.socket(socket.AF_UNIX) as hook:
        hook.settimeout(30)

        def tell(message: Message) -> None:
            hook.sendall(encode(message))

        def hear() -> None:
            while data := hook.recv(1 << 16):
                if any(isinstance(answer, Ok) for answer in decoder.feed(data)):
                    return
            raise ConnectionError("the daemon has gone")

        hook.connect(os.fsdecode(mount.control("hook").read_bytes().rstrip(b"\n")))
        tell(Hello("test", "test"))
        hear()
        paths = b"".join(os.fsencode(name) + b"\0" for name in names)
        labels = np.zeros(len(names), np.int32)
        tell(Samples("train", "train", len(names), 0, labels, np.frombuffer(paths, np.uint8), sends_batches))
        hear()
        before()
        tell(Plan("train", 0, 0, True, np.arange(len(names), dtype=np.uint32)))
        yield tell


def pusher(mount: Mounted) -> int:
    """The pid of the process that pushes, once there is one."""
    return eventually(lambda: pusher_of(mount.manager()), what="a pusher")


def pusher_of(pid: int) -> int:
    """The pid of the process that pushes for this one, or 0."""
    for child in children(pid):
        # It may end in this moment.
        with contextlib.suppress(OSError):
            if b"push_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
    return 0
