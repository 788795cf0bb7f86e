"""One trainer's connection: a task that reads and a task that feeds the sink, with a bounded backlog between them.

The reader decodes and checks messages, and answers mistakes. The feeder calls the sink, one call at a time and in
order. The sink gets all batches that wait in one call, and scores as many of their rows as there is time for. When
batches wait that take too many bytes, rows of theirs are left out. So a training that is faster than its scoring has
fewer of its rows scored, and no batch is lost as a whole.

For every other message the reader waits until the backlog has room. Then the trainer's own socket becomes full, which
its hook can bear. `progress` and `exchange` pass the backlog by: they are about now, and batches may wait for seconds.
Both tasks send answers, each whole message under a lock.
"""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import trio

from spiderfs import __version__
from spiderfs.daemon.training.connection.backlog import Backlog, Run
from spiderfs.daemon.training.connection.declaring import DeclaredBytes, Declaring
from spiderfs.daemon.training.trainer import Declared, Oldest, SampleList, Trainer
from spiderfs.errors import ProtocolError, SpiderfsError
from spiderfs.protocol import (
    VERSION,
    Batch,
    Cached,
    CachedRequest,
    Decoder,
    EpochEnd,
    Error,
    Exchange,
    Given,
    Goodbye,
    Hello,
    Limits,
    Message,
    Ok,
    PartialSamples,
    Pin,
    Pinned,
    Plan,
    Progress,
    Samples,
    Scores,
    ScoresRequest,
    WarmUp,
    Warn,
    encode,
)

log = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")
_RECEIVE_BYTES = 1 << 18
_AT_ONCE = (Progress, Exchange)
_SAID_BY_TRAINERS = (Samples, Batch, EpochEnd, Plan, *_AT_ONCE, ScoresRequest, CachedRequest, Pin, WarmUp, Goodbye)


class HookSink(Protocol):
    """Acts on the messages of trainers; the calls for one trainer come one at a time, in the order of its messages.

    `name` is that of a list which the trainer has declared. A SpiderfsError that a method raises is sent to the
    trainer. A method that would block uses a thread.
    """

    async def attached(self, trainer: Trainer) -> None: ...

    async def samples(self, trainer: Trainer, samples: SampleList) -> Declared:
        """A trainer declared a list, in place of one with the same name."""

    async def learn(self, trainer: Trainer, name: str, batches: Sequence[Batch]) -> None:
        """Learn from batches that are alike in shape and came one after another; several if the sink is behind."""

    async def epoch_end(self, trainer: Trainer, end: EpochEnd) -> None: ...

    async def plan(self, trainer: Trainer, plan: Plan) -> None: ...

    def progressed(self, trainer: Trainer, progress: Progress) -> None:
        """A trainer is so far in a plan of a declared list; the plan, and what was said before, may come later."""

    def exchange(self, trainer: Trainer, question: Exchange) -> npt.NDArray[np.uint32]:
        """One sample of a declared list for each that is wanted, or none; the plan may come later."""

    async def scores(self, trainer: Trainer, name: str) -> npt.NDArray[np.float32]:
        """One score a sample, finite and >= 0; empty while there are none."""

    @property
    def follows_plans(self) -> bool:
        """Whether plans of trainers are followed now."""

    async def cached(self, trainer: Trainer, name: str) -> npt.NDArray[np.bool_]:
        """One flag a sample."""

    async def pin(self, trainer: Trainer, name: str, indices: npt.NDArray[np.uint32]) -> int:
        """Pin these samples in place of those pinned before; returns how many of them the cache holds, or will."""

    async def warm_up(self, trainer: Trainer, name: str, active: bool) -> None:
        """The training on this list begins its warm-up, or has ended it."""

    async def detached(self, trainer: Trainer) -> None: ...


@dataclass(frozen=True)
class ServerLimits:
    """The limits on the resources that trainers may use."""

    message: Limits = field(default_factory=Limits)
    # Several trainings share a mount; each has some 8 ranks, whose dozen loader workers may keep partial samples.
    connections: int = 256
    lists: int = 8  # of one trainer: train and validation, and their subsets
    # Bytes of all lists that are being declared: 20 ranks with ImageNet's 100 MB each, or two of the longest lists.
    declared_bytes: int = 2 << 30
    # A GPU sends some 20 batches a second; beyond this rate the reader pauses.
    messages_per_s: float = 1000.0
    burst: int = 200
    # Messages that wait; batches that come one after another count as one.
    queue: int = 64
    # Bytes of batches that wait: 14,000 rows of 64 numbers, which is three seconds at 5,000 a second.
    waiting_bytes: int = 2 << 20
    malformed: int = 100
    hello_timeout_s: float = 10.0
    # The connection of a trainer that reads no answer for this time is closed.
    answer_timeout_s: float = 5.0


class Connection:
    def __init__(
        self,
        stream: trio.SocketStream,
        sink: HookSink,
        count: Callable[[str, int], None],
        limits: ServerLimits,
        declared_bytes: DeclaredBytes,
    ) -> None:
        self.stream = stream
        self._sink = sink
        self._count = count
        self._limits = limits
        self._decoder = Decoder(limits.message)
        self._answering = trio.Lock()
        self._declaring = Declaring(limits.lists, limits.message.list_bytes, declared_bytes)
        # By the list's name, what chooses among rows that wait.
        self._oldest: dict[str, Oldest | None] = {}
        self._errors = 0
        self._waiting: list[Message | ProtocolError] = []
        self._allowance = float(limits.burst)
        self._allowance_at = trio.current_time()
        peer = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid, self.uid, _ = _CREDENTIALS.unpack(peer)

    async def answer(self, message: Message, version: int = VERSION) -> None:
        """Raises TooSlowError when the trainer reads none of its answers."""
        with trio.fail_after(self._limits.answer_timeout_s):
            async with self._answering:
                await self.stream.send_all(encode(message, self._limits.message, version))

    async def greet(self) -> Trainer | PartialSamples | None:
        """The trainer, once it has said hello, or what a loader says in its place; None if neither comes."""
        with trio.move_on_after(self._limits.hello_timeout_s):
            while self._errors < self._limits.malformed:
                message = await self._next()
                if message is None:
                    return None
                if isinstance(message, Hello):
                    await self.answer(Ok(Hello.TYPE))
                    return Trainer(self.pid, self.uid, message)
                if isinstance(message, PartialSamples):
                    return message
                await self._refuse(ProtocolError(f"{message.TYPE} before hello", "order"))
        return None

    async def run(self, trainer: Trainer) -> None:
        """Read and feed until the trainer leaves, or has made too many mistakes."""
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

    # -- reading

    async def _next(self) -> Message | None:
        """The next valid message, at the rate that is allowed; None at the end of the stream."""
        while True:
            while self._waiting:
                await self._pace()
                item = self._waiting.pop(0)
                if not isinstance(item, ProtocolError):
                    return item
                await self._refuse(item)
                if item.fatal or self._errors >= self._limits.malformed:
                    return None
            data = await self.stream.receive_some(_RECEIVE_BYTES)
            if not data:
                if self._decoder.in_frame:
                    self._note_malformed()
                return None
            self._waiting = self._decoder.feed(bytes(data))

    async def _pace(self) -> None:
        now = trio.current_time()
        earned = (now - self._allowance_at) * self._limits.messages_per_s
        self._allowance = min(float(self._limits.burst), self._allowance + earned) - 1.0
        self._allowance_at = now
        if self._allowance < 0:
            self._count("hook_throttled", 1)
            await trio.sleep(-self._allowance / self._limits.messages_per_s)

    def _note_malformed(self) -> None:
        self._errors += 1
        self._count("hook_malformed", 1)

    async def _refuse(self, error: ProtocolError) -> None:
        self._note_malformed()
        if error.code == "version":
            await self._refuse_version(self._decoder.version)
        else:
            await self.answer(Error(error.code, str(error)))

    async def _refuse_version(self, version: int) -> None:
        """Tell a hook of another version what to do, in a frame that it can read."""
        where = "where the training runs" if version < VERSION else "where the mount is, and mount again"
        text = (
            f"the hook speaks version {version} of the hook protocol, and this mount version {VERSION} "
            f"(spiderfs {__version__}): update spiderfs {where}"
        )
        await self.answer(Error("version", text), version)

    async def _read(self, trainer: Trainer, backlog: Backlog) -> None:
        while self._errors < self._limits.malformed:
            message = await self._next()
            if message is None:
                return
            if not isinstance(message, _SAID_BY_TRAINERS):
                await self._refuse(ProtocolError(f"{message.TYPE} is not for a trainer to say now", "order"))
                continue
            if isinstance(message, _AT_ONCE) and message.list in trainer.lists:
                await self._carry_out(trainer, message)
            elif not isinstance(message, Samples) or await self._admitted(message):
                left_out = await backlog.put(message)
                if left_out:
                    self._heard(trainer, left_out)
            if isinstance(message, Goodbye):
                return

    async def _admitted(self, chunk: Samples) -> bool:
        try:
            return self._declaring.admit(chunk)
        except ProtocolError as exc:
            await self._refuse(exc)
            return False

    # -- feeding

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

    def _heard(self, trainer: Trainer, batches: int) -> None:
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
            self._heard(trainer, len(good))
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
            case Progress():
                _length(trainer, message.list)
                self._sink.progressed(trainer, message)
            case Exchange():
                samples = _length(trainer, message.list)
                _check_indices(samples, message.wanted)
                _check_indices(samples, message.dispatched)
                await self.answer(Given(message.list, message.request, self._sink.exchange(trainer, message)))
            case ScoresRequest():
                _length(trainer, message.list)
                scores = await self._sink.scores(trainer, message.list)
                await self.answer(Scores(message.list, message.request, self._sink.follows_plans, scores))
            case CachedRequest():
                _length(trainer, message.list)
                flags = await self._sink.cached(trainer, message.list)
                bitmap = np.packbits(flags, bitorder="little")
                await self.answer(Cached(message.list, message.request, len(flags), bitmap))
            case Pin():
                _check_indices(_length(trainer, message.list), message.indices)
                count = await self._sink.pin(trainer, message.list, message.indices)
                await self.answer(Pinned(message.list, message.request, count))
            case WarmUp():
                _length(trainer, message.list)
                await self._sink.warm_up(trainer, message.list, message.active)
            case Goodbye():
                await self.answer(Ok(Goodbye.TYPE))

    async def _declare(self, trainer: Trainer, chunk: Samples) -> None:
        whole = self._declaring.add(chunk, trainer.lists)
        if whole is None:
            return
        samples, rejected = whole
        try:
            declared = await self._sink.samples(trainer, samples)
        finally:
            self._declaring.done(chunk.list)
        trainer.lists[chunk.list], self._oldest[chunk.list] = len(samples), declared.oldest
        if rejected:
            await self.answer(
                Warn(
                    f"list {chunk.list!r}: {rejected} of {len(samples)} paths are ignored: "
                    "a path must be relative to the mount, without . and .."
                )
            )
        warnings = list(declared.warnings)
        if declared.unknown:
            warnings.append(f"{declared.unknown} of {len(samples)} paths are ignored: no such file in the source")
        for text in warnings:
            await self.answer(Warn(f"list {chunk.list!r}: {text}"))
        await self.answer(Ok(Samples.TYPE))


def _length(trainer: Trainer, name: str) -> int:
    """How many samples a declared list has."""
    if name not in trainer.lists:
        raise ProtocolError(f"no list {name[:40]!r} has been declared", "no-list")
    return trainer.lists[name]


def _check_indices(samples: int, indices: npt.NDArray[np.uint32]) -> None:
    if len(indices) and int(indices.max()) >= samples:
        raise ProtocolError(f"index {int(indices.max())} in a list of {samples} samples", "index")
