"""A profile: measurements of a mount and a loader, and the throughput by the law of the bottleneck.

What the last `spiderfs profile` of a mount has found is a record in the cache directory, for the mounts to come.

The encoded form is the original, which the loader decodes; the decoded form is a view; the augmented form is what the
loader gives, as it was kept. A sample that is in no form is read from the source as an original.
"""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from spiderfs.core.rooms import landing_of, landing_room
from spiderfs.errors import UsageError
from spiderfs.forms import partition
from spiderfs.forms.partition import Split
from spiderfs.views.recipe import NO_VIEW

# The splits that are shown beside the best one: the pure ones, and halves (the paper's figure 8).
SHOWN = (
    Split(1, 0, 0), Split(0, 1, 0), Split(0, 0, 1), Split(0.5, 0.5, 0), Split(0.5, 0, 0.5), Split(0, 0.5, 0.5),
)  # fmt: skip
NO_LIMIT = float("inf")


class Reads(NamedTuple):
    """How many files were read whole, their bytes, how long that took, and how many readers read at a time."""

    files: int
    bytes: int
    seconds: float
    readers: int = 1

    @property
    def per_s(self) -> float:
        return self.files / self.seconds

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds


class SourceSpeed(NamedTuple):
    """How long a single file takes, how many files at a time still bring more, and what these bring together."""

    latency_s: float
    readers: int
    bytes_per_s: float


class Cost(NamedTuple):
    """What one sample takes of a loader's worker, CPU time and waits, and of the mount and the training beside it."""

    cpu_s: float
    wait_s: float
    other_cpu_s: float


@dataclass(frozen=True)
class Form:
    """One form in the cache: bytes of a sample, reads of cached files, and what a loader takes for such a sample."""

    sample_bytes: float
    reads: Reads | None
    cost: Cost


@dataclass(frozen=True)
class Profile:
    """All that was measured, and for which training.

    `uses` is as in `bottleneck`, `planned` whether it publishes plans. It runs on `nodes` machines like this one, each
    with such a cache, loader and steps of its own, and all with one source. The network of each brings
    `network_bandwidth` bytes a second, and all exchange the gradients of a model of `model_bytes` after each step.
    """

    cache_bytes: float
    cores: int
    source: SourceSpeed
    samples: int
    workers: int
    batch: int
    step_s: float | None
    uncached: Cost
    encoded: Form
    augmented: Form
    keeping: Cost
    """What it takes to put a sample into the cache as the loader gives it, beside making it."""
    views: dict[str, Form] = field(default_factory=dict)
    planned: bool = False
    uses: float = 1.0
    nodes: int = 1
    network_bandwidth: float | None = None
    model_bytes: float = 0.0

    @property
    def making(self) -> Cost:
        """What it takes to make an augmented sample, and to keep it."""
        return Cost(*(one + other for one, other in zip(self.uncached, self.keeping, strict=True)))

    @property
    def device_rate(self) -> float:
        """Samples a second that the training's steps take on each node."""
        return self.batch / self.step_s if self.step_s else NO_LIMIT

    @property
    def preparing_rate(self) -> float:
        """Samples a second that the workers of a node make of cached originals."""
        return min(max(1, self.workers), self.cores) / self.encoded.cost.cpu_s

    @property
    def gradient_bytes(self) -> float:
        """What a ring-reduce moves over a node's network for a sample; the paper's C_nw is that of a batch."""
        return 2 * (self.nodes - 1) / self.nodes * self.model_bytes / self.batch

    def _cache_s(self, form: Form) -> float:
        """Seconds of a node's cache for a sample of this form; 0 without reads by as many readers as workers."""
        known = [of.reads for of in (self.encoded, *self.views.values()) if of.reads is not None]
        found = [reads for reads in known if reads.readers >= self.workers]
        if form.reads in found:
            return 1 / form.reads.per_s
        return form.sample_bytes / max(reads.bytes_per_s for reads in found) if found else 0.0

    def sizes(self, view: str | None) -> partition.FormSizes:
        decoded = self.views[view].sample_bytes if view is not None else NO_LIMIT
        return partition.FormSizes(self.encoded.sample_bytes, decoded, self.augmented.sample_bytes)

    def counts(self, split: Split, view: str | None) -> partition.Places[float]:
        """How many samples a node finds in each place: it draws from all of them, whatever the others have cached."""
        sizes = self.sizes(view)
        return partition.samples_held(
            split, self.cache_bytes, landing_bytes(self.cache_bytes, sizes), self.samples, sizes
        )

    def demands(self, view: str | None) -> partition.Places[partition.Demand]:
        """What a sample asks for in each place; with a plan no one waits for the source, which only has to keep up."""
        read_bytes, gradient_bytes = self.encoded.sample_bytes, self.gradient_bytes
        uncached = self._demand(self.uncached)._replace(
            storage_bytes=read_bytes, network_bytes=read_bytes + gradient_bytes
        )
        if self.planned:
            uncached = uncached._replace(wait_s=self.encoded.cost.wait_s)
        decoded = self.views[view] if view is not None else Form(read_bytes, None, self.uncached)

        def cached(form: Form) -> partition.Demand:
            return self._demand(form.cost)._replace(cache_s=self._cache_s(form), network_bytes=gradient_bytes)

        return partition.Places(cached(self.augmented), cached(decoded), cached(self.encoded), uncached)

    def _demand(self, cost: Cost) -> partition.Demand:
        # Without workers, the process that takes the steps makes the samples too, one after the other.
        step_s = 0.0 if self.workers or self.step_s is None else self.step_s / self.batch
        return _asked(cost._replace(wait_s=cost.wait_s + step_s))

    def capacities(self) -> partition.Capacities:
        return partition.Capacities(
            workers=self.nodes * max(1, self.workers),
            cores=self.nodes * self.cores,
            device_rate=self.nodes * self.device_rate if self.workers else NO_LIMIT,
            storage_bandwidth=self.source.bytes_per_s,
            caches=self.nodes,
            network_bandwidth=self.nodes * (self.network_bandwidth or NO_LIMIT),
        )

    def predicted(self, split: Split, view: str | None) -> partition.Prediction:
        """By the law of the bottleneck."""
        counts, keeping = self.counts(split, view), _asked(self.keeping)
        return partition.bottleneck(counts, self.demands(view), self.capacities(), self.uses, keeping)

    def best(self, view: str | None) -> Split:
        return partition.best_split(lambda split: self.predicted(split, view).samples_per_s)


def landing_bytes(cache_bytes: float, sizes: partition.FormSizes) -> int:
    """The bytes that a cache of `cache_bytes` leaves free for originals and views that come."""
    largest = max(size for size in sizes[:2] if size < NO_LIMIT)
    return landing_of(landing_room(int(cache_bytes)), int(largest), int(cache_bytes))


def _asked(cost: Cost) -> partition.Demand:
    return partition.Demand(cost.cpu_s, cost.wait_s, other_cpu_s=cost.other_cpu_s)


@dataclass(frozen=True)
class Record:
    """Samples of the training, mean bytes by view's name and NO_VIEW, and the profile; None if none was measured."""

    samples: int
    sample_bytes: dict[str, float]
    profile: Profile | None


def save_record(record: Record, path: Path) -> None:
    """Replace what was found before, but for the profile of a loader if none was measured now; raises UsageError."""
    before = load_record(path)
    profile = record.profile or (before.profile if before is not None else None)
    saved = {**asdict(record), "profile": None if profile is None else asdict(profile)}
    # A mount says itself where its cache is. Whoever runs the command for another user's mount writes nothing there.
    try:
        if path.parent.stat().st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        # A new file of a name that no one could foresee: where a link lies, its target would be overwritten.
        fd, new = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
        with os.fdopen(fd, "w") as file:
            file.write(json.dumps(saved) + "\n")
        os.rename(new, path)
    except OSError as exc:
        raise UsageError(
            f"{path} cannot be written ({exc.strerror}), so no mount can go by this profile: run it as the mount's user"
        ) from exc


def load_record(path: Path) -> Record | None:
    """The record that lies there; None if there is none that can be read."""
    try:
        saved = json.loads(path.read_bytes())
        profile = saved["profile"]
        sizes = {str(name): float(size) for name, size in saved["sample_bytes"].items()}
        samples = int(saved["samples"])
        if samples < 1 or NO_VIEW not in sizes or not all(0 < size < math.inf for size in sizes.values()):
            return None
        return Record(samples, sizes, None if profile is None else _profile(profile))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _profile(saved: dict[str, Any]) -> Profile:
    views = {name: _form(form) for name, form in saved["views"].items()}
    rest = {
        "source": SourceSpeed(*saved["source"]),
        "uncached": Cost(*saved["uncached"]),
        "encoded": _form(saved["encoded"]),
        "augmented": _form(saved["augmented"]),
        "keeping": Cost(*saved["keeping"]),
        "views": views,
    }
    return Profile(**{**saved, **rest})


def _form(saved: dict[str, Any]) -> Form:
    reads = saved["reads"]
    return Form(saved["sample_bytes"], None if reads is None else Reads(*reads), Cost(*saved["cost"]))
