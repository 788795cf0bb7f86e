"""Turns the batches of trainers into scores and hubs, and feeds the cache by them.

The way of a batch:

1. For each sample that the batch names, find the sample whose bytes the trainer got (`core/batches.py`). Otherwise the
   embedding of a substitute would be filed under the sample that it stood in for.
2. Choose the rows that there is time for.
3. Score these rows in a thread, or send them to the mount that does it for all (`several_nodes.py`).
4. Give the policy the scores and the hub (`core/feed.py`).

One thread at a time uses the scorings of all job datasets. So each other use of a scoring (to describe it, to save it,
to end an epoch) waits until the batch is scored. Everything but the scorings belongs to the manager's event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar, TypeVarTuple

import numpy as np
import numpy.typing as npt
import trio

from spiderfs.cluster import SharedHub, SharedScores
from spiderfs.core.batches import ServedSamples
from spiderfs.core.events import Access
from spiderfs.core.feed import PolicyFeed
from spiderfs.core.policy import Hub, Key
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.training.job_datasets.job_datasets import JobDataset, JobDatasets, delete_older_scores
from spiderfs.daemon.training.job_datasets.several_nodes import SeveralNodes
from spiderfs.linux import steady_clock
from spiderfs.metrics import Counters
from spiderfs.options.model import Options
from spiderfs.protocol import Batch
from spiderfs.scorer import SCORINGS
from spiderfs.scorer.scorer import Scorer
from spiderfs.scorer.scoring import BatchScores, ScorerOptions, Scoring
from spiderfs.trace import Recording, TracedBatch

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# The rows that are scored at once, of all batches that wait; all rows of a larger batch. In a list of a million samples
# that takes about a second of a core, and a row costs less the more come at once (benchmarks/engine/scorer.py).
ROWS_AT_ONCE = 4096
# Scores that are passed on at a time: each takes 10 to 20 us.
_SCORES_AT_ONCE = 1000


class _Rows(NamedTuple):
    """The rows of some batches that are scored: sample `indices[i]` of the list has `embeddings[i]` and `losses[i]`."""

    indices: npt.NDArray[np.int64]
    batches: npt.NDArray[np.int64]
    """The number of each row's batch, from 0."""
    embeddings: npt.NDArray[np.float32]
    losses: npt.NDArray[np.float32] | None
    epoch: int
    """That of all batches."""

    def apart(self) -> Iterator[_Rows]:
        """The rows of each batch."""
        for number in np.unique(self.batches):
            its = self.batches == number
            losses = None if self.losses is None else self.losses[its]
            yield _Rows(self.indices[its], self.batches[its], self.embeddings[its], losses, self.epoch)


class BatchScoring:
    """Trainers are named by their numbers; the scores of job datasets are saved below `scores_directory`."""

    def __init__(
        self,
        cache: CacheControl,
        feed: PolicyFeed,
        job_datasets: JobDatasets,
        counters: Counters,
        scores_directory: Path,
        options: Options,
        recording: Recording | None,
        nodes: SeveralNodes,
    ) -> None:
        self._cache, self._feed, self._job_datasets = cache, feed, job_datasets
        self._counters, self._scores_directory = counters, scores_directory
        self._options = ScorerOptions(
            options.neighbours, options.radius, options.radius_share, embeddings=options.embeddings, index=options.index
        )
        self._recording, self._nodes = recording, nodes
        self._records_embeddings = options.trace_embeddings
        self._served_samples = ServedSamples()
        self._one_at_a_time = trio.CapacityLimiter(1)

    @property
    def scoring(self) -> str:
        """The name of the scoring that the present policy goes by."""
        return self._cache.engine.policy.scoring

    def of(self, job_dataset: JobDataset) -> Scoring | None:
        """The scoring of a job dataset that the present policy goes by; None until it has something to learn from."""
        return job_dataset.scorings.get(self.scoring)

    def record_accesses(self, accesses: Iterable[Access]) -> None:
        """Remember which sample's bytes trainers got, until the batches with these reads arrive."""
        for access in accesses:
            if access.trainer:
                self._served_samples.record_read(access.trainer, access.wanted, access.inode)

    def forget_reads(self, trainer: int) -> None:
        """Forget the reads of a trainer that begins an epoch, or leaves: no batch comes for them any more."""
        self._served_samples.forget(trainer)

    async def learn(self, trainer: int, job_dataset: JobDataset, batches: Sequence[Batch]) -> None:
        """Score up to ROWS_AT_ONCE rows of batches of one shape; each batch whole, if scores are places within it."""
        apart = SCORINGS[self.scoring].ranks_within_batches
        groups: Sequence[Sequence[Batch]] = [[batch] for batch in batches] if apart else [batches]
        for group in groups:
            await self._learn(trainer, job_dataset, group)

    async def _learn(self, trainer: int, job_dataset: JobDataset, batches: Sequence[Batch]) -> None:
        rows, name = self._rows(trainer, job_dataset, batches), self.scoring
        if rows is None:
            return
        if self._nodes.follows(job_dataset):
            # Their indices name the samples that were served.
            sent = [Batch("", some.epoch, 0, some.indices, some.embeddings, some.losses) for some in rows.apart()]
            if self._nodes.send(job_dataset, name, sent):
                return
        scored = await self._score(name, job_dataset, rows)
        if self._recording is not None and self._records_embeddings:
            for place, some in enumerate(rows.apart()):
                inodes = job_dataset.list.inodes[some.indices]
                batch = TracedBatch(str(job_dataset.number), inodes, some.embeddings, some.losses, goes_on=place > 0)
                self._recording.event(steady_clock.now(), batch)
        hubs = await self._publish(name, job_dataset, rows, scored)
        self._nodes.publish(job_dataset, name, SharedScores(rows.embeddings.shape[1], scored.ids, scored.scores), hubs)

    def _rows(self, trainer: int, job_dataset: JobDataset, batches: Sequence[Batch]) -> _Rows | None:
        """The rows to score, matched with the samples that were served; None if none is of a sample of the list."""
        served: list[Key] = []
        for batch in batches:
            served += self._served_samples.arrived(trainer, job_dataset.list.inodes[batch.indices].tolist())
        numbers = np.repeat(np.arange(len(batches)), [len(batch.indices) for batch in batches])
        indices = np.array([job_dataset.list.index_of.get(inode, -1) for inode in served], np.int64)
        known = np.flatnonzero(indices >= 0)
        if not len(known):
            return None
        limit = max(ROWS_AT_ONCE, *(len(batch.indices) for batch in batches))
        rows = known[job_dataset.thinning.take(indices[known], limit)]
        self._counters.add("hook_rows_left_out", len(known) - len(rows))
        embeddings = np.concatenate([batch.embeddings for batch in batches])[rows].astype(np.float32)
        given = [batch.losses for batch in batches if batch.losses is not None]
        losses = np.concatenate(given)[rows].astype(np.float32) if given else None
        return _Rows(indices[rows], numbers[rows], embeddings, losses, batches[0].epoch)

    def thinned(
        self, trainer: int, job_dataset: JobDataset, indices: npt.NDArray[np.uint32], count: int
    ) -> npt.NDArray[np.int64] | None:
        """The `count` of these waiting rows whose samples' scores are the oldest; the others are done with.

        Which samples were served is not known yet, so the ages are those of the samples that were wanted. None if some
        of them are not in the list: then no row is done with.
        """
        if int(indices.max(initial=0)) >= len(job_dataset.list.keys):
            return None
        kept = job_dataset.thinning.oldest(indices.astype(np.int64), count)
        left_out = np.delete(indices, kept)
        # Of several rows of one sample the last is kept. So the reads of those that are left out came before its read.
        self._served_samples.arrived(trainer, job_dataset.list.inodes[left_out].tolist())
        job_dataset.thinning.leave_out(len(left_out))
        self._counters.add("hook_rows_left_out", len(left_out))
        return kept

    async def _score(self, name: str, job_dataset: JobDataset, rows: _Rows) -> BatchScores:
        def score() -> tuple[BatchScores, float]:
            # In the thread: the wait for another job dataset's scoring is none of this one's time.
            started = time.perf_counter()
            scoring = job_dataset.scoring_for(name, rows.embeddings.shape[1], self._options)
            scored = scoring.batch(rows.indices, rows.embeddings, rows.losses, len(np.unique(rows.batches)))
            return scored, time.perf_counter() - started

        scored, took_s = await self.in_turn(score)
        job_dataset.scoring_s += took_s
        return scored

    async def _publish(self, name: str, job_dataset: JobDataset, rows: _Rows, scored: BatchScores) -> list[SharedHub]:
        """Give the policy these scores, and of each batch its best sample that is no hub yet; returns these hubs."""
        hubs: list[SharedHub] = []
        if not await self._pass_on(name, job_dataset, scored.ids, lambda some: scored.scores[some]):
            return hubs
        job_dataset_id, inodes = job_dataset.job_dataset_id, job_dataset.list.inodes
        batch_of = dict(zip(rows.indices.tolist(), rows.batches.tolist(), strict=True))
        without_hub = set(batch_of.values())
        for found in scored.hubs():
            inode, batch = int(inodes[found.id]), batch_of[found.id]
            if batch not in without_hub or not inode or self._feed.is_hub(job_dataset_id, inode):
                continue
            hubs.append(SharedHub(found.id, found.neighbours, found.distances))
            self._publish_hub(job_dataset, hubs[-1])
            without_hub.remove(batch)
            if not without_hub:
                break
        return hubs

    def _publish_hub(self, job_dataset: JobDataset, found: SharedHub) -> None:
        inodes, labels = job_dataset.list.inodes, job_dataset.list.labels
        # Another node may have sent it.
        good = (inodes[found.neighbours] != 0) & (labels[found.neighbours] == labels[found.id])
        neighbours, distances = inodes[found.neighbours][good], found.distances[good]
        hub = Hub(int(inodes[found.id]), job_dataset.job_dataset_id, neighbours.tolist(), distances.tolist())
        self._cache.apply(self._feed.hub_found(hub))

    async def adopt(self, job_dataset: JobDataset, scores: SharedScores, hubs: Iterable[SharedHub]) -> None:
        """Take over scores and hubs that another node has made."""
        name, ids = self.scoring, scores.ids.astype(np.int64)

        def take_over() -> None:
            job_dataset.scoring_for(name, scores.dimension, self._options).adopt(BatchScores(ids, scores.scores))

        await self.in_turn(take_over)
        if await self._pass_on(name, job_dataset, ids, lambda some: scores.scores[some]):
            for hub in hubs:
                if job_dataset.list.inodes[hub.id]:
                    self._publish_hub(job_dataset, hub)

    async def _pass_on(
        self,
        name: str,
        job_dataset: JobDataset,
        ids: npt.NDArray[np.int64],
        scores: Callable[[slice], npt.NDArray[np.float32]],
    ) -> bool:
        """Give the policy scores of the scoring `name`, a few at a time: other things may happen between.

        `ids` names each file of the list once at most, and `scores` gives the scores of a slice of `ids`. False if the
        rest is left out: the policy may have changed, and scores are kept for the next one that goes by them, or
        the job dataset may be over.
        """
        for first in range(0, len(ids), _SCORES_AT_ONCE):
            if first:
                await trio.lowlevel.checkpoint()
            if self.scoring != name or self._job_datasets.get(job_dataset.job_dataset_id) is not job_dataset:
                return False
            some = slice(first, first + _SCORES_AT_ONCE)
            keys = job_dataset.list.inodes[ids[some]]
            # The list may have been declared again meanwhile, and a file be gone.
            there = keys != 0
            self._feed.scored(job_dataset.job_dataset_id, keys[there].tolist(), scores(some)[there].tolist())
        return True

    async def new_epoch(self, job_datasets: Collection[JobDataset]) -> dict[str, float]:
        """Begin an epoch of these scorings; returns how far the scores of each job dataset spread, if it has any."""
        sigmas = {}
        for job_dataset in job_datasets:
            if (scoring := self.of(job_dataset)) is not None:
                await self.in_turn(scoring.new_epoch)
                sigmas[job_dataset.job_dataset_id] = scoring.sigma
        return sigmas

    async def introduce(self, job_dataset: JobDataset) -> None:
        """Give the policy a job dataset that is in memory, and the scores that its job has saved, if there are any."""
        name = self.scoring
        await self.in_turn(job_dataset.remember, name, self._options)
        # It may have left memory meanwhile. What is begun then no one would end.
        if self._job_datasets.get(job_dataset.job_dataset_id) is not job_dataset:
            return
        self._cache.apply(self._feed.begin(job_dataset.job_dataset_id, job_dataset.job_id, job_dataset.list.label_of))
        if name in job_dataset.scorings:
            ids = np.unique(job_dataset.list.one_of_file).astype(np.int64)
            # A score that is new since counts.
            await self._pass_on(name, job_dataset, ids, lambda some: job_dataset.scorings[name].scores[ids[some]])

    def to_draw_by(self, job_dataset: JobDataset) -> npt.NDArray[np.float32]:
        """One score a sample, for a sampler; empty while there are none."""
        scoring = self.of(job_dataset)
        return np.empty(0, np.float32) if scoring is None else scoring.to_draw_by()

    async def described(self, job_dataset: JobDataset, sample: int) -> list[tuple[str, str]] | None:
        """Figures of a scoring by name, with the recall of its index among `sample` samples; None before any score."""
        if (scoring := self.of(job_dataset)) is None:
            return None

        def describe() -> list[tuple[str, str]]:
            found = scoring.described()
            if isinstance(scoring, Scorer):
                found.append(("recall", f"{scoring.recall(sample, np.random.default_rng(0)):.3f}"))
            return found

        return await self.in_turn(describe)

    def save(self) -> None:
        """Write down the scores of all job datasets. Blocks on the disk, and must not run while a batch is scored."""
        for job_dataset in self._job_datasets:
            job_dataset.save()
        delete_older_scores(self._scores_directory, {job_dataset.directory for job_dataset in self._job_datasets})

    async def in_turn(self, use: Callable[[*Ts], T], *args: *Ts) -> T:
        """What `use` returns, in a thread, while no other call uses a scoring; raises what it raises."""
        return await trio.to_thread.run_sync(use, *args, limiter=self._one_at_a_time)
