"""Where a training keeps partly augmented samples if its files lie in a mount: a section of the mount's cache.

A loader's worker puts a sample into a sealed memory file, and gives it to the mount over the hook's socket
(`spiderfs/daemon/training/connection/partial_connection.py`); it is read as readers around FUSE read samples
(`spiderfs.client`). A sample's key follows from the inode of its file, so a file that changes has other partial
samples, and from the store's name, which stands for the transforms and their seed.

What cannot be kept or read is made again. No error of the mount reaches the training, and no call waits for long.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from spiderfs.client import Client
from spiderfs.protocol import (
    Decoder,
    Error,
    Keep,
    Message,
    Ok,
    PartialSamples,
    ProtocolError,
    Room,
    Turn,
    Turns,
    encode,
)
from spiderfs.protocol.partials import partial_inode, sealed_file
from trainer_hook.connection.mounts import DEFAULT_PATIENCE, connect, find_mount, socket_finder
from trainer_hook.refurbishing.directory_store import Missing, pickled, unpickled
from trainer_hook.refurbishing.sampler import Draw

log = logging.getLogger("trainer_hook")

Answer = TypeVar("Answer")

_RECEIVE_BYTES = 1 << 16
# This many samples of a process may be on their way. The mount keeps one in a millisecond.
_AHEAD = 4
# A worker waits this long for the mount when that many are on their way; then it goes on without keeping the sample.
_WAIT_S = 1.0


class Unusable(Exception):
    """The mount cannot keep partial samples; the text says why."""


class Line:
    """One process's connection to the mount, through which it puts samples; raises Unusable where there is none."""

    def __init__(self, path: Path, begun: PartialSamples) -> None:
        self.pid = os.getpid()
        self._decoder = Decoder()
        self._answers: list[Message | ProtocolError] = []
        self._unanswered = 0
        self.refusals: list[str] = []
        try:
            self._stream = connect(path, DEFAULT_PATIENCE.connect_s)
        except OSError as exc:
            raise Unusable(str(exc)) from exc
        try:
            self._stream.sendall(encode(begun))
            answer = self._next(DEFAULT_PATIENCE.connect_s)
        except (OSError, ProtocolError) as exc:
            self.close()
            raise Unusable(str(exc)) from exc
        if not isinstance(answer, Room):
            self.close()
            raise Unusable(answer.text if isinstance(answer, Error) else f"it answered {answer}")
        self.room_bytes, self.most_bytes = answer.room_bytes, answer.most_bytes

    def close(self) -> None:
        self._stream.close()

    def put(self, payload: bytes, inodes: Sequence[int]) -> None:
        """Send a sample; raises OSError and ProtocolError if the connection is of no more use."""
        self.settle(_AHEAD - 1, _WAIT_S)
        if self._unanswered >= _AHEAD:
            raise TimeoutError("it does not answer")
        fd = sealed_file(payload)
        try:
            passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
            frame = encode(Keep(len(payload), np.array(inodes, np.uint64)))
            sent = self._stream.sendmsg([frame], passed)
            if sent < len(frame):
                self._stream.sendall(frame[sent:])
        finally:
            os.close(fd)
        self._unanswered += 1

    def settle(self, most: int, wait_s: float) -> None:
        """Take answers until at most `most` are left to come, or `wait_s` has passed."""
        deadline = time.monotonic() + wait_s
        while self._unanswered and (
            answer := self._next(max(0.0, deadline - time.monotonic()) if self._unanswered > most else 0.0)
        ):
            self._count_answer(answer)

    def turns(self, indices: Sequence[int], generation: int, wait_s: float) -> Turns:
        """Ask which generations to use next; raises OSError and ProtocolError if the connection is of no more use."""
        deadline = time.monotonic() + wait_s
        self._stream.sendall(encode(Turn(np.array([generation], np.uint64), np.array(indices, np.uint32))))
        while answer := self._next(max(0.0, deadline - time.monotonic())):
            if isinstance(answer, Turns):
                return answer
            if not self._unanswered:
                raise ProtocolError(answer.text if isinstance(answer, Error) else f"it answered {answer.TYPE}")
            self._count_answer(answer)
        raise TimeoutError("it does not answer")

    def _count_answer(self, answer: Message) -> None:
        self._unanswered -= 1
        if not isinstance(answer, Ok):
            self.refusals.append(answer.text if isinstance(answer, Error) else answer.TYPE)

    def _next(self, wait_s: float) -> Message | None:
        """The next answer; None if none comes within `wait_s`."""
        while not self._answers:
            poll = select.poll()
            poll.register(self._stream, select.POLLIN)
            if not poll.poll(1000 * wait_s):
                return None
            data = self._stream.recv(_RECEIVE_BYTES)
            if not data:
                raise ConnectionResetError("it closed the connection")
            self._answers += self._decoder.feed(data)
        answer = self._answers.pop(0)
        if isinstance(answer, ProtocolError):
            raise answer
        return answer


class MountStore:
    """Partly augmented samples of the files at `paths`, in the cache of the mount in which they lie.

    Usable in loader workers, by fork or as a copy: each process has a connection of its own.
    """

    def __init__(
        self, mount: Path, paths: Sequence[str], name: str, wanted_bytes: float, job: str | None = None
    ) -> None:
        """Raises Unusable if the mount cannot keep them; `room_bytes` is what it has room for.

        A sample may have `most_bytes`. `job` is that of the training if it shares them with others (`turns`).
        """
        self._mount, self._paths, self._name = mount, paths, name
        self._begun = PartialSamples("trainer_hook", name, wanted_bytes, job, None if job is None else len(paths))
        self._line: Line | None = None
        self._client: Client | None = None
        self._retry_at, self._pause_s = 0.0, DEFAULT_PATIENCE.first_pause_s
        self._has_said = False
        self._line = self._connected()
        self.room_bytes, self.most_bytes = self._line.room_bytes, self._line.most_bytes

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_line": None, "_client": None}

    def close(self) -> None:
        """End this process's connection; the room goes to others when the last process has ended its own."""
        if self._line is not None and self._line.pid == os.getpid():
            self._line.close()

    def connect(self) -> None:
        """Connect this process, as its first `put` would; raises Unusable."""
        self._connected()

    def get(self, index: int, generation: int) -> Any:
        """What was put there; raises Missing."""
        try:
            if self._client is None:
                self._client = Client(self._mount)
            payload = self._client.kept(self._inode(index, generation))
        except OSError as exc:
            raise Missing from exc
        if payload is None:
            raise Missing
        return unpickled(payload)

    def put(self, index: int, generation: int, sample: Any, replaces: int | None = None) -> None:
        """Keep a sample in place of its generation `replaces`, if there is room; raises as `pickled` does."""
        payload = pickled(sample)
        numbers = (generation,) if replaces is None else (generation, replaces)

        def send(line: Line) -> None:
            if len(payload) > line.most_bytes:
                self._say_once(f"{len(payload)} bytes, and sample_max_bytes={line.most_bytes}")
            else:
                line.put(payload, [self._inode(index, number) for number in numbers])

        self._ask(send)

    def turns(self, indices: Sequence[int], generation: int) -> list[Draw]:
        """The samples with the generations that the job is to use next.

        New ones, which it is to keep, are `generation`. Without an answer all are new, and none is kept.
        """
        answer = self._ask(lambda line: line.turns(indices, generation, _WAIT_S))
        if answer is None or not len(answer.generations) == len(answer.replaces) == len(indices):
            return [Draw(index, generation, keeps=False) for index in indices]
        numbers = zip(indices, answer.generations.tolist(), answer.replaces.tolist(), strict=True)
        return [Draw(index, number, number == generation, replaced or None) for index, number, replaced in numbers]

    def settle(self) -> None:
        """Wait a moment until the mount has answered all that this process has put."""
        if self._line is not None and self._line.pid == os.getpid():
            self._ask(lambda line: line.settle(0, _WAIT_S))

    def _ask(self, ask: Callable[[Line], Answer]) -> Answer | None:
        """What `ask` returns for this process's connection; None if there is none, or it is lost."""
        try:
            line = self._connected()
            answer = ask(line)
        except Unusable:
            return None
        except (OSError, ProtocolError) as exc:
            self._lose(exc)
            return None
        for text in line.refusals:
            self._say_once(text)
        line.refusals.clear()
        return answer

    def _inode(self, index: int, generation: int) -> int:
        return partial_inode(self._name, os.stat(self._paths[index]).st_ino, generation)

    def _connected(self) -> Line:
        if self._line is None or self._line.pid != os.getpid():
            # A forked worker leaves the connection of the process that it came from as it is.
            self._line = None
            if time.monotonic() < self._retry_at:
                raise Unusable
            try:
                self._line = Line(socket_finder(self._mount, None)(), self._begun)
            except (OSError, Unusable) as exc:
                self._lose(exc)
                raise Unusable(str(exc)) from exc
            self._pause_s = DEFAULT_PATIENCE.first_pause_s
        return self._line

    def _lose(self, exc: Exception) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
        self._say_once(str(exc))
        self._retry_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, DEFAULT_PATIENCE.longest_pause_s)

    def _say_once(self, text: str) -> None:
        if not self._has_said:
            log.warning("the mount %s cannot take a partly augmented sample (%s): it is made anew", self._mount, text)
        self._has_said = True


def mount_of(paths: Sequence[str]) -> Path:
    """The mount of this user's in which the first of these files lies; raises Unusable if there is none.

    What another user has written would be unpickled here, so that user's mount is not used.
    """
    mount = find_mount(os.path.dirname(paths[0]))
    if mount is None:
        raise Unusable("the files lie in no mount")
    with contextlib.suppress(OSError):
        owner = os.stat(socket_finder(mount, None)()).st_uid
        if owner == os.geteuid():
            return mount
        raise Unusable(f"the mount is that of user {owner}")
    raise Unusable("the mount does not answer")
