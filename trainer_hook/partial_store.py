"""Where a training without a mount keeps partly augmented samples: one file for each, in a directory in memory.

A file is replaced as a whole when the sample's next generation is made, so a reader finds one generation or another,
and takes only the one it wants. What cannot be written or read is a sample that has to be made again: no error of the
store reaches the training.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

log = logging.getLogger("trainer_hook")

_GENERATION = struct.Struct("<q")
# Where Linux has files in memory (shm_overview(7)).
_MEMORY = Path("/dev/shm")


class Missing(Exception):
    """The store does not have this generation of a sample."""


class PartialStore:
    """Partly augmented samples in `directory`; usable in loader workers, by fork or as a copy."""

    def __init__(self, directory: Path, owner: int | None = None) -> None:
        """The directory is removed by `close` in the process `owner`, if there is one."""
        self.directory = directory
        self._owner = owner
        self._failed = False

    def close(self) -> None:
        """Remove the directory, if this process is the one that is to do so."""
        # Loader workers are forks of the training, and end while it goes on.
        if os.getpid() == self._owner:
            shutil.rmtree(self.directory, ignore_errors=True)

    @classmethod
    def in_memory(cls) -> PartialStore:
        """A new store in memory, or where temporary files are if the system has no files in memory."""
        above = _MEMORY if os.access(_MEMORY, os.W_OK) else None
        return cls(Path(tempfile.mkdtemp(prefix="spiderfs-partials-", dir=above)), os.getpid())

    def get(self, index: int, generation: int) -> Any:
        """What was put there; raises Missing."""
        try:
            with open(self._path(index), "rb", buffering=0) as file:
                content = file.read()
            if _GENERATION.unpack_from(content)[0] != generation:
                raise Missing
            return pickle.loads(memoryview(content)[_GENERATION.size :])
        except (OSError, struct.error, pickle.UnpicklingError, EOFError) as exc:
            raise Missing from exc

    def put(self, index: int, generation: int, sample: Any) -> None:
        """Keep a sample in place of its earlier generation, if there is room; raises what pickling it raises."""
        content = pickle.dumps(sample, protocol=pickle.HIGHEST_PROTOCOL)
        path = self._path(index)
        # Another process may be writing the same sample.
        new = path.with_suffix(f".{os.getpid()}")
        try:
            with open(new, "wb", buffering=0) as file:
                written = file.write(_GENERATION.pack(generation) + content)
                if written < _GENERATION.size + len(content):
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
