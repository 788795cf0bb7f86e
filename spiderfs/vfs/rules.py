"""The rules for readers: how long a name is trusted, and which readers get a substitute. Pure: no clock, no I/O.

A worker, through the kernel, and the client in a reader's own process (`spiderfs.client`) must give the same answer
from the same records, so both ask here. Without an answer a worker goes on to the source, and a client to the mount.

**Settling.** The mtime of a file says that a change has begun, not that it is over, and a clock of whole seconds gives
two changes one mtime. So until a version has settled it is **provisional**: bytes that are read of it serve one open,
and are stored nowhere. It has settled when its mtime is older than a time window by the source's clock, or was first
seen longer ago than a window by ours, which bounds the wait if the source's clock is ahead. If that is behind, young
versions look old: `behind_s` says by how much, when a file changes between two looks and the new mtime lies before the
first. Listings settle alike. Three kinds of change escape this: a write through mmap, whose mtime comes with the page
(`dirty_expire_centisecs`); a write(2) longer than the window; an old mtime that someone sets again. Times are seconds
since 1970.
"""

from __future__ import annotations

import os
import stat
from typing import NamedTuple, Protocol

from spiderfs.sources.source import SourceStat
from spiderfs.store.store import ContentKey

# Some file systems count time in whole seconds (ext3, some servers), or in steps of two seconds (FAT).
WINDOW_S = 2.0
# One write(2) writes up to 2 GiB (write(2)), and the kernel makes it wait while the disk is slow.
_WRITTEN_BYTES_PER_S = 50e6
_LONGEST_WRITE_BYTES = 2 << 30
# We take it that no clock is further behind; a still older mtime was set by a program (`cp -p`, `rsync -t`).
MOST_BEHIND_S = 86400.0


def window_s(size: int) -> float:
    """How long a change of a file of this size may go on after its mtime was set."""
    return WINDOW_S + min(size, _LONGEST_WRITE_BYTES) / _WRITTEN_BYTES_PER_S


def settles_at(
    mtime_ns: int, size: int, asked_at: float, answered_at: float, behind_s: float, known: float | None
) -> float:
    """The time at which a version has settled, or 0 if it had settled when we asked the source for it.

    `size` is in bytes; `asked_at` and `answered_at` are when we asked and when the source answered. `known` is what
    this function returned when we saw the same version before.
    """
    window = window_s(size)
    # A time that lies more than a window ahead is not trusted: our clock has been set back since.
    if known is not None and known <= answered_at + window:
        return known
    if mtime_ns / 1e9 <= asked_at - behind_s - window:
        return 0.0
    return answered_at + window


def may_look_old(mtime_ns: int, size: int, asked_at: float) -> bool:
    """Whether a version of this age could be a young one from a clock that is behind."""
    age_s = asked_at - mtime_ns / 1e9
    return window_s(size) <= age_s <= window_s(size) + MOST_BEHIND_S


def behind_s(seen_at: float, mtime_ns: int, answered_at: float) -> float:
    """An upper bound on how far the source's clock is behind, from a change that was made after `seen_at`."""
    mtime_s = mtime_ns / 1e9
    return answered_at - mtime_s if seen_at - mtime_s > WINDOW_S and answered_at - mtime_s <= MOST_BEHIND_S else 0.0


# No one trusts anything for longer, the kernel included; `ttl=inf` is a year.
FOREVER_S = 365 * 86400.0


class Credentials(NamedTuple):
    """With what rights a thread opens files; `groups` has its first group and the supplementary ones."""

    uid: int
    groups: frozenset[int]
    may_read_all: bool = False


ANYBODY = Credentials(-1, frozenset(), may_read_all=True)
"""A reader of a mount whose kernel compares no one with owners and modes."""


class Ownership(NamedTuple):
    """The owner and permissions that the mount shows instead of the source's; None leaves those as they are.

    The kernel itself compares a reader that opens a file by its path with these. With a substitute it cannot: the
    reader has passed the directories above the file that it asked for, and only spiderfs compares it with those above
    the substitute.
    """

    uid: int | None = None
    gid: int | None = None
    file_mode: int | None = None
    dir_mode: int | None = None

    def shown(self, found: SourceStat) -> tuple[int, int, int]:
        """Mode, owner and group of a file of the source."""
        mode = found.mode
        replaced = self.dir_mode if stat.S_ISDIR(mode) else self.file_mode if stat.S_ISREG(mode) else None
        if replaced is not None:
            mode = stat.S_IFMT(mode) | replaced
        return mode, found.uid if self.uid is None else self.uid, found.gid if self.gid is None else self.gid

    def may_read(self, who: Credentials, found: SourceStat) -> bool:
        return who.may_read_all or self._granted(who, found, os.R_OK)

    def may_pass(self, who: Credentials, directory: SourceStat) -> bool:
        return who.may_read_all or self._granted(who, directory, os.X_OK)

    def _granted(self, who: Credentials, found: SourceStat, mask: int) -> bool:
        """As inode_permission of the kernel: the first class that the reader belongs to decides."""
        mode, uid, gid = self.shown(found)
        if who.uid == uid:
            mode >>= 6
        elif gid in who.groups:
            mode >>= 3
        return mode & mask == mask


class Settings(NamedTuple):
    """The options that readers' answers depend on; replaced as a whole when one is changed while mounted."""

    ttl_s: float = 3600.0
    negative_ttl_s: float = 2.0
    dir_ttl_s: float = 1.0
    sample_max_bytes: int = 8 << 20
    wait_for_fetches: bool = True
    """Give no substitute for a file that is being fetched already."""
    ownership: Ownership = Ownership()
    checks_permissions: bool = False
    """Whether the kernel compares readers with owners and modes (allow_other, or an immutable mount)."""
    checked_since_s: float = 0.0
    """No name is trusted that was checked before; an immutable mount asks for each name itself."""


class Validity(NamedTuple):
    """The times between which something is trusted, in seconds since the epoch."""

    since: float
    until: float

    def at(self, now: float) -> bool:
        return self.since <= now < self.until

    def and_also(self, other: Validity) -> Validity:
        """The times at which both are trusted."""
        return Validity(max(self.since, other.since), min(self.until, other.until))


class Cached(Protocol):
    """A process's knowledge of cached files."""

    def stored(self, key: ContentKey) -> bool:
        """Whether the store has this small file."""

    def under_way(self, key: ContentKey) -> bool:
        """Whether some process of the mount is fetching this file now."""


def left_s(checked_at: float, now: float, ttl_s: float, since_s: float = 0.0, settles_at: float = 0.0) -> float:
    """How many more seconds to trust a name that was checked at `checked_at`; 0 or less: ask the source.

    If its version had not settled then, someone may have been writing the file: the name is trusted until it settles.

    A name that was checked in the future is not trusted: the clock was set back before this mount. Nor is a name that
    was never checked (`Catalogue.expire`), or before `since_s`, whatever the TTL.
    """
    age_s = now - checked_at
    if age_s < 0 or checked_at < since_s:
        return 0.0
    left = (ttl_s if ttl_s < FOREVER_S else FOREVER_S) - age_s
    return left if settles_at <= checked_at else min(left, settles_at - now)


def trusted(checked_at: float, ttl_s: float, since_s: float = 0.0) -> Validity:
    """The times at which a name is trusted: those for which `left_s` is more than 0."""
    return Validity(checked_at, checked_at + min(ttl_s, FOREVER_S) if checked_at >= since_s else checked_at)


def is_provisional(settles_at: float, now: float) -> bool:
    """Whether a version's bytes may still change under it, so that nothing of it is kept (`vfs/rules.py`)."""
    return settles_at > now


def is_at_hand(inode: int, cached: Cached, settings: Settings) -> bool:
    """Whether a file needs no substitute: it is cached, or a fetch of it that has begun is waited for."""
    key = ContentKey(inode)
    return cached.stored(key) or (settings.wait_for_fetches and cached.under_way(key))


def directories_to_pass(
    who: Credentials, ownership: Ownership, substitute: SourceStat, path: bytes, passed: bytes
) -> list[bytes] | None:
    """The directories that a reader must be allowed to pass to be given a substitute; None: it may not read that.

    A reader gets no substitute that it could not open by the substitute's own `path`. It has asked for a file in the
    directory `passed`, so the kernel has let it through that one.
    """
    if not ownership.may_read(who, substitute):
        return None
    above = path.rpartition(b"/")[0]
    if who.may_read_all or above == passed:
        return []
    needed = [above]
    while above:
        above = above.rpartition(b"/")[0]
        needed.append(above)
    return needed
