"""The file system of an immutable mount, where the kernel opens files without asking (`-o immutable`).

The kernel knows that there is no OPEN (`fuse/bindings.py`): it keeps the pages of a file, and never says that it was
closed; each request about an open file names the inode alone. Other requests do the work of OPEN:

- **The first READ**, at offset 0, makes a small file local and counts as an open. What the page cache answers is not
  seen.
- **GETATTR** finds out that a name means another version. The kernel asks for the attributes of a file before it opens
  it, unless it trusts those that it has. If the answer is ESTALE, it looks the whole path up again. So where a READ was
  answered with ESTALE, the kernel is made to **doubt** the inode. (fstat(2) sends the same request, and gets an error:
  so this answer is given for nothing but a change that was not to happen.)
- **LOOKUP** gives a trainer its substitute, and reports that at once. While some trainer may be given one, names are
  trusted for 0 seconds; when that begins, the worker makes the kernel forget those that it knows.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable
from functools import partial
from typing import Any

from spiderfs.core.events import HIT, PUSHED, UNREAD, UNSTORED
from spiderfs.errors import ReadOnly, SourceUnavailable, SpiderfsError, Stale
from spiderfs.shared.shared_memory import SharedSlots
from spiderfs.sources.source import Delivery, SourceStat
from spiderfs.store.store import ContentKey
from spiderfs.vfs.answer_types import Attributes, Caller, Entry
from spiderfs.vfs.catalogue import PROVISIONAL, ROOT_INODE, VIEWS_INODE, Dentry, Node
from spiderfs.vfs.control_files import ControlAttributes, ImmutableControl
from spiderfs.vfs.filesystem import Filesystem
from spiderfs.vfs.rules import FOREVER_S

log = logging.getLogger(__name__)

# Files of which the log has said that they have changed; when there are more, it may say so again.
_REPORTED = 4096
# READs that have failed and may be sent once more, at most; and how soon, on a busy machine.
_FAILURES, _SAME_CALL_S = 1024, 1.0


class ImmutableFilesystem(Filesystem):
    _control: ImmutableControl

    def __init__(
        self, *, control: ImmutableControl, doubt: Callable[[int], None], pusher_threads: SharedSlots, **parts: Any
    ) -> None:
        """`doubt`: see `Kernel.doubt`. `parts` are those of `Filesystem`."""
        super().__init__(control=control, **parts)
        self._doubt, self._pusher_threads = doubt, pusher_threads
        # Attributes of the directories that are no names of the source.
        self._fixed: dict[int, SourceStat] = {}
        self._reported: set[int] = set()
        # First READs that have just failed, by inode and thread: when, and with which error.
        self._failed: dict[tuple[int, int], tuple[float, type[SourceUnavailable], str]] = {}

    async def _answer(self, dentry: Dentry, left: float, parent: int, caller: Caller) -> Entry:
        gives = self._redirects.gives and stat.S_ISREG(dentry.stat.mode)
        if caller.pid in self._pusher_threads:
            # No one is to be given a substitute for what is read ahead, whoever has started the daemon.
            return self._entry(await self._sized_ahead(dentry), 0.0 if gives else left)
        if not gives:
            return await super()._answer(dentry, left, parent, caller)
        before = self._redirects.last_lookup(caller.pid)
        if (substitute := await self._substitutes.given(dentry, parent, caller)) is None:
            return self._entry(await self._on_demand.sized_name(dentry), 0.0)
        substitute = await self._on_demand.sized(substitute)
        attributes = self._attributes(substitute.inode, substitute.stat, FOREVER_S)
        # The kernel may look a name up twice for one open. If the thread had looked another name up meanwhile, its note
        # would be about that one.
        if before != (dentry.inode, substitute.inode):
            trainer = self._redirects.trainer_of(caller.pid)
            # No open will report the substitute.
            self._counters.add("redirects")
            number = trainer.number if trainer else 0
            self._events.record_access(
                attributes.inode, attributes.size, HIT, caller.pid, trainer=number, wanted=dentry.inode
            )
        return Entry(attributes, 0.0)

    def _listed(self, dentry: Dentry) -> Entry:
        if self._redirects.gives and stat.S_ISREG(dentry.stat.mode) and not self._on_demand.is_unsized(dentry):
            return self._entry(dentry, 0.0)
        return super()._listed(dentry)

    @property
    def _directory_attributes_ttl_s(self) -> float:
        # The kernel needs them at each look-up below the directory.
        return FOREVER_S

    async def _directory(self, node: Node) -> tuple[SourceStat, float]:
        # The kernel may ask for them again, and no one below the directory may wait for a source that hangs.
        if node.inode in (ROOT_INODE, VIEWS_INODE):
            if node.inode not in self._fixed:
                self._fixed[node.inode], _ = await super()._directory(node)
            return self._fixed[node.inode], FOREVER_S
        known = self._catalogue.find(*self._catalogue.parent_of(node.path))
        if known is not None and known.inode == node.inode and self._left_s(known) > 0:
            return known.stat, FOREVER_S
        return (await super()._directory(node))[0], FOREVER_S

    def _control_attributes(self, found: ControlAttributes) -> Attributes:
        # cp(1) leaves out a file whose number is another one when it is opened than it was before.
        return super()._control_attributes(found)._replace(shown=self._control.first_inode(found.inode))

    async def getattr(self, inode: int, is_open: bool | None = None, uid: int = 0) -> Attributes:
        """The attributes. Raises Stale, to have the name looked up, for a version that its name no longer means.

        `is_open`: the caller has the file open, and reads or seeks; False: it may be about to open the file. `uid` is
        the user who asks.
        """
        if self._control.owns(inode):
            if is_open:
                # The text of the control file must count every read until now.
                await self._fetcher.caught_up()
                return self._control_attributes(await self._control.begin_reading(inode, uid))
            return self._control_attributes(self._control.getattr(inode))
        found = await super().getattr(inode)
        if is_open is None or not stat.S_ISREG(found.mode):
            return found
        node = self._catalogue.node(inode)
        if is_open and not self._catalogue.still_names(node):
            # A reader that has the file open goes on with its version. The next open has to ask all the same.
            return found._replace(timeout_s=0.0)
        if not is_open:
            await self._on_demand.check_still_named(node)
        return found

    async def read_immutable(
        self, inode: int, offset: int, size: int, caller: Caller, delivery: Delivery | None = None
    ) -> memoryview | bytes:
        """As `read`. The process that reads the file may answer through `delivery` before this returns."""
        if self._control.owns(inode):
            return await self._control.read_inode(inode, offset, size)
        if offset == 0 and self._failed:
            self._raise_if_just_failed(inode, caller)
        try:
            piece: memoryview | bytes | None
            if inode & PROVISIONAL:
                return await self._read_provisional(inode, offset, size, caller)
            if caller.pid in self._pusher_threads:
                piece = await self._pushed_read(inode, offset, size, delivery)
            else:
                piece = None if offset else await self._first_read(inode, size, caller, delivery)
            if piece is not None:
                self._counters.add("reads")
                self._counters.add("read_bytes", len(piece))
                return piece
            return await self.read(inode, offset, size, inode, caller)
        except Stale as exc:
            self._doubt(inode)
            if self._catalogue.known(inode) is not None:
                self._report(inode, exc)
            raise
        except SourceUnavailable as exc:
            if offset == 0 and caller.pid not in self._pusher_threads:
                if len(self._failed) >= _FAILURES:
                    self._failed.clear()
                self._failed[inode, caller.pid] = self._now(), type(exc), str(exc)
            raise

    def _raise_if_just_failed(self, inode: int, caller: Caller) -> None:
        """Fail as the thread's last READ did, once.

        When the READ of all that a reader may want has failed, the kernel asks for the first page alone. The reader
        made one call, and would wait for all attempts again.
        """
        failed = self._failed.pop((inode, caller.pid), None)
        if failed is not None and 0 <= self._now() - failed[0] < _SAME_CALL_S:
            raise failed[1](failed[2])

    async def _read_provisional(self, inode: int, offset: int, size: int, caller: Caller) -> memoryview | bytes:
        """Read a version for all that open it before it settles: their handle is the number that the kernel knows."""
        self._counters.add("reads")
        is_pushed = offset == 0 and caller.pid in self._pusher_threads
        if offset == 0 and not is_pushed:
            self._provisional_files.note_open()
        where = UNREAD
        try:
            piece = await self._provisional_files.read(inode, inode, offset, size)
            where = UNSTORED
        finally:
            if is_pushed:
                self._note_pushed(self._catalogue.node(inode), where)
        return piece

    async def _first_read(
        self, inode: int, size: int, caller: Caller, delivery: Delivery | None
    ) -> memoryview | bytes | None:
        """Account for an open, and make a small file local; its first bytes, if they are at hand then."""
        trainer = self._trainer_of(inode, caller)
        # Most READs end here. They have no need of the catalogue, which takes 3 us.
        if (cached := self._small_files.read_cached(inode, size, caller, trainer)) is not None:
            return cached
        node = self._catalogue.node(inode)
        if node.stat.size > self.settings.sample_max_bytes:
            self.large_files.note_open(node, caller)
            return None
        opened = await self._small_files.open_for(node, caller, delivery, trainer, inode)
        return None if opened.fetched is None else memoryview(opened.fetched)[:size]

    def _trainer_of(self, inode: int, caller: Caller) -> int:
        """The number of the trainer for which a file is opened as itself, else 0: a substitute was reported before."""
        if not self._redirects.attended or (trainer := self._redirects.trainer_of(caller.pid)) is None:
            return 0
        last = self._redirects.last_lookup(caller.pid)
        return 0 if last is not None and last[1] == inode != last[0] else trainer.number

    async def _sized_ahead(self, dentry: Dentry) -> Dentry:
        """A name with the size of what is shown; what was fetched for that is reported to the manager."""
        if (sized := await self._on_demand.sized_ahead(dentry)) is None:
            return dentry
        node, fetched = sized
        # Reported before the READ that follows, which another worker may get.
        self._note_pushed(node, await fetched.settled() if fetched.claim() else HIT)
        return dentry._replace(stat=node.stat)

    async def _pushed_read(self, inode: int, offset: int, size: int, delivery: Delivery | None) -> memoryview | None:
        """Make a planned small file local; its bytes, if fetched now. The first READ is reported, and a fetch, once."""
        node, key = self._catalogue.node(inode), ContentKey(inode)
        is_first = offset == 0
        if not node.stat.size or self._fetcher.stored(key) or await self._fetcher.has_arrived(key):
            if is_first:
                self._note_pushed(node, HIT)
            return None
        try:
            fetched = await self._on_demand.fetch(node, delivery=delivery if is_first else None, is_read=False)
        except SpiderfsError:
            if is_first:
                self._note_pushed(node, UNREAD)
            raise
        if fetched.claim():
            fetched.when_settled(partial(self._note_pushed, node))
        elif is_first:
            self._note_pushed(node, HIT)
        return memoryview(fetched.payload)[offset : offset + size]

    def _note_pushed(self, node: Node, where: int) -> None:
        self._events.record_access(node.inode, node.stat.size, where | PUSHED, 0)
        # Many wait for this: the manager pushes the next one.
        self._events.flush()

    def _report(self, inode: int, exc: Stale) -> None:
        if inode in self._reported:
            return
        if len(self._reported) >= _REPORTED:
            self._reported.clear()
        self._reported.add(inode)
        log.warning("%s, but the mount is `immutable`: its reader gets ESTALE, and the next open the new version", exc)

    def may_be_written(self, inode: int) -> bool:
        return self._control.owns(inode)

    async def write_immutable(self, inode: int, data: bytes) -> int:
        if not self.may_be_written(inode):
            raise ReadOnly("spiderfs is read-only")
        return await self._control.write_inode(inode, data)

    async def truncate(self, inode: int) -> Attributes:
        if not self.may_be_written(inode):
            raise ReadOnly("spiderfs is read-only")
        self._control.check_writable(inode)
        return self._control_attributes(self._control.getattr(inode)._replace(size=0))

    async def forget(self, inode: int) -> None:
        """The kernel does not know the inode any more."""
        if self._control.owns(inode):
            await self._control.forget(inode)
