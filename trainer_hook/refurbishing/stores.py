"""Where a training run keeps partly augmented samples: in a directory in memory, or in a section of a mount's cache.

A sample that cannot be written or read is made again. No error of a store reaches the training run.

**Without a mount** (`DirectoryStore`) each sample is one file, which is replaced as a whole by its next generation. So
a reader finds one generation or another, and takes only the one that it wants.

**With files in a mount** (`MountStore`) a loader's worker writes a sample to a sealed memory file, and sends it to the
mount over the hook's socket (`spiderfs/daemon/training/connection/partial_connection.py`); it is read as direct readers
read samples (`spiderfs.client`). A sample's key follows from the inode of its file, so a changed file has other partial
samples, and from the store's name, which stands for the transforms and their seed. No call waits for long.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import io
import logging
import math
import os
import pickle
import select
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from spiderfs import protocol
from spiderfs.client import Client
from spiderfs.protocol import ProtocolError
from spiderfs.protocol.partials import partial_inode, sealed_file
from spiderfs.protocol.requests import connected
from trainer_hook.connection.client import DEFAULT_PATIENCE, find_mount, socket_finder
from trainer_hook.refurbishing.sampler import RefurbishedDraw

log = logging.getLogger("trainer_hook")

# What a file begins with: the sample's generation, and the name of what made it.
_HEAD = struct.Struct("<q16s")
# Where Linux has files in memory (shm_overview(7)).
_MEMORY = Path("/dev/shm")
_PREFIX = "spiderfs-partials-"


class Missing(Exception):
    """The store does not have this generation of a sample."""


class PartialStore:
    """Partly augmented samples in `directory`; usable in loader workers, by fork or as a copy.

    A directory that goes with a training is locked by it and its workers (flock(2)). One that no one has locked was
    left by a training that was killed, and the next training removes it.
    """

    def __init__(self, directory: Path, owner: int | None = None, name: str = "") -> None:
        """The directory is removed by `close` in the process `owner`, if there is one.

        `name`, of up to 32 hexadecimal digits, stands for what makes the samples: those of other names are not served.
        """
        self.directory = directory
        self._owner = owner
        self._name = bytes.fromhex(name).ljust(16, b"\0")
        self._lock = None if owner is None else _locked(directory)
        self._failed = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lock": None}

    def close(self) -> None:
        """Remove the directory, if this process owns it."""
        # Loader workers are forks of the training, and end while it goes on.
        if os.getpid() == self._owner:
            shutil.rmtree(self.directory, ignore_errors=True)
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    @classmethod
    def in_memory(cls) -> PartialStore:
        """A new store in memory, or where temporary files are if the system has no files in memory."""
        above = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        # Those of this user that no process has locked were left behind.
        for directory in above.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                is_own = directory.stat(follow_symlinks=False).st_uid == os.geteuid()
                if is_own and (fd := _locked(directory)) is not None:
                    shutil.rmtree(directory, ignore_errors=True)
                    os.close(fd)
        while True:
            store = cls(Path(tempfile.mkdtemp(prefix=_PREFIX, dir=above)), os.getpid())
            # Another training that begins in this moment may have taken it for one that was left.
            if store.directory.exists():
                return store
            store.close()

    def get(self, index: int, generation: int) -> Any:
        """What was put there; raises Missing."""
        try:
            with open(self.directory / str(index), "rb", buffering=0) as file:
                content = file.read()
            if _HEAD.unpack_from(content) != (generation, self._name):
                raise Missing
        except (OSError, struct.error) as exc:
            raise Missing from exc
        return unpickled(memoryview(content)[_HEAD.size :])

    def put(self, index: int, generation: int, sample: Any, replaces: int | None = None) -> None:
        """Keep a sample in place of any earlier generation, if there is room; raises as `pickled` does."""
        content = pickled(sample)
        path = self.directory / str(index)
        # Another process may be writing the same sample.
        new = path.with_suffix(f".{os.getpid()}")
        try:
            with open(new, "wb", buffering=0) as file:
                written = file.write(_HEAD.pack(generation, self._name) + content)
                if written < _HEAD.size + len(content):
                    raise OSError("no room")
            new.rename(path)
        except OSError as exc:
            with contextlib.suppress(OSError):
                new.unlink()
            # The generation before must not take the room of this one for ever.
            if not self._failed:
                log.warning(
                    "%s cannot take another partly augmented sample (%s): it is made again", self.directory, exc
                )
            self._failed = True


class _CropPickler(pickle.Pickler):
    """Pickles of a tensor that shows a part of another one that part alone: a crop is not kept with its image."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.requires_grad or value.layout != torch.strided:
            return NotImplemented
        if value.untyped_storage().nbytes() == value.nbytes:
            return NotImplemented
        part: Any = value.clone()
        return part.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def pickled(sample: Any) -> bytes:
    """A sample as it is kept; raises ValueError for one that cannot be pickled."""
    content = io.BytesIO()
    try:
        _CropPickler(content, protocol=pickle.HIGHEST_PROTOCOL).dump(sample)
        return content.getvalue()
    except Exception as exc:
        raise ValueError(
            f"a sample cannot be kept as it is here ({exc}): have it be something that can be pickled, for refurbish by"
            " another split"
        ) from exc


def unpickled(content: bytes | memoryview) -> Any:
    """A sample as it was before it was pickled; raises Missing."""
    try:
        return pickle.loads(content)
    except Exception as exc:
        # Errors of any kind come from what is damaged, and from classes that are gone.
        raise Missing from exc


def _locked(directory: Path) -> int | None:
    """A descriptor that holds the lock of a directory; None if someone else has it, or has removed the directory."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


Answer = TypeVar("Answer")

_RECEIVE_BYTES = 1 << 16
# This many samples of a process may be on their way. The mount keeps one in a millisecond.
_AHEAD = 4
# A worker waits this long for the mount when that many are on their way; then it goes on without keeping the sample.
_WAIT_S = 1.0


class StoreUnusable(Exception):
    """The mount cannot keep partial samples; the text says why."""


class MountConnection:
    """One process's connection to the mount, through which it puts samples; raises Unusable where there is none."""

    def __init__(self, path: Path, begun: protocol.PartialSamples) -> None:
        self.pid = os.getpid()
        self._decoder = protocol.Decoder()
        self._answers: list[protocol.Message | ProtocolError] = []
        self._unanswered = 0
        self.refusals: list[str] = []
        try:
            self._stream = connected(path, DEFAULT_PATIENCE.connect_s)
        except OSError as exc:
            raise StoreUnusable(str(exc)) from exc
        try:
            self._stream.sendall(protocol.encode(begun))
            answer = self._next(DEFAULT_PATIENCE.connect_s)
        except (OSError, ProtocolError) as exc:
            self.close()
            raise StoreUnusable(str(exc)) from exc
        if not isinstance(answer, protocol.Room):
            self.close()
            raise StoreUnusable(answer.text if isinstance(answer, protocol.Error) else f"it answered {answer}")
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
            frame = protocol.encode(protocol.Keep(len(payload), np.array(inodes, np.uint64)))
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

    def turns(self, indices: Sequence[int], generation: int, wait_s: float) -> protocol.Turns:
        """Ask which generations to use next; raises OSError and ProtocolError if the connection is of no more use."""
        deadline = time.monotonic() + wait_s
        self._stream.sendall(
            protocol.encode(protocol.Turn(np.array([generation], np.uint64), np.array(indices, np.uint32)))
        )
        while answer := self._next(max(0.0, deadline - time.monotonic())):
            if isinstance(answer, protocol.Turns):
                return answer
            if not self._unanswered:
                raise ProtocolError(answer.text if isinstance(answer, protocol.Error) else f"it answered {answer.TYPE}")
            self._count_answer(answer)
        raise TimeoutError("it does not answer")

    def _count_answer(self, answer: protocol.Message) -> None:
        self._unanswered -= 1
        if not isinstance(answer, protocol.Ok):
            self.refusals.append(answer.text if isinstance(answer, protocol.Error) else answer.TYPE)

    def _next(self, wait_s: float) -> protocol.Message | None:
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
        self._mount, self._paths, self.name = mount, paths, name
        self._begun = protocol.PartialSamples(
            "trainer_hook", name, wanted_bytes, job, None if job is None else len(paths)
        )
        self._line: MountConnection | None = None
        self._client: Client | None = None
        self._retry_at, self._pause_s = -math.inf, DEFAULT_PATIENCE.first_pause_s
        self._has_said = False
        self._line = self.connect()
        self.room_bytes, self.most_bytes = self._line.room_bytes, self._line.most_bytes

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_line": None, "_client": None}

    def close(self) -> None:
        """End this process's connection; the room goes to others when the last process has ended its own."""
        if self._line is not None and self._line.pid == os.getpid():
            self._line.close()

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

        def send(line: MountConnection) -> None:
            if len(payload) > line.most_bytes:
                self._log_once(f"{len(payload)} bytes, and sample_max_bytes={line.most_bytes}")
            else:
                line.put(payload, [self._inode(index, number) for number in numbers])

        self._ask(send)

    def turns(self, indices: Sequence[int], generation: int) -> list[RefurbishedDraw]:
        """The samples with the generations that the job is to use next.

        New ones, which it is to keep, are `generation`. Without an answer all are new, and none is kept.
        """
        answer = self._ask(lambda line: line.turns(indices, generation, _WAIT_S))
        if answer is None or not len(answer.generations) == len(answer.replaces) == len(indices):
            return [RefurbishedDraw(index, generation, keeps=False) for index in indices]
        numbers = zip(indices, answer.generations.tolist(), answer.replaces.tolist(), strict=True)
        return [
            RefurbishedDraw(index, number, number == generation, replaced or None)
            for index, number, replaced in numbers
        ]

    def settle(self) -> None:
        """Wait a moment until the mount has answered all that this process has put."""
        if self._line is not None and self._line.pid == os.getpid():
            self._ask(lambda line: line.settle(0, _WAIT_S))

    def _ask(self, ask: Callable[[MountConnection], Answer]) -> Answer | None:
        """What `ask` returns for this process's connection; None if there is none, or it is lost."""
        try:
            line = self.connect()
            answer = ask(line)
        except StoreUnusable:
            return None
        except (OSError, ProtocolError) as exc:
            self._lose(exc)
            return None
        for text in line.refusals:
            self._log_once(text)
        line.refusals.clear()
        return answer

    def _inode(self, index: int, generation: int) -> int:
        return partial_inode(self.name, os.stat(self._paths[index]).st_ino, generation)

    def connect(self) -> MountConnection:
        """This process's connection, which is made at its first use; raises StoreUnusable."""
        if self._line is None or self._line.pid != os.getpid():
            # A forked worker leaves the connection of the process that it came from as it is.
            self._line = None
            if time.monotonic() < self._retry_at:
                raise StoreUnusable
            try:
                self._line = MountConnection(socket_finder(self._mount, None)(), self._begun)
            except (OSError, StoreUnusable) as exc:
                self._lose(exc)
                raise StoreUnusable(str(exc)) from exc
            self._pause_s = DEFAULT_PATIENCE.first_pause_s
        return self._line

    def _lose(self, exc: Exception) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
        self._log_once(str(exc))
        self._retry_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, DEFAULT_PATIENCE.longest_pause_s)

    def _log_once(self, text: str) -> None:
        if not self._has_said:
            log.warning("the mount %s cannot take a partly augmented sample (%s): it is made again", self._mount, text)
        self._has_said = True


def mount_of(paths: Sequence[str]) -> Path:
    """The mount of this user's in which the first of these files lies; raises Unusable if there is none.

    What another user has written would be unpickled here, so that user's mount is not used.
    """
    mount = find_mount(os.path.dirname(paths[0]))
    if mount is None:
        raise StoreUnusable("the files lie in no mount")
    with contextlib.suppress(OSError):
        owner = os.stat(socket_finder(mount, None)()).st_uid
        if owner == os.geteuid():
            return mount
        raise StoreUnusable(f"the mount is that of user {owner}")
    raise StoreUnusable("the mount does not answer")
