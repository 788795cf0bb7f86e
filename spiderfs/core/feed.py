"""The policy feed: the one place where scores, hubs, epochs and pins of trainings reach policy and engine.

The daemon, `spiderfs simulate` and the benchmarks without a mount use this class, so they decide alike. No method of a
guided policy changes who is a member, so what has to follow is written here: the engine places a hub that was found,
and settles after the ratio was set. `Changes` are for the store. `note` is given all that the cache learns, as the
hints of a trace; a replay with the same hints between the same accesses takes the same decisions.

A **job** is a training with all its ranks, a **job dataset** what one job learns about one list; strings of the
caller's name both. One job changes nothing of another's, but for two things that the one cache makes necessary: the
worth of a sample follows from the scores of all job datasets (`Worths`), and the ratio is the largest that the jobs
with scores ask for (`Elastic`), unless the user has pinned it. A job that only plans has no use for either section.

While plans are followed and only late reads get substitutes, hubs get no more than 2 %: readers seldom get one, and a
hub takes the room of a sample whose next use is known. (With a fifth of the samples cached, a tenth of that for hubs
costs 7 % more bytes, and 2 % of it 1 %: benchmarks/training/lookahead.py.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spiderfs.core.engine import NOTHING, Changes, Engine, merged
from spiderfs.core.events import AtHand, Epoch, Hint, Labels, Pinning, Published, Ratio, Scored, WarmUp
from spiderfs.core.policy import Hub, Key
from spiderfs.errors import ConfigError

# The most quantiles of a table: between two of them a rank is off by a thousandth at most.
QUANTILES = 1024

Worth = tuple[Key, float]
"""A sample and its new worth, a positive number."""


class Worths:
    """The scores of all job datasets, as one number for each sample, by which the cache ranks: its **worth**.

    That is its score, unchanged, while one job dataset has scores. Of several it is the largest of the sample's
    **normalised ranks**: the share of a job dataset's samples that score less, plus half of those that score the same,
    between 0 and 1. So what one job dataset needs most is kept, and larger numbers win nothing. Ranks are read from a
    table of quantiles, which is renewed when the job dataset ends an epoch, and when it has scored twice as many
    samples as when the table was made.

    Each method returns worths that have changed, among others that have not. After a renewal, the first scores of a
    second job dataset, or the end of one, more change: ranking by a million takes seconds, so these are **due**, and
    the caller takes some at a time (`due`). A worth is computed when it is taken, so it undoes nothing that was passed
    on later. Until none is due, some samples have their old worth, perhaps in another unit. That decides which samples
    are kept, never which bytes a reader gets, and some are taken at each read, so few samples enter or leave at a wrong
    place.
    """

    def __init__(self) -> None:
        # Only job datasets that have scores.
        self._job_datasets: dict[str, _Scores] = {}
        # Each sample once; the last one is passed on first.
        self._due: list[Key] = []

    @property
    def job_dataset_ids(self) -> Sequence[str]:
        """The job datasets that have scores."""
        return list(self._job_datasets)

    def scored(self, job_dataset_id: str, keys: Sequence[Key], scores: Sequence[float]) -> Iterable[Worth]:
        """A job dataset has new scores, one for each key; each must be positive, and keys may not repeat."""
        if not keys:
            return ()
        is_new = job_dataset_id not in self._job_datasets
        job_dataset = self._job_datasets.setdefault(job_dataset_id, _Scores())
        job_dataset.of.update(zip(keys, scores, strict=True))
        if len(self._job_datasets) == 1:
            return zip(keys, scores, strict=True)
        if is_new:
            for each in self._job_datasets.values():
                if not each.ranked or len(each.of) >= 2 * each.ranked:
                    each.renew()
                    self._now_due(each.of)
        elif len(job_dataset.of) >= 2 * job_dataset.ranked:
            job_dataset.renew()
            self._now_due(job_dataset.of)
        return self._worths(keys)

    def epoch_ended(self, job_dataset_id: str) -> None:
        """The job of this job dataset has ended an epoch."""
        job_dataset = self._job_datasets.get(job_dataset_id)
        if job_dataset is not None and len(self._job_datasets) > 1:
            job_dataset.renew()
            self._now_due(job_dataset.of)

    def forget(self, job_dataset_id: str) -> None:
        """A job dataset is over: worths are due for those of its samples that another job dataset has scored."""
        gone = self._job_datasets.pop(job_dataset_id, None)
        if gone is None:
            return
        if not self._job_datasets:
            self._due.clear()
        elif len(self._job_datasets) == 1:
            (left,) = self._job_datasets.values()
            left.ranked = 0
            self._now_due(left.of)
        else:
            self._now_due(gone.of)

    def due(self, count: int) -> Iterable[Worth]:
        """The worths of the next `count` samples that are due, or of fewer: no one may have a score of some."""
        if not self._due:
            return ()
        some = self._due[-count:]
        del self._due[-count:]
        known = [key for key in some if any(key in job_dataset.of for job_dataset in self._job_datasets.values())]
        if len(self._job_datasets) == 1:
            (alone,) = self._job_datasets.values()
            return [(key, alone.of[key]) for key in known]
        return self._worths(known)

    def clear(self) -> None:
        """Forget all scores: the next ones are in another unit."""
        self._job_datasets.clear()
        self._due.clear()

    def _now_due(self, keys: Mapping[Key, object]) -> None:
        """These samples are due beside those that are due already, which come first."""
        self._due = [*keys, *(key for key in self._due if key not in keys)]

    def _worths(self, keys: Sequence[Key]) -> Iterable[Worth]:
        """The largest rank of each of these samples; some job dataset must have scored each."""
        worths = np.zeros(len(keys))
        for job_dataset in self._job_datasets.values():
            worths = np.maximum(worths, job_dataset.ranks(keys))
        return zip(keys, worths.tolist(), strict=True)


class _Scores:
    """The scores of one job dataset, and the table by which they become ranks."""

    def __init__(self) -> None:
        self.of: dict[Key, float] = {}
        self.ranked = 0
        """How many samples had scores when the table was made; 0 if there is no table."""
        self._quantiles: NDArray[np.float64] = np.empty(0)
        self._ranks: NDArray[np.float64] = np.empty(0)

    def renew(self) -> None:
        """Make the table again from the scores; there must be some."""
        count = len(self.of)
        values, times = np.unique(np.fromiter(self.of.values(), np.float64, count), return_counts=True)
        ranks = (np.cumsum(times) - times / 2) / count
        if len(values) > QUANTILES:
            chosen = np.linspace(0, len(values) - 1, QUANTILES).astype(np.int64)
            values, ranks = values[chosen], ranks[chosen]
        self._quantiles, self._ranks, self.ranked = values, ranks, count

    def ranks(self, keys: Sequence[Key]) -> NDArray[np.float64]:
        """The normalised rank of each key, 0 where this job dataset has no score; lower for a lower score, or equal."""
        scores = np.array([self.of.get(key, 0.0) for key in keys], np.float64)
        return np.where(scores > 0, np.interp(scores, self._quantiles, self._ranks), 0.0)


# Accuracies that are remembered: Delta needs the last few, and smoothing needs some before them.
REMEMBERED = 64


# m of eq. 6, in epochs; how many observations of sigma the line is fitted through; and the polynomials that smooth.
GROWTH_WINDOW, SLOPE_WINDOW, SMOOTHING_WINDOW, SMOOTHING_ORDER = 5, 5, 5, 2
HALF_GROWTH = 0.01
"""gamma of eq. 7: the growth of accuracy per epoch at which u is 1/2. The paper does not give it."""


@dataclass(frozen=True, slots=True)
class ElasticOptions:
    """Shares from 0 to 1: r_start and r_end of eq. 8, the ratio when the training begins, and when it ends."""

    start: float = 0.9
    end: float = 0.8


class Elastic:
    """The ratio that one job asks for, from its sigma and its accuracy after each epoch (SpiderCache 4.3, eq. 5 to 8).

    Sigma is the standard deviation of the scores. It rises while the training sorts the samples out, and falls when it
    converges. Then the ratio goes from `start` to `end`, the more slowly, the faster the accuracy (a share from 0 to 1)
    still grows.

    The paper leaves some things open. Here beta stays 1 once it was 1. The slope of sigma is that of a line through
    several observations, because a single step is noise. u lies between 0 and 1 whatever the accuracy does. With less
    than two accuracies u is 1, as if the accuracy grew fast: lowering the ratio too early costs accuracy, but lowering
    it too late costs only hits.
    """

    def __init__(self, options: ElasticOptions | None = None) -> None:
        self.options = options or ElasticOptions()
        self._sigmas: deque[float] = deque(maxlen=SLOPE_WINDOW)
        self._accuracies: deque[float] = deque(maxlen=REMEMBERED)
        self._latched = False

    def observe_sigma(self, sigma: float) -> None:
        """Note sigma, the standard deviation of the scores; to be called once per epoch."""
        self._sigmas.append(sigma)
        if len(self._sigmas) == SLOPE_WINDOW:
            # Of the least-squares line through equally spaced values only the sign of its slope counts.
            times = np.arange(SLOPE_WINDOW) - (SLOPE_WINDOW - 1) / 2
            self._latched |= bool(times @ np.asarray(self._sigmas) < 0)

    def observe_accuracy(self, accuracy: float) -> None:
        """Note the accuracy at the end of an epoch."""
        self._accuracies.append(accuracy)

    @property
    def sigma(self) -> float:
        """The sigma that was observed last; 0 if none was."""
        return self._sigmas[-1] if self._sigmas else 0.0

    @property
    def beta(self) -> int:
        """1 since sigma first fell, and 0 before (eq. 5)."""
        return int(self._latched)

    @property
    def delta(self) -> float:
        """The mean growth of the smoothed accuracy per epoch, over the last m epochs, or over all if fewer (eq. 6)."""
        steps = np.diff(_smoothed(list(self._accuracies))[-GROWTH_WINDOW - 1 :])
        return float(steps.mean()) if len(steps) else 0.0

    @property
    def u(self) -> float:
        """Delta / (gamma + Delta), where a negative Delta counts as 0 (eq. 7)."""
        if len(self._accuracies) < 2:
            return 1.0
        delta = max(0.0, self.delta)
        return delta / (HALF_GROWTH + delta)

    def ratio(self, progress: float) -> float:
        """The ratio when the share `progress` (t/T of eq. 8) of the training is done."""
        start, end = self.options.start, self.options.end
        return float(start - self.beta * (start - end) * min(1.0, max(0.0, progress)) ** (1 + self.u))

    def state(self) -> dict[str, Any]:
        return {"sigmas": [*self._sigmas], "accuracies": [*self._accuracies], "latched": self._latched}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned; an empty state begins again."""
        self._sigmas = deque(state.get("sigmas", ()), SLOPE_WINDOW)
        self._accuracies = deque(state.get("accuracies", ()), REMEMBERED)
        self._latched = bool(state.get("latched", False))


def _smoothed(series: Sequence[float]) -> NDArray[np.float64]:
    """The series with each value that of a polynomial fitted to its window (Savitzky and Golay, 1964).

    The values at each end come from the polynomial of the first or last full window. If the series is shorter than the
    window, one polynomial is fitted to all of it; with no more values than its order, it is returned unchanged.
    """
    values = np.asarray(series, np.float64)
    window = min(SMOOTHING_WINDOW, len(values))
    if window <= SMOOTHING_ORDER:
        return values
    powers = np.vander(np.arange(window), SMOOTHING_ORDER + 1)
    # This matrix turns the values in a window into the values of the fitted polynomial at the same points.
    fit = powers @ np.linalg.pinv(powers)
    fitted = np.lib.stride_tricks.sliding_window_view(values, window) @ fit.T
    middle = window // 2
    return np.concatenate([fitted[0, :middle], fitted[:, middle], fitted[-1, middle + 1 :]])


# The least ratio while plans are followed and only late reads get substitutes.
PLANNED_RATIO = 0.98
# Jobs whose elastic states are kept, those that began last: a job that comes back goes on from there.
KEPT_JOBS = 64
# Pinned samples that are placed for each `Changes`, so that a caller can do other things between.
PLACED_AT_ONCE = 500
# Worths that are due (`Worths`), passed on with scores, with ends of epochs and of job datasets, and with a read.
# Scores come once a batch. Of reads a thousand may come at once, and the event loop does nothing else meanwhile:
# passing one on takes 10 to 20 us.
DUE_WITH_SCORES, DUE_WITH_READ = 1000, 8


@dataclass(frozen=True, slots=True)
class PolicyFeedOptions:
    elastic: ElasticOptions = field(default_factory=ElasticOptions)
    epochs: int = 100
    """T of SpiderCache eq. 8 for a job that does not say how many epochs it has."""
    only_late: bool = False
    """Whether only late reads get substitutes (`substitute_when=late`)."""


@dataclass(frozen=True, slots=True)
class JobRatio:
    """What one job asks for; see `ElasticOptions` for the names. `epochs_done` of `epochs` are over."""

    job_id: str
    ratio: float
    sigma: float
    beta: int
    delta: float
    u: float
    epochs_done: int
    epochs: int


@dataclass(frozen=True, slots=True)
class RatioStatus:
    """`ratio` is None for a policy whose room is not divided; `jobs` are those that have job datasets now."""

    ratio: float | None
    pinned: float | None
    jobs: Sequence[JobRatio]


@dataclass(slots=True)
class _JobState:
    elastic: Elastic
    epochs: int | None = None
    epochs_done: int = 0
    job_dataset_ids: dict[str, None] = field(default_factory=dict)


def _unnoted(hint: Hint) -> None:
    """Where no trace is written. A lambda could not be pickled with the feed."""


class PolicyFeed:
    def __init__(
        self,
        engine: Engine,
        size_of: Callable[[Key], int | None],
        options: PolicyFeedOptions | None = None,
        note: Callable[[Hint], object] = _unnoted,
    ) -> None:
        """`size_of` a sample is its bytes if they are at hand, in the store or in landing, and None if they are not."""
        self._engine = engine
        self._size_of = size_of
        self._options = options or PolicyFeedOptions()
        self._note = note
        self._worths = Worths()
        self._jobs: dict[str, _JobState] = {}
        self._pinned_ratio: float | None = None
        self._planned = False

    # -- jobs and job datasets

    def begin_job(self, job_id: str, epochs: int | None = None, epochs_done: int | None = None) -> Changes:
        """A job begins, or comes back to its elastic state; `epochs` in all, and `epochs_done`, None if not known."""
        job = self._job(job_id)
        if epochs is not None:
            job.epochs = epochs
        if epochs_done is not None:
            job.epochs_done = epochs_done
        return self._share()

    def begin(self, job_dataset_id: str, job_id: str, labels: Mapping[Key, int]) -> Changes:
        """A job declared a list, or declared it again; scores that are known already are to be passed by `scored`."""
        self._job(job_id).job_dataset_ids[job_dataset_id] = None
        self._note(Labels(job_dataset_id, labels))
        self._engine.policy.listed(job_dataset_id, labels)
        changes = self._share()
        ratio = self._engine.policy.ratio
        if self._engine.policy.adjustable and ratio is not None:
            self._note(Ratio(ratio))
        return changes

    def end(self, job_dataset_id: str, keys: Iterable[Key] = ()) -> Changes:
        """A job dataset is over; `keys` are samples of no other job dataset. May be called again, for others of its
        samples."""
        self._engine.policy.forget_job_dataset(job_dataset_id, keys)
        self._worths.forget(job_dataset_id)
        self._rank_due(DUE_WITH_SCORES)
        for job in self._jobs.values():
            job.job_dataset_ids.pop(job_dataset_id, None)
        return self._share()

    def policy_changed(self) -> Changes:
        """The engine has another policy: every job dataset has to `begin` again, with its scores for this policy."""
        self._worths.clear()
        return self._share()

    # -- what trainings learn

    def scored(self, job_dataset_id: str, keys: Sequence[Key], scores: Sequence[float]) -> None:
        """A job dataset has new scores, one for each of these different samples; says nothing to an unguided policy."""
        policy = self._engine.policy
        if not policy.guided or not keys:
            return
        self._note(Scored(job_dataset_id, tuple(keys), tuple(scores)))
        self._rank(self._worths.scored(job_dataset_id, keys, scores))
        self._rank_due(DUE_WITH_SCORES)
        for key, score in zip(keys, scores, strict=True):
            policy.scored_by(job_dataset_id, key, score)

    def is_hub(self, job_dataset_id: str, key: Key) -> bool:
        """Whether a sample is a hub of the job dataset already: the hub of a batch is its best sample that is none
        yet."""
        return self._engine.policy.is_hub(job_dataset_id, key)

    def hub_found(self, hub: Hub) -> Changes:
        """The scorer found a hub: it enters the cache if its bytes are at hand."""
        policy = self._engine.policy
        if not policy.has_hubs:
            return NOTHING
        size = self._at_hand(hub.key)
        self._note(hub)
        policy.hub_found(hub)
        return NOTHING if size is None else self._engine.place(hub.key, size)

    def epoch_ended(
        self, job_id: str, epoch: int, sigmas: Mapping[str, float], accuracy: float | None = None
    ) -> Changes:
        """A job ended its epoch `epoch`, counted from 0; other jobs go on.

        `sigmas` has the standard deviation of the scores of each of its job datasets that has scores, and `accuracy` is
        a share from 0 to 1, if it is known.
        """
        job = self._job(job_id)
        for job_dataset_id in job.job_dataset_ids:
            self._note(Epoch(job_dataset_id, accuracy))
            self._worths.epoch_ended(job_dataset_id)
            self._rank_due(DUE_WITH_SCORES)
            self._engine.policy.new_epoch(job_dataset_id)
        if sigmas:
            job.elastic.observe_sigma(sum(sigmas.values()) / len(sigmas))
        if accuracy is not None:
            job.elastic.observe_accuracy(accuracy)
        job.epochs_done = epoch + 1
        return self._share()

    def pin(self, job_dataset_id: str, keys: Collection[Key]) -> Iterator[Changes]:
        """Pin these samples of a job dataset, in place of those that were pinned; they are placed a few at a time."""
        changed = list(self._engine.policy.pin(job_dataset_id, keys))
        if changed:
            for key in changed:
                self._at_hand(key)
            self._note(Pinning(job_dataset_id, tuple(keys)))
        return self._place_in_turn(changed)

    @property
    def pinned(self) -> Mapping[str, Collection[Key]]:
        """The samples of each job dataset that the policy has pinned."""
        return self._engine.policy.pinned

    def warm_up(self, job_dataset_id: str, active: bool) -> None:
        """A job warms up, or does so no more: for a policy that then evicts nothing."""
        policy = self._engine.policy
        if policy.guided:
            self._note(WarmUp(job_dataset_id, active))
            policy.warm_up(job_dataset_id, active)

    # -- substitutes

    @property
    def has_substitutes(self) -> bool:
        """Whether readers may be given substitutes under this policy."""
        return self._engine.policy.has_substitutes

    def substitute(self, job_dataset_id: str, key: Key) -> Key | None:
        """The member whose bytes a reader of this job dataset may get for a sample; None if it gets the sample's
        own."""
        return self._engine.policy.substitute_for(job_dataset_id, key)

    def served(self, job_dataset_id: str, wanted: Key, given: Key) -> None:
        """A reader of this job dataset asked for a sample and got these bytes; to be called before `Engine.opened`."""
        self._rank_due(DUE_WITH_READ)
        policy = self._engine.policy
        if wanted != given:
            policy.substituted(job_dataset_id, given, wanted)
        else:
            policy.read_by(job_dataset_id, wanted)

    def redirects_changed(self) -> list[tuple[str, Key, Key | None]]:
        """All redirects that may have changed since the last call: job dataset, sample, substitute (None if it has
        none)."""
        policy = self._engine.policy
        if not policy.has_substitutes:
            return []
        self._note(Published())
        return policy.redirects_changed()

    def forget_published(self) -> None:
        """Make the next `redirects_changed` return every redirect, as if it had never returned any."""
        self._engine.policy.forget_published()

    # -- the ratio

    def pin_ratio(self, ratio: float | None) -> Changes:
        """Fix the ratio, or let the jobs decide it again (None); raises ConfigError where that cannot be done."""
        policy = self._engine.policy
        if ratio is not None:
            if not policy.adjustable:
                raise ConfigError(f"ratio: policy={policy.name} has no ratio that can be set; choose policy=spider")
            if not 0 <= ratio <= 1:
                raise ConfigError(f"ratio: {ratio:g} is no share: write a number from 0 to 1, or auto")
        self._pinned_ratio = ratio
        return self._share()

    def schedule_changed(self) -> Changes:
        """A plan may be followed now where none was before, or the other way round; cheap if nothing has changed."""
        if self._engine.schedule.active == self._planned:
            return NOTHING
        return self._share()

    def change(self, options: PolicyFeedOptions) -> None:
        """Take over other options; the ratio follows at the end of the next epoch."""
        self._options = options
        for job in self._jobs.values():
            job.elastic.options = options.elastic

    def status(self) -> RatioStatus:
        policy = self._engine.policy
        jobs = []
        for job_id, job in self._jobs.items():
            if job.job_dataset_ids:
                found = job.elastic.sigma, job.elastic.beta, job.elastic.delta, job.elastic.u
                jobs.append(JobRatio(job_id, self._ratio_of(job), *found, job.epochs_done, self._epochs_of(job)))
        return RatioStatus(policy.ratio, self._pinned_ratio, jobs)

    # -- over a remount

    def state(self) -> dict[str, Any]:
        """The elastic state of the jobs that began last, in types that msgpack can carry."""
        jobs = [[job_id, job.epochs, job.epochs_done, job.elastic.state()] for job_id, job in self._jobs.items()]
        return {"pinned": self._pinned_ratio, "jobs": jobs}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned; an empty state begins again."""
        self._pinned_ratio = state.get("pinned")
        self._jobs.clear()
        for job_id, epochs, epochs_done, elastic in state.get("jobs", ()):
            job = self._job(job_id)
            job.epochs, job.epochs_done = epochs, epochs_done
            job.elastic.restore(elastic)

    # -- inside

    def _job(self, job_id: str) -> _JobState:
        job = self._jobs.get(job_id)
        if job is None:
            over = [other for other, known in self._jobs.items() if not known.job_dataset_ids]
            for other in over[: max(0, len(self._jobs) + 1 - KEPT_JOBS)]:
                del self._jobs[other]
            job = self._jobs[job_id] = _JobState(Elastic(self._options.elastic))
        return job

    def _rank(self, worths: Iterable[Worth]) -> None:
        for key, worth in worths:
            self._engine.scored(key, worth)

    def _rank_due(self, count: int) -> None:
        """Called at the same places of a replay as of the mount, so that both have ranked by the same worths at any
        read."""
        if self._engine.policy.guided:
            self._rank(self._worths.due(count))

    def _at_hand(self, key: Key) -> int | None:
        """The bytes of a sample that is to be placed, if they are at hand, which the trace records."""
        size = self._size_of(key)
        if size is not None:
            self._note(AtHand(key, size))
        return size

    def _place_in_turn(self, keys: Sequence[Key]) -> Iterator[Changes]:
        """Have the engine put these samples where the policy wants them, as far as their bytes are at hand by then."""
        for first in range(0, len(keys), PLACED_AT_ONCE):
            sizes = ((key, self._size_of(key)) for key in keys[first : first + PLACED_AT_ONCE])
            yield merged(self._engine.place(key, size) for key, size in sizes if size is not None)

    def _share(self) -> Changes:
        """Share the room as the running jobs, the plans and the user want it now."""
        policy = self._engine.policy
        self._planned = self._engine.schedule.active
        ratio = self._wanted_ratio()
        if ratio is None or not policy.adjustable or ratio == policy.ratio:
            return NOTHING
        self._note(Ratio(ratio))
        policy.set_ratio(ratio)
        return self._engine.settle()

    def _wanted_ratio(self) -> float | None:
        """None if no one wants a certain ratio."""
        if self._pinned_ratio is not None:
            return self._pinned_ratio
        running = [job for job in self._jobs.values() if job.job_dataset_ids]
        scored = set(self._worths.job_dataset_ids)
        learned = [job for job in running if not scored.isdisjoint(job.job_dataset_ids)]
        ratios = [self._ratio_of(job) for job in learned or running]
        if ratios and self._options.only_late and self._planned:
            ratios.append(PLANNED_RATIO)
        return max(ratios, default=None)

    def _ratio_of(self, job: _JobState) -> float:
        return job.elastic.ratio(job.epochs_done / self._epochs_of(job))

    def _epochs_of(self, job: _JobState) -> int:
        return job.epochs or self._options.epochs
