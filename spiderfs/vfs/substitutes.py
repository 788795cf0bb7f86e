"""Gives trainers substitutes at a worker's look-ups: the one place where a name comes to mean another file.

`redirects.py` chooses the substitute, for workers and for clients. This module does what only a worker has to do: it
checks that the caller could have opened the substitute by the substitute's own path, and it sends an open back to the
look-up when the kernel still trusts the name. Since the look-up alone is redirected, each inode still means one
version of one file, and size, bytes and pages in the kernel agree for every reader.
"""

from __future__ import annotations

import logging
import os

from spiderfs.errors import SourceError, Stale
from spiderfs.shared.published import Attached
from spiderfs.sources.source import SourceStat
from spiderfs.vfs.answer_types import Caller
from spiderfs.vfs.catalogue import Dentry, Node
from spiderfs.vfs.on_demand import Part, Shared
from spiderfs.vfs.rules import ANYBODY, Credentials, directories_to_pass

log = logging.getLogger(__name__)

# Directories whose attributes are remembered; when there are more, all of them are forgotten at once.
_DIRECTORIES = 65536


class Substitutes(Part):
    """Gives the substitutes of one worker."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        # Of directories on the way to substitutes: their attributes, and when these were asked for.
        self._passed: dict[bytes, tuple[SourceStat, float]] = {}

    async def given(self, dentry: Dentry, parent: int, caller: Caller) -> Node | None:
        """The substitute that the caller gets for a name in the directory `parent`; None: it gets the file itself."""
        if (trainer := self._redirects.trainer_of(caller.pid)) is None:
            return None
        substitute = self._redirects.substitute(dentry.inode, trainer, self._fetcher, self._settings())
        node = None if substitute is None else await self._openable(substitute, parent, caller)
        # Noted also if it gets the file itself: a note of an earlier look-up, which no open has followed, is void now.
        self._redirects.remember_lookup(caller.pid, dentry.inode, dentry.inode if node is None else node.inode)
        return node

    async def _openable(self, substitute: int, parent: int, caller: Caller) -> Node | None:
        """The substitute, if it is certain that the caller could open this version by the substitute's own path."""
        ownership = self._settings().ownership
        try:
            node = self._catalogue.node(substitute)
            if not self._catalogue.still_names(node):
                # Its bytes make room for others at any moment, and then no one has them any more.
                return None
            who: Credentials | None = ANYBODY
            if self._settings().checks_permissions:
                who = self._redirects.credentials_of(caller.pid, caller.uid, caller.gid)
            if who is None:
                return None
            needed = directories_to_pass(who, ownership, node.stat, node.path, self._catalogue.node(parent).path)
            if needed is None:
                return None
            for directory in needed:
                if not ownership.may_pass(who, await self._attributes(directory)):
                    return None
            return node
        except (Stale, SourceError) as exc:
            log.debug("no substitute: %s", exc)
            return None

    async def _attributes(self, directory: bytes) -> SourceStat:
        """A directory's attributes, as fresh as the kernel would have them."""
        now = self._now()
        found, asked_at = self._passed.get(directory, (None, 0.0))
        if found is None or not 0 <= now - asked_at < self._settings().dir_ttl_s:
            node = self._catalogue.node(self._catalogue.directory_inode(directory))
            found = (await self._lister.refresh(node)).stat
            if len(self._passed) >= _DIRECTORIES:
                self._passed.clear()
            self._passed[directory] = found, now
        return found

    def send_back(self, node: Node, trainer: Attached, caller: Caller) -> None:
        """Raises Stale if a look-up would now give this trainer a substitute for the file that it opens.

        The kernel still trusts the name; ESTALE makes it look the name up (`OnDemand.check_still_named`) and open
        what it is given then. So no name has to be forgotten beforehand.
        """
        if not self._redirects.active:
            return
        if self._redirects.substitute(node.inode, trainer, self._fetcher, self._settings()) is not None:
            # Only once: a reader that opens without a name (/proc/self/fd) comes back without a look-up, and then gets
            # the file itself.
            self._redirects.remember_lookup(caller.pid, node.inode, node.inode)
            raise Stale(f"{os.fsdecode(node.path)} has a substitute")
