"""How a loader hands a partly augmented sample to the mount: the sample's inode, and its bytes in a sealed memory file.

A memory file (memfd_create(2)) can be sealed: then no one can change, cut or lengthen it any more, not even the process
that made it. So the one that gets it may look at its size first, and read it then.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat

from spiderfs.errors import ProtocolError

# Inodes of samples are less than this, so no loader can put its bytes in the place of a sample's.
FIRST_PARTIAL = 1 << 63
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def sealed_file(payload: bytes) -> int:
    """The descriptor of a new sealed memory file with these bytes, for the caller to close; raises OSError."""
    fd = os.memfd_create("spiderfs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        left = memoryview(payload)
        while left:
            left = left[os.write(fd, left) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


def read_sealed(fd: int, size: int) -> bytes:
    """The whole content of another process's memory file, which is `size` bytes long; closes nothing.

    Raises ProtocolError for anything but a sealed memory file of this size. No descriptor makes the caller wait: seals
    are looked at first, and only files in memory have them (fcntl(2)).
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        found = os.fstat(fd)
    except OSError as exc:
        raise ProtocolError(f"its descriptor is no memory file ({exc.strerror}): use memfd_create") from exc
    if not stat.S_ISREG(found.st_mode) or seals & _SEALS != _SEALS:
        raise ProtocolError("its memory file is not sealed: add F_SEAL_WRITE, F_SEAL_SHRINK and F_SEAL_GROW")
    if found.st_size != size:
        raise ProtocolError(f"its memory file has {found.st_size} bytes, not {size}")
    try:
        payload = os.pread(fd, size, 0)
    except OSError as exc:
        raise ProtocolError(f"its memory file cannot be read ({exc.strerror})") from exc
    if len(payload) != size:
        raise ProtocolError(f"its memory file gave {len(payload)} bytes of {size}")
    return payload


def partial_inode(store: str, version: int, generation: int) -> int:
    """The inode of one generation of a partial sample, by the sample's own (`version`) and the name of its store."""
    digest = hashlib.blake2b(f"{store} {version} {generation}".encode(), digest_size=8).digest()
    return FIRST_PARTIAL | int.from_bytes(digest, "little")
