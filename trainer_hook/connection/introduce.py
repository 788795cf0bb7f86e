"""Introducing a loader's list to the daemon of a mount: this process has one connection to it, whatever uses it."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from spiderfs.protocol import Hello
from trainer_hook.connection.client import QUEUE_BATCHES, Client
from trainer_hook.connection.jobs import Job, hooks_job, plans_job
from trainer_hook.connection.mounts import find_mount, socket_finder
from trainer_hook.connection.sample_list import Declaration, Sample, declaration


@dataclass(eq=False)
class _User:
    """One loader's use of a list, for a hook if it `teaches`; `loader` returns None when that loader has been freed."""

    split: str
    paths: list[bytes]
    loader: Callable[[], object]
    teaches: bool


@dataclass
class _Connection:
    """The only connection of this process to a mount. There is one, because the daemon tells readers by process.

    `hello` says which job the process belongs to: that of its hooks, or one of its own while it has only plans.
    """

    client: Client
    hello: Hello
    users: list[_User] = field(default_factory=list)

    def begin(self, job: Job, client_name: str) -> None:
        """A hook is attached: its job is this process's job from now on. Raises ValueError if others have another."""
        before = vars(self.hello)
        agreed = hooks_job(job.id, self.hello.job if self.taught else None)
        if not self.taught:
            self.hello = job.hello(client_name, agreed)
        elif job.id in (None, self.hello.job):
            told = {name: value for name, value in vars(job).items() if name != "id" and value}
            if told:
                # The job has gone on since its hello, and the daemon knows which epoch runs.
                self.hello = replace(self.hello, **({"epoch": None} | told))
        else:
            raise ValueError(
                f"job={job.id!r}: a hook of this process belongs to the job {self.hello.job!r}: "
                "close it first, or give both one job="
            )
        if vars(self.hello) != before:
            self.client.become(self.hello, {user.split for user in self.users})

    @property
    def taught(self) -> bool:
        """Whether a hook uses this connection, and not plans alone."""
        return any(user.teaches for user in self.users)

    def others(self, split: str, paths: list[bytes]) -> list[_User]:
        """The users of another list that has this name."""
        return [user for user in self.users if user.split == split and user.paths != paths]

    def let_go(self, user: _User) -> None:
        """Remove a user; the list is withdrawn with its last user."""
        if user in self.users:
            self.users.remove(user)
            if self.users and all(other.split != user.split for other in self.users):
                self.client.withdraw(user.split)


_connections: dict[tuple[int, Path, str], _Connection] = {}


class Introduced(NamedTuple):
    """A list that was declared, this process's client of the mount, and the id of its job.

    `let_go` ends the loader's use of both; its argument is how many seconds it may take to send what waits.
    """

    declaration: Declaration
    client: Client
    job: str
    let_go: Callable[[float], None]


def introduce(
    directory: str | os.PathLike[str],
    loader: DataLoader[Any] | None,
    *,
    samples: Iterable[Sample] | None,
    split: str,
    socket: str | os.PathLike[str] | None,
    client_name: str,
    job: Job | None = None,
    queue_batches: int = QUEUE_BATCHES,
) -> Introduced:
    """Declare the list of a loader's data set to the daemon of the mount at or above `directory`.

    `job` is a hook's; a plan has none, and belongs to the job of this process's hooks. Raises ValueError if another
    loader uses another list of the same name, or another hook has another job.
    """
    if not isinstance(directory, str | os.PathLike):
        raise ValueError(f"the directory is a {type(directory).__name__}, no path: give the directory of the mount")
    directory = Path(os.path.abspath(directory))
    root = find_mount(directory) or Path(os.path.realpath(directory))
    declared = declaration(None if loader is None else loader.dataset, root, directory, split, split, samples)
    key = (os.getpid(), root, "" if socket is None else os.fspath(socket))
    connection = _connections.get(key)
    if connection is not None and (connection.others(split, declared.paths) or (job is not None and connection.taught)):
        _let_go_of_collected(connection)
        # If the last user was a hook that was freed just now, the connection has ended with it.
        connection = _connections.get(key)
    if connection is None:
        hello = Job().hello(client_name, plans_job()) if job is None else job.hello(client_name, hooks_job(job.id))
        client = Client(socket_finder(directory, socket), hello, queue_batches=queue_batches)
        connection = _connections[key] = _Connection(client, hello)
    else:
        if connection.others(split, declared.paths):
            raise ValueError(
                f"another loader's list is called {split!r}: close its plan or hook, or give this one another split="
            )
        if job is not None:
            connection.begin(job, client_name)
    loader_of = (lambda: connection) if loader is None else weakref.ref(loader)
    user = _User(split, declared.paths, loader_of, teaches=job is not None)
    connection.users.append(user)
    teaches = any(other.teaches for other in connection.users if other.split == split)
    connection.client.declare(replace(declared, teaches=teaches))

    def let_go(timeout_s: float) -> None:
        connection.let_go(user)
        if not connection.users and _connections.get(key) is connection:
            del _connections[key]
            connection.client.close(timeout_s)

    return Introduced(declared, connection.client, connection.hello.job, let_go)


def _let_go_of_collected(connection: _Connection) -> None:
    """End the uses of loaders that were freed without a close, such as those of earlier folds (k-fold validation)."""
    # A model and its hook refer to each other, so only the garbage collector frees them.
    gc.collect()
    for user in list(connection.users):
        if user.loader() is None:
            connection.let_go(user)


def when_collected(owner: object, let_go: Callable[[float], None]) -> Callable[[], object]:
    """Call `let_go` when `owner` is freed, with no time to wait; at the end of the process it is not called.

    Returns a function that calls this off.
    """
    finalizer = weakref.finalize(owner, let_go, 0.0)
    finalizer.atexit = False
    return finalizer.detach
