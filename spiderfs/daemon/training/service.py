"""The mount's service for trainings: it makes the parts, and passes each message on to those whom it concerns.

    hook_server -> hook_connection -> service -> trainers             who is attached, with which lists
                                                 declared_lists       lists come into memory and leave it
                                                 scoring              batches become scores and hubs
                                                 several_nodes        which mount scores a training's batches
                                                 plans                the draws of epochs
                                                 plans_elsewhere      those of jobs on other nodes
                                                 pinboard             the samples that trainers hold
                                                 redirect_publisher   what workers are told of stand-ins
                                                 job_accounts         what each job reads

What they learn reaches policy and engine through `core/learning/teaching.py` alone. The service decides nothing itself.
Changes for readers are published last, so that a worker that sees a redirect finds the stand-in in the cache.

Each part is given what it needs of the others when it is made, and can be made alone with fakes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgpack
import numpy as np
import numpy.typing as npt
import trio

from spiderfs.cluster.link import Link, LinkStatus
from spiderfs.core.events import FROM_THE_SOURCE, HIT, OPENED, UNSEEN, WARMED, Access
from spiderfs.core.hints import Disconnected, Dispatched, Planned, Progressed
from spiderfs.core.learning.elastic import ElasticOptions
from spiderfs.core.learning.teaching import Teaching, TeachingOptions
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.training.courses.courses import Courses
from spiderfs.daemon.training.courses.declared_lists import DeclaredLists
from spiderfs.daemon.training.courses.job_accounts import JobAccounts, JobStatus
from spiderfs.daemon.training.courses.pinboard import Pinboard
from spiderfs.daemon.training.courses.plans_elsewhere import PlansElsewhere
from spiderfs.daemon.training.courses.redirect_publisher import RedirectPublisher
from spiderfs.daemon.training.courses.scoring import BatchScoring
from spiderfs.daemon.training.courses.several_nodes import SeveralNodes
from spiderfs.daemon.training.courses.trainers import Trainers
from spiderfs.daemon.training.plans import Plans
from spiderfs.daemon.training.trainer import Declared, SampleList, Trainer
from spiderfs.linux import steady_clock
from spiderfs.options.model import Options
from spiderfs.protocol import Batch, EpochEnd, Exchange, Plan, Progress
from spiderfs.shared.attached_trainers import Attached
from spiderfs.trace.format import Kind
from spiderfs.trace.recording import Recording, news_noted_in, noted_in
from spiderfs.vfs.on_demand import Supply

# Workers look for news of trainers fifty times a second; one that does not come to it is not waited for any longer.
_ASKED_S, _LOOK_S = 1.0, 0.005


class Training:
    """A `HookSink`, and what the manager knows of trainings."""

    def __init__(
        self,
        supply: Supply,
        cache: CacheControl,
        publish_trainers: Callable[[Iterable[Attached]], None],
        scores_directory: Path,
        options: Options,
        recording: Recording | None,
        wake_prefetcher: Callable[[], None],
        names_asked: Callable[[], bool],
    ) -> None:
        """`names_asked` says whether all workers have the kernel ask for each name."""
        self.courses = Courses()
        self.accounts = JobAccounts(cache.engine.schedule.planned, time.time() - steady_clock.now())
        self._cache = cache
        catalogue = self._catalogue = supply.catalogue
        self._recording = recording
        self.teaching = Teaching(
            cache.engine, cache.size_of, _teaching_options(options), noted_in(recording, self.courses.number_of)
        )
        self.trainers = Trainers(publish_trainers, lambda: self.teaching.has_stand_ins)
        link = Link(options.cluster, supply.counters) if options.cluster else None
        self._nodes = SeveralNodes(link, self.courses, self.trainers, supply.counters)
        self.scoring = BatchScoring(
            cache, self.teaching, self.courses, supply.counters, scores_directory, options, recording, self._nodes
        )
        self.redirects = RedirectPublisher(self.teaching, supply.records, self.courses)
        self.declared_lists = DeclaredLists(
            supply,
            cache,
            self.teaching,
            self.courses,
            self.trainers,
            self.scoring,
            self.redirects,
            scores_directory,
        )
        self._counters = supply.counters
        self._immutable = options.immutable
        self._names_asked = names_asked
        self._gives_stand_ins = options.substitute != "off"
        self._sample_max_bytes = options.sample_max_bytes
        self.plans = Plans(cache, self.teaching, options, wake_prefetcher, self._read_unseen, catalogue.size_of)
        self._plans_elsewhere = None
        if link is not None and cache.engine.homes is not None:
            self._plans_elsewhere = PlansElsewhere(
                link, cache.engine.homes, cache.engine, self.courses, supply.counters, lambda: self.plans.followed
            )
        self.pinboard = Pinboard(catalogue, cache, self.teaching, self.courses)
        # Hears what ranks tell of their plans; None without a recording.
        self._note_news = news_noted_in(recording, self.courses.number_of)

    # -- what the manager tells

    def begin(self, taught: bytes | None) -> None:
        """Before any trainer attaches: no reader is redirected, and jobs go on from what `taught` gave."""
        self.trainers.publish()
        self.redirects.begin()
        if taught is not None:
            state = msgpack.unpackb(taught)
            self.teaching.restore(state)
            self.accounts.restore(state.get("epochs", ()))

    def taught(self) -> bytes:
        """What jobs need to go on after a remount, beside the scores, which `scoring` saves; and their epochs."""
        packed: bytes = msgpack.packb({**self.teaching.state(), "epochs": self.accounts.epochs()})
        return packed

    def heard(self, access: Access, offered: bool) -> None:
        """A reader, or the mount itself, got bytes; `offered` says whether the engine has the access next."""
        course = self.trainers.course_with(access.trainer, access.wanted) if access.trainer else None
        if self._recording is not None and access.where not in (OPENED, WARMED):
            self._record(self._recording, access, 0 if course is None else course.number, offered)
        if course is not None and offered:
            self.teaching.served(course.course_id, access.wanted, access.inode)

    def _read_unseen(self, reads: Sequence[tuple[int, int]]) -> None:
        """Trainers took these samples, and no worker heard of the opens: the kernel had the bytes.

        Where the kernel tells every open, what is unseen was not opened, or the news of it was lost.
        """
        if not self._immutable:
            return
        now_s, accesses = steady_clock.now(), []
        for trainer, inode in reads:
            size = self._catalogue.size_of(inode)
            # The kernel reads nothing of an empty file, and large files are not counted by opens.
            if 0 < size <= self._sample_max_bytes:
                accesses.append(Access(now_s, inode, inode, size, 0, 0, trainer, UNSEEN))
        for access in accesses:
            self.heard(access, True)
            self._cache.engine.read_unseen(access.inode, access.size)
        self._counters.add("page_cache_reads", len(accesses))
        self.accounts.record_accesses(accesses)

    async def _until_names_are_asked(self) -> None:
        """Wait until workers have heard that a trainer may be given stand-ins, and have told the kernel.

        The kernel drops the pages of files by that: what is pushed before would be pushed twice.
        """
        if self._immutable and self._gives_stand_ins and self.trainers.may_be_given:
            with trio.move_on_after(_ASKED_S):
                while not self._names_asked():
                    await trio.sleep(_LOOK_S)

    def _record(self, recording: Recording, access: Access, number: int, offered: bool) -> None:
        if access.wanted != access.inode:
            wanted_size = self._catalogue.size_of(access.wanted)
            recording.redirect(access.time_s, access.wanted, wanted_size, access.inode, access.size, number)
        else:
            kind, unseen = Kind.BLOCK if access.block else Kind.OPEN, access.where == UNSEEN
            served = unseen or access.where == HIT
            recording.append(
                access.time_s, access.inode, access.size, kind, access.block, served, number, offered, unseen
            )

    def record_accesses(self, accesses: Sequence[Access]) -> None:
        """Learn from workers' events what readers got; the engine has seen these events already."""
        # Reads wait for their batches: none comes for those of a trainer that only plans, or that has left.
        teaching = self.trainers.teaching
        self.scoring.record_accesses(access for access in accesses if access.trainer in teaching)
        self.accounts.record_accesses(map(self._with_origin_bytes, accesses))
        self._cache.apply(self.teaching.schedule_changed())

    def _with_origin_bytes(self, access: Access) -> Access:
        """The access with as many bytes as its file has at the source, if its view was fetched from there."""
        node = self._catalogue.known(access.inode) if access.where in FROM_THE_SOURCE else None
        return access if node is None else access._replace(size=node.version.size)

    def jobs(self) -> tuple[JobStatus, ...]:
        """One status for each job that has a trainer attached, with what it has read unseen until now."""
        self.plans.tell_unseen()
        statuses = self.accounts.statuses(self.trainers.attached(), self.teaching.status(), steady_clock.now())
        return tuple(self._with_exchanged(status) for status in statuses)

    def _with_exchanged(self, status: JobStatus) -> JobStatus:
        counts = self.plans.sharing.counts(status.job_id)
        return replace(status, exchanged=counts.exchanged, saved_bytes=counts.saved_bytes)

    async def keep_house(self) -> None:
        """Let go of what belongs to jobs that are over."""
        self.plans.tell_unseen()
        await self.declared_lists.let_go()
        jobs = {course.job_id for course in self.courses} | {trainer.job_id for trainer in self.trainers.attached()}
        self.accounts.keep_only(jobs)
        self.plans.sharing.keep_only(jobs)

    def pin_ratio(self, ratio: float | None) -> None:
        """Fix the ratio, or with None let the jobs decide it again; raises ConfigError where that cannot be done."""
        self._cache.apply(self.teaching.pin_ratio(ratio))

    def change(self, options: Options) -> None:
        """Take over live options; the ratio follows at the end of the epoch."""
        self.teaching.change(_teaching_options(options))
        self.plans.change(options)

    async def policy_changed(self) -> None:
        """Teach a policy that was just chosen all lists and their scores, and tell workers of its redirects alone."""
        self.pinboard.forget()
        self._cache.apply(self.teaching.policy_changed())
        for course in self.courses:
            await self.scoring.introduce(course)
        await self.redirects.publish_all()
        self.trainers.publish()

    async def share_with_other_nodes(self) -> None:
        """Share what is learned with the mounts of other nodes, by the option `cluster`."""
        await self._nodes.run(self.scoring, self.redirects.publish, self._plans_elsewhere)

    def link_status(self) -> LinkStatus | None:
        """The state of the link to other nodes, if there is one."""
        return self._nodes.link_status()

    def end(self) -> None:
        """The mount is about to end, and so are connections: what trainers have pinned is to be saved all the same."""
        self.pinboard.forget()

    # -- what trainers say (`HookSink` of hook_connection.py)

    async def attached(self, trainer: Trainer) -> None:
        hello = trainer.hello
        # Rank 0 speaks for all; before it comes, any rank does.
        if hello.rank == 0 or not self.trainers.any_of(hello.job):
            self._cache.apply(self.teaching.begin_job(hello.job, hello.epochs, hello.epoch))
        self.trainers.attach(trainer)
        self.accounts.attached(self.trainers.number_of(trainer), hello.job, hello.name, hello.epoch or 0)

    async def samples(self, trainer: Trainer, samples: SampleList) -> Declared:
        declared = await self.declared_lists.declare(trainer, samples)
        self._nodes.look_again()
        number, course = self.trainers.number_of(trainer), self.trainers.course_of(trainer, samples.name)
        await self.redirects.publish_all()
        await self._until_names_are_asked()
        return replace(declared, oldest=partial(self.scoring.thinned, number, course))

    async def learn(self, trainer: Trainer, name: str, batches: Sequence[Batch]) -> None:
        course = self.trainers.course_of(trainer, name)
        self.trainers.teach(trainer, name)
        await self._until_names_are_asked()
        await self._nodes.until_in_turn(trainer.job_id, batches[0].epoch)
        await self.scoring.learn(self.trainers.number_of(trainer), course, batches)
        await self.redirects.publish()

    async def epoch_end(self, trainer: Trainer, end: EpochEnd) -> None:
        number = self.trainers.number_of(trainer)
        self.scoring.forget_reads(number)
        self.plans.epoch_ended(number, end.epoch)
        self._nodes.say_ended(trainer, end.epoch)
        if not self.trainers.ends_epoch(trainer, end.epoch):
            return
        self.accounts.begin_epoch(trainer.job_id, end.epoch + 1, steady_clock.now())
        await self._nodes.once_all_ended(trainer.job_id, end.epoch, partial(self._end_epoch, trainer.job_id, end))

    async def _end_epoch(self, job_id: str, end: EpochEnd) -> None:
        sigmas = await self.scoring.new_epoch(self.courses.of_job(job_id))
        await self.pinboard.epoch_ended(job_id)
        self._cache.apply(self.teaching.epoch_ended(job_id, end.epoch, sigmas, end.accuracy))
        await self.redirects.publish()

    async def plan(self, trainer: Trainer, plan: Plan) -> None:
        course = self.trainers.course_of(trainer, plan.list)
        number = self.trainers.number_of(trainer)
        if await self.declared_lists.follow(course):
            self.plans.sharing.files_changed(course.list.digest)
            await self.redirects.publish_all()
        if plan.begun and len(plan.order) and self.trainers.leads(trainer):
            self.accounts.begin_epoch(trainer.job_id, plan.epoch, steady_clock.now())
        await self.plans.take(number, course.list, plan)
        if self._plans_elsewhere is not None and self.plans.followed:
            await self._plans_elsewhere.tell(number, course.list, plan)
        if self._note_news is not None and self.plans.followed:
            keys = course.list.inodes[course.list.one_of_file[plan.order]]
            self._note_news(Planned(number, course.course_id, plan.epoch, plan.position, plan.begun, keys))

    def progressed(self, trainer: Trainer, progress: Progress) -> None:
        number = self.trainers.number_of(trainer)
        self.plans.progressed(number, progress)
        if self._note_news is not None and self.plans.followed:
            course = self.trainers.course_of(trainer, progress.list)
            self._note_news(Progressed(number, course.course_id, progress.epoch, progress.dispatched, progress.taken))

    def exchange(self, trainer: Trainer, question: Exchange) -> npt.NDArray[np.uint32]:
        rank = (self.trainers.number_of(trainer), question.list)
        course = self.trainers.course_of(trainer, question.list)
        if self._note_news is not None:
            keys = course.list.inodes[course.list.one_of_file[question.dispatched]]
            first = question.position - len(keys)
            self._note_news(Dispatched(rank[0], course.course_id, question.epoch, first, keys))
        return self.plans.exchange(rank, trainer.job_id, course.list, question)

    async def scores(self, trainer: Trainer, name: str) -> npt.NDArray[np.float32]:
        return self.scoring.to_draw_by(self.trainers.course_of(trainer, name))

    @property
    def follows_plans(self) -> bool:
        return self.plans.followed

    async def cached(self, trainer: Trainer, name: str) -> npt.NDArray[np.bool_]:
        members, course = self._cache.engine.members, self.trainers.course_of(trainer, name)
        return np.array([inode in members for inode in course.list.inodes.tolist()], np.bool_)

    async def pin(self, trainer: Trainer, name: str, indices: npt.NDArray[np.uint32]) -> int:
        course = self.trainers.course_of(trainer, name)
        held = await self.pinboard.pin(trainer, name, course, indices)
        # A pinned sample has no stand-in from now on, and stands in for no other.
        await self.redirects.publish()
        return held

    async def warm_up(self, trainer: Trainer, name: str, active: bool) -> None:
        self.teaching.warm_up(self.trainers.course_of(trainer, name).course_id, active)
        # A course that warms up has no stand-ins.
        await self.redirects.publish()

    async def detached(self, trainer: Trainer) -> None:
        number = self.trainers.number_of(trainer)
        self.scoring.forget_reads(number)
        self.plans.trainer_left(number)
        if self._note_news is not None:
            self._note_news(Disconnected(number))
        self.trainers.detach(trainer)
        self._nodes.left(trainer)
        await self.pinboard.trainer_left(trainer)


def _teaching_options(options: Options) -> TeachingOptions:
    elastic = ElasticOptions(start=options.ratio_start, end=options.ratio_end)
    return TeachingOptions(elastic, options.ratio_epochs, only_late=options.substitute_when == "late")
