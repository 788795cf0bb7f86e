"""The attached trainers: the number of each, and the job datasets to which its lists belong.

A trainer gets a number when it attaches. Events of workers name it by this number, and so does the engine's schedule.
All trainers of a job share its job datasets. A trainer has **sent batches of** a job dataset once it has sent a batch
of it, and it **trains on** one if it has said so with the list, or has sent batches of it; a trainer that only
publishes plans trains on none, and never gets a substitute.

Workers learn of trainers from a file (`shared/published.py`), which is written again at each change here. All
state belongs to the manager's event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from spiderfs.daemon.training.job_datasets.job_datasets import JobDataset
from spiderfs.daemon.training.trainer import Trainer
from spiderfs.linux.process_table import started_at
from spiderfs.shared.published import Attached

log = logging.getLogger(__name__)

# Events have 16 bits for the number of a trainer, and 0 stands for a reader that is no trainer.
_MAX_NUMBER = 0xFFFF


class Trainers:
    def __init__(self, publish: Callable[[Iterable[Attached]], None], has_substitutes: Callable[[], bool]) -> None:
        """`publish` writes the list for workers or raises OSError; call `self.publish` if `has_substitutes` changes."""
        self._publish, self._has_substitutes = publish, has_substitutes
        self._numbers: dict[Trainer, int] = {}
        self._last_number = 0
        # By job: the rank that has ended an epoch for it, and that epoch's number.
        self._ended: dict[str, tuple[Trainer, int]] = {}
        self._job_datasets: dict[tuple[Trainer, str], JobDataset] = {}
        """By trainer, and by the name that the trainer has given its list."""
        self._sends_batches: set[tuple[Trainer, str]] = set()
        self._learned: set[tuple[Trainer, str]] = set()
        self.may_be_given = False
        """Whether workers know that some trainer may be given substitutes, now or when it has come further."""

    def attach(self, trainer: Trainer) -> None:
        taken = set(self._numbers.values())
        while (number := self._last_number % _MAX_NUMBER + 1) in taken:
            self._last_number = number
        self._last_number = self._numbers[trainer] = number
        if trainer.pid == 0:
            log.warning("a trainer is of another pid namespace: it gets no substitutes, see docs/howto/containers.md")

    def detach(self, trainer: Trainer) -> None:
        del self._numbers[trainer]
        if not self.any_of(trainer.job_id):
            self._ended.pop(trainer.job_id, None)
        for key in [key for key in self._job_datasets if key[0] is trainer]:
            self._forget(key)
        self.publish()

    def number_of(self, trainer: Trainer) -> int:
        return self._numbers[trainer]

    @property
    def feed(self) -> set[int]:
        """The numbers of the trainers that feed a list: those that send batches, and may be given substitutes."""
        return {self._numbers[trainer] for trainer, _ in self._sends_batches}

    def attached(self) -> list[Trainer]:
        return list(self._numbers)

    def any_of(self, job_id: str) -> bool:
        return any(trainer.job_id == job_id for trainer in self._numbers)

    def remote_ranks(self, job_id: str) -> set[int]:
        """The ranks of a job that other mounts have, as far as its trainers here know."""
        hellos = [trainer.hello for trainer in self._numbers if trainer.job_id == job_id]
        world_size = max((hello.world_size for hello in hellos), default=0)
        return set(range(world_size)).difference(hello.rank for hello in hellos)

    def scores_for_all(self, job_id: str) -> bool | None:
        """Whether this mount has rank 0 of a job, and others have ranks of it too; None if all its ranks are here."""
        remote = self.remote_ranks(job_id)
        return 0 not in remote if remote else None

    def leads(self, trainer: Trainer) -> bool:
        """Whether this is the lowest rank of its job that this mount has."""
        return trainer.rank <= min(other.rank for other in self._numbers if other.job_id == trainer.job_id)

    def ends_epoch(self, trainer: Trainer, epoch: int) -> bool:
        """Whether a trainer's end of an epoch is its job's here: the lowest rank's, and no higher one's after it."""
        if not self.leads(trainer):
            return False
        who, last = self._ended.get(trainer.job_id, (trainer, -1))
        if last == epoch and who is not trainer and trainer.rank > who.rank:
            return False
        self._ended[trainer.job_id] = trainer, epoch
        return True

    def declare(self, trainer: Trainer, name: str, job_dataset: JobDataset, sends_batches: bool) -> None:
        """Note that a trainer's list with this name belongs to this job dataset from now on."""
        key = trainer, name
        if self._job_datasets.get(key) is not job_dataset:
            self._learned.discard(key)
        self._job_datasets[key] = job_dataset
        if sends_batches or key in self._learned:
            self._sends_batches.add(key)
        else:
            self._sends_batches.discard(key)
        self.publish()

    def withdraw(self, trainer: Trainer, name: str) -> None:
        self._forget((trainer, name))
        self.publish()

    def _forget(self, key: tuple[Trainer, str]) -> None:
        del self._job_datasets[key]
        self._sends_batches.discard(key)
        self._learned.discard(key)

    def job_dataset_of(self, trainer: Trainer, name: str) -> JobDataset:
        return self._job_datasets[trainer, name]

    def learns_from(self, trainer: Trainer, name: str) -> None:
        """Note that a trainer has sent a batch of this list."""
        if (trainer, name) not in self._learned:
            self._learned.add((trainer, name))
            self._sends_batches.add((trainer, name))
            self.publish()

    def learned(self, trainer: Trainer, name: str) -> JobDataset | None:
        """The job dataset by whose substitutes a trainer may read the list with this name."""
        return self._job_datasets[trainer, name] if (trainer, name) in self._learned else None

    def any_uses(self, job_dataset_id: str) -> bool:
        """Whether some trainer has declared the list of this job dataset."""
        return any(job_dataset.job_dataset_id == job_dataset_id for job_dataset in self._job_datasets.values())

    def job_dataset_with(self, trainer: int, inode: int) -> JobDataset | None:
        """The job dataset by which the trainer with this number knows a file; None if none of its lists has it."""
        for (owner, _), job_dataset in self._job_datasets.items():
            if self._numbers.get(owner) == trainer and inode in job_dataset.list.index_of:
                return job_dataset
        return None

    def publish(self) -> None:
        """Let workers know who is attached; where the disk is full, they know of no one until it has room."""
        rows = []
        for trainer, number in self._numbers.items():
            declared = [key for key in self._job_datasets if key[0] is trainer]
            learned = tuple({self._job_datasets[key].number for key in declared if key in self._learned})
            sends_batches = self._has_substitutes() and any(key in self._sends_batches for key in declared)
            try:
                if trainer.pid and declared:
                    rows.append(Attached(number, trainer.pid, started_at(trainer.pid), learned, sends_batches))
            except OSError:
                log.debug("trainer %d has ended", trainer.pid)
        try:
            self._publish(rows)
        except OSError as exc:
            log.warning("workers do not learn of trainers (%s): their plans and substitutes rest", exc.strerror)
            rows = []
        self.may_be_given = any(row.sends_batches for row in rows)
