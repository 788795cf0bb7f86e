"""The job of a training: what `attach` is told of it, and the id that all its ranks share.

Each training has an id, by which the daemon keeps what its model learns apart from what others learn. If the user gives
none, rank 0 chooses one at random and leaves it in torch.distributed's store, where the other ranks find it. Reading
the store is no collective call: a rank that never attaches keeps nobody waiting, except where rank 0 is that rank.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from spiderfs.protocol import Hello, ProtocolError, encode
from trainer_hook.ranks import count_of, rank_and_world, shared_store

log = logging.getLogger("trainer_hook")

# Ranks attach within seconds of each other, unless one of them first prepares data for all.
_AGREE_S = 60.0
# Of a random UUID: if one mount ever sees a thousand jobs, two of them have the same id with a chance of 2 in 10^9.
_ID_DIGITS = 12


@dataclass(frozen=True)
class Job:
    """What `attach` was told of a training; None stands for what it was not told (`attach` explains the names).

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
        """The message that begins this job."""
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


def plans_job(timeout_s: float = _AGREE_S) -> str:
    """The id of the job of a training that has plans alone: one as long as its ranks run; waits for rank 0 for a while.

    Ranks may end their connections at other times, as that depends on when each frees its loaders.
    """
    return _of_rank_0(shared_store(), "spiderfs plans", None, "plan on rank 0 too", timeout_s)


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
