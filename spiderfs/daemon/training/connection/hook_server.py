"""The server of the hook's socket, to which training processes send embeddings, losses and plans.

Each connection is one trainer, and has tasks and a queue of its own. So neither a slow sink nor another trainer delays
it, and no bytes of a trainer do harm beyond its connection. An invalid message is answered with an error and counted; a
stream that cannot be parsed ends the connection. Only processes of root and of the daemon's own user are admitted
(SO_PEERCRED).

A trainer declares a list in chunks (`Declaring`). A chunk counts from when it was read until its list is declared or
given up. The bytes of one list are limited, and the bytes of all lists that all connections declare at a time
(`DeclaredBytes`). After a list was refused, its further chunks are ignored.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import trio

from spiderfs import __version__, protocol
from spiderfs.daemon.training.connection.partial_connection import PartialConnection, PartialKeeper
from spiderfs.daemon.training.service import Training
from spiderfs.daemon.training.trainer import Oldest, SampleList, Trainer
from spiderfs.errors import ProtocolError, SpiderfsError
from spiderfs.protocol import Batch, EpochEnd, Error, Exchange, Goodbye, Message, Ok, Plan, Progress, Samples, Warn
from spiderfs.protocol.requests import socket_address
from spiderfs.shared.escapes import escaped_path
from spiderfs.views.tree import VIEWS_DIRECTORY


@dataclass
class DeclaredBytes:
    """The bytes of all lists that are being declared, over all connections; `limit` is how many there may be."""

    limit: int
    held: int = 0


@dataclass
class _Begun:
    """What there is of a list; `rejected` counts paths that cannot lie below the mount."""

    split: str
    total: int
    sends_batches: bool
    texts: list[bytes] = field(default_factory=list)
    labels: list[npt.NDArray[np.int32]] = field(default_factory=list)
    samples: int = 0
    rejected: int = 0
    message_bytes: int = 0


class Declaring:
    """The lists that one connection declares: at most `lists` of them, each of at most `list_bytes`."""

    def __init__(self, lists: int, list_bytes: int, together: DeclaredBytes) -> None:
        self._lists, self._list_bytes, self._together = lists, list_bytes, together
        self._held = 0
        # Bytes of each list since its first chunk; None if the list was refused.
        self._read: dict[str, int | None] = {}
        self._begun: dict[str, _Begun] = {}

    def admit(self, chunk: Samples) -> bool:
        """Count a chunk; False if its list was refused before. Raises ProtocolError to refuse the list now."""
        before = self._read.get(chunk.list, 0) if chunk.first else 0
        if before is None:
            return False
        size = _list_bytes(chunk)
        self._read[chunk.list] = None
        if before + size > self._list_bytes:
            raise ProtocolError(
                f"list {chunk.list!r}: more than {self._list_bytes} bytes of paths and labels", "too-large"
            )
        if self._together.held + size > self._together.limit:
            raise ProtocolError(
                f"list {chunk.list!r}: the lists on their way from all trainers take more than {self._together.limit} "
                "bytes: declare it again when others are done",
                "too-many",
            )
        self._read[chunk.list] = before + size
        self._hold(size)
        return True

    def add(self, chunk: Samples, declared: Iterable[str]) -> tuple[SampleList, int] | None:
        """Add a chunk that was admitted; returns the list and how many of its paths are unusable, if this was its last.

        The caller then has to call `done`. Raises ProtocolError for a chunk that does not follow the one before.
        """
        try:
            begun, paths = self._begun_by(chunk, declared), chunk.split_paths()
        except ProtocolError:
            self._hold(-_list_bytes(chunk))
            raise
        good = [path if is_below_mount(path) else b"" for path in paths]
        begun.rejected += sum(bool(path) and not kept for path, kept in zip(paths, good, strict=True))
        begun.texts.append(b"".join(path + b"\0" for path in good))
        begun.labels.append(chunk.labels)
        begun.samples += len(paths)
        begun.message_bytes += _list_bytes(chunk)
        if begun.samples < chunk.total:
            return None
        text, labels = b"".join(begun.texts), np.concatenate(begun.labels)
        return SampleList(chunk.list, chunk.split, text, labels, begun.sends_batches), begun.rejected

    def _begun_by(self, chunk: Samples, declared: Iterable[str]) -> _Begun:
        """What there is of the list whose next chunk this is."""
        begun = self._begun.get(chunk.list)
        if chunk.first == 0:
            if len({*declared, *self._begun, chunk.list}) > self._lists:
                raise ProtocolError(
                    f"more than {self._lists} lists: close plans and hooks that are over, and reuse names (split=)",
                    "too-many",
                )
            self.done(chunk.list)
            begun = self._begun[chunk.list] = _Begun(chunk.split, chunk.total, bool(chunk.sends_batches))
        due = 0 if begun is None else begun.samples
        if begun is None or (chunk.split, chunk.total, chunk.first) != (begun.split, begun.total, due):
            raise ProtocolError(f"list {chunk.list!r}: a chunk from {chunk.first} where {due} was due")
        return begun

    def __contains__(self, name: object) -> bool:
        return name in self._begun

    def done(self, name: str) -> None:
        if (begun := self._begun.pop(name, None)) is not None:
            self._hold(-begun.message_bytes)

    def end(self) -> None:
        """The connection has ended: forget the lists that it was declaring."""
        self._begun.clear()
        self._hold(-self._held)

    def _hold(self, size: int) -> None:
        self._held += size
        self._together.held += size


def _list_bytes(chunk: Samples) -> int:
    return chunk.paths.nbytes + chunk.labels.nbytes


def is_below_mount(path: bytes) -> bool:
    """Whether a relative path lies below the mount, in its one normal form; of the control directory, views alone."""
    names = path.split(b"/")
    if names[0] == b".spiderfs" and not path.startswith(VIEWS_DIRECTORY + b"/"):
        return False
    return not any(name in (b"", b".", b"..") for name in names)


Run = list[Batch]

# What the objects of a batch take beside its numbers.
_BATCH_BYTES = 1000


class Backlog:
    """The messages of one trainer that wait to be acted on, in their order and within bounds.

    Batches that come one after another and are alike in shape wait as one run, because the sink takes them together.
    While runs take more bytes than they may, half of their rows leave: which ones, each list has said when it was
    declared. No batch is refused because scoring is slow, so a trainer never waits for it; every other message waits
    for room.

    A run also has to wait if its rows may not leave yet, since its list is being declared or one of its indices is
    wrong. A list that is declared again may have other samples.
    """

    def __init__(
        self, items: int, batch_bytes: int, oldest: Mapping[str, Oldest | None], declaring: Container[str]
    ) -> None:
        """`oldest` has, by its list's name, what chooses rows that stay; lists in `declaring` are being declared."""
        self._limit, self._limit_bytes, self._oldest = items, batch_bytes, oldest
        self._declaring = declaring
        self._items: deque[Message | Run] = deque()
        self._held_bytes = 0
        self._closed = False
        self._changed = trio.Event()

    async def put(self, message: Message) -> int:
        """Add a message; waits for room, if it has to. Returns of how many batches that waited no row is left."""
        gone = 0
        if isinstance(message, Batch):
            last = self._items[-1] if self._items else None
            if isinstance(last, list) and _kind_of(last[0]) == _kind_of(message):
                last.append(message)
            else:
                await self._room()
                self._items.append([message])
            self._held_bytes += _bytes_of([message])
            self._wake()
            while (before := self._held_bytes) > self._limit_bytes:
                gone += self._thin()
                if self._held_bytes < before:
                    break
                await self._changed.wait()
        else:
            await self._room()
            self._items.append(message)
            self._wake()
        return gone

    async def take(self) -> Message | Run | None:
        """The next message, or all batches of the next run; None when the backlog is empty and closed."""
        while not self._items:
            if self._closed:
                return None
            await self._changed.wait()
        item = self._items.popleft()
        if isinstance(item, list):
            self._held_bytes -= _bytes_of(item)
        self._wake()
        return item

    def close(self) -> None:
        """No message comes any more."""
        self._closed = True
        self._wake()

    async def _room(self) -> None:
        while len(self._items) >= self._limit:
            await self._changed.wait()

    def _thin(self) -> int:
        """Make all runs smaller that can be; returns of how many batches no row is left."""
        gone, self._held_bytes = 0, 0
        for place, item in enumerate(self._items):
            if isinstance(item, list):
                smaller = self._items[place] = self._thinned(item)
                gone += len(item) - len(smaller)
                self._held_bytes += _bytes_of(smaller)
        return gone

    def _thinned(self, run: Run) -> Run:
        """These batches without half of their rows, and without the batches that have none then."""
        name, indices = run[0].list, np.concatenate([batch.indices for batch in run])
        oldest = None if name in self._declaring else self._oldest.get(name)
        # The larger half: a run of one row stays, for a run without rows is none.
        chosen = None if oldest is None else oldest(indices, (len(indices) + 1) // 2)
        if chosen is None:
            return run
        kept = np.zeros(len(indices), bool)
        kept[chosen] = True
        ends = np.cumsum([len(batch.indices) for batch in run])
        smaller = [_rows_of(batch, rows) for batch, rows in zip(run, np.split(kept, ends), strict=False)]
        return [batch for batch in smaller if len(batch.indices)]

    def _wake(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()


def _bytes_of(run: Run) -> int:
    arrays = [array for batch in run for array in (batch.indices, batch.embeddings, batch.losses, batch.labels)]
    return len(run) * _BATCH_BYTES + sum(array.nbytes for array in arrays if array is not None)


def _kind_of(batch: Batch) -> tuple[str, int, bool]:
    """What is the same for batches that can be scored as one."""
    return batch.list, batch.embeddings.shape[1], batch.losses is None


def _rows_of(batch: Batch, rows: npt.NDArray[np.bool_]) -> Batch:
    """Some rows of a batch, as copies: the message that they came in leaves memory."""
    losses = None if batch.losses is None else batch.losses[rows]
    labels = None if batch.labels is None else batch.labels[rows]
    return replace(batch, indices=batch.indices[rows], embeddings=batch.embeddings[rows], losses=losses, labels=labels)


_CREDENTIALS = struct.Struct("3i")
_RECEIVE_BYTES = 1 << 18
# Letters of a path that a warning shows, of which each may take four bytes there.
_EXAMPLE = 200
_AT_ONCE = (Progress, Exchange)
_ASKED = (protocol.ScoresRequest, protocol.CachedRequest, protocol.Pin, protocol.WarmUp)
_SAID_BY_TRAINERS = (Samples, Batch, EpochEnd, Plan, *_AT_ONCE, *_ASKED, Goodbye)


@dataclass(frozen=True)
class ServerLimits:
    """The limits on the resources that trainers may use."""

    message: protocol.Limits = field(default_factory=protocol.Limits)
    # Several trainings share a mount; each has some 8 ranks, whose dozen loader workers may keep partial samples.
    connections: int = 256
    lists: int = 8  # of one trainer: train and validation, and their subsets
    # Bytes of all lists that are being declared: 20 ranks with ImageNet's 100 MB each, or two of the longest lists.
    declared_bytes: int = 2 << 30
    # Messages that wait; batches that come one after another count as one.
    queue: int = 64
    # Bytes of batches that wait: 14,000 rows of 64 numbers, which is three seconds at 5,000 a second.
    waiting_bytes: int = 2 << 20
    hello_timeout_s: float = 10.0
    # The connection of a trainer that reads no answer for this time is closed.
    answer_timeout_s: float = 5.0


class Connection:
    """One trainer's connection: a task that reads and a task that feeds the sink, with a bounded backlog between them.

    The reader decodes and checks messages, and answers mistakes. The feeder calls the sink, one call at a time and in
    order, with all batches that wait in one call (`Backlog`). For every other message the reader waits until the
    backlog has room. Then the trainer's own socket becomes full, which its hook can bear. `progress` and `exchange`
    pass the backlog by: they are about now, and batches may wait for seconds. Both tasks send answers, each whole
    message under a lock.
    """

    def __init__(
        self,
        stream: trio.SocketStream,
        sink: Training,
        count: Callable[[str, int], None],
        limits: ServerLimits,
        declared_bytes: DeclaredBytes,
        partials: PartialKeeper | None = None,
    ) -> None:
        self.stream, self._partials, self._sink = stream, partials, sink
        self._count, self._limits = count, limits
        self._decoder = protocol.Decoder(limits.message)
        self._answering = trio.Lock()
        self._declaring = Declaring(limits.lists, limits.message.list_bytes, declared_bytes)
        # By the list's name, what chooses among rows that wait.
        self._oldest: dict[str, Oldest | None] = {}
        # The last epoch that each list has begun, and the lists that are over: an empty plan has begun a later epoch.
        self._epochs: dict[str, int] = {}
        self._over: dict[str, None] = {}
        self._waiting: list[Message | ProtocolError] = []
        peer = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid, self.uid, _ = _CREDENTIALS.unpack(peer)

    async def answer(self, message: Message, version: int = protocol.VERSION) -> None:
        """Raises TooSlowError when the trainer reads none of its answers."""
        with trio.fail_after(self._limits.answer_timeout_s):
            async with self._answering:
                await self.stream.send_all(protocol.encode(message, self._limits.message, version))

    async def greet(self) -> Trainer | protocol.PartialSamples | None:
        """The trainer, once it has said hello, or what a loader says in its place; None if neither comes."""
        with trio.move_on_after(self._limits.hello_timeout_s):
            while True:
                if (message := await self._next()) is None:
                    return None
                if isinstance(message, protocol.Hello):
                    await self.answer(Ok(protocol.Hello.TYPE))
                    return Trainer(self.pid, self.uid, message)
                if isinstance(message, protocol.PartialSamples):
                    return message
                await self._refuse(ProtocolError(f"{message.TYPE} before hello", "order"))
        return None

    async def run(self, trainer: Trainer) -> None:
        """Read and feed until the trainer leaves, or its stream cannot be read any more."""
        backlog = Backlog(self._limits.queue, self._limits.waiting_bytes, self._oldest, self._declaring)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._feed, trainer, backlog)
                await self._read(trainer, backlog)
                backlog.close()
        except* (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            log.debug("trainer %d has gone", trainer.pid)
        finally:
            self._declaring.end()

    async def _next(self) -> Message | None:
        """The next valid message; None at the end of the stream."""
        while True:
            while self._waiting:
                item = self._waiting.pop(0)
                if not isinstance(item, ProtocolError):
                    return item
                await self._refuse(item)
                if item.fatal:
                    return None
            if not (data := await self.stream.receive_some(_RECEIVE_BYTES)):
                if self._decoder.in_frame:
                    self._count("hook_malformed", 1)
                return None
            self._waiting = self._decoder.feed(bytes(data))

    async def _refuse(self, error: ProtocolError) -> None:
        self._count("hook_malformed", 1)
        text, version = str(error), protocol.VERSION
        if error.code == "version":
            # The answer goes in a frame that a hook of another version can read.
            version = self._decoder.version
            where = "where the training runs" if version < protocol.VERSION else "where the mount is, and mount again"
            text = (
                f"the hook speaks version {version} of the hook protocol, and this mount version {protocol.VERSION} "
                f"(spiderfs {__version__}): update spiderfs {where}"
            )
        await self.answer(Error(error.code, text), version)

    async def _read(self, trainer: Trainer, backlog: Backlog) -> None:
        while (message := await self._next()) is not None:
            if not isinstance(message, _SAID_BY_TRAINERS):
                await self._refuse(ProtocolError(f"{message.TYPE} is not for a trainer to say now", "order"))
                continue
            if isinstance(message, _AT_ONCE) and message.list in trainer.lists:
                await self._carry_out(trainer, message)
            elif not isinstance(message, Samples) or await self._admitted(message):
                left_out = await backlog.put(message)
                if left_out:
                    self._count_batches(trainer, left_out)
            if isinstance(message, Goodbye):
                return

    async def _admitted(self, chunk: Samples) -> bool:
        try:
            return self._declaring.admit(chunk)
        except ProtocolError as exc:
            await self._refuse(exc)
            return False

    async def _feed(self, trainer: Trainer, backlog: Backlog) -> None:
        while (waited := await backlog.take()) is not None:
            await self._carry_out(trainer, waited)

    async def _carry_out(self, trainer: Trainer, said: Message | Run) -> None:
        kind = Batch.TYPE if isinstance(said, list) else said.TYPE
        try:
            if isinstance(said, list):
                await self._learn(trainer, said)
            else:
                await self._act(trainer, said)
        except ProtocolError as exc:
            await self._refuse(exc)
        except SpiderfsError as exc:
            await self.answer(Error("failed", str(exc)))
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            raise
        except Exception:
            # A mistake in the sink must end neither the daemon nor the connection.
            log.exception("%s of trainer %d could not be acted on", kind, trainer.pid)
            self._count("internal_errors", 1)
            await self.answer(Error("failed", f"{kind}: an internal error, see the daemon's log"))

    def _count_batches(self, trainer: Trainer, batches: int) -> None:
        trainer.batches += batches
        self._count("hook_batches", batches)

    async def _learn(self, trainer: Trainer, batches: list[Batch]) -> None:
        name, good = batches[0].list, []
        samples = _length(trainer, name)
        for batch in batches:
            try:
                _check_indices(samples, batch.indices)
            except ProtocolError as exc:
                await self._refuse(exc)
            else:
                good.append(batch)
        if good:
            self._count_batches(trainer, len(good))
            await self._sink.learn(trainer, name, good)

    async def _act(self, trainer: Trainer, message: Message) -> None:
        match message:
            case Samples():
                await self._declare(trainer, message)
            case EpochEnd():
                if message.unmatched:
                    self._count("hook_forwards_unmatched", message.unmatched)
                await self._sink.epoch_end(trainer, message)
            case Plan():
                _check_indices(_length(trainer, message.list), message.order)
                await self._sink.plan(trainer, message)
                if message.begun:
                    self._over.pop(message.list, None)
                    if not len(message.order) and message.epoch > self._epochs.get(message.list, message.epoch):
                        self._over[message.list] = None
                    self._epochs[message.list] = message.epoch
            case Progress():
                _length(trainer, message.list)
                self._sink.progressed(trainer, message)
            case Exchange():
                samples = _length(trainer, message.list)
                _check_indices(samples, message.wanted)
                _check_indices(samples, message.dispatched)
                ready = None if self._partials is None else self._partials.ready(message)
                if ready is not None and len(ready) != samples:
                    raise ProtocolError(f"partial samples of {len(ready)} samples, and a list of {samples}", "index")
                given = self._sink.exchange(trainer, message, ready)
                await self.answer(protocol.Given(message.list, message.request, given))
            case protocol.ScoresRequest():
                _length(trainer, message.list)
                scores = await self._sink.scores(trainer, message.list)
                await self.answer(protocol.Scores(message.list, message.request, self._sink.follows_plans, scores))
            case protocol.CachedRequest():
                _length(trainer, message.list)
                flags = await self._sink.cached(trainer, message.list)
                bitmap = np.packbits(flags, bitorder="little")
                await self.answer(protocol.Cached(message.list, message.request, len(flags), bitmap))
            case protocol.Pin():
                _check_indices(_length(trainer, message.list), message.indices)
                count = await self._sink.pin(trainer, message.list, message.indices)
                await self.answer(protocol.Pinned(message.list, message.request, count))
            case protocol.WarmUp():
                _length(trainer, message.list)
                await self._sink.warm_up(trainer, message.list, message.active)
            case Goodbye():
                await self.answer(Ok(Goodbye.TYPE))

    async def _declare(self, trainer: Trainer, chunk: Samples) -> None:
        # If this list were one too many, those that are over are forgotten, the oldest first.
        while self._over and len({*trainer.lists, chunk.list}) > self._limits.lists:
            over = next(iter(self._over))
            for of_lists in (self._over, self._epochs, self._oldest, trainer.lists):
                del of_lists[over]
            self._sink.withdrawn(trainer, over)
        if (whole := self._declaring.add(chunk, trainer.lists)) is None:
            return
        samples, rejected = whole
        try:
            declared = await self._sink.samples(trainer, samples)
        finally:
            self._declaring.done(chunk.list)
        trainer.lists[chunk.list], self._oldest[chunk.list] = len(samples), declared.oldest
        self._over.pop(chunk.list, None)
        self._epochs.pop(chunk.list, None)
        if rejected:
            await self.answer(
                Warn(
                    f"list {chunk.list!r}: {rejected} of {len(samples)} paths are ignored: "
                    "a path must be relative to the mount, without . and .."
                )
            )
        warnings = list(declared.warnings)
        if declared.unknown:
            warnings.append(
                f"{declared.unknown} of {len(samples)} paths are ignored: no such file in the mount, such as "
                f"{escaped_path(declared.example).decode()[:_EXAMPLE]}"
            )
        for text in warnings:
            await self.answer(Warn(f"list {chunk.list!r}: {text}"))
        await self.answer(Ok(Samples.TYPE))


def _length(trainer: Trainer, name: str) -> int:
    if name not in trainer.lists:
        raise ProtocolError(f"no list {name[:40]!r} has been declared", "no-list")
    return trainer.lists[name]


def _check_indices(samples: int, indices: npt.NDArray[np.uint32]) -> None:
    if len(indices) and int(indices.max()) >= samples:
        raise ProtocolError(f"index {int(indices.max())} in a list of {samples} samples", "index")


log = logging.getLogger(__name__)

_BACKLOG = 64
# How long the sink may act on the end of a connection.
_DETACH_TIMEOUT_S = 5.0
# How often the server looks whether the socket's file is there; each look costs 0.3 ms where nothing else goes on.
LOOK_AGAIN_S = 5.0
DEFAULT_LIMITS = ServerLimits()


def listen(path: Path) -> socket.socket:
    """A listening socket that only its owner and root can reach; it replaces the one of an earlier daemon."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The file gets the mode that the socket has when it is bound (unix(7)), so no other user can connect in between.
    os.fchmod(listener.fileno(), 0o600)
    with socket_address(path) as address:
        listener.bind(address)
    path.chmod(0o600)
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


class HookServer:
    """Admits trainers at the hook's socket, and passes their messages to `sink`; `count` adds to a named counter."""

    def __init__(
        self,
        sink: Training,
        count: Callable[[str, int], None],
        limits: ServerLimits = DEFAULT_LIMITS,
        partials: PartialKeeper | None = None,
    ) -> None:
        """Without `partials`, loaders are refused as by a daemon that knows nothing of them."""
        self._sink, self._partials, self._count = sink, partials, count
        self._limits = limits
        self._connections = 0
        self.declared_bytes = DeclaredBytes(limits.declared_bytes)
        self.trainers: list[Trainer] = []

    async def serve(self, listener: socket.socket, path: Path) -> None:
        """Serve connections until cancelled; if the socket's file at `path` goes away, another takes its place."""
        async with trio.open_nursery() as connections:
            while True:
                accepting = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
                async with trio.open_nursery() as nursery:
                    serving = partial(trio.serve_listeners, self._serve_one, [accepting], handler_nursery=connections)
                    nursery.start_soon(serving)
                    while os.path.lexists(path):
                        await trio.sleep(LOOK_AGAIN_S)
                    nursery.cancel_scope.cancel()
                listener = await self._listen_again(path)

    async def _listen_again(self, path: Path) -> socket.socket:
        said = False
        while True:
            try:
                listener = listen(path)
            except OSError as exc:
                # Without its directory the whole mount begins again, and says so.
                if not said and path.parent.is_dir():
                    log.warning(
                        "cannot make the hook's socket (%s): no trainer can attach until %s can be made", exc, path
                    )
                    said = True
                await trio.sleep(LOOK_AGAIN_S)
            else:
                log.info("the hook's socket had gone: there is another one")
                return listener

    async def _serve_one(self, stream: trio.SocketStream) -> None:
        connection = Connection(stream, self._sink, self._count, self._limits, self.declared_bytes, self._partials)
        self._connections += 1
        try:
            if await self._admitted(connection):
                await self._converse(connection)
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            log.debug("process %d closed its connection early", connection.pid)
        except Exception:
            log.exception("the connection of process %d failed", connection.pid)
            self._count("internal_errors", 1)
        finally:
            self._connections -= 1
            await trio.aclose_forcefully(stream)

    async def _admitted(self, connection: Connection) -> bool:
        if connection.uid not in (0, os.geteuid()):
            refusal = Error("refused", f"this mount belongs to user {os.geteuid()}, not to user {connection.uid}")
        elif self._connections > self._limits.connections:
            refusal = Error("too-many", f"{self._limits.connections} trainers are connected already")
        else:
            return True
        self._count("hook_refused", 1)
        await connection.answer(refusal)
        return False

    async def _converse(self, connection: Connection) -> None:
        trainer = await connection.greet()
        if isinstance(trainer, protocol.PartialSamples):
            if self._partials is None:
                await connection.answer(Error("unknown", "this daemon keeps no partial samples"))
                return
            answer, most_bytes = connection.answer, self._limits.message
            serving = PartialConnection(connection.stream, self._partials, answer, self._count, most_bytes)
            await serving.run(trainer)
            return
        if trainer is None:
            return
        try:
            await self._sink.attached(trainer)
        except SpiderfsError as exc:
            await connection.answer(Error("failed", str(exc)))
            return
        self.trainers.append(trainer)
        try:
            await connection.run(trainer)
        finally:
            self.trainers.remove(trainer)
            with trio.move_on_after(_DETACH_TIMEOUT_S, shield=True):
                await self._sink.detached(trainer)
