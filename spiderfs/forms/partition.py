"""In which form a cache should keep its samples: the law of the bottleneck of a data pipeline.

A sample may be kept **encoded** (E, the original), **decoded** (D, a view or a decoded form) or **augmented** (A, what
a loader stored of it); what is kept in no form comes from **storage** (S). A `Split` says which share of the cache each
form has. `bottleneck` says how many samples a second a training gets then: the minimum over all resources of what a
resource can do, divided by what a sample is expected to ask of it. A loader's worker is such a resource, whose CPU time
and waits add up, because it prepares one sample after the other. And an augmented sample asks for more than its use:
after `uses` uses it is made again, from storage, and kept.

The names and terms are those of Seneca's paper ("Preparation Meets Opportunity", section 5.1), whose own prediction is
a mean over the four places (equation 9, `benchmarks/training/equation_9.py`). The paper's cache is on other machines.
Here each node has its own, so its network carries what it reads from storage, and the gradients. PCIe has no term: the
measured rate of the steps includes it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

_SPLIT = re.compile(r"([0-9]{1,3})-([0-9]{1,3})-([0-9]{1,3})", re.ASCII)
# What is fetched has to land somewhere, and a training's other samples want some room.
MOST_AUGMENTED = 0.9
# A sample that is always shown as a view and finds no room is made again at each use, while room that views leave is
# filled with originals. The mean of 256 sizes is off by some 2 %.
_SURELY = 0.97
_DEVIATIONS = 2


class Split(NamedTuple):
    """The shares of the cache for each form; they add up to 1."""

    encoded: float
    decoded: float
    augmented: float

    @classmethod
    def parse(cls, text: str) -> Split:
        """A split from `50-30-20`, in percent; raises ValueError with one line that says what to write."""
        if (match := _SPLIT.fullmatch(text)) is None:
            raise ValueError("write percents of originals, views and augmented samples like 50-30-20")
        percents = [int(part) for part in match.groups()]
        if sum(percents) != 100:
            raise ValueError(f"the three percents add up to {sum(percents)}: write three that add up to 100")
        return cls(*(percent / 100 for percent in percents))

    @property
    def views(self) -> float:
        """The share of views among the bytes of originals and views; 0 if the split has neither."""
        return self.decoded / (self.encoded + self.decoded) if self.decoded else 0.0

    def __str__(self) -> str:
        return "-".join(f"{100 * share:.0f}" for share in self)


class FormSizes(NamedTuple):
    """Bytes of a sample in each form; in the paper S_data, and M * S_data for both others."""

    encoded: float
    decoded: float
    augmented: float


class Places(NamedTuple, Generic[T]):
    """A value for each place in which a sample is found: how many lie there, or how fast they come from there."""

    augmented: T
    decoded: T
    encoded: T
    storage: T


def view_share(split: Split, cache_bytes: float, landing_bytes: float, samples: float, sizes: FormSizes) -> float:
    """The share of all samples that should be shown as views for these to fill their part of the cache, and fit.

    That is N_D / N_total, with N_D by equation 4 for samples of which none is augmented: loaders choose those later.
    Originals and views share what is left of the cache beside the bytes kept free for landing.
    """
    if split.decoded == 0:
        return 0.0
    room_bytes = (split.encoded + split.decoded) * cache_bytes - landing_bytes
    fit = min(samples, max(0.0, _SURELY * split.views * room_bytes / sizes.decoded))
    # Each sample is drawn by itself, so their number varies as a binomial one does: by 17 % of 30, by 0.3 % of 100,000.
    varies = _DEVIATIONS * math.sqrt(fit * (1 - fit / samples))
    return max(0.0, fit - varies) / samples


def samples_held(
    split: Split, cache_bytes: float, landing_bytes: float, samples: float, sizes: FormSizes
) -> Places[float]:
    """How many of `samples` a mount with this split holds in each place.

    That is less than the paper's equations 2 to 8 say: a mount leaves room for landing, and shows as many views as
    surely fit (`view_share`). Originals take what the other forms leave.
    """
    share = min(split.augmented, MOST_AUGMENTED)
    augmented = min(samples, share * cache_bytes / sizes.augmented)
    shown = samples * view_share(split, cache_bytes, landing_bytes, samples, sizes)
    # Loaders augment originals first: what is shown as a view takes less time already.
    decoded = min(samples - augmented, shown)
    taken_bytes = augmented * sizes.augmented + (decoded * sizes.decoded if decoded else 0.0)
    room_bytes = max(0.0, cache_bytes - landing_bytes - taken_bytes)
    # Where all are in the first two, their sum may be rounded to a bit more.
    left = max(0.0, samples - (augmented + decoded))
    encoded = min(left, room_bytes / sizes.encoded)
    return Places(augmented, decoded, encoded, left - encoded)


class Demand(NamedTuple):
    """What one sample asks of each resource."""

    cpu_s: float = 0.0
    wait_s: float = 0.0
    """Seconds that a loader's worker waits for bytes."""
    storage_bytes: float = 0.0
    other_cpu_s: float = 0.0
    """CPU seconds of processes that share the cores with the workers: the mount's, and the training's main process."""
    cache_s: float = 0.0
    """Seconds for which the sample's bytes take all that a node's cache can give (1 / B_cache, by form)."""
    network_bytes: float = 0.0
    """Bytes over a node's network: the sample's own, and its share of the gradients of a step (C_nw / batch)."""


_NOTHING = Demand()


@dataclass(frozen=True)
class Capacities:
    """What all nodes together can do; infinite where nothing is known of a limit.

    `workers` are the loader's, `cores` those on which they and the mount run, `device_rate` is the samples a second
    that steps take, `caches` one for each node, `network_bandwidth` bytes a second.
    """

    workers: float
    cores: float
    device_rate: float = float("inf")
    storage_bandwidth: float = float("inf")
    caches: float = float("inf")
    network_bandwidth: float = float("inf")


class Prediction(NamedTuple):
    samples_per_s: float
    bottleneck: str
    """The field of `Capacities` that allows no more."""


def bottleneck(
    counts: Places[float],
    demands: Places[Demand],
    capacities: Capacities,
    uses: float = 1.0,
    keeping: Demand = _NOTHING,
) -> Prediction:
    """The samples a second of a training whose samples are found in these places, and ask for this there.

    Each augmented sample is used `uses` times, by as many jobs or in as many epochs, and then made again from storage;
    `keeping` is what it asks for then besides, to be kept.
    """
    total = sum(counts)
    shares = [count / total for count in counts]
    # A use of an augmented sample brings a part of its next making with it.
    made = counts.augmented / total / uses
    shares[-1] += made

    def expected(of: Callable[[Demand], float]) -> float:
        asked = sum(share * of(demand) for share, demand in zip(shares, demands, strict=True))
        return asked + made * of(keeping)

    asked = {
        "workers": expected(lambda demand: demand.cpu_s + demand.wait_s),
        "cores": expected(lambda demand: demand.cpu_s + demand.other_cpu_s),
        "device_rate": 1.0,
        "storage_bandwidth": expected(lambda demand: demand.storage_bytes),
        "caches": expected(lambda demand: demand.cache_s),
        "network_bandwidth": expected(lambda demand: demand.network_bytes),
    }
    rates = {name: getattr(capacities, name) / amount for name, amount in asked.items() if amount > 0}
    slowest = min(rates, key=lambda name: float(rates[name]))
    return Prediction(rates[slowest], slowest)


def splits(step_percent: int = 1) -> Iterator[Split]:
    """All splits in these steps, the pure ones included: 5,151 in steps of 1 %. Most encoded ones come first."""
    for encoded in range(100, -1, -step_percent):
        for decoded in range(100 - encoded, -1, -step_percent):
            yield Split(encoded / 100, decoded / 100, (100 - encoded - decoded) / 100)


def best_split(predicted: Callable[[Split], float], step_percent: int = 1) -> Split:
    """The fastest split by brute force (section 5.2); of equals, to a millionth, the one with most originals."""
    best, most = Split(1.0, 0.0, 0.0), 0.0
    for split in splits(step_percent):
        rate = predicted(split)
        if rate > most * (1 + 1e-6):
            best, most = split, rate
    return best
