"""What each job reads: how many samples, how fast, and where they came from. Control files show it.

Workers' events name the trainer that read, by its number, and the prefetcher names the trainer for whose plan it
fetched. An account is kept while its job has a trainer, or job datasets in memory; the counts of its epochs are kept
for later mounts. All state belongs to the manager's event loop.

Of a plan that is followed each draw counts once, in the epoch that drew it (`Schedule.drawn`): the news of an epoch's
last reads come when the next one has begun, and loader workers read for an epoch before it has. What no plan names
counts in the epoch that ran at the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from spiderfs.core.events import FROM_THE_SOURCE, HIT, UNREPORTED, UNSEEN, Access
from spiderfs.core.feed import RatioStatus
from spiderfs.daemon.training.trainer import Trainer

# The pace of a job is that of this many whole seconds, the last ones.
_PACE_S = 10
# Epochs whose counts are kept, the latest: 300 bytes each.
_KEPT_EPOCHS = 1000
_COUNTED = (HIT, *FROM_THE_SOURCE)
_DRAWN = (*_COUNTED, UNSEEN, UNREPORTED)


@dataclass
class _Epoch:
    """What a job has read in one epoch, in the words of `.spiderfs/epochs`.

    `seconds` are those from its first read to its last, and `ended` is the time of the last one. `waited` of the
    `samples` waited for the source, `waited_s` in all readers together. `planned` were opened as a followed plan had
    named them, `late` of these waited. `origin_bytes` are as in `JobAccounts.statuses`.
    """

    job: str
    name: str | None
    epoch: int
    ended: float = 0.0
    seconds: float = 0.0
    samples: int = 0
    waited: int = 0
    waited_s: float = 0.0
    planned: int = 0
    late: int = 0
    page_cache_reads: int = 0
    substitutes: int = 0
    read_bytes: int = 0
    origin_bytes: int = 0
    # No field: whether the next read comes after a pause, which is none of its time.
    resumed = False

    def read(self, access: Access, planned: bool, ended: float) -> None:
        # Events of several workers do not come in the order of their times.
        if self.samples and not self.resumed:
            self.seconds += max(0.0, ended - self.ended)
        self.resumed = False
        self.ended = max(self.ended, ended)
        waited = access.where in FROM_THE_SOURCE
        self.samples += 1
        self.waited += waited
        self.waited_s += access.waited_us / 1e6
        self.planned += planned
        self.late += planned and waited
        self.page_cache_reads += access.where == UNSEEN
        self.substitutes += access.wanted != access.inode
        self.read_bytes += access.size
        self.origin_bytes += access.size if waited else 0


@dataclass
class _Account:
    epoch: _Epoch
    # The epoch before, of which news may still come, and when that one began.
    before: _Epoch | None = None
    began_s: float = 0.0
    samples: int = 0
    hits: int = 0
    page_cache_reads: int = 0
    origin_bytes: int = 0
    substitutes: int = 0
    # Samples read in each of the last seconds in which there were any.
    paced: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_PACE_S + 1))

    def read(self, access: Access) -> None:
        self.samples += 1
        self.hits += access.where in (HIT, UNSEEN)
        self.page_cache_reads += access.where == UNSEEN
        self.substitutes += access.wanted != access.inode
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
    def __init__(self, planned: Callable[[int, int], bool] = lambda trainer, inode: False, unix_s: float = 0.0) -> None:
        """`planned`: whether a trainer follows a plan that names a sample. `unix_s` is the time at second 0."""
        self._planned, self._unix_s = planned, unix_s
        self._epochs: deque[_Epoch] = deque(maxlen=_KEPT_EPOCHS)
        self._accounts: dict[str, _Account] = {}
        # Events of a trainer may come after it has left; its number is given to another one much later.
        self._job_of: dict[int, str] = {}

    def attached(self, number: int, job_id: str, name: str | None = None, epoch: int = 0) -> None:
        """A trainer attached, under this number, and its job is in this epoch."""
        self._job_of[number] = job_id
        if job_id not in self._accounts:
            self._accounts[job_id] = _Account(self._epoch(job_id, name, epoch))

    def begin_epoch(self, job_id: str, epoch: int, now_s: float) -> None:
        """What a job reads from now on is of this epoch."""
        if (account := self._accounts.get(job_id)) is not None and account.epoch.epoch != epoch:
            before = account.epoch
            account.epoch = self._epoch(before.job, before.name, epoch)
            account.before, account.began_s = before if before.samples else None, now_s
            if before.samples:
                self._epochs.append(before)

    def _epoch(self, job_id: str, name: str | None, epoch: int) -> _Epoch:
        """The counts of an epoch that goes on after a pause, or new ones."""
        for known in self._epochs:
            if (known.job, known.epoch) == (job_id, epoch):
                self._epochs.remove(known)
                known.resumed = True
                return known
        return _Epoch(job_id, name, epoch)

    def epochs(self) -> list[dict[str, Any]]:
        """The counts of all epochs that are known, those that go on at the end."""
        running = (account.epoch for account in self._accounts.values() if account.epoch.samples)
        return [asdict(epoch) for epoch in (*self._epochs, *running)]

    def restore(self, epochs: Iterable[Mapping[str, Any]]) -> None:
        """Take over what `epochs` returned in an earlier mount, or before the manager was started again."""
        known = _Epoch("", None, 0)
        self._epochs.extend(_Epoch(**epoch) for epoch in epochs if epoch.keys() == asdict(known).keys())

    def record_accesses(self, accesses: Iterable[Access]) -> None:
        """Add what trainers have read that no plan of theirs names; large files are not counted."""
        for access in accesses:
            account = self._of(access.trainer) if access.where in _COUNTED else None
            if account is not None and not self._planned(access.trainer, access.wanted):
                account.read(access)
                early = account.before is not None and access.time_s < account.began_s
                epoch = account.before if early and account.before is not None else account.epoch
                epoch.read(access, False, self._unix_s + access.time_s)

    def drawn(self, access: Access, epoch: int) -> None:
        """Add what a trainer has read for a draw of this epoch."""
        if (account := self._of(access.trainer)) is not None and access.where in _DRAWN:
            account.read(access)
            self._row(account.epoch, epoch).read(access, True, self._unix_s + access.time_s)

    def _row(self, running: _Epoch, epoch: int) -> _Epoch:
        """The counts of an epoch of a job, which may have ended, or not have begun."""
        if running.epoch == epoch:
            return running
        row = next((row for row in reversed(self._epochs) if (row.job, row.epoch) == (running.job, epoch)), None)
        if row is None:
            row = _Epoch(running.job, running.name, epoch)
            self._epochs.append(row)
        return row

    def fetched_ahead(self, trainer: int, size: int) -> None:
        """Add a sample of `size` bytes that was fetched ahead for a trainer's plan."""
        if (account := self._of(trainer)) is not None:
            account.origin_bytes += size
            account.epoch.origin_bytes += size

    def keep_only(self, job_ids: Collection[str]) -> None:
        """Forget all other jobs, but not their epochs."""
        over = [account.epoch for job_id, account in self._accounts.items() if job_id not in job_ids]
        self._epochs.extend(epoch for epoch in over if epoch.samples)
        self._accounts = {job_id: account for job_id, account in self._accounts.items() if job_id in job_ids}
        self._job_of = {number: job_id for number, job_id in self._job_of.items() if job_id in job_ids}

    def statuses(self, trainers: Iterable[Trainer], ratios: RatioStatus, now_s: float) -> list[dict[str, Any]]:
        """One status for each job of these trainers, which are attached.

        `lists` has the number of samples by the list's name, `epoch` is the one that runs. `hits` of the `samples` read
        did not wait for the source; of those, `page_cache_reads` were answered by the kernel alone. `origin_bytes` were
        read from the source: those for which the job waited, and those fetched ahead for its plans.
        """
        jobs: dict[str, list[Trainer]] = {}
        for trainer in trainers:
            jobs.setdefault(trainer.job_id, []).append(trainer)
        epochs_done = {job.job_id: job.epochs_done for job in ratios.jobs}
        statuses = []
        for job_id, ranks in jobs.items():
            hello, account = ranks[0].hello, self._accounts[job_id]
            status: dict[str, Any] = {
                "job": job_id,
                "name": hello.name,
                "clients": [*dict.fromkeys(trainer.hello.client for trainer in ranks)],
                "pids": [trainer.pid for trainer in ranks],
                "ranks": [trainer.rank for trainer in ranks],
                "world_size": hello.world_size,
                "lists": {name: samples for trainer in ranks for name, samples in trainer.lists.items()},
                "epoch": epochs_done.get(job_id, hello.epoch or 0),
                "epochs": hello.epochs,
                "samples_per_s": account.samples_per_s(now_s),
            }
            counted = ("samples", "hits", "page_cache_reads", "origin_bytes", "substitutes")
            statuses.append(status | {name: getattr(account, name) for name in counted})
        return statuses

    def _of(self, trainer: int) -> _Account | None:
        return self._accounts.get(self._job_of.get(trainer, ""))
