"""Replay: drive an engine with recorded accesses, and count what the cache would have served.

A law checks every result. In an epoch that reads each sample exactly once, a cache that fetches only on demand serves
only the samples that it held when the epoch began. So no policy has a hit ratio above the cached fraction, however much
it foresees. A higher ratio needs repeated draws, fetching ahead, or substitutes.

Guided policies get the hints of a trace again, between the same accesses: the recorded ones, or those of the recorded
batches scored again (`rescored`) by a mount's scorings. With the settings of the mount these are the same scores.
Lists, pins, ends of epochs and the ratio stay as recorded; the replay chooses the hub of a batch, the best of its
samples that is no hub yet. A hub whose bytes were at hand when the trace was recorded enters the cache without a second
read.

If substitutes were served, the samples that they replaced have old embeddings; a trace recorded with `substitute=off`
has the right embeddings of all samples.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spiderfs.core import events
from spiderfs.core.engine import Engine
from spiderfs.core.feed import PolicyFeed
from spiderfs.core.homes import Homes
from spiderfs.core.plans.exchange import SharedList
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.policy import Hub, Key, Policy
from spiderfs.errors import UsageError
from spiderfs.options.types import radius_of
from spiderfs.options.units import Capacity, round_size
from spiderfs.policies import POLICIES
from spiderfs.scorer import SCORINGS
from spiderfs.scorer.scorer import Scorer
from spiderfs.scorer.scoring import FoundHub, ScorerOptions, Scoring
from spiderfs.trace import Accesses, Trace, TracedBatch

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Replay:
    """Counts, one for each epoch; the last epoch may be incomplete."""

    opens: Counts
    hits: Counts
    """Opens that did not wait for the source, including those that were redirected."""
    redirects: Counts
    served_bytes: Counts
    origin_bytes: Counts
    distinct: Counts
    """Different samples that were read in each epoch."""
    distinct_in_all: int
    """Different samples that were read in all epochs together."""

    @property
    def hit_ratio(self) -> float:
        return int(self.hits.sum()) / int(self.opens.sum())

    @property
    def warm_hit_ratio(self) -> float:
        """The hit ratio from the second epoch on; if there is one epoch only, its hit ratio."""
        warm = slice(1 if len(self.opens) > 1 else 0, None)
        return int(self.hits[warm].sum()) / int(self.opens[warm].sum())

    @property
    def origin_bytes_per_sample(self) -> float:
        """Origin bytes divided by the number of opens."""
        return int(self.origin_bytes.sum()) / int(self.opens.sum())

    @property
    def coverage(self) -> NDArray[np.float64]:
        """For each epoch the share of all samples that were read in it."""
        return self.distinct / self.distinct_in_all


def policy_for(policy: type[Policy], accesses: Accesses) -> Policy:
    """A new policy for a replay of these accesses; it knows them beforehand if it needs the future."""
    return policy.foreseeing([key for key in accesses.keys if not isinstance(key, tuple)])


def replay(
    engine: Engine,
    accesses: Accesses,
    epoch_length: int,
    hints: Sequence[tuple[int, events.Hint]] = (),
    ratio: float | None = None,
    news: Sequence[tuple[int, events.RankNews]] = (),
    before: Callable[[int], None] = lambda number: None,
) -> Replay:
    """Feed all accesses (at least one) to an engine, and count by epochs of `epoch_length` accesses.

    Each hint comes with the number of the access before which the policy gets it; hints are in that order. The engine
    gets `news` of ranks in the same way. `ratio` fixes the ratio until a hint sets another one; None leaves it to the
    policy. `before` is called with the number of each access, before it.
    """
    return _replayed([engine], lambda key: engine, accesses, epoch_length, hints, ratio, news, before)


def replay_on_nodes(
    nodes: int,
    engine: Callable[[int, Homes], Engine],
    capacity_bytes: int,
    accesses: Accesses,
    epoch_length: int,
    hints: Sequence[tuple[int, events.Hint]] = (),
    ratio: float | None = None,
) -> Replay:
    """As `replay`, on so many nodes of this capacity each, whose engines `engine` makes; all get all hints.

    The accesses are dealt to them in turn, as a training with a rank on each node reads an epoch, and their caches act
    as one (`core/homes.py`): a node requests what it has not cached from its home, which fetches what it has not.
    """
    names = [f"{number:06}" for number in range(nodes)]
    homes = Homes(dict.fromkeys(names, 1.0), names[0])
    engines = [engine(capacity_bytes, homes.seen_from(place)) for place in range(nodes)]

    def home_of(key: Key) -> Engine:
        # The blocks of a file have one home.
        number = key[0] if isinstance(key, tuple) else key
        assert isinstance(number, int)
        return engines[homes.home(number)]

    return _replayed(engines, home_of, accesses, epoch_length, hints, ratio)


def _replayed(
    engines: Sequence[Engine],
    home_of: Callable[[Key], Engine],
    accesses: Accesses,
    epoch_length: int,
    hints: Sequence[tuple[int, events.Hint]],
    ratio: float | None,
    news: Sequence[tuple[int, events.RankNews]] = (),
    before: Callable[[int], None] = lambda number: None,
) -> Replay:
    ranks = PlannedRanks(engines[0], news)
    sizes = dict(zip(accesses.keys, accesses.sizes, strict=True))
    feeds = [ReplayedFeed(engine, sizes, hints, ratio) for engine in engines]
    outcomes = []
    for number, access in enumerate(zip(accesses.keys, accesses.sizes, accesses.job_dataset_ids, strict=True)):
        for feed in feeds:
            feed.give(number)
        ranks.give(number)
        before(number)
        own, home = engines[number % len(engines)], home_of(access[0])
        outcomes.append(served(own, feeds[number % len(engines)], *access, None if home is own else home))
    for feed in feeds:
        feed.give(len(accesses))
    return counted(accesses, epoch_length, outcomes)


def served(
    engine: Engine, feed: ReplayedFeed, key: Key, size: int, job_dataset_id: str, home: Engine | None = None
) -> tuple[bool, bool]:
    """Have a reader of a job dataset (or of none, "") read a sample; whether that is a hit, and whether it is
    redirected.

    What the engine has not cached it asks the `home` for, which is another one.
    """
    hit = key in engine.members
    given = feed.choose(job_dataset_id, key, hit) if job_dataset_id else key
    if job_dataset_id:
        feed.served(job_dataset_id, key, given)
    redirected = given != key
    if home is not None and not hit and not redirected:
        hit = key in home.members
        read(home, key, size)
    read(engine, given, engine.members[given].size if redirected else size)
    return hit or redirected, redirected


def read(engine: Engine, key: Key, size: int) -> None:
    """Report to the engine that a small file, or a block, was read."""
    if isinstance(key, tuple):
        engine.block_read(key, size)
    else:
        engine.opened(key, size)


def counted(accesses: Accesses, epoch_length: int, outcomes: list[tuple[bool, bool]]) -> Replay:
    """The counts by epochs, of what `served` has returned for each access."""
    hits, redirects = np.array(outcomes).T
    sizes = np.asarray(accesses.sizes, np.int64)
    starts = np.arange(0, len(accesses), epoch_length)
    return Replay(
        opens=np.diff(starts, append=len(accesses)),
        hits=np.add.reduceat(hits.astype(np.int64), starts),
        redirects=np.add.reduceat(redirects.astype(np.int64), starts),
        served_bytes=np.add.reduceat(sizes, starts),
        origin_bytes=np.add.reduceat(np.where(hits, 0, sizes), starts),
        distinct=np.array([np.unique(accesses.ids[start : start + epoch_length]).size for start in starts]),
        distinct_in_all=accesses.distinct,
    )


class ReplayedFeed:
    """Gives the hints of a trace to a guided policy, each before its access, as the daemon does in a training."""

    def __init__(
        self, engine: Engine, sizes: Mapping[Key, int], hints: Sequence[tuple[int, events.Hint]], ratio: float | None
    ) -> None:
        self._engine = engine
        self._hints = deque(hints if engine.policy.guided else ())
        self._sizes = sizes
        # The bytes of samples that are at hand for the next hub or pins.
        self._at_hand: dict[Key, int] = {}
        self._epochs: Counter[str] = Counter()
        self._feed = PolicyFeed(engine, self._size_of)
        if ratio is not None:
            self._set_ratio(ratio)

    def give(self, number: int) -> None:
        """Give all hints that are due before access `number`."""
        while self._hints and self._hints[0][0] == number:
            self._give(self._hints.popleft()[1])

    def choose(self, job_dataset_id: str, key: Key, hit: bool) -> Key:
        """The sample whose bytes a reader of this job dataset gets for this one, which is cached if it is a `hit`."""
        found = None if hit else self._feed.substitute(job_dataset_id, key)
        return key if found is None else found

    def served(self, job_dataset_id: str, key: Key, given: Key) -> None:
        """A reader of this job dataset asked for a sample, and gets these bytes."""
        self._feed.served(job_dataset_id, key, given)

    def _give(self, hint: events.Hint) -> None:
        feed = self._feed
        match hint:
            case events.Scored(job_dataset_id, keys, scores):
                feed.scored(job_dataset_id, keys, scores)
            case events.AtHand(key, size):
                self._at_hand[key] = size
            case Hub():
                feed.hub_found(hint)
                self._at_hand.clear()
            case events.Candidates(job_dataset_id, hubs):
                found = next((hub for hub in hubs if not feed.is_hub(job_dataset_id, hub.key)), None)
                # A hub that no access of the trace reads has no known size.
                if found is not None:
                    self._at_hand.update({found.key: self._sizes[found.key]} if found.key in self._sizes else {})
                    feed.hub_found(found)
                    self._at_hand.clear()
            case events.Ratio(ratio):
                self._set_ratio(ratio)
            case events.Epoch(job_dataset_id, accuracy):
                feed.epoch_ended(job_dataset_id, self._epochs[job_dataset_id], {}, accuracy)
                self._epochs[job_dataset_id] += 1
            case events.Labels(job_dataset_id, labels):
                feed.begin(job_dataset_id, job_dataset_id, labels)
            case events.Pinning(job_dataset_id, keys):
                for _ in feed.pin(job_dataset_id, keys):
                    pass
                self._at_hand.clear()
            case events.WarmUp(job_dataset_id, active):
                feed.warm_up(job_dataset_id, active)

    def _set_ratio(self, ratio: float) -> None:
        if self._engine.policy.adjustable:
            self._feed.pin_ratio(ratio)

    def _size_of(self, key: Key) -> int | None:
        return self._engine.members[key].size if key in self._engine.members else self._at_hand.get(key)


@dataclass
class _List:
    """A list that some job datasets have in common; it is shared from the first exchange on."""

    keys: Sequence[Key]
    index_of: Mapping[Key, int]
    shared: SharedList | None = None


@dataclass
class _Sharing:
    """How far a rank has come in the epoch that it exchanges."""

    epoch: PlannedEpoch
    taken: int


class PlannedRanks:
    """Gives news of ranks to an engine, each before its access; the news are in that order.

    Their plans overrule the policy, and so do the pending samples of jobs that exchange. The samples come in the order
    in which they were exchanged when the trace was recorded. With another capacity or policy a mount would have
    exchanged others, so a replay shows how the rules of eviction (`core/plans/foresight.py`) serve these orders.
    Nothing is fetched ahead. Time is counted in accesses.
    """

    def __init__(self, engine: Engine, news: Sequence[tuple[int, events.RankNews]]) -> None:
        self._engine, self._news = engine, deque(news)
        self._chance = random.Random(1).random
        self._list_of = lists_of(one for _, one in news if isinstance(one, events.Planned))
        self._sharing: dict[tuple[int, str], _Sharing] = {}

    def give(self, number: int) -> None:
        """Give all news that is due before access `number`."""
        while self._news and self._news[0][0] == number:
            self._give(self._news.popleft()[1], float(number))

    def _give(self, news: events.RankNews, now_s: float) -> None:
        match news:
            case events.Planned():
                self._plan(news, now_s)
            case events.Progressed(rank, job_dataset_id, epoch, dispatched, taken):
                self._engine.progressed(rank, job_dataset_id, epoch, dispatched, taken, now_s)
                self._take(rank, job_dataset_id, epoch, taken)
            case events.Dispatched():
                self._hand(news)
            case events.Disconnected(rank):
                for other, job_dataset_id in list(self._sharing):
                    if other == rank:
                        self._end(rank, job_dataset_id)
                self._engine.unplan(rank)

    def _plan(self, plan: events.Planned, now_s: float) -> None:
        if plan.begun and not len(plan.keys):
            self._end(plan.rank, plan.job_dataset_id)
        known = self._list_of[plan.job_dataset_id]
        order = np.fromiter((known.index_of[key] for key in plan.keys), np.uint32, len(plan.keys))
        epoch = PlannedEpoch(plan.epoch, known.keys, known.index_of, order, plan.start)
        self._engine.plan(plan.rank, plan.job_dataset_id, epoch, now_s, plan.begun)

    def _hand(self, handed: events.Dispatched) -> None:
        rank = handed.rank, handed.job_dataset_id
        reader = self._engine.schedule.readers.get(rank)
        if reader is None or reader.epoch.number != handed.epoch or reader.epoch.repeats:
            return
        epoch, shared = reader.epoch, self._shared(handed.job_dataset_id)
        sharing = self._sharing.get(rank)
        if sharing is None or sharing.epoch is not epoch:
            self._sharing[rank] = _Sharing(epoch, handed.position)
            shared.begin(rank, handed.job_dataset_id, np.unique(epoch.order[handed.position :]))
            self._engine.rerank()
        samples = [epoch.index_of[key] for key in handed.keys if key in epoch.index_of]
        for position, sample in enumerate(samples, handed.position):
            for key in epoch.swap(position, sample):
                self._engine.exchange_pending.changed(key)
        shared.dispatched(rank, samples)

    def _take(self, rank: int, job_dataset_id: str, epoch: int, taken: int) -> None:
        sharing = self._sharing.get((rank, job_dataset_id))
        if sharing is not None and sharing.epoch.number == epoch and taken > sharing.taken:
            sharing.taken += self._shared(job_dataset_id).taken((rank, job_dataset_id), taken - sharing.taken)

    def _end(self, rank: int, job_dataset_id: str) -> None:
        if self._sharing.pop((rank, job_dataset_id), None) is not None:
            self._shared(job_dataset_id).end((rank, job_dataset_id))
            self._engine.rerank()

    def _shared(self, job_dataset_id: str) -> SharedList:
        known = self._list_of[job_dataset_id]
        if known.shared is None:
            known.shared = SharedList(known.keys, known.index_of, self._chance, self._engine.exchange_pending.changed)
            self._engine.share(id(known), known.shared)
        return known.shared


def lists_of(plans: Iterable[events.Planned]) -> dict[str, _List]:
    """The list of each job dataset: all samples of its plans; job datasets whose lists have a sample in common have one
    list."""
    groups: list[tuple[dict[Key, None], set[str]]] = []
    for plan in plans:
        keys, job_datasets = dict.fromkeys(plan.keys), {plan.job_dataset_id}
        others = []
        for group in groups:
            if plan.job_dataset_id in group[1] or not group[0].keys().isdisjoint(keys):
                keys, job_datasets = group[0] | keys, group[1] | job_datasets
            else:
                others.append(group)
        groups = [*others, (keys, job_datasets)]
    found: dict[str, _List] = {}
    for keys, job_datasets in groups:
        known = _List(list(keys), {key: sample for sample, key in enumerate(keys)})
        found |= dict.fromkeys(job_datasets, known)
    return found


def depends_on_neighbours(scoring: str) -> bool:
    """Whether a scoring uses the radius and the number of neighbours."""
    return issubclass(SCORINGS[scoring], Scorer)


class Rescored(NamedTuple):
    hints: list[tuple[int, events.Hint]]
    """The hints to replay instead of `Trace.hints`."""
    described: dict[str, dict[str, str]]
    """For each job dataset, by its number, how its scoring describes itself at the end of the trace."""


def rescored(trace: Trace, scoring: str, options: ScorerOptions) -> Rescored:
    """The results of a scoring of a trace; raises UsageError if the trace has no embeddings, or is damaged."""
    if not trace.has_batches:
        raise UsageError(
            "the trace holds no embeddings, so nothing can be scored again: record one with a trainer attached and"
            " trace_embeddings=on"
        )
    hints: list[tuple[int, events.Hint]] = []
    job_datasets: dict[str, _JobDataset] = {}
    for before, event in _batches_and_hints(trace):
        if isinstance(event, list):
            job_dataset_id = event[0].job_dataset_id
            if job_dataset_id not in job_datasets:
                raise _damaged(f"it holds a batch of job dataset {job_dataset_id}, but not its list")
            hints += [(before, hint) for hint in job_datasets[job_dataset_id].batches(event)]
            continue
        hints.append((before, event))
        if isinstance(event, events.Labels):
            # After a crash of the manager a trainer declares its list again, and its scoring goes on.
            known = job_datasets.get(event.job_dataset_id)
            if known is None or known.labels != event.labels:
                job_datasets[event.job_dataset_id] = _JobDataset(event.job_dataset_id, event.labels, scoring, options)
        elif isinstance(event, events.Epoch) and event.job_dataset_id in job_datasets:
            job_datasets[event.job_dataset_id].new_epoch()
    return Rescored(hints, {name: found.described() for name, found in job_datasets.items()})


def _batches_and_hints(trace: Trace) -> Iterator[tuple[int, list[TracedBatch] | events.Hint]]:
    """The batches of a trace, those that were scored together as one, and the hints that no scoring finds."""
    together: list[TracedBatch] = []
    came_before = 0
    for before, event in trace.events:
        if isinstance(event, TracedBatch):
            if together and not (event.goes_on and event.job_dataset_id == together[0].job_dataset_id):
                yield came_before, together
                together = []
            together.append(event)
            came_before = before
        elif isinstance(event, events.Labels | events.Epoch | events.Ratio | events.Pinning | events.WarmUp):
            if together:
                yield came_before, together
                together = []
            yield before, event
    if together:
        yield came_before, together


class _JobDataset:
    """A job dataset and its scoring, as a mount has them."""

    def __init__(self, job_dataset_id: str, labels: Mapping[Key, int], scoring: str, options: ScorerOptions) -> None:
        self.labels = labels
        self._job_dataset_id = job_dataset_id
        self._keys = list(labels)
        self._index_of = {key: index for index, key in enumerate(self._keys)}
        self._name = scoring
        self._options = options
        self._scoring: Scoring | None = None

    def batches(self, batches: Sequence[TracedBatch]) -> list[events.Hint]:
        """The new scores of batches that were scored together, and the hub of each of them that has one."""
        apart = SCORINGS[self._name].ranks_within_batches
        groups = [[batch] for batch in batches] if apart else [batches]
        return [hint for group in groups for hint in self._scored(group)]

    def _scored(self, batches: Sequence[TracedBatch]) -> list[events.Hint]:
        if empty := next((batch for batch in batches if not batch.embeddings.size), None):
            raise _damaged("it has a batch of {} samples of {} dimensions".format(*empty.embeddings.shape))
        keys = np.concatenate([batch.inodes for batch in batches]).tolist()
        try:
            indices = [self._index_of[key] for key in keys]
        except KeyError as exc:
            raise _damaged(
                f"a batch of job dataset {self._job_dataset_id} has the file {exc}, which its list has not"
            ) from None
        dimension = int(batches[0].embeddings.shape[1])
        if self._scoring is None or not self._scoring.fits(dimension):
            labels = np.fromiter(self.labels.values(), np.int64, len(self.labels))
            self._scoring = SCORINGS[self._name](labels, dimension, self._options)
        given = [batch.losses for batch in batches if batch.losses is not None]
        try:
            embeddings = np.concatenate([batch.embeddings for batch in batches]).astype(np.float32)
            losses = np.concatenate(given).astype(np.float32) if given else None
            scored = self._scoring.batch(indices, embeddings, losses, len(batches))
        except ValueError as exc:
            raise _damaged(str(exc)) from exc
        found = [self._keys[index] for index in scored.ids.tolist()]
        hints: list[events.Hint] = [events.Scored(self._job_dataset_id, found, scored.scores.tolist())] if found else []
        numbers = np.repeat(np.arange(len(batches)), [len(batch.inodes) for batch in batches]).tolist()
        batch_of = dict(zip(indices, numbers, strict=True))
        hubs_of: dict[int, list[FoundHub]] = {}
        for hub in scored.hubs():
            hubs_of.setdefault(batch_of[hub.id], []).append(hub)
        # As the mount does, the batch with the best hub comes first.
        hints += [
            events.Candidates(self._job_dataset_id, _Hubs(self._job_dataset_id, self._keys, its))
            for its in hubs_of.values()
        ]
        return hints

    def new_epoch(self) -> None:
        if self._scoring is not None:
            self._scoring.new_epoch()

    def described(self) -> dict[str, str]:
        return {} if self._scoring is None else dict(self._scoring.described())


class _Hubs(Sequence[Hub]):
    """The hubs that a batch may have, the best first: which one it gets depends on the policy that is replayed.

    Arrays hold the neighbours of all of them, 8 bytes each: with 30 neighbours a sample takes 240 bytes.
    """

    def __init__(self, job_dataset_id: str, keys: Sequence[Key], found: Sequence[FoundHub]) -> None:
        self._job_dataset_id = job_dataset_id
        self._keys = keys
        self._ids = [hub.id for hub in found]
        self._ends = np.cumsum([len(hub.neighbours) for hub in found], dtype=np.int64)
        self._neighbours = np.concatenate([hub.neighbours for hub in found]).astype(np.int32)
        self._distances = np.concatenate([hub.distances for hub in found])

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, place: int) -> Hub:  # type: ignore[override]  # no one asks for a slice
        key = self._keys[self._ids[place]]
        its = slice(int(self._ends[place - 1]) if place else 0, int(self._ends[place]))
        neighbours = [self._keys[index] for index in self._neighbours[its].tolist()]
        return Hub(key, self._job_dataset_id, neighbours, self._distances[its].tolist())


def _damaged(reason: str) -> UsageError:
    return UsageError(f"the trace is damaged: {reason}: record another, or replay it without scoring again")


def chosen_settings(
    radii: str | None, neighbours: int | None, embeddings: Literal["unit", "raw"] | None = None
) -> list[ScorerOptions]:
    """The settings to score again with; none for the recorded scores. Raises UsageError if `radii` are no radii."""
    given = {"neighbours": neighbours, "embeddings": embeddings}
    options = ScorerOptions(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    if radii is None:
        return [options] if neighbours is not None or embeddings is not None else []
    try:
        settings = [replace(options, radius=radius_of(word.strip())) for word in radii.split(",")]
    except ValueError as exc:
        raise UsageError(str(exc)) from exc
    return list(dict.fromkeys(settings))


class HintSource:
    """The hints for the replays of one trace."""

    def __init__(self, trace: Trace, settings: Sequence[ScorerOptions], ratio: float | None) -> None:
        """`settings` are those to score again with; a `ratio` makes replays ignore the recorded ratios."""
        self._trace, self._settings, self._ratio = trace, settings, ratio
        self._recorded = trace.hints()
        self._rescored: dict[tuple[str, ScorerOptions], list[tuple[int, events.Hint]]] = {}
        self.scorings: list[dict[str, Any]] = []
        """A summary of each new scoring, as plain data."""

    def settings_for(self, policy: type[Policy]) -> Sequence[ScorerOptions | None]:
        """The settings to replay a policy with; None stands for the recorded hints."""
        if not self._settings or not policy.guided:
            return [None]
        return self._settings if depends_on_neighbours(policy.scoring) else self._settings[:1]

    def hints(self, policy: type[Policy], setting: ScorerOptions | None) -> list[tuple[int, events.Hint]]:
        """The hints for a policy, each with the number of the access before which it comes."""
        hints = self._recorded if setting is None else self._scored(policy.scoring, setting)
        if self._ratio is None:
            return hints
        return [(before, hint) for before, hint in hints if not isinstance(hint, events.Ratio)]

    def _scored(self, scoring: str, setting: ScorerOptions) -> list[tuple[int, events.Hint]]:
        if (scoring, setting) not in self._rescored:
            began = perf_counter()
            found = rescored(self._trace, scoring, setting)
            self._rescored[scoring, setting] = found.hints
            recorded, scored = (set(_scores(hints)) for hints in (self._recorded, found.hints))
            self.scorings.append(
                {
                    "scoring": scoring,
                    **self.described(scoring, setting),
                    "scores": len(scored),
                    "scores_as_recorded": len(scored & recorded),
                    "seconds": perf_counter() - began,
                    "job_datasets": found.described,
                }
            )
        return self._rescored[scoring, setting]

    @staticmethod
    def described(scoring: str, setting: ScorerOptions | None) -> dict[str, Any]:
        """A setting as plain data; the values are None if they make no difference to the scoring."""
        if setting is None or not depends_on_neighbours(scoring):
            return {"radius": None, "neighbours": None}
        radius = setting.radius if isinstance(setting.radius, str) else f"{setting.radius:.12g}"
        return {"radius": radius, "neighbours": setting.neighbours}


def _scores(hints: Sequence[tuple[int, events.Hint]]) -> Iterator[tuple[int, str, Key, float]]:
    """Each new score: the number of the access before which it came, the job dataset, the sample and the score."""
    for before, hint in hints:
        if isinstance(hint, events.Scored):
            yield from ((before, hint.job_dataset_id, *score) for score in zip(hint.keys, hint.scores, strict=True))


# The policy that knows the whole trace.
BOUND = "belady"


def chosen_policies(text: str) -> list[str]:
    """The policies that an option names, the bound last; raises UsageError if there is no such policy."""
    names = list(POLICIES) if text == "all" else [word.strip() for word in text.split(",")]
    for name in names:
        if name not in POLICIES:
            raise UsageError(f"there is no policy {name!r}: choose among all, {', '.join(POLICIES)}")
    return [*dict.fromkeys(name for name in names if name != BOUND), BOUND]


def chosen_capacities(text: str) -> list[Capacity]:
    """The capacities that an option names; raises UsageError if one cannot be read."""
    try:
        return [Capacity.parse(word.strip()) for word in text.split(",")]
    except ValueError as exc:
        raise UsageError(f"capacity: {exc}") from exc


def compare(
    trace: Trace,
    name: str,
    policies: list[str],
    capacities: list[Capacity],
    epoch_length: int | None,
    ratio: float | None = None,
    settings: Sequence[ScorerOptions] = (),
    plans: bool = False,
    nodes: int = 1,
    progress: Callable[[str], object] = lambda begins: None,
) -> dict[str, Any]:
    """Replay a trace with every policy at every capacity; the result is plain data, ready for JSON.

    `progress` is called with the name of each replay as it begins.
    With `plans`, those that were recorded overrule every policy but the bound, and so do the pending samples of
    jobs that exchange. Each of `nodes` has such a capacity; the bound is one cache with the room of all.
    """
    if plans and nodes > 1:
        raise UsageError("the plans of a trace are those of one mount: leave out --plans, or --nodes")
    if plans and not trace.has_plans:
        raise UsageError(f"the trace {name} holds no plans: record one of trainings that attach or plan")
    news = trace.rank_news() if plans else []
    accesses, hint_source = trace.accesses(), HintSource(trace, settings, ratio)
    if not len(accesses):
        raise UsageError(f"the trace {name} holds no accesses: record one with -o trace=FILE")
    epoch_length = min(epoch_length or accesses.distinct, len(accesses))
    results: list[dict[str, Any]] = []
    for capacity in capacities:
        capacity_bytes = capacity.budget_bytes(accesses.distinct_bytes)
        runs = [(policy, setting) for policy in policies for setting in hint_source.settings_for(POLICIES[policy])]
        for policy, setting in runs:
            progress(f"{policy} at {capacity}, {len(results)} of {len(runs) * len(capacities)} done")
            hints = hint_source.hints(POLICIES[policy], setting)
            began = perf_counter()
            known = () if policy == BOUND else news
            engine = partial(_engine, policy, accesses)
            if nodes > 1 and policy != BOUND:
                result = replay_on_nodes(nodes, engine, capacity_bytes, accesses, epoch_length, hints, ratio)
            else:
                result = replay(engine(capacity_bytes * nodes), accesses, epoch_length, hints, ratio=ratio, news=known)
            results.append(
                {
                    "policy": policy,
                    **hint_source.described(POLICIES[policy].scoring, setting),
                    "capacity": str(capacity),
                    "capacity_bytes": capacity_bytes,
                    "hit_ratio": result.hit_ratio,
                    "warm_hit_ratio": result.warm_hit_ratio,
                    "redirects": int(result.redirects.sum()),
                    "origin_bytes": int(result.origin_bytes.sum()),
                    "origin_bytes_per_sample": result.origin_bytes_per_sample,
                    "seconds": perf_counter() - began,
                    "epochs": _epochs(result),
                }
            )
    return {
        "trace": name,
        "accesses": len(accesses),
        "distinct": accesses.distinct,
        "distinct_bytes": accesses.distinct_bytes,
        "epoch_length": epoch_length,
        "plans": plans,
        "nodes": nodes,
        "served_ratio_when_recorded": trace.served_ratio() if trace.recorded else None,
        "accuracies_when_recorded": trace.accuracies(),
        "scorings": hint_source.scorings,
        "results": results,
    }


def _engine(policy: str, accesses: Accesses, capacity_bytes: int, homes: Homes | None = None) -> Engine:
    return Engine(policy_for(POLICIES[policy], accesses), capacity_bytes, homes=homes)


def _epochs(result: Replay) -> list[dict[str, Any]]:
    names = ("opens", "hits", "redirects", "origin_bytes", "coverage")
    rows = zip(*(getattr(result, name).tolist() for name in names), strict=True)
    return [dict(zip(names, row, strict=True)) for row in rows]


def columns(report: dict[str, Any]) -> tuple[str, ...]:
    """The headings of the table of a comparison; the first two are of words, the others of numbers."""
    policy = "policy, radius" if report["scorings"] else "policy"
    return "capacity", policy, "hits", "later hits", "substitutes", "per read", "fetched"


def policy_named(row: dict[str, Any]) -> str:
    """The policy of a row as it is shown; MIN bounds the policies that give each reader its own sample."""
    return f"{BOUND} (bound)" if row["policy"] == BOUND else str(row["policy"])


def rows(report: dict[str, Any]) -> list[tuple[tuple[str, ...], bool]]:
    """The lines of that table, and whether each is a capacity's last; the capacity is named in its first line alone."""
    found: list[tuple[tuple[str, ...], bool]] = []
    shown_capacity = None
    for row in report["results"]:
        is_bound = row["policy"] == BOUND
        cells = (
            row["capacity"] if row["capacity"] != shown_capacity else "",
            policy_named(row) + (f", {row['radius']}" if row["radius"] else ""),
            f"{row['hit_ratio']:.1%}",
            f"{row['warm_hit_ratio']:.1%}",
            f"{row['redirects']:,}",
            round_size(row["origin_bytes_per_sample"]),
            round_size(row["origin_bytes"]),
        )
        found.append((cells, is_bound))
        shown_capacity = row["capacity"]
    return found


def caption(report: dict[str, Any]) -> str:
    """The text below the table of a comparison."""
    coverage = [epoch["coverage"] for epoch in report["results"][0]["epochs"]]
    text = (
        f"{report['accesses']:,} accesses to {report['distinct']:,} samples, {report['distinct_bytes']:,} bytes in all;"
        f" {len(coverage)} epochs of {report['epoch_length']:,} accesses,"
        f" each seeing {sum(coverage) / len(coverage):.0%} of the samples on average."
    )
    if report["served_ratio_when_recorded"] is not None:
        text += f" When it was recorded, {report['served_ratio_when_recorded']:.1%} did not wait for the source."
    if report["plans"]:
        text += " Recorded plans, and the pending samples of jobs that exchange, overrule all policies but belady."
    if report["nodes"] > 1:
        text += (
            f" {report['nodes']} nodes with this capacity each take the accesses in turns; hits and bytes are those of"
            " all, and belady has the room of all."
        )
    text += " Later hits are those after epoch 1; fetched are the bytes read from the source."
    if any(row["redirects"] for row in report["results"]):
        text += (
            " Hits include substitutes, cached samples of the same class in place of uncached ones; belady has none, so"
            " a policy with substitutes may have more hits than belady."
        )
    return text + " belady is the optimum where all sizes are equal, and near it where they are not."


def lines_about_scorings(report: dict[str, Any]) -> list[str]:
    """One line for each job dataset that was scored again."""
    lines = []
    for scoring in report["scorings"]:
        for number, facts in scoring["job_datasets"].items():
            found = ", ".join(f"{fact} {value.partition('  ')[0]}" for fact, value in facts.items())
            radius = f", radius {scoring['radius']}" if scoring["radius"] else ""
            lines.append(f"Scored again ({scoring['scoring']}{radius}), job dataset {number}: {found}")
    return lines
