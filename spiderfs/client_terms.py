"""What the manager and the readers that go around FUSE (`spiderfs.client`) tell each other.

The mount's root has an attribute (`CLIENT_XATTR`) with the path of the **terms**: a file in which the manager writes
what a reader has to know to answer as a worker would, and the name of a FIFO beside it, which the manager makes for its
own lifetime. A reader writes one record into it for each file that it serves itself. As long as somebody reads from the
FIFO there is a manager, and so a mount; a write that fails with EPIPE says that both may be over.

A client that does not know the version of what it is told leaves it, and reads through the mount.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from spiderfs.core.events import ACCESS_RECORD, HIT

VERSION = 1
CLIENT_XATTR = "user.spiderfs.client"
TERMS_FILE = "client.json"


class Terms(NamedTuple):
    """What a worker knows from its options; most names are those of `filesystem.Settings` and `Ownership`."""

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


def publish_terms(path: Path, terms: Terms, pipe: str) -> None:
    """Let clients know, and under which name the FIFO lies beside the terms; raises OSError where the disk is full."""
    temporary = path.with_suffix(".new")
    try:
        temporary.write_text(json.dumps({"version": VERSION, "pipe": pipe, **terms._asdict()}))
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def published_terms(path: Path) -> tuple[Terms, str]:
    """Terms, and the name of the FIFO; raises OSError, or ValueError for the terms of another version."""
    found = json.loads(path.read_text())
    if found.pop("version") != VERSION:
        raise ValueError(f"{path} is of another version of spiderfs")
    pipe = found.pop("pipe")
    return Terms(**found), pipe


def hit_record(now: float, given: int, wanted: int, size: int, pid: int, trainer: int) -> bytes:
    """One file served: the same record as a worker's for an open that it answered from the store."""
    return ACCESS_RECORD.pack(now, given, wanted, size, 0, pid, trainer, HIT)


def lost_record(now: float, opens: int) -> bytes:
    """Tells of files served whose records found the FIFO full. No file has the inode 0."""
    return ACCESS_RECORD.pack(now, 0, 0, opens, 0, 0, 0, HIT)
