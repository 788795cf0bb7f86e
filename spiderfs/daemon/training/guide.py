"""What trainers teach the cache: their batches become scores, hubs and redirects, and their epochs the sections' ratio.

One dataset per list of samples, by its content: the ranks of a distributed training share one, and a training that goes
on after a restart finds its scores. Scoring runs in a thread, one batch at a time; everything else on the manager's
event loop, where the engine lives. What was really served for a sample comes from the workers' events, through the
served samples, so that a stand-in's embedding is never filed under the sample that it stood in for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import trio
import xxhash

from spiderfs.core.events import Access
from spiderfs.core.hints import Hub
from spiderfs.core.policy import Key
from spiderfs.core.schedule import PlannedEpoch
from spiderfs.core.served_samples import ServedSamples
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.training.dataset import Dataset, delete_older_scores, inodes_of, leave_out_contradictions
from spiderfs.daemon.training.lists import Lists
from spiderfs.daemon.training.pinboard import Pinboard
from spiderfs.daemon.training.ratio import SectionRatio
from spiderfs.daemon.training.trainer import SampleList, Trainer
from spiderfs.linux.process_table import started_at
from spiderfs.metrics import Counters
from spiderfs.options.model import Options
from spiderfs.protocol import Batch, EpochEnd, Plan
from spiderfs.scorer.scorer import Scorer
from spiderfs.scorer.scoring import ScorerOptions, Scoring
from spiderfs.shared.attached_trainers import Attached, publish_trainers
from spiderfs.shared.redirect_table import redirect_row, redirect_rows
from spiderfs.store.environment import exit_if_corrupt
from spiderfs.store.store import Records
from spiderfs.trace.format import TraceWriter
from spiderfs.vfs.catalogue import Catalogue
from spiderfs.vfs.lister import Lister

log = logging.getLogger(__name__)


class Guide:
    """The HookSink of the manager."""

    def __init__(
        self,
        catalogue: Catalogue,
        lister: Lister,
        records: Records,
        cache: CacheControl,
        counters: Counters,
        trainers_file: Path,
        scores_directory: Path,
        options: Options,
        trace: Callable[[], TraceWriter | None] = lambda: None,
        planned: Callable[[], None] = lambda: None,
    ) -> None:
        self._catalogue = catalogue
        self._lister = lister
        self._records = records
        self._cache = cache
        self._counters = counters
        self._trainers_file = trainers_file
        self._scores_directory = scores_directory
        self._trace = trace
        self._trace_embeddings = options.trace_embeddings
        self._planned = planned
        self._follow_plans = options.plan
        self._served_samples = ServedSamples()
        self._scoring = trio.CapacityLimiter(1)
        self._publishing = trio.Lock()
        self._numbers: dict[Trainer, int] = {}
        self._attached = 0
        self._lists = Lists(cache, records, self._scoring, self._publishing)
        self._using = self._lists.using
        # The lists that a trainer teaches. One that only publishes plans is never given a stand-in.
        self._taught: set[tuple[Trainer, str]] = set()
        self.datasets = self._lists.datasets
        self.ratio = SectionRatio(cache, options)
        self._pinboard = Pinboard(catalogue, cache, trace)
        self._planning = False
        self._scorer_options = ScorerOptions(radius=options.radius)

    def begin(self, state: bytes | None) -> None:
        """Before anybody is attached: nobody is redirected, and the ratio goes on from what `state` gave."""
        self._publish_trainers()
        self.withdraw_redirects()
        if state is not None:
            self.ratio.restore(state)

    # -- trainers

    def ending(self) -> None:
        """The mount is about to end, which is not the trainers' leaving: what they have pinned is to be saved."""
        self._pinboard.forget()

    async def attached(self, trainer: Trainer) -> None:
        # Events carry 16 bits of it, and 0 is nobody.
        self._attached = self._attached % 0xFFFF + 1
        self._numbers[trainer] = self._attached
        if trainer.pid == 0:
            log.warning("a trainer is of another pid namespace: it gets no stand-ins, see HOOK_PROTOCOL.md")

    async def detached(self, trainer: Trainer) -> None:
        self._served_samples.forget(self._numbers[trainer])
        self._cache.engine.unplan(self._numbers[trainer])
        del self._numbers[trainer]
        for key in [key for key in self._using if key[0] is trainer]:
            del self._using[key]
            self._taught.discard(key)
        self._publish_trainers()
        await self._pinboard.gone(trainer)

    def _publish_trainers(self) -> None:
        rows = []
        for trainer, number in self._numbers.items():
            declared = [key for key in self._using if key[0] is trainer]
            taught = tuple({self._using[key].number for key in declared if key in self._taught})
            try:
                if trainer.pid and declared:
                    rows.append(Attached(number, trainer.pid, started_at(trainer.pid), taught))
            except OSError:
                log.debug("trainer %d has ended", trainer.pid)
        try:
            publish_trainers(self._trainers_file, rows)
        except OSError as exc:
            log.warning("workers do not learn of trainers (%s): their plans and stand-ins rest", exc.strerror)

    async def samples(self, trainer: Trainer, samples: SampleList) -> int:
        digest = xxhash.xxh3_64_hexdigest(b"\0".join(samples.paths) + samples.labels.tobytes())
        with self._lists.declaring(digest):
            await self._lists.make_room(digest, len(samples))
            inodes = await inodes_of(samples, self._catalogue, self._lister)
            unknown = int((inodes == 0).sum())
            leave_out_contradictions(inodes, samples.labels)
            dataset = self.datasets.get(digest)
            if dataset is None or not np.array_equal(dataset.inodes, inodes):
                number = self._lists.number_of(digest)
                dataset = Dataset(number, digest, samples, inodes, self._scores_directory / digest)
                self.datasets[digest] = dataset
                if trace := self._trace():
                    trace.labels(time.time(), dataset.label_of, dataset.number)
                await self._remember(dataset)
            self._using[trainer, samples.name] = dataset
        self._publish_trainers()
        await self.republish()
        return unknown

    async def let_go(self) -> None:
        """Give back what lists take that nobody has used for a while."""
        await self._lists.let_go()

    async def _remember(self, dataset: Dataset) -> None:
        """Let the policy know the list; go on with the scores of an earlier training on the same, if there are any."""
        name = self._cache.engine.policy.scoring
        await trio.to_thread.run_sync(dataset.remember, name, self._scorer_options, limiter=self._scoring)
        # By now it may be another policy's.
        policy, scoring = self._cache.guided, self.scoring_of(dataset)
        if policy is not None:
            policy.listed(dataset.digest, dataset.label_of)
        if policy is not None and scoring is not None:
            for inode, score in zip(dataset.keys, scoring.scores.tolist(), strict=True):
                if inode:
                    self._cache.engine.scored(inode, score)

    async def policy_changed(self) -> None:
        """Tell a policy that was just chosen all scores there are of its kind, and readers its redirects alone."""
        self._pinboard.forget()
        for dataset in list(self.datasets.values()):
            await self._remember(dataset)
        await self.republish()

    def scoring_of(self, dataset: Dataset) -> Scoring | None:
        """What learns about a list for the policy there is now, once there was something to learn."""
        return dataset.scorings.get(self._cache.engine.policy.scoring)

    # -- what training says

    async def learn(self, trainer: Trainer, samples: SampleList, batches: Sequence[Batch]) -> None:
        """Score a batch; of several only as many rows as the largest of them has."""
        dataset = self._using[trainer, samples.name]
        if (trainer, samples.name) not in self._taught:
            self._taught.add((trainer, samples.name))
            self._publish_trainers()
        served: list[Key] = []
        for batch in batches:
            served += self._served_samples.arrived(self._numbers[trainer], dataset.inodes[batch.indices].tolist())
        all_places = np.array([dataset.place_of.get(inode, -1) for inode in served], np.int64)
        known = np.flatnonzero(all_places >= 0)
        if not len(known):
            return
        rows = known[dataset.to_score(all_places[known], max(len(batch.indices) for batch in batches))]
        self._counters.add("hook_rows_left_out", len(known) - len(rows))
        places = all_places[rows]
        embeddings = np.concatenate([batch.embeddings for batch in batches])[rows].astype(np.float32)
        given = [batch.losses for batch in batches if batch.losses is not None]
        losses = np.concatenate(given)[rows].astype(np.float32) if given else None
        name = self._cache.engine.policy.scoring
        started = time.perf_counter()
        scored = await trio.to_thread.run_sync(
            lambda: dataset.scoring_for(name, embeddings.shape[1], self._scorer_options).batch(
                places, embeddings, losses
            ),
            limiter=self._scoring,
        )
        dataset.scorings_made += 1
        dataset.scoring_s += time.perf_counter() - started
        policy = self._cache.guided
        now = time.time()
        trace = self._trace()
        if trace and policy is not None:
            trace.ratio(now, policy.ratio)
        if trace and self._trace_embeddings:
            trace.batch(now, dataset.number, dataset.inodes[places], embeddings, losses)
        if policy is None or policy.scoring != name:
            return
        for place, score in zip(scored.ids.tolist(), scored.scores.tolist(), strict=True):
            inode = int(dataset.inodes[place])
            if inode:
                self._cache.engine.scored(inode, score)
                if trace:
                    trace.score(now, inode, score)
        hub = scored.hub()
        if hub is not None:
            inode = int(dataset.inodes[hub.id])
            neighbours = dataset.inodes[hub.neighbours].tolist()
            distances = hub.distances.tolist()
            policy.hub_found(Hub(inode, dataset.digest, neighbours, distances))
            if trace:
                trace.hub(now, Hub(inode, dataset.digest, neighbours, distances), dataset.number)
            with exit_if_corrupt():
                self._cache.place(inode)
        await self.publish_redirects()

    async def epoch_end(self, trainer: Trainer, end: EpochEnd) -> None:
        self._served_samples.forget(self._numbers[trainer])
        self._cache.engine.end_epoch(self._numbers[trainer], end.epoch)
        if trainer.rank != 0:
            return
        sigmas = []
        datasets = {dataset for (owner, _), dataset in self._using.items() if owner is trainer}
        for dataset in datasets:
            scoring = self.scoring_of(dataset)
            if scoring is not None:
                await trio.to_thread.run_sync(scoring.new_epoch, limiter=self._scoring)
                sigmas.append(scoring.sigma)
        policy = self._cache.guided
        if policy is not None:
            policy.new_epoch()
        await self._pinboard.epoch_ended()
        self.ratio.epoch_ended(end.epoch, sigmas, end.accuracy)
        if trace := self._trace():
            for dataset in datasets:
                trace.epoch(time.time(), dataset.number, end.accuracy)
            if policy is not None:
                trace.ratio(time.time(), policy.ratio)
        if policy is not None:
            await self.publish_redirects()

    async def plan(self, trainer: Trainer, samples: SampleList, plan: Plan) -> None:
        dataset = self._using[trainer, samples.name]
        order = dataset.one_of_file[plan.order]
        epoch = await trio.to_thread.run_sync(
            PlannedEpoch, plan.epoch, dataset.keys, dataset.place_of, order, plan.position
        )
        # Now, for the option may have changed meanwhile.
        if not self._follow_plans:
            return
        self._cache.engine.plan(self._numbers[trainer], samples.name, epoch, time.time(), plan.begun)
        self._follow_schedule()
        self._planned()

    def _follow_schedule(self) -> None:
        """Whether a plan is followed has a say in how the cache is shared."""
        if self._cache.engine.schedule.active != self._planning:
            self._planning = not self._planning
            self.ratio.apply()

    async def scores(self, trainer: Trainer, samples: SampleList) -> npt.NDArray[np.float32]:
        scoring = self.scoring_of(self._using[trainer, samples.name])
        return np.empty(0, np.float32) if scoring is None else scoring.to_draw_by()

    async def cached(self, trainer: Trainer, samples: SampleList) -> npt.NDArray[np.bool_]:
        members = self._cache.engine.members
        return np.array([inode in members for inode in self._using[trainer, samples.name].inodes.tolist()], np.bool_)

    async def pin(self, trainer: Trainer, samples: SampleList, indices: npt.NDArray[np.uint32]) -> int:
        held = await self._pinboard.say(trainer, samples.name, self._using[trainer, samples.name], indices)
        # What is pinned has no stand-ins from now on, and is none.
        await self.publish_redirects()
        return held

    # -- what workers saw

    def dataset_of(self, trainer: int, inode: int) -> int:
        """The number of the list by which this trainer knows this file; 0 if it has declared none with it."""
        for (owner, _), dataset in self._using.items():
            if self._numbers.get(owner) == trainer and inode in dataset.place_of:
                return dataset.number
        return 0

    def note(self, accesses: list[Access]) -> None:
        """Note what was served, and let the policy know who stood in for whom."""
        policy = self._cache.guided
        for access in accesses:
            if access.trainer:
                self._served_samples.note(access.trainer, access.wanted, access.inode)
            if access.wanted not in (0, access.inode) and policy is not None:
                policy.stood_in(access.inode, access.wanted)
        self._follow_schedule()

    def change(self, options: Options) -> None:
        """Take over live options; the ratio follows at the end of the epoch."""
        self.ratio.change(options)
        self._follow_plans = options.plan
        if not options.plan:
            for number in self._numbers.values():
                self._cache.engine.unplan(number)

    def has_stand_in(self, inode: int) -> bool:
        """Whether readers of some list are given another file for this one while it is not cached."""
        policy = self._cache.guided
        return policy is not None and any(policy.stand_in(digest, inode) is not None for digest in self.datasets)

    # -- redirects

    async def republish(self) -> None:
        """Publish every redirect anew: hubs of an earlier mount belong to a dataset that has only now been declared."""
        async with self._publishing:
            self.withdraw_redirects()
            if self._cache.guided is not None:
                self._cache.guided.forget_told()
        await self.publish_redirects()

    def withdraw_redirects(self) -> None:
        """Begin with an empty table: what an earlier manager had published may no longer be cached."""
        self._records.put(redirect_row(dataset, wanted, None) for wanted, dataset, _ in redirect_rows(self._records))

    async def publish_redirects(self) -> None:
        """Let workers know what has changed; the kernel finds out when it opens what it believes (`vfs/filesystem.py`).

        One at a time: two batches of changes must reach the table in the order in which they were drawn.
        """
        async with self._publishing:
            with exit_if_corrupt():
                await self._publish_redirects()

    async def _publish_redirects(self) -> None:
        policy = self._cache.guided
        changes = policy.redirects_changed() if policy is not None else []
        if not changes:
            return
        rows = []
        for digest, wanted, given in changes:
            assert isinstance(wanted, int)
            assert given is None or isinstance(given, int)
            if digest in self.datasets:
                rows.append(redirect_row(self.datasets[digest].number, wanted, given))
        await trio.to_thread.run_sync(self._records.put, rows)

    async def described(self, dataset: Dataset, sample: int) -> list[tuple[str, str]] | None:
        """What people may want to know of a list's scoring; None before anything was scored.

        Where there is an index, this says which share of the neighbours it finds, by comparison with all for `sample`
        samples. Asked in the thread of the scoring, so that no batch changes it meanwhile.
        """
        scoring = self.scoring_of(dataset)
        if scoring is None:
            return None

        def describe() -> list[tuple[str, str]]:
            found = scoring.described()
            if isinstance(scoring, Scorer):
                found.append(("recall", f"{scoring.recall(sample, np.random.default_rng(0)):.3f}"))
            return found

        return await trio.to_thread.run_sync(describe, limiter=self._scoring)

    # -- saving

    def save(self) -> None:
        """Write all scores down; blocks on the disk, and must not run while a batch is scored."""
        for dataset in list(self.datasets.values()):
            dataset.save()
        delete_older_scores(self._scores_directory, self.datasets)

    async def save_in_thread(self) -> None:
        await trio.to_thread.run_sync(self.save, limiter=self._scoring)
