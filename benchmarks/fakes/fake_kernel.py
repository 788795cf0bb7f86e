"""A kernel that remembers what it was sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import trio

from spiderfs.fuse.kernel import Serving
from spiderfs.protocol.extents import PAGE_BYTES


@dataclass
class FakeKernel:
    """A `Kernel` that asks nothing; it serves until `unmounted` is set."""

    descriptor: int = -1
    resends: bool = True
    pushed: list[tuple[int, int, bytes]] = field(default_factory=list)
    """Inode, where the pages begin, and their bytes."""
    forgotten: list[tuple[int, bytes]] = field(default_factory=list)
    served: list[Serving] = field(default_factory=list)
    names_forgotten: int = 0
    doubted: list[int] = field(default_factory=list)
    dropped: list[tuple[int, int, int]] = field(default_factory=list)
    resent: int = 0
    left: bool = False
    unmounted: trio.Event = field(default_factory=trio.Event)

    async def serve(self, serving: Serving) -> None:
        self.served.append(serving)
        await self.unmounted.wait()

    def push(self, inode: int, content: bytes, offset: int = 0) -> None:
        assert offset % PAGE_BYTES == 0, "the kernel loses what is pushed of a part of a page"
        self.pushed.append((inode, offset, content))

    def forget_name(self, parent: int, name: bytes) -> None:
        self.forgotten.append((parent, name))

    def forget_names(self) -> bool:
        self.names_forgotten += 1
        return True

    def doubt(self, inode: int) -> None:
        self.doubted.append(inode)

    def drop_pages(self, inode: int, offset: int, size: int) -> None:
        self.dropped.append((inode, offset, size))

    def resend(self) -> bool:
        self.resent += 1
        return self.resends

    def unmount(self, at: Path) -> None:
        self.unmounted.set()

    def leave(self) -> None:
        self.left = True
