"""A loader's connection to the hook's socket, through which it puts partly augmented samples into the mount's cache.

Such a connection begins with `partials` in place of `hello`. Each `keep` comes with one descriptor, of a sealed memory
file that has the sample's bytes (unix(7), SCM_RIGHTS). They are looked at, copied and kept one after another, and each
is answered in its turn; so a connection holds one sample in memory. What is wrong with a message or its descriptor is
answered, counted, and harms no one else. Descriptors that come where none is expected are closed at once.

Jobs that share what they keep ask by `turn` which generations to use next (`core/partials.py`). Who has had what is
forgotten when the last of them has gone.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import trio

from spiderfs import protocol
from spiderfs.core.partials import MOST_JOBS, Partials
from spiderfs.core.partials import Turns as SharedTurns
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.errors import ProtocolError, SpiderfsError
from spiderfs.protocol.partials import FIRST_PARTIAL, read_sealed
from spiderfs.store.store import Content, ContentKey

_RECEIVE_BYTES = 4096
# In a small cache, files that are fetched may push a sample out of landing before it is kept; then it lands again.
_TRIES = 3
# A message has one descriptor. With room for more, those that are too many are seen, and refused with a reason; the
# kernel closes those that find no room.
_MOST_DESCRIPTORS = 8
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)


class PartialKeeper:
    """Keeps partial samples for loaders: lands their bytes in the store, and has the cache control keep them."""

    def __init__(self, content: Content, cache: CacheControl, most_bytes: int) -> None:
        """`most_bytes` is the size of the largest sample that is taken."""
        self._content, self._cache = content, cache
        self._connections: Counter[str] = Counter()
        self._turns: dict[str, SharedTurns] = {}
        self._jobs: Counter[tuple[str, str]] = Counter()
        self._landing: set[int] = set()
        self.most_bytes = most_bytes

    def begin(self, begun: protocol.PartialSamples) -> int:
        """Begin for a process; returns how many bytes its store may fill. Raises ProtocolError if jobs do not agree."""
        if begun.job is not None and begun.samples is not None:
            turns = self._turns.get(begun.store) or SharedTurns(begun.samples)
            if turns.samples != begun.samples:
                raise ProtocolError(f"{begun.samples} samples, and {turns.samples} of the other jobs")
            if not turns.join(begun.job):
                raise ProtocolError(f"{MOST_JOBS} jobs share these samples already", "too-many")
            self._turns[begun.store] = turns
            self._jobs[begun.store, begun.job] += 1
        self._connections[begun.store] += 1
        return self._section.begin(begun.store, int(begun.wanted_bytes))

    def end(self, begun: protocol.PartialSamples) -> None:
        """A process that has begun leaves."""
        if begun.job is not None:
            self._jobs[begun.store, begun.job] -= 1
            if not self._jobs[begun.store, begun.job]:
                del self._jobs[begun.store, begun.job]
                self._turns[begun.store].leave(begun.job)
                if not self._turns[begun.store].jobs:
                    del self._turns[begun.store]
        self._connections[begun.store] -= 1
        if not self._connections[begun.store]:
            del self._connections[begun.store]
            self._section.end(begun.store)

    def turns(self, begun: protocol.PartialSamples, turn: protocol.Turn) -> protocol.Turns:
        """Which generations a job is to use next; raises ProtocolError."""
        shared = self._turns.get(begun.store)
        if begun.job is None or shared is None:
            raise ProtocolError("turn is for a loader that has named its job", "order")
        if len(turn.indices) and int(turn.indices.max()) >= shared.samples:
            raise ProtocolError(f"sample {int(turn.indices.max())} of {shared.samples}", "index")
        return protocol.Turns(*shared.take(begun.job, turn.indices, int(turn.generation[0])))

    def ready(self, question: protocol.Exchange) -> npt.NDArray[np.bool_] | None:
        """For each sample whether the job can use a generation that is there; None if it shares no partial samples."""
        shared = self._turns.get(question.store or "")
        return None if shared is None or question.job is None else shared.ready(question.job)

    @property
    def _section(self) -> Partials:
        return self._cache.partials

    async def keep(self, fd: int, size: int, inode: int, replaces: int | None) -> None:
        """Keep the bytes of a sealed memory file; raises ProtocolError, also if there is no room, and StoreError."""
        if inode < FIRST_PARTIAL:
            raise ProtocolError(f"{inode} is the inode of a sample: a partial sample's is {FIRST_PARTIAL} or more")
        if not 0 < size <= self.most_bytes:
            raise ProtocolError(f"a partial sample of {size} bytes: 1 to {self.most_bytes}", "too-large")
        # A version never changes. What another process has put there is the same, unless one of them is wrong.
        if inode in self._section or inode in self._landing:
            return
        self._landing.add(inode)
        try:
            for _ in range(_TRIES):
                if not await trio.to_thread.run_sync(
                    lambda: self._content.land(ContentKey(inode), read_sealed(fd, size))
                ):
                    self._cache.make_room_for(size)
                elif self._cache.keep_partial(inode, size, replaces):
                    return
            raise ProtocolError(f"a partial sample of {size} bytes finds no room", "full")
        finally:
            self._landing.discard(inode)


@dataclass
class PartialConnection:
    stream: trio.SocketStream
    keeper: PartialKeeper
    answer: Callable[[protocol.Message], Awaitable[None]]
    count: Callable[[str, int], None]
    limits: protocol.Limits

    async def run(self, begun: protocol.PartialSamples) -> None:
        """Serve the connection until the loader leaves, or its stream cannot be read any more."""
        try:
            room_bytes = self.keeper.begin(begun)
        except ProtocolError as exc:
            self.count("hook_malformed", 1)
            await self.answer(protocol.Error(exc.code, str(exc)))
            return
        try:
            await self.answer(protocol.Room(float(room_bytes), self.keeper.most_bytes))
            await self._serve(begun)
        finally:
            self.keeper.end(begun)

    async def _serve(self, begun: protocol.PartialSamples) -> None:
        decoder = protocol.Decoder(self.limits)
        descriptors: list[int] = []
        try:
            while data := await self._receive(descriptors):
                if decoder.in_frame and len(descriptors) > 1:
                    # A frame that goes on and on could bring as many as the manager may have.
                    self.count("hook_malformed", 1)
                    await self.answer(protocol.Error("malformed", "more descriptors than one with a keep"))
                    return
                for message in decoder.feed(data):
                    try:
                        if isinstance(message, protocol.Goodbye):
                            return
                        await self._act(begun, message, descriptors)
                    except ProtocolError as exc:
                        self.count("hook_malformed" if exc.code != "full" else "partials_refused", 1)
                        await self.answer(protocol.Error(exc.code, str(exc)))
                        if exc.fatal:
                            return
                    except SpiderfsError as exc:
                        self.count("partials_refused", 1)
                        await self.answer(protocol.Error("failed", str(exc)))
                if descriptors and not decoder.in_frame:
                    self.count("hook_malformed", 1)
                    await self._close(descriptors)
                    await self.answer(
                        protocol.Error("malformed", "descriptors that belong to no message: send one with each keep")
                    )
        finally:
            with trio.CancelScope(shield=True):
                await self._close(descriptors)

    async def _receive(self, descriptors: list[int]) -> bytes:
        """The next bytes, b"" at the end; descriptors that came with them are added to the list."""
        flags = socket.MSG_CMSG_CLOEXEC
        try:
            data, ancillary, _, _ = await self.stream.socket.recvmsg(_RECEIVE_BYTES, _ANCILLARY_BYTES, flags)
        except ConnectionError:
            # A loader that leaves without having read all answers.
            return b""
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) // numbers.itemsize * numbers.itemsize])
                descriptors += numbers
        return bytes(data)

    async def _act(
        self, begun: protocol.PartialSamples, message: protocol.Message | ProtocolError, descriptors: list[int]
    ) -> None:
        mine = [*descriptors]
        descriptors.clear()
        try:
            if isinstance(message, ProtocolError):
                raise message
            if isinstance(message, protocol.Turn) and not mine:
                await self.answer(self.keeper.turns(begun, message))
                return
            if not isinstance(message, protocol.Keep):
                raise ProtocolError(f"{message.TYPE} is not for a loader to say", "order")
            if len(mine) != 1:
                raise ProtocolError(f"keep comes with {len(mine)} descriptors: send one with each")
            inodes = message.inodes.tolist()
            replaces = inodes[1] if len(inodes) > 1 else None
            await self.keeper.keep(mine[0], message.bytes, inodes[0], replaces)
            self.count("partials_kept", 1)
            await self.answer(protocol.Ok(protocol.Keep.TYPE))
        finally:
            with trio.CancelScope(shield=True):
                await self._close(mine)

    @staticmethod
    async def _close(descriptors: list[int]) -> None:
        """Close them in a thread, since closing a file of a slow file system may take its time."""
        closing = [*descriptors]
        descriptors.clear()

        def close() -> None:
            for fd in closing:
                with contextlib.suppress(OSError):
                    os.close(fd)

        if closing:
            await trio.to_thread.run_sync(close)
