"""What takes the kernel's place where there is no mount: a Unix socket, from which workers take requests.

The supervisor listens before it forks, and workers accept connections from the same socket. A request names a path, and
the worker walks along it as the kernel would: it looks up name after name, follows symbolic links, and does all of it
again, once, if a version has changed on the way (ESTALE). There are no pages that someone would keep, so nothing has to
be forgotten, and no request is handed out again: a client whose worker dies sees the end of its connection, and asks
another worker (`client/served.py`). Each request is noted, so that one at which worker after worker dies is answered
with an error (`fuse/resent_requests.py`).

Only the daemon's own user and root are answered. An open file belongs to the connection that has opened it, and is
closed with it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import stat
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import trio

from spiderfs import errors
from spiderfs.errors import SpiderfsError
from spiderfs.fuse import wire
from spiderfs.fuse.kernel import Serving, error_number
from spiderfs.linux.mounts import MAX_SYMLINKS
from spiderfs.protocol import requests
from spiderfs.vfs.answer_types import Attributes, Caller
from spiderfs.vfs.catalogue import ROOT_INODE
from spiderfs.vfs.filesystem import Filesystem

log = logging.getLogger(__name__)

_BACKLOG = 512
# Connections of one worker; a process that could open no more files could not read from the source either.
MOST_CONNECTIONS = 4096
# Names in one answer to `list`: some 100 bytes each.
_NAMES = 10_000
_FULL_PAUSE_S = 0.05
# What a connection has left open is closed within this time, also when the worker ends.
_RELEASE_S = 1.0
_LONGEST_BYTES = 1 << 62


def listen(at: Path) -> SocketKernel:
    """Listen at this path, in a directory that is this user's alone; raises MountError."""
    try:
        at.parent.mkdir(mode=0o700, exist_ok=True)
        found = at.parent.lstat()
        if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
            raise errors.MountError(
                f"{at.parent} is not a directory of this user alone: run chmod 700, or name another,"
                f" {requests.ENVIRONMENT}=DIR"
            )
        with requests.socket_address(at) as address:
            if _answers(address):
                raise errors.MountError(f"spiderfs://{at.name} is served already: choose another name, or end it first")
            at.unlink(missing_ok=True)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(address)
        at.chmod(0o600)
        listener.listen(_BACKLOG)
    except OSError as exc:
        raise errors.MountError(
            f"cannot listen at {at} ({exc.strerror}): name another directory, {requests.ENVIRONMENT}=DIR"
        ) from exc
    listener.setblocking(False)
    return SocketKernel(listener)


def _answers(address: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address)
        except BlockingIOError:
            return True  # so many wait already
        except OSError:
            return False
        return True


class SocketKernel:
    """A `Kernel` over a socket that listens."""

    descriptor = None

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener

    async def serve(self, serving: Serving) -> None:
        connections = 0

        async def attend(accepted: socket.socket) -> None:
            nonlocal connections
            connections += 1
            try:
                with trio.socket.from_stdlib_socket(accepted) as peer:
                    await Session(serving, peer).attend(connections > MOST_CONNECTIONS)
            finally:
                connections -= 1

        async with trio.open_nursery() as nursery:
            while True:
                await trio.lowlevel.wait_readable(self._listener)
                try:
                    accepted, _ = self._listener.accept()
                except BlockingIOError:
                    # Another worker was quicker, or `unmount` has shut it down. accept(2) does not tell that from a
                    # listener without connections; poll(2) reports POLLHUP in any case.
                    poll = select.poll()
                    poll.register(self._listener, 0)
                    if poll.poll(0):
                        break
                except OSError as exc:
                    if exc.errno not in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.ENOMEM):
                        raise
                    log.warning("a connection could not be accepted: %s", exc)
                    await trio.sleep(_FULL_PAUSE_S)
                else:
                    nursery.start_soon(attend, accepted)
            nursery.cancel_scope.cancel()

    def unmount(self, at: Path) -> None:
        # Every process that has the socket sees this, and who connects from here on is refused.
        self._listener.shutdown(socket.SHUT_RDWR)
        at.unlink(missing_ok=True)

    def leave(self) -> None:
        self._listener.close()

    def resend(self) -> bool:
        return True

    def forget_names(self) -> bool:
        return True

    def _nothing(self, *_: object, **__: object) -> None:
        """There are no pages that someone would keep."""

    push = forget_name = doubt = drop_pages = _nothing


class Session:
    """One connection, whose requests are answered one after the other."""

    def __init__(self, serving: Serving, peer: trio.socket.SocketType) -> None:
        self._serving = serving
        self._fs: Filesystem = serving.filesystem
        self._peer = peer
        self._who = requests.peer_of(peer)
        # By handle: the inode that was opened.
        self._opened: dict[int, list[int]] = {}
        self._of_paths: dict[str, Callable[[Caller, bytes, int], Awaitable[Any]]] = {
            "stat": self._stat,
            "readlink": self._readlink,
            "list": self._list,
            "open": self._open,
        }

    async def attend(self, too_many: bool) -> None:
        try:
            while (asked := await self._request()) is not None:
                answer = await self._answer(asked, too_many)
                await self._send(requests.frame(answer))
        except (ValueError, BrokenPipeError, ConnectionError) as exc:
            log.debug("a connection of process %d ended: %s", self._who.pid, exc)
        finally:
            with trio.move_on_after(_RELEASE_S, shield=True):
                for handle, inodes in self._opened.items():
                    for inode in inodes:
                        # An error has no receiver, as one of RELEASE in a mount.
                        with contextlib.suppress(SpiderfsError):
                            await self._fs.release(handle, inode)

    async def _request(self) -> Any:
        """What is asked next; None at the end of the connection. Raises ValueError for what is no request."""
        head = await self._received(requests.LENGTH.size)
        if len(head) < requests.LENGTH.size:
            return None
        (length,) = requests.LENGTH.unpack(head)
        if length > requests.REQUEST_BYTES:
            raise ValueError(f"a request of {length} bytes")
        return msgpack.unpackb(await self._received(length), use_list=False)

    async def _received(self, size: int) -> bytes:
        """So many bytes, or fewer at the end of the connection."""
        received = bytearray()
        while len(received) < size and (piece := await self._peer.recv(size - len(received))):
            received += piece
        return bytes(received)

    async def _send(self, message: bytes) -> None:
        left = memoryview(message)
        while left:
            left = left[await self._peer.send(left) :]

    async def _answer(self, asked: Any, too_many: bool) -> tuple[int, Any]:
        counters = self._serving.counters
        self._serving.idle()
        try:
            if self._who.uid not in (0, os.geteuid()):
                raise errors.AccessDenied(f"user {self._who.uid} is not served")
            if too_many:
                raise errors.Busy(f"{MOST_CONNECTIONS} connections are open already")
            handle = self._handler(asked)
            number, what = hash(asked) % wire.RESENT, f"{asked[0]} of {asked[2]!r:.100}"
            answer = 0, await self._serving.held.answer(number, what, handle)
        except Exception as exc:
            answer = error_number(exc, counters), None
        counters.add("answers")
        return answer

    def _handler(self, asked: Any) -> Callable[[], Awaitable[Any]]:
        """Raises InvalidArgument for a request that no client makes."""
        match asked:
            case (_, _, bytes(path), *_) if b"\0" in path:
                raise errors.InvalidArgument("a path with a zero byte")
            case (str(name), int(thread), bytes(path), int(argument)) if (
                name in self._of_paths and 0 <= argument <= wire.MOST_POSITION
            ):
                return partial(self._twice, partial(self._of_paths[name], self._caller(thread), path, argument))
            case ("getxattr", int(thread), bytes(path), str(attribute)):
                return partial(self._twice, partial(self._getxattr, self._caller(thread), path, attribute))
            case ("read", int(handle), int(inode), int(offset), int(size)) if (
                inode in self._opened.get(handle, ()) and 0 <= offset <= _LONGEST_BYTES and size >= 0
            ):
                return partial(self._read, handle, inode, offset, size)
            case ("write", int(handle), bytes(data)) if handle in self._opened:
                return partial(self._fs.write, handle, data)
            case ("close", int(handle), int(inode)) if inode in self._opened.get(handle, ()):
                return partial(self._close, handle, inode)
        raise errors.InvalidArgument(f"no request {asked!r:.100}")

    def _caller(self, thread: int) -> Caller:
        # In another pid namespace the thread has another number, and the process is as good.
        known = os.path.exists(f"/proc/{self._who.pid}/task/{thread}")
        return Caller(self._who.uid, self._who.gid, thread if known else self._who.pid)

    @staticmethod
    async def _twice(act: Callable[[], Awaitable[Any]]) -> Any:
        """As the kernel does: what was stale is looked up again, from the root."""
        try:
            return await act()
        except errors.Stale:
            return await act()

    # -- names

    async def _walk(self, caller: Caller, path: bytes, follow: int = 1) -> Place:
        """What a path means; with `follow` 0 a symbolic link at its end. Raises NotFound and others.

        A link to an absolute path leads out of what is served, and so nowhere.
        """
        trail = [Place(ROOT_INODE, stat.S_IFDIR, None)]
        left, links = deque(path.split(b"/")), 0
        while left:
            name = left.popleft()
            if not stat.S_ISDIR(trail[-1].mode):
                raise errors.NotADirectory(os.fsdecode(path))
            if name == b"..":
                del trail[max(1, len(trail) - 1) :]
            if name in (b"", b".", b".."):
                continue
            found = (await self._fs.lookup(trail[-1].inode, name, caller)).attributes
            if not found.inode:
                raise errors.NotFound(os.fsdecode(path))
            if not stat.S_ISLNK(found.mode) or not (left or follow):
                trail.append(Place(found.inode, found.mode, found))
                continue
            links += 1
            target = await self._fs.readlink(found.inode)
            if links > MAX_SYMLINKS:
                raise errors.TooManyLinks(os.fsdecode(path))
            if target.startswith(b"/"):
                raise errors.NotFound(f"{os.fsdecode(path)} leads to {os.fsdecode(target)}, which is not served")
            left.extendleft(reversed(target.split(b"/")))
        return trail[-1]

    async def _stat(self, caller: Caller, path: bytes, follow: int) -> tuple[int, ...]:
        place = await self._walk(caller, path, follow)
        if place.attributes is None or stat.S_ISDIR(place.mode):
            return shown(await self._fs.getattr(place.inode))
        return shown(place.attributes)

    async def _readlink(self, caller: Caller, path: bytes, _: int) -> bytes:
        return await self._fs.readlink((await self._walk(caller, path, 0)).inode)

    async def _getxattr(self, caller: Caller, path: bytes, attribute: str) -> bytes:
        return await self._fs.getxattr((await self._walk(caller, path)).inode, attribute)

    async def _list(self, caller: Caller, path: bytes, after: int) -> tuple[list[Any], int]:
        """Names with their attributes (None: not known) behind a position, and the last position, 0 at the end."""
        place = await self._walk(caller, path)
        if not stat.S_ISDIR(place.mode):
            raise errors.NotADirectory(os.fsdecode(path))
        if not after:
            await self._fs.opendir(place.inode)
        rows = await self._fs.readdir(place.inode, after, _NAMES)
        listed = []
        for name, entry, _ in rows:
            found = entry.attributes
            if not found.inode:
                # The listing alone does not know it. A name whose attributes fail hides no other.
                with contextlib.suppress(SpiderfsError):
                    found = (await self._fs.lookup(place.inode, name, caller)).attributes
            listed.append((name, shown(found) if found.inode else None))
        return listed, rows[-1][2] if len(rows) == _NAMES else 0

    # -- contents

    async def _open(self, caller: Caller, path: bytes, flags: int) -> tuple[Any, ...]:
        """Attributes, handle and inode of the open file, or its content if that is not too long; then it is closed."""
        try:
            place = await self._walk(caller, path)
        except errors.NotFound:
            if flags & os.O_CREAT:
                raise errors.ReadOnly("spiderfs is read-only") from None
            raise
        if place.attributes is None or stat.S_ISDIR(place.mode):
            raise errors.IsADirectory(os.fsdecode(path))
        attributes, inode = place.attributes, place.inode
        handle, _, fetched, large, _ = await self._fs.open(inode, flags, caller)
        self._opened.setdefault(handle, []).append(inode)
        if large or flags & (os.O_WRONLY | os.O_RDWR):
            return shown(attributes), handle, inode, None
        content = fetched
        try:
            if content is None:
                content = await self._whole(handle, inode)
        except BaseException:
            await self._close(handle, inode)
            raise
        if content is not None and len(content) <= requests.INLINE_BYTES:
            await self._close(handle, inode)
            return shown(attributes), handle, inode, content
        return shown(attributes), handle, inode, None

    async def _whole(self, handle: int, inode: int) -> bytes | None:
        """What an open file holds; None if that is more than INLINE_BYTES. The size of a control file is not known."""
        content = bytearray()
        while len(content) <= requests.INLINE_BYTES:
            piece = await self._read(handle, inode, len(content), requests.PIECE_BYTES)
            content += piece
            if len(piece) < requests.PIECE_BYTES:
                return bytes(content)
        return None

    async def _read(self, handle: int, inode: int, offset: int, size: int) -> bytes:
        piece = bytes(await self._fs.read(handle, offset, min(size, requests.PIECE_BYTES), inode))
        self._serving.idle()
        return piece

    async def _close(self, handle: int, inode: int) -> None:
        inodes = self._opened[handle]
        inodes.remove(inode)
        if not inodes:
            del self._opened[handle]
        await self._fs.release(handle, inode)


class Place(NamedTuple):
    """The end of a path; the root's attributes are not known."""

    inode: int
    mode: int
    attributes: Attributes | None


def shown(attributes: Attributes) -> tuple[int, ...]:
    """Mode, inode, owner, group, size and mtime (ns), as clients get them."""
    inode = attributes.shown or attributes.inode
    return attributes.mode, inode, attributes.uid, attributes.gid, attributes.size, attributes.mtime_ns
