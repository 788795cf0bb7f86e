"""What the manager and the readers that go around FUSE (`spiderfs.client`) tell each other.

The manager makes a FIFO for its lifetime, whose path `.spiderfs/client` shows, and writes beside it what a reader has
to know to answer as a worker would. A reader writes one record into the FIFO for each file that it serves itself. While
the FIFO has a reader there is a manager, and the mount lives; a write that fails with EPIPE says that both may be over.

A new manager makes another FIFO, so its path also tells one manager from the next. A version that does not know what
it is told (`VERSION`) leaves it, and reads through the mount.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from spiderfs.core.access_record import ACCESS_RECORD

VERSION = 1
TERMS_FILE = "client.json"
_HIT = 0  # `core.events.HIT`: a client serves nothing else


class Terms(NamedTuple):
    """What a worker knows from its options; the names are those of `filesystem.Settings` and `Ownership`."""

    ttl_s: float
    sample_max_bytes: int
    wait_for_fetches: bool
    substitute: str
    uid: int | None
    gid: int | None
    file_mode: int | None
    dir_mode: int | None
    checks_permissions: bool
    """Whether the kernel compares readers with owners and modes (allow_other)."""
    pid_namespace: int
    """That of the daemon, in which trainers' pids count and LMDB tells live readers from dead ones."""


def pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def publish_terms(path: Path, terms: Terms) -> None:
    """Let clients know; raises OSError where the disk is full, and clients then keep what they know."""
    temporary = path.with_suffix(".new")
    try:
        temporary.write_text(json.dumps({"version": VERSION, **terms._asdict()}))
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def published_terms(path: Path) -> Terms:
    """Raises OSError, or ValueError for the terms of another version."""
    found = json.loads(path.read_text())
    if found.pop("version") != VERSION:
        raise ValueError(f"{path} is of another version of spiderfs")
    return Terms(**found)


def hit_record(now: float, given: int, wanted: int, size: int, pid: int, trainer: int) -> bytes:
    """One file served: the same record as a worker's for an open that it answered from the store."""
    return ACCESS_RECORD.pack(now, given, wanted, size, 0, pid, trainer, _HIT)


def lost_record(now: float, opens: int) -> bytes:
    """Tells of files served whose records found the FIFO full. No file has the inode 0."""
    return ACCESS_RECORD.pack(now, 0, 0, opens, 0, 0, 0, _HIT)
