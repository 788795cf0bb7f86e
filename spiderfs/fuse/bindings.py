"""Mounting: the choice of the binding to the kernel, for which all others use the port.

The binding that speaks the kernel's own protocol is here too: `session.py` takes requests, `operations.py`
answers them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from spiderfs.errors import MountError
from spiderfs.fuse import session, wire
from spiderfs.fuse.kernel import Kernel, Serving, error_number
from spiderfs.fuse.operations import ImmutableOperations, Operations
from spiderfs.linux import mounts
from spiderfs.vfs.immutable_filesystem import ImmutableFilesystem


class KernelBinding:
    """A `Kernel` over the descriptor that `session.mount` has returned."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    async def serve(self, serving: Serving) -> None:
        filesystem, counters = serving.filesystem, serving.counters
        operations = (
            ImmutableOperations(filesystem, counters, self.push, self.drop_pages)
            if isinstance(filesystem, ImmutableFilesystem)
            else Operations(filesystem, counters, self.push, serving.handles, serving.passthrough)
        )
        await session.RequestLoop(
            self.descriptor,
            operations.handlers(),
            lambda exc: error_number(exc, counters),
            counters,
            serving.idle,
            lambda: filesystem.at_rest,
            serving.held,
        ).serve()

    def push(self, inode: int, content: bytes) -> None:
        # ENOENT: the kernel does not know the inode any more. Nor is it an error that it has no memory for this.
        with contextlib.suppress(OSError):
            os.writev(self.descriptor, (wire.store(inode, len(content)), content))

    def forget_name(self, parent: int, name: bytes) -> None:
        # ENOENT: the kernel does not know the name.
        with contextlib.suppress(FileNotFoundError):
            os.write(self.descriptor, wire.forget_name(parent, name))

    def forget_names(self) -> bool:
        return self._notify(wire.forget_names())

    def doubt(self, inode: int) -> None:
        self._notify(wire.doubt(inode))

    def drop_pages(self, inode: int, offset: int, size: int) -> None:
        self._notify(wire.drop_pages(inode, offset, size))

    def _notify(self, notice: bytes) -> bool:
        # ENOENT: the kernel does not know the inode any more. EINVAL: it does not know this notice, or the connection
        # is at its end.
        try:
            os.write(self.descriptor, notice)
        except OSError:
            return False
        return True

    def resend(self) -> bool:
        return session.resend(self.descriptor)

    def unmount(self, at: Path) -> None:
        mounts.unmount_or_detach(at)

    def leave(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def mount(
    binding: str, at: Path, source: str, allow_other: bool, programs_run: bool, immutable: bool = False
) -> Kernel:
    """Mount, and answer INIT; `immutable`: the kernel is to open files without asking. Raises MountError."""
    speak = BINDINGS[binding]()
    return speak(session.mount(at, source, allow_other, programs_run, immutable))


def _pyfuse3() -> Callable[[int], Kernel]:
    # Here, for spiderfs works without pyfuse3.
    try:
        from spiderfs.fuse.pyfuse3_binding import Pyfuse3Binding
    except ImportError as exc:
        raise MountError(
            f"binding=pyfuse3 cannot be used here ({exc}): "
            "run `pip install '.[pyfuse3]'` in a checkout of spiderfs, or mount with -o binding=kernel"
        ) from exc
    return Pyfuse3Binding


# Each function loads one binding and returns what makes a `Kernel` of the descriptor of a mount. It raises MountError
# if the binding is not installed.
BINDINGS: dict[str, Callable[[], Callable[[int], Kernel]]] = {"kernel": lambda: KernelBinding, "pyfuse3": _pyfuse3}
