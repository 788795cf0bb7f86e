"""The rights of readers, by the owners and modes that a mount shows.

The kernel itself compares a reader that opens a file by its path with these. With a stand-in it cannot: the reader has
passed the directories above the file that it asked for, and only this module compares it with those above the stand-in.
"""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from spiderfs.sources.source import SourceStat


class Credentials(NamedTuple):
    """With what rights a thread opens files; `groups` has its first group and the supplementary ones."""

    uid: int
    groups: frozenset[int]
    may_read_all: bool = False


ANYBODY = Credentials(-1, frozenset(), may_read_all=True)
"""A reader of a mount whose kernel compares nobody with owners and modes."""


class Ownership(NamedTuple):
    """The owner and permissions that the mount shows instead of the source's; None leaves those as they are."""

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
