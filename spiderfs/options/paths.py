"""The three paths of a mount (source, mount point, cache directory), and which of them may lie inside another."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from spiderfs.errors import ConfigError, SourceAway, SourceUnavailable, SpiderfsError
from spiderfs.linux.mounts import CONTROL_DIR, canonical, check_mountable, spiderfs_mounts
from spiderfs.options.units import Capacity, round_size
from spiderfs.shared.layout import DATA_FILE, CacheLayout
from spiderfs.sources.open import OPENERS, is_url, without_secrets

# An automounter, or a disk that has to start up, takes some seconds for its first answer.
SOURCE_PATIENCE_S = 10.0
_POLL_S = 0.005
# `s3://bucket` and `server:/export`; a directory of such a name is written `./NAME`.
_ADDRESS = re.compile(r"[^/]+:/")

SOURCE_FAULTS = {
    errno.ENOENT: "does not exist: check the path, and whether its file system is mounted",
    errno.ENOTDIR: "is not a directory: name the directory that holds the files",
    errno.EACCES: "cannot be read by this user: change its permissions, or mount as another user",
    errno.ENOTCONN: "is a mount whose daemon is dead: unmount it first",
}


def default_cache_dir(identity: str) -> Path:
    """A source's cache if cache_dir does not name it (`OpenedSource.identity`); raises ConfigError without a home."""
    try:
        own = "/var/cache" if os.geteuid() == 0 else os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        root = Path(own).expanduser()
    except RuntimeError as exc:
        raise ConfigError("this user has no home directory: choose a place for the cache, -o cache_dir=DIR") from exc
    digest = hashlib.blake2b(os.fsencode(identity), digest_size=8).hexdigest()
    return root / "spiderfs" / digest


def nearest_directory(path: Path) -> Path:
    """The directory at a path, or the one in which it would be made."""
    return next(place for place in (path, *path.parents) if place.is_dir())


def on_one_disk(source: Path, cache_dir: Path) -> bool:
    """Whether the source lies on the disk of the cache, so that caching does not speed it up."""
    return source.stat().st_dev == nearest_directory(cache_dir).stat().st_dev


def capacity_remark(capacity: Capacity, cache_dir: Path, *others: Path) -> str:
    """Why this capacity can hardly be meant, as a line for the user, or empty; `others` are on other disks."""
    size = capacity.budget_bytes(0)
    if capacity.bare and size < 1 << 20:
        return f"capacity={capacity} is {size} bytes: write a size with its unit, such as 20GiB"
    # Those on one disk have its room together, and one that is missing has none.
    places = [nearest_directory(cache_dir), *(other for other in others if other.is_dir())]
    disks = {place.stat().st_dev: shutil.disk_usage(place) for place in places}.values()
    total, _, free = map(sum, zip(*disks, strict=True))
    # A cache that was kept has taken some of the disk already.
    kept = CacheLayout(cache_dir).store.is_dir()
    disk = "disks" if others else "disk"
    room, what = (total, f"of the whole {disk}") if kept else (free, f"that are free on the {disk}")
    # A total of 0 is that of no disk: the mount says in its own words that it cannot be used.
    if capacity.unit == "percent" or size <= room or not total:
        return ""
    shown = ", ".join(map(str, (cache_dir, *others)))
    return f"capacity={capacity} is more than the {round_size(room)} {what} of {shown}: the cache will hold less"


def missing_remark(others: Iterable[Path]) -> str:
    """Which directories of a cache are left out, as a line for the user; empty if there is none."""
    if not (missing := [str(place) for place in others if not os.access(place, os.W_OK | os.X_OK)]):
        return ""
    return f"the cache goes without {', '.join(missing)}: mount the disk, and create a directory that you may write to"


def check_source_name(source: str) -> None:
    """Raise ConfigError if the source is an address that spiderfs cannot show."""
    if is_url(source):
        return
    shown_source = without_secrets(source)
    scheme, _, rest = shown_source.partition(":")
    if rest and (scheme := scheme.lower()) in OPENERS:
        raise ConfigError(f"the source {shown_source} is neither a URL nor a path: write {scheme}://{rest.lstrip('/')}")
    if not _ADDRESS.match(source):
        return
    *shown, last = ("directories", *(f"{known}://" for known in OPENERS if known))
    raise ConfigError(
        f"the source {shown_source} is an address, and spiderfs shows {', '.join(shown)} and {last} only: mount it"
        " first, for example with rclone, and name that directory"
    )


def check_source_answers(source: str | Path, ask: Callable[[], object], patience_s: float = SOURCE_PATIENCE_S) -> None:
    """Raise ConfigError if `ask` does not return in time or raises a SpiderfsError, whose message is then the reason.

    It is a SourceAway if the source has not answered, or only that it cannot answer now.

    Call this before anything else touches the source. A child process asks. If the source hangs, this function leaves
    the child behind: no signal ends a process that waits for a hung source, and a waiting thread would hold up the end
    of this process. An OSError is an answer; `check_paths` explains it.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        away = False
        try:
            # A program that waits for the end of our output must not have to wait for the source.
            os.closerange(0, 3)
            os.setsid()
            ask()
        except SpiderfsError as exc:
            away = isinstance(exc, SourceUnavailable)
            # A pipe takes so many bytes at once, whether anybody reads them or not.
            os.write(writer, str(exc).encode(errors="replace")[: select.PIPE_BUF])
        finally:
            os._exit(away)
    os.close(writer)
    deadline = time.monotonic() + patience_s
    try:
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                raise SourceAway(
                    f"the source {source} has not answered for {patience_s:g} s: check whether its server or disk works"
                )
            time.sleep(_POLL_S)
        os.set_blocking(reader, False)
        reason = os.read(reader, select.PIPE_BUF).decode(errors="replace")
    finally:
        os.close(reader)
    if reason:
        raise SourceAway(reason) if ended[1] else ConfigError(reason)


def knows_names_of(cache_dir: Path, identity: str) -> bool:
    """Whether a cache directory has names of the source with this identity, and of no other."""
    layout = CacheLayout(cache_dir)
    try:
        return layout.source.read_bytes() == os.fsencode(identity) + b"\n" and (layout.names / DATA_FILE).exists()
    except OSError:
        return False


def check_paths(source: Path | str, mountpoint: Path | None, cache_dirs: Iterable[Path]) -> None:
    """Raise ConfigError or MountError unless these paths can be used together; `mountpoint`: None without a mount."""
    mountpoint = canonical(mountpoint) if mountpoint is not None else None
    lies_in = [("mount point", mountpoint)] if mountpoint is not None else []
    if isinstance(source, Path):
        source = Path(os.path.realpath(source))
        lies_in.insert(0, ("source", source))
        if mountpoint is not None and source != mountpoint and mountpoint.is_relative_to(source):
            raise ConfigError(f"the mount point {mountpoint} lies inside the source {source}: choose one outside it")
        if mountpoint is not None and source.is_relative_to(mountpoint):
            raise ConfigError(f"the mount point {mountpoint} would hide the source {source}: choose another directory")
        for point in spiderfs_mounts():
            if source.is_relative_to(point / CONTROL_DIR):
                raise ConfigError(f"the source {source} belongs to the mount at {point}: name {point}, or its source")
    for cache_dir in map(Path, map(os.path.realpath, cache_dirs)):
        for name, path in lies_in:
            if cache_dir.is_relative_to(path):
                raise ConfigError(f"cache_dir={cache_dir} lies inside the {name}: choose a directory outside {path}")
        try:
            if cache_dir.exists() and not cache_dir.is_dir():
                raise ConfigError(f"cache_dir={cache_dir} is not a directory: choose or create another one")
        except OSError as exc:
            reason = f"cannot be used ({exc.strerror}): choose another directory"
            raise ConfigError(f"cache_dir={cache_dir} {reason}") from exc
    if mountpoint is not None:
        check_mountable(mountpoint)
    if isinstance(source, Path):
        try:
            os.scandir(source).close()
        except OSError as exc:
            raise ConfigError(f"the source {source} {SOURCE_FAULTS.get(exc.errno or 0, exc.strerror)}") from exc
