"""Extended attributes: those of the source's files, and `user.spiderfs.*`, the state of a file in the cache."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import trio

from spiderfs.errors import NoAttribute, StoreError
from spiderfs.linux.mounts import NO_READ_AHEAD_KIB, set_read_ahead
from spiderfs.protocol.reads import READS_XATTR, ReadBytes, encoded
from spiderfs.shared.published import CLIENT_XATTR
from spiderfs.shared.read_log import Read
from spiderfs.store.store import BLOCK_BYTES, LANDING, ContentKey, Member
from spiderfs.vfs.answer_types import Caller
from spiderfs.vfs.catalogue import ROOT_INODE, Node
from spiderfs.vfs.on_demand import Part, Shared
from spiderfs.vfs.rules import is_provisional

log = logging.getLogger(__name__)

_PREFIX = "user.spiderfs."


class Xattrs(Part):
    """Of everything but control files, which have none."""

    def __init__(self, shared: Shared, client_terms: Path) -> None:
        """`client_terms`: see `shared/published.py`."""
        super().__init__(shared)
        self._client_terms = client_terms

    async def names(self, inode: int) -> list[str]:
        """Those of the source alone: a program that copies a file with its attributes must not copy the cache's."""
        names = await self._client.call(self._client.source.listxattr, self._catalogue.node(inode).path)
        return [name for name in names if name.startswith("user.") and not name.startswith(_PREFIX)]

    async def value(self, inode: int, name: str, caller: Caller) -> bytes:
        """Raises NoAttribute."""
        if not name.startswith("user."):
            raise NoAttribute(name)
        if inode == ROOT_INODE and name == CLIENT_XATTR:
            return os.fsencode(self._client_terms)
        if inode == ROOT_INODE and (name + ".").startswith(READS_XATTR + "."):
            return await self._reads(name.removeprefix(READS_XATTR), caller)
        node = self._catalogue.node(inode)
        if name.startswith(_PREFIX) and node.is_regular:
            if (render := _OWN.get(name.removeprefix(_PREFIX))) is None:
                raise NoAttribute(name)
            await self._fetcher.caught_up()
            return os.fsencode(render(self, node))
        if (value := await self._client.call(self._client.source.getxattr, node.path, name)) is None:
            raise NoAttribute(name)
        return value

    async def _reads(self, since: str, caller: Caller) -> bytes:
        """What the caller's process has read since then; see `protocol/reads.py`."""
        if not caller.pid or caller.uid not in (0, os.getuid()):
            # Of a process of a foreign pid namespace no READs are known. Others may not change the mount's read-ahead.
            raise NoAttribute(READS_XATTR)
        if self._read_log.keep(self._now()):
            # Pages that the kernel adds to what a reader wants are not what a sample has.
            await trio.to_thread.run_sync(set_read_ahead, self._read_log.mountpoint, NO_READ_AHEAD_KIB)
        reads: list[Read] | None = None if since else []
        if since:
            with contextlib.suppress(ValueError):
                process = self._redirects.process_of(caller.pid)
                reads = self._read_log.since(float(since[1:]), process, caller.pid)
        if reads is None:
            raise NoAttribute(READS_XATTR)
        found = []
        for inode, own, begin, end in reads:
            if (node := self._catalogue.known(inode)) is not None and begin < node.stat.size:
                found.append(ReadBytes(own, begin, min(end, node.stat.size), node.path))
        return encoded(self._now(), found)

    def _state(self, node: Node) -> str:
        if is_provisional(node.settles_at, self._now()):
            return "provisional"
        if node.stat.size <= self._settings().sample_max_bytes:
            stored = node.stat.size == 0 or self._fetcher.stored(ContentKey(node.inode))
            return "cached" if stored else "uncached"
        cached, blocks = self._fetcher.stored_blocks(node.inode), -(-node.stat.size // BLOCK_BYTES)
        if cached == blocks:
            return "cached"
        return f"partial {cached}/{blocks}" if cached else "uncached"

    def _member(self, node: Node) -> Member | None:
        try:
            return self._content.member(ContentKey(node.inode))
        except StoreError as exc:
            log.debug("%s: taken for not cached", exc)
            return None

    def _served_by(self, node: Node) -> str:
        paths = [self._catalogue.node(inode).path for inode in self._redirects.substitutes(node.inode)]
        return "\n".join(os.fsdecode(path) for path in paths) or "itself"


_OWN: dict[str, Callable[[Xattrs, Node], str]] = {
    "state": Xattrs._state,
    "section": lambda of, node: member.section if (member := of._member(node)) else "none",
    "score": lambda of, node: f"{m.score:g}" if (m := of._member(node)) and m.section != LANDING else "none",
    "served_by": Xattrs._served_by,
    "inode": lambda _, node: str(node.inode),
    "version": lambda _, node: f"{node.stat.size} {node.stat.mtime_ns}",
}
