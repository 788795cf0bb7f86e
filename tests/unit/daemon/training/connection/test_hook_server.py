"""The hook server over real Unix sockets, with a sink that remembers."""

from __future__ import annotations

import logging
import os
import random
import stat
import struct
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import msgpack
import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked
from waiting import eventually

from benchmarks.fakes import RecordingSink
from spiderfs.daemon.training.connection import hook_server
from spiderfs.daemon.training.connection.hook_server import HookServer, ServerLimits, is_below_mount, listen
from spiderfs.daemon.training.trainer import Declared, SampleList, Trainer
from spiderfs.errors import HookError
from spiderfs.metrics import COUNTERS
from spiderfs.protocol import (
    VERSION,
    Batch,
    Cached,
    CachedRequest,
    Decoder,
    EpochEnd,
    Error,
    Goodbye,
    Hello,
    Limits,
    Message,
    Ok,
    Pin,
    Pinned,
    Plan,
    ProtocolError,
    Samples,
    Scores,
    ScoresRequest,
    Warn,
    encode,
)
from spiderfs.protocol.requests import socket_address

PATIENCE_S = 10.0
NOBODY = 65534


def samples(*paths: bytes, name: str = "train", total: int | None = None, first: int = 0) -> Samples:
    text = np.frombuffer(b"".join(path + b"\0" for path in paths), np.uint8)
    return Samples(name, name, total or len(paths), first, np.arange(len(paths), dtype=np.int32), text)


def batch(*indices: int, name: str = "train", step: int = 0) -> Batch:
    return Batch(name, 0, step, np.array(indices, np.uint32), np.ones((len(indices), 4), np.float16))


class Client:
    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._decoder = Decoder()
        self._waiting: list[Message | ProtocolError] = []

    async def send(self, *messages: Message) -> None:
        await self.stream.send_all(b"".join(map(encode, messages)))

    async def answer(self) -> Message | None:
        """The next answer; None when the daemon has closed the connection."""
        with trio.fail_after(PATIENCE_S):
            while not self._waiting:
                try:
                    data = await self.stream.receive_some()
                except trio.BrokenResourceError:
                    return None
                if not data:
                    return None
                self._waiting = self._decoder.feed(bytes(data))
        return self._waiting.pop(0)

    async def said(self, kind: type[Message], words: str = "") -> None:
        answer = await self.answer()
        assert isinstance(answer, kind), answer
        assert words in repr(answer)

    async def greet(self, *paths: bytes) -> None:
        await self.send(Hello("test", "test"))
        await self.said(Ok, "hello")
        if paths:
            await self.send(samples(*paths))
            await self.said(Ok, "samples")


class Daemon:
    def __init__(self, path: Path, sink: RecordingSink, limits: ServerLimits) -> None:
        self.path = path
        self.sink = sink
        self.counted: Counter[str] = Counter()
        self.server = HookServer(sink, self._count, limits)

    def _count(self, name: str, amount: int) -> None:
        assert name in {definition.name for definition in COUNTERS}
        self.counted[name] += amount

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        with socket_address(self.path) as address:
            stream = await trio.open_unix_socket(address)
        async with stream:
            yield Client(stream)


@asynccontextmanager
async def served(
    tmp_path: Path,
    sink: RecordingSink | None = None,
    limits: ServerLimits = ServerLimits(),  # noqa: B008
) -> AsyncIterator[Daemon]:
    daemon = Daemon(tmp_path / "hook.sock", sink or RecordingSink(), limits)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(daemon.server.serve, listen(daemon.path), daemon.path)
        yield daemon
        nursery.cancel_scope.cancel()


@pytest.fixture
def daemon(tmp_path: Path) -> AbstractAsyncContextManager[Daemon]:
    return served(tmp_path)


async def test_another_socket_takes_the_place_of_one_that_was_deleted(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_server, "LOOK_AGAIN_S", 0.01)
    async with daemon.client() as client:
        await client.greet()
        for _ in range(2):
            daemon.path.unlink()
            await eventually(daemon.path.exists)
            async with daemon.client() as other:
                await other.greet(b"a")
        # Who was connected before goes on.
        await client.send(samples(b"a"))
        await client.said(Ok, "samples")


async def test_a_whole_talk(tmp_path: Path) -> None:
    sink = RecordingSink(scores_given=np.array([1, 2, 3], np.float32))
    async with served(tmp_path, sink) as daemon, daemon.client() as client:
        await client.greet(b"a", b"b/c", b"d")
        await client.send(
            Plan("train", 0, 0, True, np.array([2, 0], np.uint32)),
            batch(2, 0),
            EpochEnd(0, 0.5),
            ScoresRequest("train", 7),
        )
        scores = await client.answer()
        assert isinstance(scores, Scores)
        assert (scores.request, scores.scores.tolist()) == (7, [1, 2, 3])
        await client.send(CachedRequest("train", 8))
        cached = await client.answer()
        assert isinstance(cached, Cached)
        assert (cached.request, cached.flags().tolist()) == (8, [True, False, True])
        await client.send(Pin("train", 9, np.array([2, 0], np.uint32)))
        pinned = await client.answer()
        assert isinstance(pinned, Pinned)
        assert (pinned.request, pinned.count) == (9, 2)
        await client.send(Goodbye())
        await client.said(Ok, "goodbye")
        assert await client.answer() is None
    order = ["attached", "samples", "plan", "learn", "epoch_end", "scores", "cached", "pin", "detached"]
    assert [name for name, _ in sink.calls] == order
    (trainer,) = {trainer for _, trainer in sink.calls}
    assert (trainer.pid, trainer.uid, trainer.rank) == (os.getpid(), os.getuid(), 0)
    (_, declared), *_ = sink.lists
    assert (list(declared.paths), declared.labels.tolist()) == ([b"a", b"b/c", b"d"], [0, 1, 2])
    assert daemon.counted == {"hook_batches": 1}


async def test_the_socket_is_its_owners_and_its_path_may_be_long(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    for _ in range(2):
        async with served(directory) as daemon:
            assert stat.S_IMODE(daemon.path.stat().st_mode) == 0o600
            async with daemon.client() as client:
                await client.greet()


async def test_a_list_may_have_so_many_bytes(tmp_path: Path) -> None:
    """Refused once, before it takes memory; the rest of it is passed over, and others can be declared."""
    limits = ServerLimits(message=Limits(list_bytes=1000))
    async with served(tmp_path, limits=limits) as daemon, daemon.client() as client:
        await client.greet()
        chunks = [samples(b"x" * 40, total=1000, first=first) for first in range(100)]
        await client.send(*chunks)
        await client.said(Error, "more than 1000 bytes of paths and labels")
        await eventually(lambda: daemon.server.declared_bytes.held <= 1000)
        await client.send(samples(b"a", b"b"))
        await client.said(Ok, "samples")
        await client.send(samples(b"a" * 400, b"b" * 400, b"c" * 300, name="train"))
        await client.said(Error, "too-large")
        await client.send(samples(b"a" * 400, b"b" * 400, name="other"))
        await client.said(Ok, "samples")
        assert daemon.server.declared_bytes.held == 0
    assert [len(declared) for _, declared in daemon.sink.lists] == [2, 2]
    assert daemon.counted["hook_malformed"] == 2
    (trainer,) = {trainer for _, trainer in daemon.sink.calls}
    assert list(trainer.lists.values()) == [2, 2]


async def test_the_lists_of_all_trainers_may_have_so_many_bytes(tmp_path: Path) -> None:
    async with served(tmp_path, limits=ServerLimits(declared_bytes=1000)) as daemon:
        async with daemon.client() as one, daemon.client() as other:
            await one.greet()
            await other.greet()
            await one.send(samples(b"x" * 900, total=2))
            await eventually(lambda: daemon.server.declared_bytes.held > 900)
            await other.send(samples(b"y" * 900))
            await other.said(Error, "declare it again when others are done")
            await one.send(samples(b"x" * 40, total=2, first=1))
            await one.said(Ok, "samples")
            await other.send(samples(b"y" * 900))
            await other.said(Ok, "samples")
            # What was begun, and never ended, goes with its connection or by being begun again.
            await other.send(samples(b"x" * 900, total=2))
            await other.send(samples(b"x" * 30, total=2))
            await eventually(lambda: daemon.server.declared_bytes.held == 35)
        await eventually(lambda: daemon.server.declared_bytes.held == 0)


async def test_a_list_in_chunks(tmp_path: Path) -> None:
    async with served(tmp_path) as daemon, daemon.client() as client:
        await client.greet()
        await client.send(samples(b"a", b"b", total=3), samples(b"c", total=3, first=2))
        await client.said(Ok, "samples")
        await client.send(samples(b"x", total=3), samples(b"y", total=3, first=2))
        await client.said(Error, "where 1 was due")
        await client.send(samples(b"y", total=3, first=1, name="other"))
        await client.said(Error, "where 0 was due")
        await client.send(batch(2), batch(3))
        await client.said(Error, "index 3 in a list of 3")
        await client.send(Pin("train", 1, np.array([0, 3], np.uint32)), Pin("other", 2, np.array([0], np.uint32)))
        await client.said(Error, "index 3 in a list of 3")
        await client.said(Error, "no list 'other'")
    assert [list(declared.paths) for _, declared in daemon.sink.lists] == [[b"a", b"b", b"c"]]
    assert len(daemon.sink.batches) == 1
    assert daemon.sink.pins == []
    assert daemon.counted["hook_malformed"] == 5


@pytest.mark.parametrize(
    ("path", "good"),
    [
        *((path, True) for path in (b"a/b", b"a", b"..a", b"a/.spiderfs")),
        *((path, False) for path in (b"/a", b"../a", b"a/../b", b"a//b", b"a/", b".", b".spiderfs/config")),
    ],
)
def test_paths_below_the_mount(path: bytes, good: bool) -> None:
    assert is_below_mount(path) is good


async def test_paths_that_are_no_use_are_ignored_with_their_count(tmp_path: Path) -> None:
    async with served(tmp_path, RecordingSink(known=frozenset([b"a"]))) as daemon, daemon.client() as client:
        await client.send(Hello("test", "test"), samples(b"a", b"/etc/passwd", b"../b", b"gone", b""))
        await client.said(Ok)
        await client.said(Warn, "2 of 5 paths are ignored: a path must be relative")
        await client.said(Warn, "1 of 5 paths are ignored: no such file in the mount, such as gone")
        await client.said(Ok, "samples")
    ((_, declared),) = daemon.sink.lists
    assert list(declared.paths) == [b"a", b"", b"", b"gone", b""]


async def test_what_is_out_of_order_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path, limits=ServerLimits(lists=2)) as daemon, daemon.client() as client:
        await client.send(batch(0))
        await client.said(Error, "batch before hello")
        await client.greet(b"a")
        await client.send(Hello("again", "again"))
        await client.said(Error, "not for a trainer to say now")
        await client.send(batch(0, name="other"))
        await client.said(Error, "no list 'other'")
        await client.send(samples(b"a", name="b"), samples(b"a", name="c"))
        await client.said(Ok)
        await client.said(Error, "more than 2 lists")
        await client.send(samples(b"a"))
        await client.said(Ok)


async def test_a_list_that_is_over_makes_room(tmp_path: Path) -> None:
    def plan(name: str, epoch: int, *order: int) -> Plan:
        return Plan(name, epoch, 0, True, np.array(order, np.uint32))

    async with served(tmp_path, limits=ServerLimits(lists=2)) as daemon, daemon.client() as client:
        await client.greet(b"a")
        await client.send(plan("train", 0, 0), samples(b"a", name="b"), plan("b", 4, 0))
        await client.said(Ok)
        # Breaking an epoch off ends no list.
        await client.send(plan("train", 0), samples(b"a", name="c"))
        await client.said(Error, "more than 2 lists: close plans and hooks that are over")
        await client.send(plan("b", 5), samples(b"b", name="c"), plan("b", 6, 0), plan("train", 1, 0))
        await client.said(Ok)
        await client.said(Error, "no list 'b'")
        # It may come back, and one that is read again is not over.
        await client.send(plan("c", 0, 0), plan("c", 1), samples(b"a", name="b"), plan("train", 2), plan("train", 3, 0))
        await client.said(Ok)
        await client.send(samples(b"b", name="c"))
        await client.said(Error, "more than 2 lists")
    assert [call for call, _ in daemon.sink.calls if "withdrawn" in call] == ["withdrawn b", "withdrawn c"]


@pytest.mark.parametrize(("version", "advice"), [(2, "where the training runs"), (4, "where the mount is")])
async def test_a_hook_of_another_version_is_told_so_in_its_own_framing(
    tmp_path: Path, version: int, advice: str
) -> None:
    async with served(tmp_path) as daemon:
        async with daemon.client() as client:
            old = msgpack.packb({"type": "hello", "client": "torch", "rank": 0, "world_size": 1})
            await client.stream.send_all(struct.pack("<2sBBII", b"sf", version, 0, len(old), 0) + old)
            data = b""
            while piece := await client.stream.receive_some():
                data += piece
        assert (data[:2], data[2]) == (b"sf", version)
        # Prefix, header and the message `error` are the same in all versions.
        ((error,)) = Decoder().feed(b"sf" + bytes([VERSION]) + data[3:])
        assert isinstance(error, Error)
        assert error.code == "version"
        assert f"the hook speaks version {version} of the hook protocol, and this mount version {VERSION}" in error.text
        assert error.text.partition("update spiderfs ")[2].startswith(advice)
        assert "\n" not in error.text
    assert daemon.sink.calls == []


async def test_a_slow_sink_loses_no_batch_and_keeps_no_one_else_waiting(tmp_path: Path) -> None:
    async with served(tmp_path, limits=ServerLimits(queue=4)) as daemon, daemon.client() as slow:
        await slow.greet(b"a")
        daemon.sink.batch_s = 1.0
        await slow.send(*(batch(0, step=step) for step in range(300)))
        async with daemon.client() as other:
            await other.greet(b"b", b"c")
            await other.send(ScoresRequest("train", 1))
            await other.said(Scores)
        assert len(daemon.sink.batches) < 300
        daemon.sink.batch_s = 0
        await eventually(lambda: len(daemon.sink.batches) == 300)
    assert [recorded.step for _, recorded in daemon.sink.batches] == [*range(300)]


async def test_batches_that_wait_take_bounded_memory_and_rows_leave_for_it(tmp_path: Path) -> None:
    async with served(tmp_path, limits=ServerLimits(waiting_bytes=20_000)) as daemon, daemon.client() as slow:
        await slow.greet(b"a")
        daemon.sink.batch_s = 0.5
        await slow.send(*(batch(0, step=step) for step in range(100)), EpochEnd(0, None))
        await eventually(lambda: len(daemon.sink.ends) == 1)
    assert "thinned" in [name for name, _ in daemon.sink.calls]
    assert 10 <= len(daemon.sink.batches) <= 60
    assert daemon.counted["hook_batches"] == 100, "a batch of which nothing is left was heard too"


async def test_the_last_row_of_waiting_batches_does_not_leave(tmp_path: Path) -> None:
    """The last batch of an epoch may have one row, and the end of the epoch parts it from the batches that follow."""
    async with served(tmp_path, limits=ServerLimits(waiting_bytes=1500)) as daemon, daemon.client() as slow:
        await slow.greet(b"a")
        daemon.sink.batch_s = 0.1
        for epoch in range(4):
            await slow.send(batch(0, step=epoch), EpochEnd(epoch, None))
        await eventually(lambda: len(daemon.sink.ends) == 4)
    assert [recorded.step for _, recorded in daemon.sink.batches] == [*range(4)]
    assert daemon.counted["internal_errors"] == 0


async def test_no_row_leaves_while_its_list_is_declared_again(tmp_path: Path) -> None:
    """The list may be a shorter one then: the sink knows it already, and the connection still has the one before."""
    declared_again = trio.Event()

    class Sink(RecordingSink):
        async def samples(self, trainer: Trainer, samples: SampleList) -> Declared:
            found = await super().samples(trainer, samples)
            if len(self.lists) == 2:
                await declared_again.wait()
            return found

    async with served(tmp_path, Sink(), ServerLimits(waiting_bytes=20_000)) as daemon, daemon.client() as client:
        await client.greet(b"a", b"b")
        await client.send(samples(b"a"))
        await eventually(lambda: len(daemon.sink.lists) == 2)
        await client.send(*(batch(1, step=step) for step in range(30)), EpochEnd(0, None))
        await wait_all_tasks_blocked(0.05)
        assert "thinned" not in [name for name, _ in daemon.sink.calls]
        declared_again.set()
        await client.said(Ok, "samples")
        for _ in range(30):
            await client.said(Error, "index 1 in a list of 1")
        await eventually(lambda: len(daemon.sink.ends) == 1)


async def test_a_slow_sink_gets_all_batches_that_wait_in_one_call(tmp_path: Path) -> None:
    async with served(tmp_path) as daemon, daemon.client() as slow:
        await slow.greet(b"a")
        daemon.sink.batch_s = 0.05
        told = [batch(0, step=step) for step in range(20)]
        await slow.send(*told[:10], batch(9), *told[10:], EpochEnd(0, None))
        await eventually(lambda: len(daemon.sink.ends) == 1)
        await slow.said(Error, "index 9 in a list of 1")
    assert [recorded.step for _, recorded in daemon.sink.batches] == [*range(20)], "each once, and in order"
    calls = [name for name, _ in daemon.sink.calls if name in ("learn", "epoch_end")]
    # 21 arrive at once: those that are there come together, and nothing goes past the epoch's end.
    assert calls[-1] == "epoch_end"
    assert calls.count("learn") <= 6


async def test_no_bytes_harm_anybody_else(tmp_path: Path) -> None:
    rng = random.Random(5)
    good = (
        encode(Hello("x", "x")) + encode(samples(b"a", b"b")) + encode(batch(0, 1)) + encode(ScoresRequest("train", 1))
    )

    async with served(tmp_path) as daemon, daemon.client() as witness:
        await witness.greet(b"a")
        for _ in range(150):
            data = bytearray(good if rng.random() < 0.8 else rng.randbytes(200))
            for _ in range(rng.randrange(1, 6)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            async with daemon.client() as client:
                try:
                    await client.stream.send_all(data)
                    await client.stream.send_eof()
                    with trio.fail_after(PATIENCE_S):
                        async for _ in client.stream:
                            pass
                except trio.BrokenResourceError:
                    continue
        await witness.send(ScoresRequest("train", 1))
        await witness.said(Scores)
    assert daemon.counted["hook_malformed"] > 20
    assert daemon.counted["internal_errors"] == 0


async def test_mistakes_do_not_end_the_connection_however_many(daemon: Daemon) -> None:
    async with daemon.client() as client:
        await client.greet(b"a")
        await client.send(*[Ok("nonsense")] * 1000, ScoresRequest("train", 1))
        for _ in range(1000):
            assert isinstance(await client.answer(), Error)
        await client.said(Scores)


async def test_limits_of_connections_messages_and_patience(tmp_path: Path) -> None:
    limits = ServerLimits(connections=2, message=Limits(frame_bytes=4096))
    async with served(tmp_path, limits=limits) as daemon:
        async with daemon.client() as client, daemon.client() as second, daemon.client() as third:
            await client.greet(b"a")
            await second.greet()
            await third.said(Error, "2 trainers are connected already")
            assert await third.answer() is None
            await client.stream.send_all(encode(Plan("train", 0, 0, True, np.zeros(2000, np.uint32))))
            await client.said(Error, "at most 4096")
            assert await client.answer() is None
        await eventually(lambda: not daemon.server.trainers)
    assert daemon.counted["hook_refused"] == 1


async def test_who_says_nothing_is_waited_for_for_a_while(tmp_path: Path) -> None:
    limits = ServerLimits(hello_timeout_s=0.1)
    async with served(tmp_path, limits=limits) as daemon, daemon.client() as silent:
        assert await silent.answer() is None


async def test_a_sink_that_fails_is_answered_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(RecordingSink):
        async def epoch_end(self, trainer: Trainer, end: EpochEnd) -> None:
            raise HookError("not now") if end.epoch else ZeroDivisionError("a mistake")

    with caplog.at_level(logging.CRITICAL):
        async with served(tmp_path, Failing()) as daemon, daemon.client() as client:
            await client.greet(b"a")
            await client.send(EpochEnd(0), EpochEnd(1))
            await client.said(Error, "an internal error")
            await client.said(Error, "not now")
    assert daemon.counted["internal_errors"] == 1


async def test_a_foreign_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only root can become someone else; the socket's mode is opened for it, so that the credentials decide."""
    program = (
        "import os, socket, sys\n"
        "listening = socket.socket(socket.AF_UNIX)\n"
        "os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))\n"
        "os.fchdir(int(sys.argv[3])); listening.connect(sys.argv[1])\n"
        "sys.stdout.buffer.write(listening.recv(4096)); sys.exit(bool(listening.recv(1)))\n"
    )

    if os.getuid() != 0:
        # An ordinary user cannot become another one: let the daemon think that it is.
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    async with served(tmp_path) as daemon:
        daemon.path.chmod(0o666)
        directory = os.open(daemon.path.parent, os.O_RDONLY)
        uid = NOBODY if os.getuid() == 0 else os.getuid()
        arguments = [sys.executable, "-c", program, daemon.path.name, str(uid), str(directory)]
        tmp_path.chmod(0o755)
        result = await trio.run_process(arguments, capture_stdout=True, pass_fds=[directory])
        os.close(directory)
        (answer,) = Decoder().feed(result.stdout)
        assert isinstance(answer, Error)
        assert (answer.code, f"not to user {uid}" in answer.text) == ("refused", True)
    assert daemon.counted == {"hook_refused": 1}
    assert daemon.sink.calls == []
