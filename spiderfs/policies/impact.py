"""Keep samples of high loss, and let others substitute for those of low loss (ImPACT, sections III-C and III-D).

The half of a job dataset's scored samples with the higher losses is its H-list. A sample on the H-list of any job
dataset is an **H-sample** of the cache, with the worth that it had when the last list was made; all others are
**L-samples**. The cached ones are the H-part and the L-part of the members, which share the room by how often each is
read.

- An H-sample enters if there is room, or evicts a member of lower worth.
- An L-sample enters if it can evict an L-member that is used up: all job datasets that read it did so in this epoch.
- A reader that asks for an uncached L-sample of its job dataset gets a substitute: a member of the same label, an
  L-sample of this job dataset too, that no reader of this job dataset got in this epoch under whatever name.

Before there are H-samples nothing is evicted, as in MinIO; so it is while the only job dataset warms up. Members pass
from old parts to new ones a few at each event, as victims in the order of the part that they are in (the paper's shadow
heap). Pinned samples (the paper's S) are in a section of their own: no victims, and in no substitution.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from spiderfs.core.heap import Heap
from spiderfs.core.policy import (
    PINNED,
    SAMPLES,
    UNKNOWN,
    Key,
    PinnedSamples,
    Policy,
    in_saved_order,
    pinned_limit,
    saved_keys,
)

# A member is offered to this many samples. With fewer, more members would stay unused because no reader asks for their
# samples; with more, more rows of the table would be written in vain.
SAMPLES_EACH = 8
# This many members are offered at a time, which keeps the table of redirects small; others follow as these are used.
MAX_OFFERED = 8192
# To find samples that need a substitute, this many samples of a label are looked at.
_LOOKED_AT = 8 * SAMPLES_EACH


class SingleUseSubstitutes:
    """The members that may substitute for one job dataset, each once, and the samples that they are offered to (the
    L-cache).

    A redirect is read from a table that is written before. So it is decided beforehand for which samples a member would
    be the substitute: a few that are uncached and that no reader has asked for in this epoch. The first of these that a
    reader asks for uses the member up; the others then get another substitute, or are read themselves. Until it is used
    a member waits to be offered, is **offered** (there are redirects from some samples to it), or is **idle**: when it
    was to be offered, no sample of its label needed a substitute (`needs`).
    """

    def __init__(self, needs: Callable[[Key], bool]) -> None:
        self._needs = needs
        self._labels: Mapping[Key, int] = {}
        # For each label: its samples, and the index at which the next search for one in need begins.
        self._alike: dict[int, list[Key]] = {}
        self._next: dict[int, int] = {}
        # The members that are not used yet, by state: those that wait; those that are offered, with the samples that
        # they are offered to; and those that are idle, by label (None: they have none).
        self._waiting: OrderedDict[Key, None] = OrderedDict()
        self._offered: dict[Key, list[Key]] = {}
        self._idle: dict[int | None, OrderedDict[Key, None]] = {}
        # The substitute of each sample.
        self._substitute_of: dict[Key, Key] = {}
        self._changes: dict[Key, Key | None] = {}

    def __len__(self) -> int:
        """The number of members that are not used yet."""
        return len(self._waiting) + len(self._offered) + sum(map(len, self._idle.values()))

    def listed(self, labels: Mapping[Key, int]) -> None:
        """Note the labels; they replace earlier ones."""
        members = [*self._offered, *(key for idle in self._idle.values() for key in idle)]
        for key in members:
            self.discard(key)
        self._alike.clear()
        self._next.clear()
        for key, label in labels.items():
            self._alike.setdefault(label, []).append(key)
        self._labels = labels
        self._waiting.update(dict.fromkeys(members))

    def add(self, key: Key) -> None:
        """Add a member that was not used yet."""
        if key not in self._offered and key not in self._idle.get(self._labels.get(key), ()):
            self._waiting.setdefault(key)

    def discard(self, key: Key) -> None:
        """Remove a member: it was used, or it left the cache."""
        self._waiting.pop(key, None)
        label = self._labels.get(key)
        idle = self._idle.get(label, OrderedDict())
        idle.pop(key, None)
        rows = self._offered.pop(key, ())
        for wanted in rows:
            del self._substitute_of[wanted]
            self._changes[wanted] = None
        for _ in range(min(len(rows), len(idle))):
            self._waiting[idle.popitem(last=False)[0]] = None

    def take_back(self, key: Key) -> None:
        """Take back the redirect of a sample: it entered the cache, or was read, and needs no substitute any more."""
        substitute = self._substitute_of.pop(key, None)
        if substitute is None:
            return
        rows = self._offered[substitute]
        rows.remove(key)
        self._changes[key] = None
        if not rows:
            del self._offered[substitute]
            self._waiting[substitute] = None

    def clear(self) -> None:
        """Remove all members."""
        self._idle.clear()
        for key in list(self._offered):
            self.discard(key)
        self._waiting.clear()

    def substitute_for(self, key: Key) -> Key | None:
        """The member that substitutes for a sample; None if there is none."""
        self._offer()
        return self._substitute_of.get(key)

    def drain_changes(self) -> list[tuple[Key, Key | None]]:
        """The redirects that have changed since the last call: sample, and substitute (None if it has none)."""
        self._offer()
        changes = list(self._changes.items())
        self._changes.clear()
        return changes

    def change_all(self) -> None:
        """Make the next `drain_changes` return every redirect."""
        self._changes.update(self._substitute_of)

    def _offer(self) -> None:
        """Offer members that wait, in the order in which they came, until MAX_OFFERED are offered."""
        while self._waiting and len(self._offered) < MAX_OFFERED:
            key, _ = self._waiting.popitem(last=False)
            label = self._labels.get(key)
            rows = [] if label is None else self._in_need(label)
            if not rows:
                self._idle.setdefault(label, OrderedDict())[key] = None
                continue
            self._offered[key] = rows
            for wanted in rows:
                self._substitute_of[wanted] = key
                self._changes[wanted] = key

    def _in_need(self, label: int) -> list[Key]:
        """Up to SAMPLES_EACH samples of a label that need a substitute and have none."""
        alike, found = self._alike[label], []
        begin = self._next.get(label, 0)
        for step in range(min(_LOOKED_AT, len(alike))):
            key = alike[(begin + step) % len(alike)]
            if key not in self._substitute_of and self._needs(key):
                found.append(key)
                if len(found) == SAMPLES_EACH:
                    break
        self._next[label] = (begin + step + 1) % len(alike)
        return found


# The share of the scored samples that are H-samples; the paper leaves it open.
H_SHARE = 0.5
# Reads of H-samples and of L-samples counted at the start: the paper's 9 to 1. Counts are halved at each epoch, so
# these soon weigh little.
FIRST_HIGH_READS, FIRST_LOW_READS = 900.0, 100.0
# The H-list is made again after as many reads as this share of the scored samples, which is four times in an epoch of
# half of them. Made once in an epoch, it is an epoch old when the sampler draws by newer losses: of 3,000 images with a
# fifth cached, 29 % of the reads were hits, and 31 % with the newer lists.
LISTED_AFTER_SHARE = 1 / 8
# The fewest reads between two lists.
LISTED_AFTER_READS = 256


class ImpactJobDataset:
    """`is_away(key)` says whether a sample is neither cached nor pinned."""

    def __init__(self, is_away: Callable[[Key], bool]) -> None:
        self._is_away = is_away
        self.labels: Mapping[Key, int] = {}
        self.losses: dict[Key, float] = {}
        self.high: frozenset[Key] = frozenset()
        """The H-list."""
        self.asked_for: set[Key] = set()
        """All samples that readers asked for in this epoch."""
        self.used: set[Key] = set()
        """The L-members that readers got in this epoch, under whatever name."""
        self.substitutes = SingleUseSubstitutes(self.needs_substitute)
        self.warms_up = False
        self.is_back = True
        """False after a remount, until something comes from the job dataset."""
        self.high_reads, self.low_reads = FIRST_HIGH_READS, FIRST_LOW_READS
        self._reads_since_list = 0
        # Whether an epoch has ended, and whether the last one had no reads.
        self._has_begun = self._is_idle = False

    def wants(self, key: Key) -> bool:
        """Whether a member is one of the samples that this job dataset reads in its epochs."""
        return not self._is_idle and (key in self.losses or key in self.labels)

    def needs_substitute(self, key: Key) -> bool:
        """Whether readers of this sample need a substitute; what no batch has named may be a validation's."""
        return key in self.losses and key not in self.high and key not in self.asked_for and self._is_away(key)

    def read(self, key: Key, counts: bool) -> None:
        """A reader got these bytes under the sample's own name; the read moves the ratio if it `counts`."""
        self.asked_for.add(key)
        self._is_idle = False
        self._reads_since_list += 1
        # Before there is a list no one knows which samples are L-samples.
        if counts and self.high:
            if key in self.high:
                self.high_reads += 1
            else:
                self.low_reads += 1

    def use(self, key: Key) -> None:
        """A member was read: it substitutes for this job dataset no more, if it is one of its L-samples."""
        if key not in self.high:
            self.used.add(key)
            self.substitutes.discard(key)

    def offer(self, key: Key) -> None:
        """A member may be a substitute, if it is one of the job dataset's L-samples and was not read in this epoch."""
        if key in self.high:
            return
        if key in self.asked_for:
            self.used.add(key)
        elif self.high and key not in self.used:
            self.substitutes.add(key)

    def new_epoch(self) -> None:
        """Begin an epoch: every L-member may be a substitute again."""
        self.high_reads, self.low_reads = self.high_reads / 2, self.low_reads / 2
        self._is_idle = self._has_begun and not self.asked_for
        self._has_begun = True
        self.forget_reads()

    def forget_reads(self) -> None:
        self.asked_for.clear()
        self.used.clear()
        self.substitutes.clear()

    @property
    def list_is_old(self) -> bool:
        """Whether there is a list, and enough reads have come since for a new one."""
        enough = max(LISTED_AFTER_READS, len(self.losses) * LISTED_AFTER_SHARE)
        return bool(self.high) and self._reads_since_list >= enough

    def renew_list(self) -> None:
        """Choose the H-samples by the losses of now; there are none while the job dataset warms up."""
        self._reads_since_list = 0
        # Members are offered again by the new list.
        self.substitutes.clear()
        keys, count = list(self.losses), int(len(self.losses) * H_SHARE)
        if count == 0 or self.warms_up:
            self.high = frozenset()
            return
        losses = np.fromiter(self.losses.values(), np.float64, len(keys))
        chosen = np.argpartition(losses, len(keys) - count)[-count:]
        self.high = frozenset(keys[index] for index in chosen.tolist())

    def state(self) -> dict[str, Any]:
        return {"high": list(self.high), "used": list(self.used), "reads": [self.high_reads, self.low_reads]}

    def restore(self, state: Mapping[str, Any], members: Container[Key]) -> None:
        """Go on from what `state` returned; of the samples that readers asked for it has the used members."""
        self.high = frozenset(saved_keys(state["high"]))
        self.high_reads, self.low_reads = state["reads"]
        self.used.update(key for key in saved_keys(state["used"]) if key in members)
        self.asked_for.update(self.used)


class HighAndLow:
    """The two parts of the cache (section III-C); `worths` has the worth of every H-sample, cached or not."""

    def __init__(self, worths: Mapping[Key, float]) -> None:
        self.worths = worths
        self.high: Heap[Key] = Heap()
        """The H-members, by worth."""
        self.low: OrderedDict[Key, None] = OrderedDict()
        """The L-members, in the order in which they entered."""
        self.high_bytes = self.low_bytes = 0

    def __contains__(self, key: object) -> bool:
        return key in self.high or key in self.low

    def add(self, key: Key, size: int) -> None:
        if key in self.worths:
            self.high.set(key, self.worths[key])
            self.high_bytes += size
        else:
            self.low[key] = None
            self.low_bytes += size

    def remove(self, key: Key, size: int) -> None:
        if key in self.high:
            self.high.discard(key)
            self.high_bytes -= size
        else:
            del self.low[key]
            self.low_bytes -= size


# The L-part may hold so much at least, which is what restocking brings at a time in the paper; but in a small cache it
# gets no more than this share for that reason.
LOW_LEAST_BYTES = 1 << 20
LOW_LEAST_SHARE = 0.1
# Members that pass from the old parts to the new ones at each event: a million members in 16,000 reads.
PASSED_AT_ONCE = 64
# L-samples that are remembered, of those that were missed last.
MAX_MISSED = 1 << 16
# If there are more H-samples, or more pins, than this, `state` leaves them out: they would be some 3 MB, saved every
# half a minute, and the next epoch brings new ones.
MAX_SAVED = 1 << 18


class Impact(Policy):
    name = "impact"
    sections = (SAMPLES, PINNED)
    scoring = "loss"
    guided = has_substitutes = restocks = True

    def __init__(self) -> None:
        self._job_datasets: dict[str, ImpactJobDataset] = {}
        self._worths: dict[Key, float] = {}
        self._sizes: dict[Key, int] = {}
        self._parts = HighAndLow({})
        # While members pass to new parts: the old parts, and the members that have not passed yet.
        self._old = HighAndLow({})
        self._to_pass: deque[Key] = deque()
        # L-members that are used up, in the order in which they became so.
        self._used: OrderedDict[Key, None] = OrderedDict()
        self._pins = PinnedSamples()
        # Members of the section of pinned samples, in the order in which they entered.
        self._pinned: dict[Key, None] = {}
        # The job dataset and the sample of the next read, if that is known, and the job datasets of the last one.
        self._next_read: tuple[str, Key] | None = None
        self._last_read: tuple[Key, Sequence[ImpactJobDataset]] | None = None
        # Redirects of job datasets that are over, which have to be taken back.
        self._left: list[tuple[str, Key, Key | None]] = []
        self.missed_ids: OrderedDict[Key, None] = OrderedDict()

    # -- as every policy

    def limit(self, section: str, share_bytes: int, held_bytes: Mapping[str, int]) -> int:
        return pinned_limit(share_bytes) if section == PINNED else share_bytes

    def section_for(self, key: Key) -> str:
        return PINNED if key in self._pins else SAMPLES

    def hit(self, key: Key, size: int) -> None:
        self._read(key)

    def missed(self, key: Key, size: int) -> None:
        for job_dataset in self._read(key):
            job_dataset.substitutes.take_back(key)
        if self._parts.worths and key in self._worths and self.ranks_low(key):
            self._miss(key)

    def inserted(self, key: Key, size: int) -> None:
        self._sizes[key] = size
        for job_dataset in self._job_datasets.values():
            job_dataset.substitutes.take_back(key)
        if key in self._pins:
            self._pinned[key] = None
        else:
            self._parts.add(key, size)
            self._offer_member(key)

    def removed(self, key: Key) -> None:
        size = self._sizes.pop(key)
        if key in self._pinned:
            del self._pinned[key]
        else:
            (self._parts if key in self._parts else self._old).remove(key, size)
        for job_dataset in self._job_datasets.values():
            job_dataset.substitutes.discard(key)
            job_dataset.used.discard(key)
        self._used.pop(key, None)

    def eviction_order(self, section: str | None = None) -> Iterator[Key]:
        if section == PINNED:
            return iter(self._pinned)
        samples = chain(self._low_members(), self._old.high.ascending(), self._parts.high.ascending())
        return samples if section == SAMPLES else chain(samples, self._pinned)

    def victims_for(self, key: Key, size: int, full: str | None) -> Iterator[Key]:
        if self.section_for(key) == PINNED:
            return iter(()) if full == PINNED else self.eviction_order(SAMPLES)
        if not self._parts.worths or self._is_of_a_warm_up(key):
            return iter(())
        low_bytes, low_share = self._low_bytes(), self._low_share()
        if key in self._parts.worths:
            worth = self._parts.worths[key]
            higher = chain(self._old.high.below(worth), self._parts.high.below(worth))
            return chain(self._low_members(), higher) if low_bytes > low_share else higher
        if low_bytes + size <= low_share:
            return chain(self._old.high.ascending(), self._parts.high.ascending())
        return iter(self._used)

    def score(self, key: Key) -> float:
        """The sample's worth to all job datasets: with one job dataset, its latest loss."""
        return self._worths.get(key, UNKNOWN)

    def state(self) -> dict[str, Any]:
        """The losses of L-samples are not in it, for the scoring saves all losses."""
        savable = (
            len(self._parts.worths) + sum(len(job_dataset.high) for job_dataset in self._job_datasets.values())
            <= 2 * MAX_SAVED
        )
        high = self._parts.worths if savable else {}
        return {
            "order": list(self.eviction_order()),
            "listed": list(high),
            "losses": list(high.values()),
            "job_datasets": {name: job_dataset.state() for name, job_dataset in self._job_datasets.items()}
            if savable
            else {},
            "missed": list(self.missed_ids),
            "pins": {name: list(keys) for name, keys in self.pinned.items()} if len(self._pins) <= MAX_SAVED else {},
        }

    def restore(self, members: Mapping[Key, int], state: Mapping[str, Any]) -> None:
        high = dict(zip(saved_keys(state.get("listed", ())), state.get("losses", ()), strict=False))
        self._worths = high | self._worths
        self._parts, self._old = HighAndLow(high or self._parts.worths), HighAndLow({})
        self._to_pass.clear()
        self._used.clear()
        self.missed_ids = OrderedDict.fromkeys(saved_keys(state.get("missed", ())))
        self._pins = PinnedSamples({name: saved_keys(keys) for name, keys in state.get("pins", {}).items()})
        self._pinned.clear()
        for job_dataset in self._job_datasets.values():
            job_dataset.forget_reads()
        for name, saved in state.get("job_datasets", {}).items():
            if name not in self._job_datasets:
                self._job_datasets[name] = ImpactJobDataset(self._is_away)
                self._job_datasets[name].is_back = False
            self._job_datasets[name].restore(saved, members)
        self._sizes = dict(members)
        for key in in_saved_order(members, state.get("order", ())):
            self.inserted(key, members[key])

    # -- as every guided policy

    def scored(self, key: Key, score: float) -> None:
        if not score > UNKNOWN:
            raise ValueError(f"a score must be positive, not {score}")
        self._worths[key] = score

    def scored_by(self, job_dataset_id: str, key: Key, score: float) -> None:
        self._job_dataset(job_dataset_id).losses[key] = score

    def listed(self, job_dataset_id: str, labels: Mapping[Key, int]) -> None:
        job_dataset = self._job_dataset(job_dataset_id)
        # A trainer that goes on with its warm-up says so again.
        job_dataset.warms_up = False
        job_dataset.labels = labels
        job_dataset.substitutes.listed(labels)

    def forget_job_dataset(self, job_dataset_id: str, keys: Iterable[Key]) -> None:
        """The H-samples stay until another job dataset has a new list: the cache is filled with them."""
        job_dataset = self._job_datasets.pop(job_dataset_id, None)
        if job_dataset is not None:
            job_dataset.substitutes.clear()
            self._left += [(job_dataset_id, key, given) for key, given in job_dataset.substitutes.drain_changes()]
        for key in keys:
            if key not in self._sizes and key not in self._parts.worths:
                self._worths.pop(key, None)

    def substitute_for(self, job_dataset_id: str, key: Key) -> Key | None:
        job_dataset = self._job_datasets.get(job_dataset_id)
        return None if job_dataset is None or key in self._sizes else job_dataset.substitutes.substitute_for(key)

    def substituted(self, job_dataset_id: str, substitute: Key, wanted: Key) -> None:
        job_dataset = self._job_dataset(job_dataset_id)
        job_dataset.asked_for.add(wanted)
        job_dataset.substitutes.take_back(wanted)
        self._miss(wanted)
        self._next_read = job_dataset_id, substitute

    def read_by(self, job_dataset_id: str, key: Key) -> None:
        self._next_read = job_dataset_id, key

    def pin(self, job_dataset_id: str, keys: Collection[Key]) -> Collection[Key]:
        changed = self._pins.replace(job_dataset_id, keys)
        for key in keys:
            for job_dataset in self._job_datasets.values():
                job_dataset.substitutes.take_back(key)
        return changed

    @property
    def pinned(self) -> Mapping[str, Collection[Key]]:
        return self._pins.by_job_dataset

    def redirects_changed(self) -> list[tuple[str, Key, Key | None]]:
        changes, self._left = self._left, []
        for job_dataset_id, job_dataset in self._job_datasets.items():
            changes += [(job_dataset_id, key, given) for key, given in job_dataset.substitutes.drain_changes()]
        return changes

    def forget_published(self) -> None:
        for job_dataset in self._job_datasets.values():
            job_dataset.substitutes.change_all()

    def new_epoch(self, job_dataset_id: str) -> None:
        """Choose the H-samples of this job dataset again; every L-member may substitute for it again."""
        job_dataset = self._job_dataset(job_dataset_id)
        for gone in [name for name, other in self._job_datasets.items() if not other.is_back]:
            del self._job_datasets[gone]
        job_dataset.new_epoch()
        self._renew_list(job_dataset)

    def warm_up(self, job_dataset_id: str, active: bool) -> None:
        """While a job dataset warms up it has no H-list; when the warm-up is over it has one at once."""
        job_dataset = self._job_dataset(job_dataset_id)
        if active != job_dataset.warms_up:
            job_dataset.warms_up = active
            self._renew_list(job_dataset)

    @property
    def ratio(self) -> float:
        """The share of H-samples among recent reads; their part has the same share of the room."""
        high = sum(job_dataset.high_reads for job_dataset in self._job_datasets.values()) or FIRST_HIGH_READS
        return high / (
            high + (sum(job_dataset.low_reads for job_dataset in self._job_datasets.values()) or FIRST_LOW_READS)
        )

    # -- as every restocked policy

    def ranks_low(self, key: Key) -> bool:
        return key not in self._parts.worths and key not in self._pins

    def missed_low(self) -> Iterable[Key]:
        return (key for key in reversed(self.missed_ids) if self.ranks_low(key))

    def room_for_unread_bytes(self) -> int:
        if not self._parts.worths:
            return 0
        return max(0, self._low_share() - self._low_bytes()) + sum(self._sizes[key] for key in self._used)

    def wants_unread(self, key: Key) -> bool:
        return self.ranks_low(key) and any(
            job_dataset.needs_substitute(key) for job_dataset in self._job_datasets.values()
        )

    # -- inside

    def _job_dataset(self, job_dataset_id: str) -> ImpactJobDataset:
        job_dataset = self._job_datasets.get(job_dataset_id)
        if job_dataset is None:
            job_dataset = self._job_datasets[job_dataset_id] = ImpactJobDataset(self._is_away)
        job_dataset.is_back = True
        return job_dataset

    def _is_away(self, key: Key) -> bool:
        return key not in self._sizes and key not in self._pins

    def _read(self, key: Key) -> Sequence[ImpactJobDataset]:
        """Note a read that got the sample's own bytes, cached or not; returns the job datasets that it counts for."""
        self._pass_members(PASSED_AT_ONCE)
        next_read, self._next_read = self._next_read, None
        known = next_read is not None and next_read[1] == key
        job_datasets = (
            [self._job_dataset(next_read[0])] if next_read is not None and known else list(self._job_datasets.values())
        )
        self._last_read = key, job_datasets
        for job_dataset in job_datasets:
            job_dataset.read(key, counts=key not in self._pins)
            if key in self._parts:
                job_dataset.use(key)
            if job_dataset.list_is_old:
                self._renew_list(job_dataset)
        self._note_used(key)
        return job_datasets

    def _is_of_a_warm_up(self, key: Key) -> bool:
        """Whether this candidate was just read, and for no other job datasets than such that warm up."""
        if self._last_read is None or self._last_read[0] != key or not self._last_read[1]:
            return False
        return all(job_dataset.warms_up for job_dataset in self._last_read[1])

    def _miss(self, key: Key) -> None:
        self.missed_ids[key] = None
        self.missed_ids.move_to_end(key)
        if len(self.missed_ids) > MAX_MISSED:
            self.missed_ids.popitem(last=False)

    def _offer_member(self, key: Key) -> None:
        """Offer a member of the new parts as a substitute to the job datasets for which it may be one."""
        for job_dataset in self._job_datasets.values():
            job_dataset.offer(key)
        self._note_used(key)

    def _note_used(self, key: Key) -> None:
        """Note an L-member if it is used up: if all job datasets that read it have read it in this epoch."""
        if key in self._parts.low and all(
            key in job_dataset.used for job_dataset in self._job_datasets.values() if job_dataset.wants(key)
        ):
            self._used.setdefault(key)

    def _renew_list(self, job_dataset: ImpactJobDataset) -> None:
        """Choose the H-samples of one job dataset again, and with them those of the cache, and let members pass."""
        self._pass_members(len(self._to_pass))
        job_dataset.renew_list()
        high = {
            key: self._worths[key] for other in self._job_datasets.values() for key in other.high if key in self._worths
        }
        self._used.clear()
        self.lists += bool(high)
        self._old, self._parts = self._parts, HighAndLow(high)
        self._to_pass.extend(self._sizes)
        self._pass_members(PASSED_AT_ONCE)

    def _pass_members(self, count: int) -> None:
        for _ in range(min(count, len(self._to_pass))):
            key = self._to_pass.popleft()
            if key in self._old:
                self._old.remove(key, self._sizes[key])
                self._parts.add(key, self._sizes[key])
                self._offer_member(key)

    def _low_members(self) -> Iterator[Key]:
        """All L-members; those that are used up come first, for the others may still be substitutes."""
        unused = (key for parts in (self._old, self._parts) for key in parts.low if key not in self._used)
        return chain(self._used, unused)

    def _low_bytes(self) -> int:
        return self._old.low_bytes + self._parts.low_bytes

    def _low_share(self) -> int:
        """The bytes that the L-part may hold of those that both parts hold together."""
        total_bytes = self._old.high_bytes + self._parts.high_bytes + self._low_bytes()
        share = int(total_bytes * (1 - self.ratio))
        return max(share, min(LOW_LEAST_BYTES, int(total_bytes * LOW_LEAST_SHARE)))


class ICache(Impact):
    """iCache has the same cache as ImPACT; ImPACT's sampler learns of losses in another way (`ImpactSampler`)."""

    name = "icache"
