"""Files that the manager publishes: the terms for readers that go around FUSE (`spiderfs.client`), and the trainers.

The mount's root has an attribute (`CLIENT_XATTR`) with the path of the **terms**: a file in which the manager writes
what a reader has to know to answer as a worker would, and the name of a FIFO beside it, which the manager makes for its
own lifetime. A reader writes one record into it for each file that it serves itself. As long as someone reads from the
FIFO there is a manager, and so a mount; a write that fails with EPIPE says that both may be over.

A client that does not know the version of the terms leaves them, and reads through the mount.

The list of attached trainers is for workers and clients. The file is replaced as a whole, so a reader of it sees one
list or the next; the file's edition says which.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, get_type_hints

VERSION = 4
CLIENT_XATTR = "user.spiderfs.client"
# The terms have some 300 bytes.
_TERMS_MAX_BYTES = 1 << 16


class Terms(NamedTuple):
    """The facts that a worker knows from its options; most names are those of `rules.Settings` and `Ownership`."""

    ttl_s: float
    checked_since_s: float
    clock_began_s: float
    """When the mount's clock began (`linux/steady_clock.py`)."""
    sample_max_bytes: int
    wait_for_fetches: bool
    substitute: str
    uid: int | None
    gid: int | None
    file_mode: int | None
    dir_mode: int | None
    checks_permissions: bool
    """Whether the kernel compares readers with owners and modes (allow_other, or an immutable mount)."""
    pushes_ahead: bool
    """Whether the kernel may have samples that the store has not: the mount alone gives substitutes then."""
    pid_namespace: int
    """The namespace of the daemon, in which trainers' pids count and LMDB tells live readers from dead ones."""


def pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def publish_terms(path: Path, terms: Terms, pipe: str) -> None:
    """Write the terms for clients, with the name of the FIFO beside the file; raises OSError where the disk is full."""
    temporary = path.with_suffix(".new")
    try:
        temporary.write_text(json.dumps({"version": VERSION, "pipe": pipe, **terms._asdict()}))
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def published_terms(path: Path) -> tuple[Terms, str]:
    """Terms, and the name of the FIFO; raises OSError, or ValueError if the file has no terms of this user's mount.

    The mount says where its terms lie, and anybody may make a mount that claims to be one of spiderfs. So only root,
    who may read any mount, trusts terms that another user has written.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or os.geteuid() not in (0, status.st_uid):
            raise ValueError(f"{path} is of another user's mount")
        text = file.read(_TERMS_MAX_BYTES)
    try:
        found = json.loads(text)
        version, pipe = found.pop("version"), found.pop("pipe")
        terms = Terms(**found)
    except (AttributeError, KeyError, TypeError, RecursionError) as exc:
        raise ValueError(f"{path} has no terms") from exc
    kinds = get_type_hints(Terms)
    if not all(isinstance(value, (kinds[name], int)) for name, value in terms._asdict().items()):
        raise ValueError(f"{path} has terms of other types")
    if version != VERSION:
        raise ValueError(f"{path} is of another version of spiderfs")
    if not isinstance(pipe, str) or "/" in pipe:
        raise ValueError(f"{path} names no FIFO beside it")
    return terms, pipe


def opened_pipe(path: Path) -> int:
    """The FIFO, to write records into; raises OSError, or ValueError for what is none: they would end up in a file."""
    if not stat.S_ISFIFO(path.lstat().st_mode):
        raise ValueError(f"{path} is no FIFO")
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError(f"{path} is no FIFO")
    return fd


class Edition(NamedTuple):
    """Shows whether a file that another process replaces is still the one that was read last.

    Two files that were published one after the other differ in one of these values at least.

    The time alone is not enough: the kernel's clock for it stands still for up to 4 ms (CONFIG_HZ=250), and goes back
    when the machine's clock is set back. Nor does the inode alone, which may be used again, or be written to in place.
    """

    mtime_ns: int
    inode: int
    size: int


def edition_of(path: Path) -> Edition | None:
    """The edition of a file; None if there is no file."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return Edition(found.st_mtime_ns, found.st_ino, found.st_size)


class Attached(NamedTuple):
    """One attached trainer; `started` is the start time of its process in clock ticks.

    `job_dataset_numbers` are those of the job datasets whose substitutes the trainer may be given: it has sent batches
    of their lists. `sends_batches` is whether there are such job datasets, or will be.
    """

    number: int
    pid: int
    started: int
    job_dataset_numbers: tuple[int, ...]
    sends_batches: bool


def publish_trainers(path: Path, trainers: Iterable[Attached]) -> None:
    """Write the list; if the disk is full, this raises OSError and the list is empty from then on."""
    temporary = path.with_suffix(".new")
    try:
        temporary.write_text(json.dumps(list(trainers)))
    except OSError:
        # An empty list is better than the old one: a trainer that has left must not be given substitutes any more.
        path.unlink(missing_ok=True)
        raise
    temporary.rename(path)


def published_trainers(path: Path) -> list[Attached]:
    """The list as it is now; empty while there is no such file, or none that can be read."""
    try:
        rows = json.loads(path.read_text())
        return [
            Attached(number, pid, since, tuple(learned), sends_batches)
            for number, pid, since, learned, sends_batches in rows
        ]
    except (OSError, ValueError):
        return []
