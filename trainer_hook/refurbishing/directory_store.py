"""Where a training without a mount keeps partly augmented samples: one file for each, in a directory in memory.

A file is replaced as a whole when the sample's next generation is made, so a reader finds one generation or another,
and takes only the one it wants. What cannot be written or read is a sample that has to be made again: no error of the
store reaches the training.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import pickle
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

import torch

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

    A directory that goes with a training is locked by it and its workers (flock(2)). One that nobody has locked was
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
        _remove_left_behind(above)
        while True:
            store = cls(Path(tempfile.mkdtemp(prefix=_PREFIX, dir=above)), os.getpid())
            # Another training that begins in this moment may have taken it for one that was left.
            if store.directory.exists():
                return store
            store.close()

    def get(self, index: int, generation: int) -> Any:
        """What was put there; raises Missing."""
        try:
            with open(self._path(index), "rb", buffering=0) as file:
                content = file.read()
            if _HEAD.unpack_from(content) != (generation, self._name):
                raise Missing
        except (OSError, struct.error) as exc:
            raise Missing from exc
        return unpickled(memoryview(content)[_HEAD.size :])

    def put(self, index: int, generation: int, sample: Any, replaces: int | None = None) -> None:
        """Keep a sample in place of any earlier generation, if there is room; raises as `pickled` does."""
        content = pickled(sample)
        path = self._path(index)
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
                log.warning("%s cannot take another partly augmented sample (%s): it is made anew", self.directory, exc)
            self._failed = True

    def _path(self, index: int) -> Path:
        return self.directory / str(index)


class _Pickler(pickle.Pickler):
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
        _Pickler(content, protocol=pickle.HIGHEST_PROTOCOL).dump(sample)
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
    """A descriptor that holds the lock of a directory; None if somebody else has it, or has removed the directory."""
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


def _remove_left_behind(above: Path) -> None:
    for directory in above.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if directory.stat(follow_symlinks=False).st_uid == os.geteuid() and (fd := _locked(directory)) is not None:
                shutil.rmtree(directory, ignore_errors=True)
                os.close(fd)
