"""What trainings teach the cache: the one place where their scores, hubs, epochs and pins reach policy and engine.

The daemon, `spiderfs simulate` and the benchmarks without a mount all teach through this class, so that they decide
alike. None of the methods of a guided policy changes who is a member. So here is written, once, what has to follow:
after a hub was found the engine places it, and after the ratio was set the engine settles. What the store has to do is
returned as `Changes`.

A **job** is a training with all its ranks, and a **course** is what one job learns about one list. Job and course are
known by strings of the caller's. What one job says changes nothing of another's, with two exceptions that the cache,
for there is only one, makes necessary:

- the worth of a sample follows from the scores of all courses (`worths.py`);
- the ratio is the largest of those that the jobs with scores ask for (`elastic.py`), unless the user has pinned it. A
  job that only plans has no use for either section.

While plans are followed and only late reads get stand-ins, readers seldom get one: only for a sample whose fetch has
not begun. Then hubs get no more than 2 %, for a hub takes the room of a sample whose next use is known. (With a fifth
of the samples cached, a tenth of that for hubs costs 7 % more bytes, and 2 % of it 1 %:
benchmarks/training/lookahead.py.)

`note` hears of everything that was taught, as the hints that a trace has. A replay that gives the same hints
between the same accesses takes the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spiderfs.core.engine import NOTHING, Changes, Engine, merged
from spiderfs.core.guided import Adjustable, Divided, Guided, HasHubs, HasPins, HasStandIns, WarmsUp
from spiderfs.core.hints import AtHand, Epoch, Hint, Hub, Labels, Pinning, Published, Ratio, Scored, WarmUp
from spiderfs.core.learning.elastic import Elastic, ElasticOptions
from spiderfs.core.learning.worths import Worth, Worths
from spiderfs.core.policy import Key
from spiderfs.errors import ConfigError

# The least ratio while plans are followed and only late reads get stand-ins.
PLANNED_RATIO = 0.98
# Jobs whose elastic states are kept, those that began last: a job that comes back goes on from there.
KEPT_JOBS = 64
# Pinned samples that are placed for each `Changes`, so that a caller can do other things between.
PLACED_AT_ONCE = 500
# Worths that are due (`worths.py`), told with scores, with ends of epochs and of courses, and with a read.
# Scores come once a batch. Of reads a thousand may come at once, and the event loop does nothing else meanwhile:
# telling a worth takes 10 to 20 us (benchmarks/engine/worths.py).
DUE_WITH_SCORES, DUE_WITH_READ = 1000, 8


@dataclass(frozen=True, slots=True)
class TeachingOptions:
    elastic: ElasticOptions = field(default_factory=ElasticOptions)
    epochs: int = 100
    """T of SpiderCache eq. 8 for a job that does not say how many epochs it has."""
    only_late: bool = False
    """Whether only late reads get stand-ins (`substitute_when=late`)."""


@dataclass(frozen=True, slots=True)
class JobRatio:
    """What one job asks for; see `elastic.py` for the names. `epochs_done` of `epochs` are over."""

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
    """`ratio` is None for a policy whose room is not divided; `jobs` are those that have courses now."""

    ratio: float | None
    pinned: float | None
    jobs: Sequence[JobRatio]


@dataclass(slots=True)
class _Job:
    elastic: Elastic
    epochs: int | None = None
    epochs_done: int = 0
    course_ids: dict[str, None] = field(default_factory=dict)


class Teaching:
    def __init__(
        self,
        engine: Engine,
        size_of: Callable[[Key], int | None],
        options: TeachingOptions | None = None,
        note: Callable[[Hint], None] = lambda hint: None,
        worths: Worths | None = None,
    ) -> None:
        """`size_of` a sample is its bytes if they are at hand, in the store or in landing, and None if they are not.

        `worths` is another rule for the worth of samples, which a benchmark compares with ours.
        """
        self._engine = engine
        self._size_of = size_of
        self._options = options or TeachingOptions()
        self._note = note
        self._worths = worths or Worths()
        self._jobs: dict[str, _Job] = {}
        self._pinned_ratio: float | None = None
        self._planned = False

    # -- jobs and courses

    def begin_job(self, job_id: str, epochs: int | None = None, epochs_done: int | None = None) -> Changes:
        """A job begins, or comes back: one with a known id goes on with its elastic state.

        `epochs` is how many the training will have in all, and `epochs_done` how many it has done before; None if that
        is not known.
        """
        job = self._job(job_id)
        if epochs is not None:
            job.epochs = epochs
        if epochs_done is not None:
            job.epochs_done = epochs_done
        return self._share()

    def begin(self, course_id: str, job_id: str, labels: Mapping[Key, int]) -> Changes:
        """A job declared a list, or declared it anew; scores that are known already are to be told by `scored`."""
        self._job(job_id).course_ids[course_id] = None
        self._note(Labels(course_id, labels))
        if isinstance(self._engine.policy, Guided):
            self._engine.policy.listed(course_id, labels)
        changes = self._share()
        if isinstance(self._engine.policy, Adjustable):
            self._note(Ratio(self._engine.policy.ratio))
        return changes

    def end(self, course_id: str, keys: Iterable[Key] = ()) -> Changes:
        """A course is over; `keys` are samples of no other course. May be called again, for others of its samples."""
        if isinstance(self._engine.policy, Guided):
            self._engine.policy.forget_course(course_id, keys)
        self._worths.forget(course_id)
        self._tell_due(DUE_WITH_SCORES)
        for job in self._jobs.values():
            job.course_ids.pop(course_id, None)
        return self._share()

    def policy_changed(self) -> Changes:
        """The engine has another policy: every course has to `begin` anew, with its scores for this policy."""
        self._worths.clear()
        return self._share()

    # -- what trainings learn

    def scored(self, course_id: str, keys: Sequence[Key], scores: Sequence[float]) -> None:
        """A course has new scores, one for each of these different samples; says nothing to an unguided policy."""
        policy = self._engine.policy
        if not isinstance(policy, Guided) or not keys:
            return
        self._note(Scored(course_id, tuple(keys), tuple(scores)))
        self._rank(self._worths.scored(course_id, keys, scores))
        self._tell_due(DUE_WITH_SCORES)
        for key, score in zip(keys, scores, strict=True):
            policy.scored_by(course_id, key, score)

    def is_hub(self, course_id: str, key: Key) -> bool:
        """Whether a sample is a hub of the course already: the hub of a batch is its best sample that is none yet."""
        policy = self._engine.policy
        return isinstance(policy, HasHubs) and policy.is_hub(course_id, key)

    def hub_found(self, hub: Hub) -> Changes:
        """The scorer found a hub: it enters the cache if its bytes are at hand."""
        policy = self._engine.policy
        if not isinstance(policy, HasHubs):
            return NOTHING
        size = self._at_hand(hub.key)
        self._note(hub)
        policy.hub_found(hub)
        return NOTHING if size is None else self._engine.place(hub.key, size)

    def epoch_ended(
        self, job_id: str, epoch: int, sigmas: Mapping[str, float], accuracy: float | None = None
    ) -> Changes:
        """A job ended its epoch `epoch`, counted from 0; other jobs go on.

        `sigmas` has the standard deviation of the scores of each of its courses that has scores, and `accuracy` is a
        share from 0 to 1, if it is known.
        """
        job = self._job(job_id)
        for course_id in job.course_ids:
            self._note(Epoch(course_id, accuracy))
            self._worths.epoch_ended(course_id)
            self._tell_due(DUE_WITH_SCORES)
            if isinstance(self._engine.policy, Guided):
                self._engine.policy.new_epoch(course_id)
        if sigmas:
            job.elastic.observe_sigma(sum(sigmas.values()) / len(sigmas))
        if accuracy is not None:
            job.elastic.observe_accuracy(accuracy)
        job.epochs_done = epoch + 1
        return self._share()

    def pin(self, course_id: str, keys: Collection[Key]) -> Iterator[Changes]:
        """Pin these samples of a course, in place of those that were pinned; they are placed a few at a time."""
        policy = self._engine.policy
        if not isinstance(policy, HasPins):
            return iter(())
        changed = list(policy.pin(course_id, keys))
        if changed:
            for key in changed:
                self._at_hand(key)
            self._note(Pinning(course_id, tuple(keys)))
        return self._place_in_turn(changed)

    @property
    def pinned(self) -> Mapping[str, Collection[Key]]:
        """The samples of each course that the policy has pinned."""
        policy = self._engine.policy
        return policy.pinned if isinstance(policy, HasPins) else {}

    def warm_up(self, course_id: str, active: bool) -> None:
        """A job warms up, or does so no more: for a policy that then evicts nothing (`guided.WarmsUp`)."""
        policy = self._engine.policy
        if isinstance(policy, WarmsUp):
            self._note(WarmUp(course_id, active))
            policy.warm_up(course_id, active)

    # -- stand-ins

    @property
    def has_stand_ins(self) -> bool:
        """Whether readers may be given stand-ins under this policy."""
        return isinstance(self._engine.policy, HasStandIns)

    def stand_in(self, course_id: str, key: Key) -> Key | None:
        """The member whose bytes a reader of this course may get for a sample; None if it gets the sample's own."""
        policy = self._engine.policy
        return policy.stand_in(course_id, key) if isinstance(policy, HasStandIns) else None

    def served(self, course_id: str, wanted: Key, given: Key) -> None:
        """A reader of this course asked for a sample and got these bytes; to be called before `Engine.opened`."""
        self._tell_due(DUE_WITH_READ)
        policy = self._engine.policy
        if wanted != given:
            if isinstance(policy, HasStandIns):
                policy.stood_in(course_id, given, wanted)
        elif isinstance(policy, Guided):
            policy.read_by(course_id, wanted)

    def redirects_changed(self) -> list[tuple[str, Key, Key | None]]:
        """All redirects that may have changed since the last call: course, sample, stand-in (None if it has none)."""
        policy = self._engine.policy
        if not isinstance(policy, HasStandIns):
            return []
        self._note(Published())
        return policy.redirects_changed()

    def forget_told(self) -> None:
        """Make the next `redirects_changed` return every redirect, as if it had never returned any."""
        policy = self._engine.policy
        if isinstance(policy, HasStandIns):
            policy.forget_told()

    # -- the ratio

    def pin_ratio(self, ratio: float | None) -> Changes:
        """Fix the ratio, or let the jobs decide it again (None); raises ConfigError where that cannot be done."""
        policy = self._engine.policy
        if ratio is not None:
            if not isinstance(policy, Adjustable):
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

    def change(self, options: TeachingOptions) -> None:
        """Take over other options; the ratio follows at the end of the next epoch."""
        self._options = options
        for job in self._jobs.values():
            job.elastic.options = options.elastic

    def status(self) -> RatioStatus:
        policy = self._engine.policy
        jobs = [
            JobRatio(
                job_id,
                self._ratio_of(job),
                job.elastic.sigma,
                job.elastic.beta,
                job.elastic.delta,
                job.elastic.u,
                job.epochs_done,
                self._epochs_of(job),
            )
            for job_id, job in self._jobs.items()
            if job.course_ids
        ]
        return RatioStatus(policy.ratio if isinstance(policy, Divided) else None, self._pinned_ratio, jobs)

    # -- over a remount

    def state(self) -> dict[str, Any]:
        """The elastic state of the jobs that began last, in types that msgpack can carry."""
        jobs = [[job_id, job.epochs, job.epochs_done, job.elastic.state()] for job_id, job in self._jobs.items()]
        return {"pinned": self._pinned_ratio, "jobs": jobs}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned; an empty state begins anew."""
        self._pinned_ratio = state.get("pinned")
        self._jobs.clear()
        for job_id, epochs, epochs_done, elastic in state.get("jobs", ()):
            job = self._job(job_id)
            job.epochs, job.epochs_done = epochs, epochs_done
            job.elastic.restore(elastic)

    # -- inside

    def _job(self, job_id: str) -> _Job:
        job = self._jobs.get(job_id)
        if job is None:
            over = [other for other, known in self._jobs.items() if not known.course_ids]
            for other in over[: max(0, len(self._jobs) + 1 - KEPT_JOBS)]:
                del self._jobs[other]
            job = self._jobs[job_id] = _Job(Elastic(self._options.elastic))
        return job

    def _rank(self, worths: Iterable[Worth]) -> None:
        for key, worth in worths:
            self._engine.scored(key, worth)

    def _tell_due(self, count: int) -> None:
        """Called at the same places of a replay as of the mount, so that both have told the same worths at any read."""
        if isinstance(self._engine.policy, Guided):
            self._rank(self._worths.due(count))

    def _at_hand(self, key: Key) -> int | None:
        """The bytes of a sample that is to be placed, if they are at hand; a replay hears of them."""
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
        if ratio is None or not isinstance(policy, Adjustable) or ratio == policy.ratio:
            return NOTHING
        self._note(Ratio(ratio))
        policy.set_ratio(ratio)
        return self._engine.settle()

    def _wanted_ratio(self) -> float | None:
        """None if nobody wants a certain ratio."""
        if self._pinned_ratio is not None:
            return self._pinned_ratio
        running = [job for job in self._jobs.values() if job.course_ids]
        scored = set(self._worths.course_ids)
        taught = [job for job in running if not scored.isdisjoint(job.course_ids)]
        ratios = [self._ratio_of(job) for job in taught or running]
        if ratios and self._options.only_late and self._planned:
            ratios.append(PLANNED_RATIO)
        return max(ratios, default=None)

    def _ratio_of(self, job: _Job) -> float:
        return job.elastic.ratio(job.epochs_done / self._epochs_of(job))

    def _epochs_of(self, job: _Job) -> int:
        return job.epochs or self._options.epochs
