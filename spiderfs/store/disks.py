"""The disks of a cache: which of them are in use, and which takes a payload.

Disk 0 is that of the first directory. It alone has LMDB, whose rows name the disk of each payload by its number, and
payloads of up to a chunk there lie in their rows. Each other disk has chunks (`extents.py`) and blocks (`blocks.py`).

- **Spreading.** A disk's share of the capacity is that of its file system in the size of all. A whole file goes to the
  disk that is filled least for its share, all blocks of a large file to one. `content.py` keeps each within its share.
- **Numbers.** The file `disks` names the store, the directory of each number, and the next to give; each other
  directory's `disk` has that name and its number. One that does not match is emptied and gets the next number. A number
  is given again after all others, so no row names bytes of another store.
- **Failures.** All processes leave a disk out that fails, until the next mount: its files are misses, and are stored
  on others when they are fetched again. The manager drops its rows. The next mount empties it, for it may have blocks
  of a file that another disk has by now. If disk 0 fails, nothing is cached.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import mmap
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import xxhash

from spiderfs.errors import StoreError
from spiderfs.shared.layout import DATA_FILE, DISK_FILE, DISKS_FILE
from spiderfs.store.environment import lost_chunks

log = logging.getLogger(__name__)

# A row has a byte for the number of a disk.
_NUMBERS = 256
# Errors that say that a disk has failed, or is gone; others may be this process's own, such as EMFILE.
_FAILURES = (errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.EACCES, errno.EUCLEAN, errno.ESTALE)


class Disks:
    """Make it before the processes of a mount are forked: they share what is left out."""

    def __init__(self, first: Path, others: Sequence[Path] = (), missing: Collection[Path] = ()) -> None:
        """`first`: the directory of the LMDB environment; `others`: its counterparts, of which some are `missing`."""
        self._others, self._missing = others, missing
        self._left_out = mmap.mmap(-1, _NUMBERS)
        self.places = {0: first}
        self._shares = {0: 1.0}
        self._name, self._next = "", 1
        """Those of the store, in a mount that has it in use."""

    @classmethod
    def of_store(cls, first: Path) -> Disks:
        """The disks of a store that a mount has in use, for a process that is not forked from it."""
        disks = cls(first)
        disks.places |= _read_table(first)[2]
        disks._shares = dict.fromkeys(disks.places, 1.0)
        return disks

    def bind(self) -> None:
        """Number the directories; no process may have the store open. Raises OSError."""
        first = self.places[0]
        self._left_out[:], self.places = bytes(_NUMBERS), {0: first}
        name, self._next, known = _read_table(first) if (first / DATA_FILE).exists() else ("", 1, {})
        name = self._name = name or os.urandom(8).hex()
        in_turn = (*range(self._next, _NUMBERS), *range(1, self._next))
        fresh = (number for number in in_turn if number not in known)
        for place in self._others:
            # Without its map of chunks, or its chunks, it begins again.
            kept = () if lost_chunks(place) else known
            number = next((number for number in kept if _reads(place, f"{name} {number}\n")), None) or next(fresh)
            self.places[number] = place
            if place in self._missing:
                self._left_out[number] = 1
            elif number not in known:
                try:
                    shutil.rmtree(place, ignore_errors=True)
                    place.mkdir(mode=0o700, parents=True)
                    (place / DISK_FILE).write_text(f"{name} {number}\n")
                    self._next = number + 1
                except OSError as exc:
                    self._leave_out(number, exc.strerror)
        self._save_table()
        self._weigh()

    def _save_table(self) -> None:
        """Note the disks in use. One that is left out is emptied later: its blocks are on other disks now."""
        places = {number: str(self.places[number]) for number in self.numbers[1:]}
        table = {"store": self._name, "next": self._next, "disks": places}
        path = self.places[0].parent / DISKS_FILE
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(table) + "\n")
        new.replace(path)

    def _weigh(self) -> None:
        found = {}
        for number in self.numbers:
            place = self.places[number] if number else self.places[0].parent
            try:
                disk = os.statvfs(place)
                found[number] = place.stat().st_dev, disk.f_blocks * disk.f_frsize
            except OSError as exc:
                if not number:
                    raise
                self._leave_out(number, exc.strerror)
        self._shares = shares_of(found)

    # -- what is in use

    @property
    def several(self) -> bool:
        return len(self.places) > 1

    @property
    def numbers(self) -> list[int]:
        """The disks in use, the first one among them."""
        return [number for number in self.places if self.has(number)]

    def has(self, number: int) -> bool:
        return number in self.places and not self._left_out[number]

    def directory(self, number: int) -> Path:
        """The directory as `cache_dir` names it."""
        return self.places[number].parent.parent

    def failed(self, number: int, exc: BaseException) -> None:
        """Leave the disk of an error out, if it has failed, or its directory has gone; disk 0 stays."""
        cause = exc if isinstance(exc, OSError) else exc.__cause__
        if isinstance(cause, OSError) and cause.errno in _FAILURES:
            self._leave_out(number, os.strerror(cause.errno))
        elif isinstance(cause, FileNotFoundError):
            self.look()

    @contextlib.contextmanager
    def watched(self, number: int) -> Iterator[None]:
        """Leave a disk out if what is done with it shows that it has failed; the error goes on."""
        try:
            yield
        except (OSError, StoreError) as exc:
            self.failed(number, exc)
            raise

    def look(self) -> None:
        """Leave out the disks whose directory has gone."""
        for number in self.numbers[1:]:
            if not os.path.exists(self.places[number] / DISK_FILE):
                self._leave_out(number, "its directory has gone")

    def _leave_out(self, number: int, why: str | None) -> None:
        if number and self.has(number):
            self._left_out[number] = 1
            log.warning("the cache goes on without %s until the next mount: %s", self.directory(number), why)
            if self._name:
                try:
                    self._save_table()
                except OSError as exc:
                    log.warning("the loss of %s could not be noted: %s", self.directory(number), exc.strerror)

    # -- spreading

    def parts(self, capacity_bytes: int) -> dict[int, int]:
        """The part of the capacity of each disk in use."""
        shares = self.shares()
        return {number: int(capacity_bytes * share / sum(shares.values())) for number, share in shares.items()}

    def shares(self, full: Collection[int] = ()) -> dict[int, float]:
        """The share of each disk in use that is not `full`."""
        return {number: self._shares[number] for number in self.numbers if number not in full}


def shares_of(disks: Mapping[int, tuple[int, int]]) -> dict[int, float]:
    """The share of each disk, by its file system's number and size; directories in one file system share its size."""
    together = Counter(system for system, _ in disks.values())
    sizes = {number: max(size, 1) / together[system] for number, (system, size) in disks.items()}
    return {number: size / sum(sizes.values()) for number, size in sizes.items()}


def spread(sizes: Sequence[int], used: Mapping[int, int], shares: Mapping[int, float]) -> list[int]:
    """The disk for each payload of these sizes, that which is then filled least for its share of what is `used`."""
    filled, chosen = {number: used.get(number, 0) for number in shares}, []
    for size in sizes:
        disk = min(shares, key=lambda number: (filled[number] + size) / shares[number])
        filled[disk] += size
        chosen.append(disk)
    return chosen


def home(inode: int, shares: Mapping[int, float]) -> int:
    """The disk for the blocks of an inode, each with a probability of its share (weighted rendezvous hashing).

    If a disk comes or goes, no inode moves between the others.
    """

    def height(number: int) -> float:
        return math.log((xxhash.xxh3_64_intdigest(b"%d %d" % (inode, number)) + 1) / 2**64) / shares[number]

    return max(shares, key=height)


def _read_table(first: Path) -> tuple[str, int, dict[int, Path]]:
    """The store's name, the next number, each directory but the first; empty without a table, or if it is damaged."""
    try:
        found = json.loads((first.parent / DISKS_FILE).read_bytes())
        places = {int(number): Path(place) for number, place in found["disks"].items()}
        return str(found["store"]), min(max(1, int(found.get("next", 1))), _NUMBERS), places
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return "", 1, {}


def _reads(place: Path, text: str) -> bool:
    try:
        return (place / DISK_FILE).read_text(errors="replace") == text
    except OSError:
        return False
