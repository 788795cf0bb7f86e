"""The layout of a cache directory: the one place where its files and directories have their names.

A table in the documentation says what each of them holds; a test compares it with this module. The scorer alone names
the files in which it saves its scores (`scorer/index.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

# In the store's directory.
IN_USE_FILE, FORMAT_FILE, VIEW_FILE, DISKS_FILE = "in-use", "format", "view", "disks"
# In the directory of one of the store's two environments. LMDB itself has chosen the first name.
DATA_FILE, BLOCKS_DIRECTORY, RESERVE_FILE = "data.mdb", "blocks", "reserve"
EXTENTS_FILE, EXTENTS_MAP_FILE = "extents", "extents.map"
# In its counterpart in another directory of the cache, which has no environment.
DISK_FILE = "disk"

_CLIENT_PIPE, _BACKING_FILE = "client-", "passthrough-"
# A handle of a control file has its top bit set, and so 16 digits.
_CONTROL_HANDLE = "[89a-f]" + "[0-9a-f]" * 15


class CacheLayout:
    FILES = ("lock", "source", "packages.key", "profile.json", "spiderfs.log", "spiderfs.log.1")
    DIRECTORIES = ("store", "run", "archives")

    def __init__(self, directory: Path) -> None:
        self.cache = directory
        self.lock, self.source, self.package_key, self.profile, self.log, self.older_log = (
            directory / name for name in self.FILES
        )
        self.store, run, self.archives = (directory / name for name in self.DIRECTORIES)
        self.content = self.store / "content"
        self.names = self.store / "names"
        self.scores = self.store / "scores"
        self.view = self.store / VIEW_FILE
        self.run = RunLayout(run)

    @classmethod
    def around(cls, client_terms: Path) -> CacheLayout:
        """The layout of the cache directory in whose `run` this file lies."""
        return cls(client_terms.parent.parent)

    @property
    def environments(self) -> tuple[Path, Path]:
        """The directories of the LMDB environments, without which there is no store."""
        return self.content, self.names


class RunLayout:
    """The layout of `run`, which holds what the processes of one mount share; every mount begins with an empty one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.control_socket = directory / "control.sock"
        self.hook_socket = directory / "hook.sock"
        self.fetch_lock = directory / "fetch.lock"
        self.full_disk = directory / "full-disk"
        self.options = directory / "options.json"
        self.trainers = directory / "trainers.json"
        self.client_terms = directory / "client.json"
        self.access_log = directory / "access.log"
        self.access_log_wanted = directory / "access.log.wanted"

    def snapshot(self, handle: int, uid: int) -> Path:
        """The file with the text that an open control file shows, or with the text written to it so far."""
        return self.directory / f"{handle:x}-{uid}.text"

    def found_snapshot(self, handle: int) -> Path | None:
        """The same file, whichever user has opened it; None if there is none."""
        return next(self.directory.glob(f"{handle:x}-*.text"), None)

    def unfinished_snapshot(self, handle: int, uid: int, worker: int) -> Path:
        """The same file while this worker is still writing it."""
        return self.directory / f"{handle:x}-{uid}.{worker}"

    def snapshots(self) -> Iterable[tuple[int, Path]]:
        """The snapshots of all open control files, unfinished ones too, each with the user who has opened it."""
        paths = self.directory.glob(f"{_CONTROL_HANDLE}-*")
        return ((int(path.stem.partition("-")[2]), path) for path in paths)

    def unfinished_snapshots(self, worker: int) -> Iterable[Path]:
        return self.directory.glob(f"{_CONTROL_HANDLE}-*.{worker}")

    def client_pipe(self, token: str) -> Path:
        return self.directory / f"{_CLIENT_PIPE}{token}"

    def client_pipes(self) -> Iterable[Path]:
        return self.directory.glob(f"{_CLIENT_PIPE}*")

    def grids(self, file: str) -> Path:
        """The extents of a large file's ranges; `file` is the hash of its path."""
        return self.directory / f"grids-{file}"

    def backing_file(self, inode: int, number: int) -> Path:
        """The note that the kernel reads this inode by itself, from the file that it has numbered so."""
        return self.directory / f"{_BACKING_FILE}{inode}-{number}"

    def backing_files(self) -> Iterator[tuple[int, int]]:
        """Inode and number of each such note."""
        for path in self.directory.glob(f"{_BACKING_FILE}*"):
            inode, number = path.name.removeprefix(_BACKING_FILE).split("-")
            yield int(inode), int(number)
