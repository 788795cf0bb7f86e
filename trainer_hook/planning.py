"""Plans without a hook: `plan` tells the daemon what a loader will read, and nothing about the model."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from spiderfs.protocol import Hello
from trainer_hook.boundary import Boundary
from trainer_hook.client import QUEUE_BATCHES, Client
from trainer_hook.exchanging import refuse_repetition, takes_part
from trainer_hook.following import Follower, drawing_loader
from trainer_hook.jobs import Job, hooks_job, plans_job
from trainer_hook.mounts import find_mount, socket_finder
from trainer_hook.planner import Planner
from trainer_hook.sample_list import Declaration, Sample, declaration


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


class Planning:
    """The plans of one loader, published until `close`, to the end of a `with` block, or while the loader exists."""

    def __init__(
        self, loader: DataLoader[Any], planner: Planner, boundary: Boundary, let_go: Callable[[float], None]
    ) -> None:
        self._let_go: Callable[[float], None] | None = let_go
        self._planner = planner
        self._follower = Follower(loader, planner, boundary, None)
        boundary.on_failure(self._step_aside)
        # Nobody has to keep this object.
        self._call_off = when_collected(drawing_loader(loader), let_go)

    def close(self, timeout_s: float = 2.0) -> None:
        """Send the messages that wait, for at most `timeout_s`, and make the loader as it was before."""
        let_go, self._let_go = self._let_go, None
        if let_go is not None:
            self._call_off()
            self._follower.undo()
            self._planner.close()
            let_go(timeout_s)

    def state_dict(self, done: bool = True) -> dict[str, Any]:
        """What the job has consumed of the epoch, and the rest; empty between epochs.

        Say `done=False` if the training has taken a batch that it has not trained on: that is part of the rest then.
        The state is the same on all ranks that have taken equally many batches, so rank 0 alone may save it. After a
        loop has left its epoch early, the state still says where. Raises RuntimeError if another rank does not say what
        it reads. The state of a SpiderSampler is the sampler's own.
        """
        return self._planner.state_dict(done)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next epoch of the loader give only what the job had not consumed, on any number of ranks.

        Give the loader's sampler all samples of the epoch, not the rest. A sampler that is told a later epoch with
        `set_epoch` begins that one instead. Raises ValueError if the state is not one of this list.
        """
        self._planner.load_state_dict(state)

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
    share: bool = False,
) -> Planning:
    """Tell the daemon of the spiderfs mount at or above `directory` what `loader` will read, epoch by epoch, in order.

    The data set must be map-style, and the sampler must have a length. Call this before the first epoch, on each rank,
    in the process that starts the loader's workers; `attach` does the same by itself. `samples` has a pair (path,
    label) for each index of the data set, in order; give it if the data set has neither `.samples` nor `.imgs`. If one
    process plans two loaders, for training and for evaluation, give them different names with `split`.

    When an epoch begins, a copy of the sampler draws it, and the sampler itself draws the same batches as without a
    plan. If a sampler shares its state with such a copy, its epochs are not planned, and that is logged.

    The next epoch (with replacement, the next two) is published early if it can be known: with a DistributedSampler, a
    SpiderSampler on one rank, an EchoSampler, or a `generator` given to the loader or its sampler. The epochs of a
    sampler that uses torch's global generator cannot be known, because the training draws from that generator too. With
    `draw_ahead` such a sampler draws its next epoch when the last batch of this one is handed out. The batches are then
    other batches than without it, but equally random. Do not use it with a sampler that the training tells the number
    of each epoch (`set_epoch`).

    With `share`, this loader takes part in the exchange of samples with other jobs that read the same list with
    `share`: then K jobs fetch together about what one fetches alone. Each epoch has the same samples, each once, in
    another order than the sampler's; orders of jobs that run side by side become alike. Leave it out where the order or
    the batches have a meaning (sorted by length, balanced by class, a curriculum), and for validation.

    `Planning.state_dict` says where an epoch is, for a training that goes on in the middle of one.

    Without a mount or a daemon this logs one warning, and the training goes on. Raises ValueError for a loader that
    cannot be planned, or that has a plan or a hook already.
    """
    Follower.check(loader)
    drawing = drawing_loader(loader)
    if share:
        refuse_repetition(drawing)
    introduced = introduce(directory, drawing, samples=samples, split=split, socket=socket, client_name=client_name)
    declared, boundary = introduced.declaration, Boundary()
    planner = Planner(
        drawing,
        introduced.client,
        declared.name,
        draw_ahead=draw_ahead,
        boundary=boundary,
        samples=len(declared.paths),
        share=takes_part(share, declared.paths),
    )
    return Planning(loader, planner, boundary, introduced.let_go)
