"""The mount's service for training runs: it makes the parts, and dispatches messages to them.

    hook_server -> service -> trainers             who is attached, with which lists
                              declared_lists       lists come into memory and leave it, and their redirects
                              scoring              batches become scores and hubs
                              several_nodes        which mount scores a training's batches; plans of other nodes
                              plans                the draws of epochs
                              job_accounts         what each job reads

What they learn reaches policy and engine through `core/feed.py` alone. The service decides nothing itself.
Changes for readers are published last, so that a worker that sees a redirect finds the substitute in the cache.

Each part is given what it needs of the others when it is made, and can be made alone with fakes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import trio

from spiderfs.cluster import Link, LinkStatus
from spiderfs.core import events
from spiderfs.core.events import FROM_THE_SOURCE, HIT, UNSEEN, Access, Planned, Progressed
from spiderfs.core.feed import ElasticOptions, PolicyFeed, PolicyFeedOptions
from spiderfs.core.plans.schedule import Draw
from spiderfs.core.policy import pinned_limit
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.training.job_datasets.declared_lists import DeclaredLists, RedirectPublisher
from spiderfs.daemon.training.job_datasets.job_accounts import JobAccounts
from spiderfs.daemon.training.job_datasets.job_datasets import JobDataset, JobDatasets
from spiderfs.daemon.training.job_datasets.scoring import BatchScoring
from spiderfs.daemon.training.job_datasets.several_nodes import RemotePlans, SeveralNodes
from spiderfs.daemon.training.job_datasets.trainers import Trainers
from spiderfs.daemon.training.plans import Plans
from spiderfs.daemon.training.trainer import Declared, SampleList, Trainer
from spiderfs.linux import steady_clock
from spiderfs.options.model import Options
from spiderfs.protocol import Batch, EpochEnd, Exchange, Plan, Progress
from spiderfs.shared.published import Attached
from spiderfs.trace import Recording, noted_in
from spiderfs.vfs.catalogue import Catalogue
from spiderfs.vfs.on_demand import Supply

# Samples that are looked up between two chances for other tasks, in some milliseconds.
_AT_A_TIME = 500


class Pinboard:
    """The samples that trainers have pinned: a trainer reads them again and again, so the cache is to hold them.

    A trainer names its pins for each list before each epoch. The pins of all trainers go to the policy, in the order in
    which they were named, as far as they fit into the policy's share for them. A pin ends when its trainer leaves or
    names other pins, and when the policy changes. The pins of an earlier mount end with the first epoch of their job in
    which no trainer has named them again. All state belongs to the manager's event loop.
    """

    def __init__(self, catalogue: Catalogue, cache: CacheControl, feed: PolicyFeed, job_datasets: JobDatasets) -> None:
        self._catalogue, self._job_datasets, self._cache = catalogue, job_datasets, cache
        self._feed = feed
        self._pins: dict[tuple[Trainer, str], tuple[JobDataset, list[int]]] = {}
        # The bytes of each job dataset's pins that the policy has.
        self._bytes: dict[str, int] = {}
        self._passing = trio.Lock()

    async def pin(self, trainer: Trainer, name: str, job_dataset: JobDataset, indices: npt.NDArray[Any]) -> int:
        """Pin these samples of a trainer's list, and no others; returns how many of them the policy holds, or will."""
        inodes = [inode for inode in dict.fromkeys(job_dataset.list.inodes[indices].tolist()) if inode]
        before = self._pins.pop((trainer, name), None)
        if inodes:
            self._pins[trainer, name] = job_dataset, inodes
        if before is not None and before[0] is not job_dataset:
            await self._pass_on(before[0].job_dataset_id)
        await self._pass_on(job_dataset.job_dataset_id)
        held = self._feed.pinned.get(job_dataset.job_dataset_id, ())
        return sum(inode in held for inode in inodes)

    async def trainer_left(self, trainer: Trainer) -> None:
        """A trainer left: end its pins."""
        # All at once: the server gives this call a few seconds, and what is not unpinned by then is at an epoch's end.
        job_datasets = [self._pins.pop(owned)[0] for owned in list(self._pins) if owned[0] is trainer]
        for job_dataset_id in dict.fromkeys(job_dataset.job_dataset_id for job_dataset in job_datasets):
            await self._pass_on(job_dataset_id)

    async def epoch_ended(self, job_id: str) -> None:
        """End the pins of an earlier mount that no trainer has named since: this job's, and those of jobs not here."""
        kept = {job_dataset.job_dataset_id for job_dataset, _ in self._pins.values()}
        kept |= {job_dataset.job_dataset_id for job_dataset in self._job_datasets if job_dataset.job_id != job_id}
        for job_dataset_id in [pinned for pinned in self._feed.pinned if pinned not in kept]:
            await self._pass_on(job_dataset_id)

    def forget(self) -> None:
        """Forget all pins, and leave the policy as it is: trainers name their pins again."""
        self._pins.clear()
        self._bytes.clear()

    async def _pass_on(self, job_dataset_id: str) -> None:
        """Give the cache a job dataset's pins; for one job dataset at a time."""
        async with self._passing:
            room = pinned_limit(self._cache.engine.budget_bytes)
            room -= sum(size for other, size in self._bytes.items() if other != job_dataset_id)
            lists = (
                inodes for job_dataset, inodes in self._pins.values() if job_dataset.job_dataset_id == job_dataset_id
            )
            accepted, taken = await self._fitting(dict.fromkeys(chain.from_iterable(lists)), room)
            self._bytes.pop(job_dataset_id, None)
            if taken:
                self._bytes[job_dataset_id] = taken
            for changes in self._feed.pin(job_dataset_id, accepted):
                self._cache.apply(changes)
                await trio.lowlevel.checkpoint()

    async def _fitting(self, inodes: Iterable[int], room: int) -> tuple[list[int], int]:
        """The first of these samples that fit into `room` bytes, and their bytes."""
        accepted, taken = [], 0
        for count, inode in enumerate(inodes):
            if count % _AT_A_TIME == 0:
                await trio.lowlevel.checkpoint()
            size = self._catalogue.size_of(inode)
            if taken + size <= room:
                accepted.append(inode)
                taken += size
        return accepted, taken


# Workers look for news of trainers fifty times a second; one that does not come to it is not waited for any longer.
_ASKED_S, _LOOK_S = 1.0, 0.005


class Training:
    """What the manager knows of trainings, and what the hook's server calls with the messages of trainers.

    The calls for one trainer come one at a time, in the order of its messages. `name` is that of a list which the
    trainer has declared. A SpiderfsError that such a method raises is sent to the trainer.
    """

    def __init__(
        self,
        supply: Supply,
        cache: CacheControl,
        publish_trainers: Callable[[Iterable[Attached]], None],
        scores_directory: Path,
        options: Options,
        recording: Recording | None,
        wake_prefetcher: Callable[[], None],
        workers_know: Callable[[], bool],
        identity: str = "",
    ) -> None:
        """`workers_know`: whether all workers act by the trainers published last; `identity` is the source's."""
        self.job_datasets = JobDatasets()
        self.accounts = JobAccounts(cache.engine.schedule.planned, time.time() - steady_clock.now())
        self._cache = cache
        cache.engine.schedule.drawn = self._drawn
        catalogue = self._catalogue = supply.catalogue
        self._recording = recording
        self.feed = PolicyFeed(
            cache.engine, cache.size_of, feed_options(options), noted_in(recording, self.job_datasets.number_of)
        )
        self.trainers = Trainers(publish_trainers, lambda: self.feed.has_substitutes)
        link = Link(options.cluster, supply.counters, identity) if options.cluster else None
        self._nodes = SeveralNodes(link, self.job_datasets, self.trainers, supply.counters)
        self.scoring = BatchScoring(
            cache, self.feed, self.job_datasets, supply.counters, scores_directory, options, recording, self._nodes
        )
        self.redirects = RedirectPublisher(self.feed, supply.records, self.job_datasets)
        self.declared_lists = DeclaredLists(
            supply,
            cache,
            self.feed,
            self.job_datasets,
            self.trainers,
            self.scoring,
            self.redirects,
            scores_directory,
            options.sample_max_bytes,
            options.mountpoint,
        )
        self._counters, self._immutable = supply.counters, options.immutable
        self._workers_know, self._wake_prefetcher = workers_know, wake_prefetcher
        self._gives_substitutes = options.substitute != "off"
        self._sample_max_bytes = options.sample_max_bytes
        self.plans = Plans(cache, self.feed, options, wake_prefetcher, self._read_unseen, catalogue.size_of)
        self._remote_plans = None
        if link is not None and cache.engine.homes is not None:
            self._remote_plans = RemotePlans(
                link, cache.engine.homes, cache.engine, self.job_datasets, supply.counters, lambda: self.plans.followed
            )
        self.pinboard = Pinboard(catalogue, cache, self.feed, self.job_datasets)
        # Records what ranks publish of their plans; None without a recording, for plans are long.
        self._note_news = None if recording is None else noted_in(recording, self.job_datasets.number_of)

    # -- what the manager reports

    def begin(self, learned: bytes | None) -> None:
        """Before any trainer attaches: no reader is redirected, and jobs go on from what `learned` gave."""
        self.trainers.publish()
        self.redirects.begin()
        if learned is not None:
            state = msgpack.unpackb(learned)
            self.feed.restore(state)
            self.accounts.restore(state.get("epochs", ()))

    def learned(self) -> bytes:
        """What jobs need to go on after a remount, beside the scores, which `scoring` saves; and their epochs."""
        packed: bytes = msgpack.packb({**self.feed.state(), "epochs": self.accounts.epochs()})
        return packed

    def on_access(self, access: Access, offered: bool) -> None:
        """A reader, or the mount itself, got bytes; `offered` says whether the engine has the access next."""
        job_dataset = self.trainers.job_dataset_with(access.trainer, access.wanted) if access.trainer else None
        if self._recording is not None and access.where not in (events.OPENED, events.WARMED):
            self._record(self._recording, access, 0 if job_dataset is None else job_dataset.number, offered)
        if job_dataset is not None and offered:
            self.feed.served(job_dataset.job_dataset_id, access.wanted, access.inode)

    def _read_unseen(self, reads: Sequence[tuple[int, int]]) -> None:
        """Trainers took these samples, and no worker saw the opens: the kernel had the bytes, or an event was lost."""
        if not self._immutable:
            return
        now_s = steady_clock.now()
        found = (self._unseen(trainer, inode, now_s) for trainer, inode in reads)
        accesses = [access for access in found if access is not None]
        for access in accesses:
            self.on_access(access, True)
            self._cache.engine.read_unseen(access.inode, access.size)
        self._counters.add("page_cache_reads", len(accesses))

    def _unseen(self, trainer: int, inode: int, at_s: float) -> Access | None:
        """A read that no worker saw; None where there was none, or none that counts."""
        size = self._catalogue.size_of(inode)
        # The kernel reads nothing of an empty file, and large files are not counted by opens.
        return Access(at_s, inode, inode, size, 0, 0, trainer, UNSEEN) if 0 < size <= self._sample_max_bytes else None

    def _drawn(self, trainer: Hashable, draw: Draw, unseen: bool) -> None:
        """A trainer has read a sample that its plan names; `unseen`: its open will not be reported."""
        assert isinstance(trainer, int)
        assert isinstance(draw.key, int)
        if (access := draw.access) is not None:
            access = self._with_origin_bytes(access)
        elif not draw.known and not (unseen and self._immutable):
            access = Access(draw.at_s, draw.key, draw.key, 0, 0, 0, trainer, events.UNREPORTED)
        elif self._immutable:
            access = self._unseen(trainer, draw.key, draw.at_s)
        if access is not None:
            self.accounts.drawn(access, draw.epoch)

    async def _until_workers_know(self, replaced: bool = False) -> None:
        """Wait until workers know that a trainer may be given substitutes, and the kernel does.

        The kernel drops the pages of files by that: what is pushed before would be pushed twice. `replaced`: a list has
        taken the place of another, by whose labels workers give substitutes until then.
        """
        if self._gives_substitutes and (replaced or (self._immutable and self.trainers.may_be_given)):
            with trio.move_on_after(_ASKED_S):
                while not self._workers_know():
                    await trio.sleep(_LOOK_S)

    def _record(self, recording: Recording, access: Access, number: int, offered: bool) -> None:
        if access.wanted != access.inode:
            wanted_size = self._catalogue.size_of(access.wanted)
            recording.redirect(access.time_s, access.wanted, wanted_size, access.inode, access.size, number)
        else:
            unseen = access.where == UNSEEN
            served = unseen or access.where == HIT
            recording.append(access.time_s, access.inode, access.size, access.block, served, number, offered, unseen)

    def record_accesses(self, accesses: Sequence[Access]) -> None:
        """Learn from workers' events what readers got; the engine has seen these events already."""
        # Reads wait for their batches: none comes for those of a trainer that only plans, or that has left.
        feed = self.trainers.feed
        self.scoring.record_accesses(access for access in accesses if access.trainer in feed)
        self.accounts.record_accesses(map(self._with_origin_bytes, accesses))
        self._cache.apply(self.feed.schedule_changed())

    def _with_origin_bytes(self, access: Access) -> Access:
        """The access with as many bytes as its file has at the source, if its view was fetched from there."""
        node = self._catalogue.known(access.inode) if access.where in FROM_THE_SOURCE else None
        return access if node is None else access._replace(size=node.version.size)

    def jobs(self) -> list[dict[str, Any]]:
        """One status for each job that has a trainer attached, with what it has read unseen until now.

        `exchanged` samples were taken in the place of others that were not cached, which saved fetching `saved_bytes`.
        """
        self.plans.report_unseen(steady_clock.now())
        statuses = self.accounts.statuses(self.trainers.attached(), self.feed.status(), steady_clock.now())
        counted = [(status, self.plans.sharing.counts(status["job"])) for status in statuses]
        return [{**one, "exchanged": its.exchanged, "saved_bytes": its.saved_bytes} for one, its in counted]

    async def keep_house(self) -> None:
        """Let go of what belongs to jobs that are over."""
        self.plans.report_unseen(steady_clock.now())
        await self.declared_lists.let_go()
        jobs = {job_dataset.job_id for job_dataset in self.job_datasets} | {
            trainer.job_id for trainer in self.trainers.attached()
        }
        self.accounts.keep_only(jobs)
        self.plans.sharing.keep_only(jobs)

    def pin_ratio(self, ratio: float | None) -> None:
        """Fix the ratio, or with None let the jobs decide it again; raises ConfigError where that cannot be done."""
        self._cache.apply(self.feed.pin_ratio(ratio))

    def change(self, options: Options) -> None:
        """Take over live options; the ratio follows at the end of the epoch."""
        self.feed.change(feed_options(options))
        self.plans.change(options)

    async def policy_changed(self) -> None:
        """Give a policy that was just chosen all lists and their scores, and workers its redirects alone."""
        self.pinboard.forget()
        self._cache.apply(self.feed.policy_changed())
        for job_dataset in self.job_datasets:
            await self.scoring.introduce(job_dataset)
        await self.redirects.publish_all()
        self.trainers.publish()

    async def share_with_other_nodes(self) -> None:
        """Share what is learned with the mounts of other nodes, by the option `cluster`."""
        await self._nodes.run(self.scoring, self.redirects.publish, self._remote_plans)

    def link_status(self) -> LinkStatus | None:
        """The state of the link to other nodes, if there is one."""
        return self._nodes.link_status()

    # -- what trainers send

    async def attached(self, trainer: Trainer) -> None:
        hello = trainer.hello
        # Rank 0 speaks for all; before it comes, any rank does.
        if hello.rank == 0 or not self.trainers.any_of(hello.job):
            self._cache.apply(self.feed.begin_job(hello.job, hello.epochs, hello.epoch))
        self.trainers.attach(trainer)
        self.accounts.attached(self.trainers.number_of(trainer), hello.job, hello.name, hello.epoch or 0)

    async def samples(self, trainer: Trainer, samples: SampleList) -> Declared:
        """A trainer declared a list, in place of one with the same name."""
        before = self.trainers.learned(trainer, samples.name)
        declared = await self.declared_lists.declare(trainer, samples)
        self._nodes.look_again()
        number, job_dataset = self.trainers.number_of(trainer), self.trainers.job_dataset_of(trainer, samples.name)
        await self.redirects.publish_all()
        await self._until_workers_know(replaced=before not in (None, job_dataset))
        return replace(declared, oldest=partial(self.scoring.thinned, number, job_dataset))

    def withdrawn(self, trainer: Trainer, name: str) -> None:
        """A list of a trainer makes room for another one."""
        self.trainers.withdraw(trainer, name)

    async def learn(self, trainer: Trainer, name: str, batches: Sequence[Batch]) -> None:
        """Learn from batches that are alike in shape and came one after another; several if this is behind."""
        job_dataset = self.trainers.job_dataset_of(trainer, name)
        self.trainers.learns_from(trainer, name)
        await self._until_workers_know()
        await self._nodes.until_in_turn(trainer.job_id, batches[0].epoch)
        await self.scoring.learn(self.trainers.number_of(trainer), job_dataset, batches)
        await self.redirects.publish()

    async def epoch_end(self, trainer: Trainer, end: EpochEnd) -> None:
        number = self.trainers.number_of(trainer)
        self.scoring.forget_reads(number)
        self._cache.engine.end_epoch(number, end.epoch)
        self._nodes.send_ended(trainer, end.epoch)
        if not self.trainers.ends_epoch(trainer, end.epoch):
            return
        self.accounts.begin_epoch(trainer.job_id, end.epoch + 1, steady_clock.now())
        await self._nodes.once_all_ended(trainer.job_id, end.epoch, partial(self._end_epoch, trainer.job_id, end))

    async def _end_epoch(self, job_id: str, end: EpochEnd) -> None:
        sigmas = await self.scoring.new_epoch(self.job_datasets.of_job(job_id))
        await self.pinboard.epoch_ended(job_id)
        self._cache.apply(self.feed.epoch_ended(job_id, end.epoch, sigmas, end.accuracy))
        await self.redirects.publish()

    async def plan(self, trainer: Trainer, plan: Plan) -> None:
        job_dataset = self.trainers.job_dataset_of(trainer, plan.list)
        number = self.trainers.number_of(trainer)
        if await self.declared_lists.follow(job_dataset):
            self.plans.sharing.files_changed(job_dataset.list.digest)
            await self.redirects.publish_all()
        if plan.begun and len(plan.order) and self.trainers.leads(trainer):
            self.accounts.begin_epoch(trainer.job_id, plan.epoch, steady_clock.now())
        await self.plans.take(number, job_dataset.list, plan)
        if self._remote_plans is not None and self.plans.followed:
            await self._remote_plans.send(number, job_dataset.list, plan)
        if self._note_news is not None and self.plans.followed:
            keys = job_dataset.list.inodes[job_dataset.list.one_of_file[plan.order]]
            self._note_news(Planned(number, job_dataset.job_dataset_id, plan.epoch, plan.position, plan.begun, keys))

    def progressed(self, trainer: Trainer, progress: Progress) -> None:
        """A trainer is so far in a plan of a declared list; the plan, and what was said before, may come later."""
        number = self.trainers.number_of(trainer)
        self.plans.progressed(number, progress)
        if self._note_news is not None and self.plans.followed:
            job_dataset = self.trainers.job_dataset_of(trainer, progress.list)
            self._note_news(
                Progressed(number, job_dataset.job_dataset_id, progress.epoch, progress.dispatched, progress.taken)
            )

    def exchange(
        self, trainer: Trainer, question: Exchange, ready: npt.NDArray[np.bool_] | None = None
    ) -> npt.NDArray[np.uint32]:
        """One sample for each that is wanted, or none; `ready`: of which the job can use a partial sample."""
        rank = (self.trainers.number_of(trainer), question.list)
        job_dataset = self.trainers.job_dataset_of(trainer, question.list)
        if self._note_news is not None:
            keys = job_dataset.list.inodes[job_dataset.list.one_of_file[question.dispatched]]
            first = question.position - len(keys)
            self._note_news(events.Dispatched(rank[0], job_dataset.job_dataset_id, question.epoch, first, keys))
        given = self.plans.sharing.ask(rank, trainer.job_id, job_dataset.list, question, ready)
        self._wake_prefetcher()
        return given

    async def scores(self, trainer: Trainer, name: str) -> npt.NDArray[np.float32]:
        """One score a sample, finite and >= 0; empty while there are none."""
        return self.scoring.to_draw_by(self.trainers.job_dataset_of(trainer, name))

    @property
    def follows_plans(self) -> bool:
        return self.plans.followed

    async def cached(self, trainer: Trainer, name: str) -> npt.NDArray[np.bool_]:
        """One flag a sample."""
        members, job_dataset = self._cache.engine.members, self.trainers.job_dataset_of(trainer, name)
        return np.array([inode in members for inode in job_dataset.list.inodes.tolist()], np.bool_)

    async def pin(self, trainer: Trainer, name: str, indices: npt.NDArray[np.uint32]) -> int:
        """Pin these samples in place of those pinned before; returns how many of them the cache holds, or will."""
        job_dataset = self.trainers.job_dataset_of(trainer, name)
        held = await self.pinboard.pin(trainer, name, job_dataset, indices)
        # A pinned sample has no substitute from now on, and stands in for no other.
        await self.redirects.publish()
        return held

    async def warm_up(self, trainer: Trainer, name: str, active: bool) -> None:
        self.feed.warm_up(self.trainers.job_dataset_of(trainer, name).job_dataset_id, active)
        # A job dataset that warms up has no substitutes.
        await self.redirects.publish()

    async def detached(self, trainer: Trainer) -> None:
        number = self.trainers.number_of(trainer)
        self.scoring.forget_reads(number)
        self.plans.trainer_left(number)
        if self._note_news is not None:
            self._note_news(events.Disconnected(number))
        self.trainers.detach(trainer)
        self._nodes.left(trainer)
        await self.pinboard.trainer_left(trainer)


def feed_options(options: Options) -> PolicyFeedOptions:
    elastic = ElasticOptions(start=options.ratio_start, end=options.ratio_end)
    return PolicyFeedOptions(elastic, options.ratio_epochs, only_late=options.substitute_when == "late")
