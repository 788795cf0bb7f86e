"""A trainer that publishes a plan over the socket, and the process that pushes for it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from mounting import Mounted, descendants, eventually

from spiderfs.protocol import Decoder, Hello, Message, Ok, Plan, Progress, Samples, encode


class Trainer:
    """A process that reads for itself: this one, or the one that `hook` belongs to."""

    def __init__(
        self,
        mount: Mounted,
        names: Sequence[str],
        sends_batches: bool = False,
        hello: Hello = Hello("test", "test"),  # noqa: B008
        classes: int = 4,
    ) -> None:
        """`sends_batches`: it says that it will send batches."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(60)
        self._socket.connect(os.fsdecode(mount.control("hook").read_bytes().rstrip(b"\n")))
        self._decoder = Decoder()
        self.ask(hello, Ok)
        paths = b"".join(os.fsencode(name) + b"\0" for name in names)
        count = len(names)
        labels = np.arange(count, dtype=np.int32) % classes
        self.ask(Samples("train", "train", count, 0, labels, np.frombuffer(paths, np.uint8), sends_batches), Ok)

    def tell(self, message: Message) -> None:
        self._socket.sendall(encode(message))

    def ask(self, message: Message, kind: type[Any]) -> Any:
        """Send a message, and wait for an answer of this kind."""
        self.tell(message)
        while True:
            data = self._socket.recv(1 << 16)
            assert data, "the daemon has gone"
            for answer in self._decoder.feed(data):
                if isinstance(answer, kind):
                    return answer

    def plan(self, order: Sequence[int], epoch: int = 0, position: int = 0, begun: bool = True) -> None:
        self.tell(Plan("train", epoch, position, begun, np.array(order, np.uint32)))
        if begun:
            self._epoch, self._taken = epoch, position

    def takes(self, files: int) -> None:
        """Read some files of the plan, of which all before were taken."""
        self.tell(Progress("train", self._epoch, self._taken + files, self._taken))
        self._taken += files

    def took(self) -> None:
        """All that was read was taken."""
        self.tell(Progress("train", self._epoch, self._taken, self._taken))

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def planned(
    mount: Mounted, names: Sequence[str], before: Callable[[], None] = lambda: None, sends_batches: bool = False
) -> Iterator[Callable[[Message], None]]:
    """Be a trainer that says that it will read these files, in this order, and reads none; yields how it says more.

    `before` is called when the mount knows the list, and not yet the plan.
    """
    with contextlib.closing(Trainer(mount, names, sends_batches)) as trainer:
        before()
        trainer.plan(range(len(names)))
        yield trainer.tell


def pusher(mount: Mounted) -> int:
    """The pid of the process that pushes, once there is one."""
    return eventually(lambda: pusher_of(mount.manager()), what="a pusher")


def pusher_of(pid: int) -> int:
    """The pid of the process that pushes for this one, or 0."""
    return next(iter(descendants(pid, b"push_process")), 0)
