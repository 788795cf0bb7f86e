"""The three places of a mount (source, mount point, cache directory) and how they may lie to each other."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import time
from pathlib import Path

from spiderfs.errors import ConfigError
from spiderfs.linux.mounts import canonical, check_mountable

# An automounter, or a disk that sleeps, takes seconds for the first answer.
SOURCE_PATIENCE_S = 10.0
_POLL_S = 0.005

SOURCE_FAULTS = {
    errno.ENOENT: "does not exist: check the path, and that what it lies on is mounted",
    errno.ENOTDIR: "is not a directory: name the directory that holds the files",
    errno.EACCES: "cannot be read by this user: change its permissions, or mount as another user",
    errno.ENOTCONN: "is a mount whose daemon has gone: unmount it first",
}


def default_cache_dir(source: str | Path) -> Path:
    """Where the cache of this source lies unless told otherwise."""
    root = (
        Path("/var/cache")
        if os.geteuid() == 0
        else Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    )
    digest = hashlib.blake2b(os.fsencode(os.path.realpath(source)), digest_size=8).hexdigest()
    return root / "spiderfs" / digest


def check_answers(source: str | Path, patience_s: float = SOURCE_PATIENCE_S) -> None:
    """Raise ConfigError if nothing at all comes from the source in time; to be called before anything else touches it.

    Asked by a process of its own, which is left behind if the source holds it: no signal ends what waits there, and a
    thread would hold up the end of this process.
    """
    child = os.fork()
    if child == 0:
        try:
            # Whoever waits for the end of our output is not to wait for the source.
            os.closerange(0, 3)
            os.setsid()
            os.scandir(source).close()
        finally:
            # An error is an answer too: what it means is said elsewhere.
            os._exit(0)
    deadline = time.monotonic() + patience_s
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            raise ConfigError(
                f"the source {source} has not answered for {patience_s:g} s: look whether its server or disk works"
            )
        time.sleep(_POLL_S)


def check_places(source: Path, mountpoint: Path, cache_dir: Path) -> None:
    """Raise ConfigError or MountError unless source, mount point and cache directory can be used together.

    The source may be the mount point: the mount then lies over it.
    """
    source = Path(os.path.realpath(source))
    mountpoint = canonical(mountpoint)
    cache_dir = Path(os.path.realpath(cache_dir))
    if source != mountpoint:
        if mountpoint.is_relative_to(source):
            raise ConfigError(f"the mount point {mountpoint} lies inside the source {source}: choose one outside of it")
        if source.is_relative_to(mountpoint):
            raise ConfigError(f"the mount point {mountpoint} would hide the source {source}: choose another one")
    for name, place in (("source", source), ("mount point", mountpoint)):
        if cache_dir.is_relative_to(place):
            raise ConfigError(f"cache_dir={cache_dir} lies inside the {name}: choose a directory outside of {place}")
    try:
        in_the_way = cache_dir.exists() and not cache_dir.is_dir()
    except OSError as exc:
        raise ConfigError(f"cache_dir={cache_dir} cannot be used ({exc.strerror}): choose another directory") from exc
    if in_the_way:
        raise ConfigError(f"cache_dir={cache_dir} is not a directory: choose or create one")
    check_mountable(mountpoint)
    try:
        os.scandir(source).close()
    except OSError as exc:
        # Mounting over what a crash left behind: it is taken away, and the source looked at, when the daemon starts.
        if not (exc.errno == errno.ENOTCONN and source == mountpoint):
            raise ConfigError(f"the source {source} {SOURCE_FAULTS.get(exc.errno or 0, exc.strerror)}") from exc
