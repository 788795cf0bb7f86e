"""The rules for readers: how long a name is trusted, and which readers get a substitute. Pure: no clock, no I/O.

A reader is answered by a worker, through the kernel, or by the client in its own process (`spiderfs.client`). Both must
give the same answer from the same records, so both ask here. A worker that finds no answer in the records goes on to
the source; a client goes on to the mount.
"""

from __future__ import annotations

import os
import stat
from typing import NamedTuple, Protocol

from spiderfs.sources.source import SourceStat
from spiderfs.store.store import ContentKey

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
    """Whether a version's bytes may still change under it, so that nothing of it is kept (`vfs/settling.py`)."""
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
