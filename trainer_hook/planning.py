"""Plans without a hook: `plan` tells the daemon what a loader will read, and nothing of what is learned."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.utils.data import DataLoader

from spiderfs.protocol import Hello
from trainer_hook.boundary import Boundary
from trainer_hook.client import QUEUE_BATCHES, Client, Declaration
from trainer_hook.following import Follower, drawing_loader
from trainer_hook.mounts import find_mount, socket_finder
from trainer_hook.planner import Planner
from trainer_hook.ranks import rank_and_world
from trainer_hook.sample_list import Sample, declaration


@dataclass(eq=False)
class _User:
    """One loader's use of a list; `loader` gives None once that loader has gone."""

    split: str
    paths: list[bytes]
    loader: Callable[[], object]


@dataclass
class _Connection:
    """A process's only one to a mount: the daemon tells by the process whose reads are whose."""

    client: Client
    users: list[_User] = field(default_factory=list)

    def others(self, split: str, paths: list[bytes]) -> list[_User]:
        """Those that use a list of other files by this name."""
        return [user for user in self.users if user.split == split and user.paths != paths]

    def let_go(self, user: _User) -> None:
        """The list is withdrawn with its last user."""
        if user in self.users:
            self.users.remove(user)
            if self.users and all(other.split != user.split for other in self.users):
                self.client.withdraw(user.split)


_connections: dict[tuple[int, Path, str], _Connection] = {}


def introduce(
    directory: str | os.PathLike[str],
    loader: DataLoader[Any] | None,
    *,
    samples: Iterable[Sample] | None,
    split: str,
    socket: str | os.PathLike[str] | None,
    client_name: str,
    queue_batches: int = QUEUE_BATCHES,
) -> tuple[Declaration, Client, Callable[[float], None]]:
    """The list of the loader's data set, declared; this process's client of the mount at or above `directory`; how to
    let go of it.

    That takes the seconds that sending what waits may take. Raises ValueError if another loader has a list of other
    files by the same name.
    """
    directory = Path(os.path.abspath(directory))
    root = find_mount(directory) or Path(os.path.realpath(directory))
    declared = declaration(None if loader is None else loader.dataset, root, directory, split, split, samples)
    key = (os.getpid(), root, "" if socket is None else os.fspath(socket))
    connection = _connections.get(key)
    if connection is None:
        hello = Hello(client_name, *rank_and_world())
        client = Client(socket_finder(directory, socket), hello, queue_batches=queue_batches)
        connection = _connections[key] = _Connection(client)
    elif connection.others(split, declared.paths):
        _let_go_of_collected(connection)
        if connection.others(split, declared.paths):
            raise ValueError(
                f"another loader's list is called {split!r}: close that first, or give this one another split"
            )
    user = _User(split, declared.paths, (lambda: connection) if loader is None else weakref.ref(loader))
    connection.users.append(user)
    connection.client.declare(declared)

    def let_go(timeout_s: float) -> None:
        connection.let_go(user)
        if not connection.users and _connections.get(key) is connection:
            del _connections[key]
            connection.client.close(timeout_s)

    return declared, connection.client, let_go


def _let_go_of_collected(connection: _Connection) -> None:
    """Loaders that nobody closed and nobody has any more, as those of the folds before (k-fold validation)."""
    # A model and its hook hold each other, so only the collector ends them.
    gc.collect()
    for user in list(connection.users):
        if user.loader() is None:
            connection.let_go(user)


def when_collected(owner: object, let_go: Callable[[float], None]) -> None:
    """Let go once nobody has `owner` any more, without waiting; the end of the process is left to the daemon."""
    weakref.finalize(owner, let_go, 0.0).atexit = False


class Planning:
    """The plans of one loader, published until `close`, or to the end of a `with` block."""

    def __init__(
        self, loader: DataLoader[Any], planner: Planner, boundary: Boundary, let_go: Callable[[float], None]
    ) -> None:
        self._let_go: Callable[[float], None] | None = let_go
        self._planner = planner
        self._follower = Follower(loader, planner, boundary, None)
        boundary.on_failure(self._step_aside)
        when_collected(self, let_go)

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what waits for at most so many seconds, and leave the loader as it was."""
        let_go, self._let_go = self._let_go, None
        if let_go is not None:
            self._follower.undo()
            self._planner.close()
            let_go(timeout_s)

    def _step_aside(self) -> None:
        self.close(0.0)

    def __enter__(self) -> Planning:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def plan(
    directory: str | os.PathLike[str],
    loader: DataLoader[Any],
    *,
    samples: Iterable[Sample] | None = None,
    split: str = "train",
    socket: str | os.PathLike[str] | None = None,
    client_name: str = "torch",
    draw_ahead: bool = False,
) -> Planning:
    """Tell the daemon of the spiderfs mount at or above `directory` what `loader` will read, epoch by epoch, in order.

    For any map-style data set and any sampler of finite length. Call it in the process whose children are the loader's
    workers, on each rank, before the first epoch; `attach` does the same by itself. `samples` are (path, label) in the
    order of the data set's indices, if it has no `.samples` or `.imgs`. A loader for evaluation, beside one for
    training, needs a `split` of another name. What an epoch will read is found out from a copy of the sampler when
    it begins, and the batches are those of the loader without a plan. A sampler that shares with such a copy what it
    draws by is not planned, with a warning.

    The next epoch, with replacement the next two, is published early where it is known: with a DistributedSampler, a
    SpiderSampler on one rank, an EchoSampler, or a `generator` given to the loader or its sampler. A sampler that uses
    torch's global generator cannot be foreseen, since the training draws from it too. `draw_ahead` draws its next epoch
    when the last batch of this one is handed out: other, equally random batches than without, and wrong for a sampler
    that is told its epoch in between.

    Without a mount or a daemon this warns once, and training goes on. Raises ValueError for a loader that cannot be
    planned, and one that is followed already.
    """
    Follower.check(loader)
    loader = drawing_loader(loader)
    declared, client, let_go = introduce(
        directory, loader, samples=samples, split=split, socket=socket, client_name=client_name
    )
    boundary = Boundary()
    planner = Planner(
        loader, client, declared.name, draw_ahead=draw_ahead, boundary=boundary, samples=len(declared.paths)
    )
    return Planning(loader, planner, boundary, let_go)
