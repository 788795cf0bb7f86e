"""What each job reads: how many samples, how fast, and where they came from. Control files show it.

Workers' events name the trainer that read, by its number, and the prefetcher names the trainer for whose plan it
fetched. An account is kept while its job has a trainer, or courses in memory. All state belongs to the manager's event
loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from spiderfs.core.events import FROM_THE_SOURCE, HIT, UNSEEN, Access
from spiderfs.core.learning.teaching import RatioStatus
from spiderfs.daemon.training.trainer import Trainer

# The pace of a job is that of this many whole seconds, the last ones.
_PACE_S = 10


@dataclass(frozen=True)
class JobStatus:
    """One job with a trainer attached.

    `lists` has the number of samples by the list's name; `epoch` is the one that runs, and `epochs` how many there will
    be, if that is known. `hits` of the `samples` read did not wait for the source; of those, `page_cache_reads` were
    answered by the kernel alone. `origin_bytes` were read from the source for this job: those for which it waited, and
    those fetched ahead for its plans.
    """

    job_id: str
    name: str | None
    clients: Sequence[str]
    pids: Sequence[int]
    ranks: Sequence[int]
    world_size: int
    lists: Mapping[str, int]
    epoch: int
    epochs: int | None
    samples_per_s: float
    samples: int
    hits: int
    page_cache_reads: int
    origin_bytes: int
    stand_ins: int
    exchanged: int = 0
    """How many samples the job has taken in the place of others that were not cached."""
    saved_bytes: int = 0
    """The bytes of those of them that were cached, which would have been fetched for these reads otherwise."""


@dataclass
class _Account:
    samples: int = 0
    hits: int = 0
    page_cache_reads: int = 0
    origin_bytes: int = 0
    stand_ins: int = 0
    # Samples read in each of the last seconds in which there were any.
    paced: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_PACE_S + 1))

    def read(self, access: Access) -> None:
        self.samples += 1
        self.hits += access.where in (HIT, UNSEEN)
        self.page_cache_reads += access.where == UNSEEN
        self.stand_ins += access.wanted != access.inode
        if access.where in FROM_THE_SOURCE:
            self.origin_bytes += access.size
        second = int(access.time_s)
        if self.paced and self.paced[-1][0] >= second:
            second, before = self.paced.pop()
            self.paced.append((second, before + 1))
        else:
            self.paced.append((second, 1))

    def samples_per_s(self, now_s: float) -> float:
        last = int(now_s)
        return sum(count for second, count in self.paced if last - _PACE_S <= second < last) / _PACE_S


class JobAccounts:
    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        # Events of a trainer may come after it has left; its number is given to another one much later.
        self._job_of: dict[int, str] = {}

    def attached(self, number: int, job_id: str) -> None:
        """A trainer attached, under this number."""
        self._job_of[number] = job_id
        self._accounts.setdefault(job_id, _Account())

    def record_accesses(self, accesses: Iterable[Access]) -> None:
        """Add what trainers have read; large files are not counted."""
        for access in accesses:
            if access.trainer and access.where in (HIT, UNSEEN, *FROM_THE_SOURCE):
                account = self._of(access.trainer)
                if account is not None:
                    account.read(access)

    def fetched_ahead(self, trainer: int, size: int) -> None:
        """Add a sample of `size` bytes that was fetched ahead for a trainer's plan."""
        account = self._of(trainer)
        if account is not None:
            account.origin_bytes += size

    def keep_only(self, job_ids: Collection[str]) -> None:
        """Forget all other jobs."""
        self._accounts = {job_id: account for job_id, account in self._accounts.items() if job_id in job_ids}
        self._job_of = {number: job_id for number, job_id in self._job_of.items() if job_id in job_ids}

    def statuses(self, trainers: Iterable[Trainer], ratios: RatioStatus, now_s: float) -> tuple[JobStatus, ...]:
        """One status for each job of these trainers, which are attached."""
        jobs: dict[str, list[Trainer]] = {}
        for trainer in trainers:
            jobs.setdefault(trainer.job_id, []).append(trainer)
        epochs_done = {job.job_id: job.epochs_done for job in ratios.jobs}
        return tuple(
            self._status(job_id, ranks, epochs_done.get(job_id, ranks[0].hello.epoch or 0), now_s)
            for job_id, ranks in jobs.items()
        )

    def _status(self, job_id: str, ranks: Sequence[Trainer], epoch: int, now_s: float) -> JobStatus:
        account, hello = self._accounts[job_id], ranks[0].hello
        return JobStatus(
            job_id=job_id,
            name=hello.name,
            clients=tuple(dict.fromkeys(trainer.hello.client for trainer in ranks)),
            pids=tuple(trainer.pid for trainer in ranks),
            ranks=tuple(trainer.rank for trainer in ranks),
            world_size=hello.world_size,
            lists={name: samples for trainer in ranks for name, samples in trainer.lists.items()},
            epoch=epoch,
            epochs=hello.epochs,
            samples_per_s=account.samples_per_s(now_s),
            samples=account.samples,
            hits=account.hits,
            page_cache_reads=account.page_cache_reads,
            origin_bytes=account.origin_bytes,
            stand_ins=account.stand_ins,
        )

    def _of(self, trainer: int) -> _Account | None:
        return self._accounts.get(self._job_of.get(trainer, ""))
