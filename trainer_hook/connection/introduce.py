"""Introducing a loader's list to the daemon of a mount: this process has one connection to it, whatever uses it.

Each training has an id, by which the daemon keeps what its model learns apart from what others learn. If the user gives
none, rank 0 chooses one at random and leaves it in torch.distributed's store, where the other ranks find it. Reading
the store is no collective call: a rank that never attaches keeps no one waiting, except where rank 0 is that rank.

A connection ends with its last use: with the last loader that is freed or hook that is closed. The garbage collector
frees loaders in any thread and in the midst of any call, also of this module or of the connection's client. So a
finalizer only notes that a use is over. The use is ended by whoever changes uses next, under a lock that no finalizer
takes; that is the sending thread, if no one else does.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from torch.utils.data import DataLoader

from spiderfs.protocol import Hello, ProtocolError, encode
from spiderfs.protocol.requests import address_of
from trainer_hook.connection.client import QUEUE_BATCHES, HookClient, Root, root_of, socket_finder
from trainer_hook.connection.sample_list import (
    Declaration,
    Sample,
    declaration,
    found_declaration,
    learned_declaration,
    range_declaration,
)
from trainer_hook.ranges.sample_ranges import SampleRanges
from trainer_hook.ranks import count_of, rank_and_world, shared_store

log = logging.getLogger("trainer_hook")

# Ranks attach within seconds of each other, unless one of them first prepares data for all.
_AGREE_S = 60.0
# Digits of a random UUID: if one mount ever sees a thousand jobs, two have the same id with a chance of 2 in 10^9.
_ID_DIGITS = 12


@dataclass(frozen=True)
class Job:
    """What `attach` was given of a training; None stands for what it was not given (`attach` explains the names).

    Raises ValueError for what the daemon would refuse.
    """

    id: str | None = None
    name: str | None = None
    epoch: int | None = None
    epochs: int | None = None
    resume: bool = False
    scores_from: str | None = None

    def __post_init__(self) -> None:
        if self.resume and self.id is None:
            raise ValueError("resume=True: give the id of the training that goes on, as job=")
        try:
            encode(self.hello("", "none" if self.id is None else self.id))
        except ProtocolError as exc:
            raise ValueError(str(exc).removeprefix("hello needs a good ")) from None

    def hello(self, client_name: str, job_id: str) -> Hello:
        rank, world_size = rank_and_world()
        return Hello(
            client=client_name,
            job=job_id,
            name=self.name,
            rank=rank,
            world_size=world_size,
            epoch=self.epoch,
            epochs=self.epochs,
            resume=self.resume or None,
            scores_from=self.scores_from,
        )


def hooks_job(given: str | None, current: str | None = None, timeout_s: float = _AGREE_S) -> str:
    """The id of the job of a hook that is attached now; waits for rank 0 for a while. All ranks attach in one order.

    `given` is the user's, and `current` that of the hooks which this process has already.
    """
    store, own = shared_store(), given or current
    key = "" if store is None else f"spiderfs job {count_of(store, 'job')}"
    if rank_and_world()[0] and own is not None:
        # Rank 0 has been given, or keeps, the same one.
        return own
    return _of_rank_0(store, key, own, "attach on rank 0 too, or give all ranks one job=", timeout_s)


def _of_rank_0(store: Any, key: str, own: str | None, advice: str, timeout_s: float) -> str:
    """The id that rank 0 leaves under `key`: `own`, or one of an earlier call, or a new one."""
    rank, new = rank_and_world()[0], uuid.uuid4().hex[:_ID_DIGITS]
    if store is None:
        return own or new
    try:
        if rank == 0:
            return str(store.compare_set(key, "", own or new).decode())
        store.wait([key], timedelta(seconds=timeout_s))
        return str(store.get(key).decode())
    except RuntimeError as exc:
        log.warning(
            "rank %d is a training of its own for the mount, as rank 0 did not say in %.0f s which one it is (%s): %s",
            rank,
            timeout_s,
            str(exc).partition("\n")[0],
            advice,
        )
        return own or new


@dataclass
class _Connection:
    """The only connection of this process to a mount. There is one, because the daemon distinguishes readers by
    process.

    `hello` says which job the process belongs to: that of its hooks, or one of its own while it has only plans.
    """

    key: tuple[int, str, str]
    client: HookClient
    hello: Hello
    uses: list[Introduced] = field(default_factory=list)
    freed: deque[Introduced] = field(default_factory=deque)
    """Uses whose owners were freed, and which are to be ended."""

    def begin(self, job: Job, client_name: str) -> None:
        """A hook is attached: its job is this process's job from now on. Raises ValueError if others have another."""
        before = vars(self.hello)
        agreed = hooks_job(job.id, self.hello.job if self.learned else None)
        if not self.learned:
            self.hello = job.hello(client_name, agreed)
        elif job.id in (None, self.hello.job):
            given = {name: value for name, value in vars(job).items() if name != "id" and value}
            if given:
                # The job has gone on since its hello, and the daemon knows which epoch runs.
                self.hello = replace(self.hello, **({"epoch": None} | given))
        else:
            raise ValueError(
                f"job={job.id!r}: a hook of this process belongs to the job {self.hello.job!r}: "
                "close it first, or give both one job="
            )
        if vars(self.hello) != before:
            self.client.become(self.hello, {use.declaration.split for use in self.uses})

    @property
    def learned(self) -> bool:
        """Whether a hook uses this connection, and not plans alone."""
        return any(use.declaration.sends_batches for use in self.uses)

    def has_another(self, declared: Declaration, loader: object) -> bool:
        """Whether another list of this name is in use; what is learned of two loaders are two lists."""
        own = ((use.declaration, use.loader()) for use in self.uses if use.declaration.split == declared.split)
        given = declared.paths, declared.learns and loader
        return any((other.paths, other.learns and other_loader) != given for other, other_loader in own)

    def end(self, use: Introduced) -> None:
        """End a use; the list is withdrawn with its last use."""
        if use in self.uses:
            self.uses.remove(use)
            if self.uses and all(other.declaration.split != use.declaration.split for other in self.uses):
                self.client.withdraw(use.declaration.split)

    def end_freed(self) -> None:
        """End the uses whose owners were freed, and with the last use the connection."""
        while self.freed:
            self.freed.popleft().release(0.0)

    def try_end_freed(self) -> bool:
        """The same for the sending thread, which must not wait; False if someone changes uses in this moment."""
        changing = _changing()
        if not changing.acquire(blocking=False):
            return False
        try:
            self.end_freed()
        finally:
            changing.release()
        return True


_connections: dict[tuple[int, str, str], _Connection] = {}
_locks: dict[int, threading.RLock] = {}


def _changing() -> threading.RLock:
    """Who changes the uses of connections holds this lock of this process: a fork may inherit one that is held."""
    return _locks.setdefault(os.getpid(), threading.RLock())


@dataclass(eq=False)
class Introduced:
    """One loader's use of a list that was declared, for a hook if the list `sends_batches`.

    `loader` returns None when that loader has been freed.
    """

    declaration: Declaration
    loader: Callable[[], object]
    connection: _Connection

    def release(self, timeout_s: float) -> None:
        """End this use; sending what waits may take `timeout_s` if it was the last use of the connection."""
        connection = self.connection
        with _changing():
            connection.end(self)
            is_over = not connection.uses and _connections.get(connection.key) is connection
            if is_over:
                del _connections[connection.key]
        if is_over:
            connection.client.close(timeout_s)

    def owner_freed(self) -> None:
        """End this use soon; for finalizers."""
        self.connection.freed.append(self)
        self.connection.client.leave(self.connection.try_end_freed)


def introduce(
    directory: str | os.PathLike[str],
    loader: DataLoader[Any] | None,
    *,
    samples: Iterable[Sample] | None,
    ranges: SampleRanges | Iterable[Any] | str | None = None,
    split: str,
    socket: str | os.PathLike[str] | None,
    client_name: str,
    job: Job | None = None,
    queue_batches: int = QUEUE_BATCHES,
) -> Introduced:
    """Declare the list of a loader's data set to the daemon of the mount at or above `directory`, or `spiderfs://NAME`.

    `job` is a hook's; a plan has none, and belongs to the job of this process's hooks. Raises ValueError if another
    loader uses another list of the same name, or another hook has another job.
    """
    if not isinstance(directory, str | os.PathLike):
        raise ValueError(f"the directory is a {type(directory).__name__}, no path: give the directory of the mount")
    root = root_of(directory)
    dataset, is_mount = None if loader is None else loader.dataset, root.has_daemon or socket is not None
    if ranges is None:
        found = None if samples is not None else found_declaration(dataset, root.path, split, is_mount=is_mount)
        declared = found or declaration(dataset, root.path, root.directory, split, split, samples, is_mount=is_mount)
    elif samples is not None:
        raise ValueError("samples and ranges: give ranges alone where samples are ranges of files")
    elif isinstance(ranges, str):
        declared = _learning(ranges, dataset, root.path, split, is_mount)
    else:
        length = len(dataset) if isinstance(dataset, Sized) else None
        declared = range_declaration(SampleRanges.of(ranges), length, root.path, split)
    with _changing():
        return _introduced(root, declared, loader, socket, client_name, job, queue_batches)


def _introduced(
    root: Root,
    declared: Declaration,
    loader: DataLoader[Any] | None,
    socket: str | os.PathLike[str] | None,
    client_name: str,
    job: Job | None,
    queue_batches: int,
) -> Introduced:
    """See `introduce`; the caller holds the lock of `_changing`."""
    key = (os.getpid(), root.path, "" if socket is None else os.fspath(socket))
    if key in _connections:
        _connections[key].end_freed()
    connection = _connections.get(key)
    if connection is not None and (
        connection.has_another(declared, loader) or (job is not None and connection.learned)
    ):
        # End the uses of loaders that were freed without a close, such as those of earlier folds (k-fold validation).
        # A model and its hook refer to each other, so only the garbage collector frees them.
        gc.collect()
        connection.end_freed()
        for use in list(connection.uses):
            if use.loader() is None:
                connection.end(use)
        # If the last user was a hook that was freed just now, the connection has ended with it.
        connection = _connections.get(key)
    if connection is None:
        if job is None:
            # A job as long as its ranks run: each ends its connection when it frees its loaders.
            agreed = _of_rank_0(shared_store(), "spiderfs plans", None, "plan on rank 0 too", _AGREE_S)
        else:
            agreed = hooks_job(job.id)
        hello = (job or Job()).hello(client_name, agreed)
        client = HookClient(socket_finder(root.directory, socket), hello, queue_batches=queue_batches)
        connection = _connections[key] = _Connection(key, client, hello)
    else:
        if connection.has_another(declared, loader):
            raise ValueError(
                f"another loader's list is called {declared.split!r}: close its plan or hook, or give this one another "
                "split="
            )
        if job is not None:
            connection.begin(job, client_name)
    loader_of = (lambda: connection) if loader is None else weakref.ref(loader)
    # No score is of a part of a file, so no batch of ranges is sent.
    use = Introduced(replace(declared, sends_batches=job is not None and declared.grid is None), loader_of, connection)
    connection.uses.append(use)
    sends_batches = any(
        other.declaration.sends_batches for other in connection.uses if other.declaration.split == declared.split
    )
    connection.client.declare(replace(declared, sends_batches=sends_batches))
    return use


def _learning(ranges: str, dataset: object, root: str, split: str, is_mount: bool) -> Declaration:
    """The list of a data set of whose samples nothing is known yet; raises ValueError where nothing can be learned."""
    if ranges != "learn":
        raise ValueError(f"ranges={ranges!r}: give a list of (path, offset, length), or 'learn'")
    if address_of(root) is not None:
        raise ValueError(f"ranges='learn': {root} is no mount: give a directory in a mount")
    if not isinstance(dataset, Sized) or not len(dataset):
        raise ValueError("ranges='learn': the data set has no samples")
    return replace(learned_declaration(SampleRanges.none(len(dataset)), root, split), learns=is_mount)


def end_with(owner: object, use: Introduced) -> Callable[[], object]:
    """End a use soon after `owner` is freed; at the end of the process it is not ended.

    Returns a function that calls this off.
    """
    finalizer = weakref.finalize(owner, use.owner_freed)
    finalizer.atexit = False
    return finalizer.detach
