"""Exchange: jobs that share a list take what the cache holds, and leave for later what it does not hold.

A rank that is about to hand a batch to its loader asks what to take in its samples' places. For each that is not
cached, the answer names one that is cached and that the rank has not read in this epoch; both change places in its
order (`trainer_hook/loader/epoch_order.py`). So each epoch of each rank stays a permutation of what its sampler drew,
and K equally fast jobs fetch (1 - c) / K of the list for each job and epoch, if the share c is cached. (Seneca's
opportunistic sampling, section 5.2, with the samples marked that are given.)

In an epoch, each sample is **pending** for the rank, then **reserved**, from the answer that names it until the loop
has taken its batch, then read. A reserved sample stays in the cache. What a rank says it has dispatched counts: a
reservation that it did not take up, as the answer came late or never, is **withdrawn** with the next question.

The choice for one wanted sample (`ask`):
1. itself, if it is cached or coming, or can never be cached, else such samples would wait for the end of every epoch;
2. with the probability `exchanged_share` a **candidate**, a cached sample that is pending for the rank, each with the
   same probability; if there is none, one that is just being fetched;
3. itself, which will be fetched.

If jobs share partial samples too (`core/partials.py`), a sample also counts as cached for a rank while its job has not
had the present generation: it is **ready**, from when another job begins to make it. For a list of a million samples
that takes the manager 4 ms a question. Labels play no part. (Candidates of the same label first saved nothing, and made
an order less like a uniform shuffle.) Exchange is on while at least two jobs share the list: what one reads alone is
known from its plan. `foresight.py` decides which samples leave, `due` what is fetched ahead. This is pure code:
`chance` gives numbers from 0 up to, but not including, 1.
"""

from __future__ import annotations

import operator
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

from spiderfs.core.policy import Key

NOWHERE = -1
"""The group of a sample that is in none."""


class Groups:
    """Samples in groups, from which one is drawn at random at once, however many there are.

    A sample is a whole number below the size, and is in one group or in none. A group is a list without an order; a
    sample that leaves it is replaced by the last one. So each change and each draw takes constant time, about half a
    microsecond, and a sample takes 12 bytes. Randomness comes in as a number from 0 up to, but not including, 1.
    """

    def __init__(self, size: int) -> None:
        self._group_array = np.full(size, NOWHERE, np.int32)
        self._place_array = np.zeros(size, np.int32)
        # One number is read from a memoryview in a third of the time that it takes from an array of numpy.
        self._group_of = self._group_array.data
        self._place_of = self._place_array.data
        self._members: dict[int, array[int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, sample: int) -> bool:
        return bool(self._group_of[sample] != NOWHERE)

    def put(self, sample: int, group: int) -> None:
        """Put a sample into this group, and out of any other."""
        self.discard(sample)
        members = self._members.get(group)
        if members is None:
            members = self._members[group] = array("i")
        self._group_of[sample] = group
        self._place_of[sample] = len(members)
        members.append(sample)
        self._count += 1

    def discard(self, sample: int) -> None:
        """Take a sample out of its group, if it is in one."""
        group = self._group_of[sample]
        if group == NOWHERE:
            return
        members = self._members[group]
        last = members.pop()
        if last != sample:
            place = self._place_of[sample]
            members[place] = last
            self._place_of[last] = place
        if not members:
            del self._members[group]
        self._group_of[sample] = NOWHERE
        self._count -= 1

    def drawn(self, group: int, chance: float) -> int | None:
        """A sample of the group, each with the same probability; None if the group is empty."""
        members = self._members.get(group)
        return None if members is None else members[int(chance * len(members))]

    def numbers(self) -> list[int]:
        """The groups that have samples, the lowest number first."""
        return sorted(self._members)

    def members(self, group: int) -> Sequence[int]:
        """The samples of a group, in no order; the caller must not change the groups while it reads them."""
        return self._members.get(group, ())

    def __iter__(self) -> Iterator[int]:
        for members in self._members.values():
            yield from members

    def refill(self, groups: npt.NDArray[np.integer]) -> None:
        """Put every sample into the group that this array has for it, NOWHERE for none; a million take 0.2 seconds."""
        self._group_array[:] = groups
        there = np.flatnonzero(self._group_array != NOWHERE)
        there = there[np.argsort(self._group_array[there], kind="stable")].astype(np.int32)
        numbers, starts, counts = np.unique(self._group_array[there], return_index=True, return_counts=True)
        self._place_array[there] = np.arange(len(there)) - np.repeat(starts, counts)
        self._members = {
            int(number): array("i", there[start : start + count].tobytes())
            for number, start, count in zip(numbers, starts, counts, strict=True)
        }
        self._count = len(there)


Chance = Callable[[], float]

# Draws in each group of equally wanted samples, to find what to fetch ahead.
_DRAWS = 8

_NOT_PLANNED, _PENDING, _RESERVED = 0, 1, 2
_CANDIDATES = 0  # the one group of a rank's candidates


@dataclass
class Exchanged:
    """What exchange has done for one rank, in samples, if nothing else is said."""

    asked: int = 0
    itself: int = 0
    """Wanted samples that were cached or coming, or that are never cached."""
    exchanged: int = 0
    """Cached or coming samples that the rank has taken in the place of others."""
    saved_bytes: int = 0
    """The bytes of those of them that were cached, as the caller of `SharedList.dispatched` has counted them."""
    withdrawn: int = 0
    """Reserved samples that the rank did not take up."""

    def __add__(self, other: Exchanged) -> Exchanged:
        return Exchanged(*map(operator.add, astuple(self), astuple(other)))


class SharingRank:
    """What one rank has yet to read of its epoch; the list has `samples` samples."""

    def __init__(self, job: Hashable, samples: int) -> None:
        self.job = job
        self.counts = Exchanged()
        self.state = bytearray(samples)
        self.offered: list[int] = []
        """What was answered last, as long as it is not known what was dispatched."""
        self.in_place: set[int] = set()
        """Those of it that were offered in the place of others."""
        self.in_hand: deque[int] = deque()
        """What was dispatched and not taken yet, in order."""
        self.candidates = Groups(samples)
        """Cached samples that are pending for the rank."""
        self.ready = self.ready_pending = np.empty(0, np.int64)
        """Samples that were ready for the rank's job at its last question, and those of them that were pending."""

    @property
    def choice(self) -> int:
        """How many candidates the rank has; some are counted twice, in both forms."""
        return len(self.candidates) + len(self.ready_pending)

    def is_ready(self, sample: int) -> bool:
        # A search in an empty array takes 3 microseconds.
        at = int(np.searchsorted(self.ready, sample)) if len(self.ready) else 0
        return at < len(self.ready) and bool(self.ready[at] == sample)


class SharedList:
    """The ranks that share a list, and the samples that are pending for each of them.

    `keys` has the file of each sample, `index_of` the sample of each file. `cacheable` says of a file whether the cache
    can ever hold it.
    Files that the cache held before must be named by `entered`. `changed` is called with a file when it is pending for
    other ranks than before, or when it begins or ceases to be reserved; not by `begin` and `end`, which change nearly
    all.
    """

    def __init__(
        self,
        keys: Sequence[Key],
        index_of: Mapping[Key, int],
        chance: Chance,
        changed: Callable[[Key], None],
        exchanged_share: float = 1.0,
        cacheable: Callable[[Key], bool] = lambda key: True,
    ) -> None:
        samples = len(keys)
        self.keys = keys
        self.index_of = index_of
        self.ranks: dict[Hashable, SharingRank] = {}
        self.exchanged_share = exchanged_share
        self.active = False
        """Whether samples are exchanged: at least two jobs share the list."""
        self.chance = chance
        self._changed = changed
        self._cacheable = cacheable
        self._held_array = np.zeros(samples, np.uint8)
        self._held = self._held_array.data
        self._coming: dict[int, None] = {}
        """Samples that some reader is about to fetch, or that are being fetched ahead, the oldest first."""
        self._ahead: set[int] = set()
        """Those of them that are being fetched ahead."""
        self._pending_ranks_array = np.zeros(samples, np.int32)
        self._pending_ranks = self._pending_ranks_array.data
        self._reserved_array = np.zeros(samples, np.int32)
        self._reserved = self._reserved_array.data
        self._wanting = Groups(samples)
        """Samples that are pending, and neither cached nor coming, by how many ranks they are pending for."""

    def __len__(self) -> int:
        return len(self.keys)

    # -- epochs of ranks ---------------------------------------------------------------------------------------------

    def begin(self, rank_id: Hashable, job: Hashable, rest: npt.NDArray[np.integer]) -> None:
        """A rank begins an epoch, or goes on with one, in place of an earlier; the `rest` is pending for it."""
        self._release(rank_id)
        rank = self.ranks[rank_id] = SharingRank(job, len(self))
        np.frombuffer(rank.state, np.uint8)[rest] = _PENDING
        self._pending_ranks_array[rest] += 1
        candidates = np.full(len(self), NOWHERE, np.int32)
        candidates[rest[self._held_array[rest] != 0]] = _CANDIDATES
        rank.candidates.refill(candidates)
        self._ranks_changed()

    def end(self, rank_id: Hashable) -> None:
        """A rank reads nothing more of its epoch; nothing is pending or reserved for it any more."""
        self._release(rank_id)
        self._ranks_changed()

    def _release(self, rank_id: Hashable) -> None:
        """Forget all that is pending and reserved for a rank; `_ranks_changed` must follow."""
        rank = self.ranks.pop(rank_id, None)
        if rank is not None:
            state = np.frombuffer(rank.state, np.uint8)
            self._pending_ranks_array[state == _PENDING] -= 1
            self._reserved_array[state == _RESERVED] -= 1
            for sample in [sample for sample in self._coming if sample not in self._ahead]:
                if not self._reserved[sample]:
                    del self._coming[sample]

    def _ranks_changed(self) -> None:
        self.active = len({rank.job for rank in self.ranks.values()}) > 1
        unheld = (self._held_array == 0) & (self._pending_ranks_array > 0)
        unheld[list(self._coming)] = False
        self._wanting.refill(np.where(unheld, self._pending_ranks_array, NOWHERE))

    # -- batches -----------------------------------------------------------------------------------------------------

    def ask(self, rank_id: Hashable, wanted: Sequence[int], ready: npt.NDArray[np.bool_] | None = None) -> list[int]:
        """Choose and reserve a sample for each of these, which the rank has not read; see the module's rules.

        `ready` says of each sample whether it is ready for the rank's job. If the rank does not share the list (any
        more), the answer is what it wants; so it is for samples that are not pending for the rank.
        """
        rank = self.ranks.get(rank_id)
        if rank is None:
            return list(wanted)
        self._withdraw(rank)
        if ready is not None:
            rank.ready = np.flatnonzero(ready)
            pending = np.frombuffer(rank.state, np.uint8)[rank.ready] == _PENDING
            rank.ready_pending = rank.ready[pending]
        # What is cached or coming is reserved first, so that it is not given in the place of another one of the batch.
        found = [self._itself(rank, sample) for sample in wanted]
        answer = [
            self._in_place_of(rank, sample) if given is None else given
            for sample, given in zip(wanted, found, strict=True)
        ]
        rank.counts.asked += len(answer)
        rank.offered = answer
        return list(answer)

    def dispatched(self, rank_id: Hashable, samples: Iterable[int]) -> list[int]:
        """The rank has handed these samples to its loader, in this order; what it was offered besides is pending again.

        Returns those of them that took the places of others.
        """
        rank = self.ranks.get(rank_id)
        if rank is None:
            return []
        handed, exchanged = list(samples), []
        offered = set(rank.offered)
        for sample in handed:
            if sample in offered:
                offered.remove(sample)
                if sample in rank.in_place:
                    exchanged.append(sample)
            elif rank.state[sample] == _PENDING:
                self._reserve(rank, sample)
                if not self._held[sample] and self._cacheable(self.keys[sample]):
                    self._comes(sample)
        rank.offered = [sample for sample in rank.offered if sample in offered]
        self._withdraw(rank)
        rank.in_hand.extend(handed)
        rank.counts.exchanged += len(exchanged)
        return exchanged

    def taken(self, rank_id: Hashable, count: int) -> int:
        """The training loop has received `count` further samples, in the order in which they were dispatched.

        Returns how many of them were known to be dispatched: no others count.
        """
        rank = self.ranks.get(rank_id)
        if rank is None:
            return 0
        known = min(count, len(rank.in_hand))
        for _ in range(known):
            sample = rank.in_hand.popleft()
            if rank.state[sample] == _RESERVED:
                rank.state[sample] = _NOT_PLANNED
                self._consumed(sample)
        return known

    def _itself(self, rank: SharingRank, sample: int) -> int | None:
        """Reserve the wanted sample if it is cached or coming, or never cached; None if it is to be fetched."""
        if rank.state[sample] != _PENDING:
            return sample
        at_hand = self._held[sample] or sample in self._coming or rank.is_ready(sample)
        if not at_hand and self._cacheable(self.keys[sample]):
            return None
        rank.counts.itself += 1
        self._reserve(rank, sample)
        return sample

    def _in_place_of(self, rank: SharingRank, wanted: int) -> int:
        """Reserve a sample in the place of one that is neither cached nor coming."""
        if rank.state[wanted] != _PENDING:
            # The question names it twice, and it was reserved for the first time.
            return wanted
        given = self._candidate(rank) if self.active and self.chance() < self.exchanged_share else None
        if given is None:
            self._reserve(rank, wanted)
            self._comes(wanted)
            return wanted
        rank.in_place.add(given)
        self._reserve(rank, given)
        return given

    def _candidate(self, rank: SharingRank) -> int | None:
        cached = rank.candidates.members(_CANDIDATES)
        for _ in range(_DRAWS if len(rank.ready_pending) else 1):
            at = int(self.chance() * rank.choice)
            if at < len(cached):
                return cached[at]
            # Of those that were ready, some have been chosen since.
            if rank.choice and rank.state[rank.ready_pending[at - len(cached)]] == _PENDING:
                return int(rank.ready_pending[at - len(cached)])
        return next((sample for sample in self._coming if rank.state[sample] == _PENDING), None)

    def _reserve(self, rank: SharingRank, sample: int) -> None:
        rank.state[sample] = _RESERVED
        self._pending_ranks[sample] -= 1
        self._reserved[sample] += 1
        rank.candidates.discard(sample)
        self._want(sample)
        self._changed(self.keys[sample])

    def _withdraw(self, rank: SharingRank) -> None:
        """What the rank was offered and has not taken up is pending for it again."""
        for sample in rank.offered:
            if rank.state[sample] == _RESERVED:
                rank.counts.withdrawn += 1
                rank.state[sample] = _PENDING
                self._pending_ranks[sample] += 1
                if self._held[sample]:
                    rank.candidates.put(sample, _CANDIDATES)
                self._consumed(sample)
        rank.offered = []
        rank.in_place = set()

    def _consumed(self, sample: int) -> None:
        """One reservation of a sample is over."""
        self._reserved[sample] -= 1
        if not self._reserved[sample] and sample not in self._ahead:
            self._coming.pop(sample, None)
        self._want(sample)
        self._changed(self.keys[sample])

    # -- what the cache holds ----------------------------------------------------------------------------------------

    def pending_ranks(self, sample: int) -> int:
        """To how many ranks a sample is pending."""
        return int(self._pending_ranks[sample])

    def wanted_by(self, sample: int) -> int:
        """How many ranks will still read a sample: it is pending or reserved for them."""
        return int(self._pending_ranks[sample] + self._reserved[sample])

    def reserved(self, sample: int) -> bool:
        """Whether some rank has been reserved the sample and has not taken it yet, so that it must stay."""
        return bool(self._reserved[sample])

    def entered(self, sample: int) -> None:
        """The cache holds a sample from now on."""
        self._ahead.discard(sample)
        self._coming.pop(sample, None)
        if not self._held[sample]:
            self._held[sample] = 1
            self._wanting.discard(sample)
            for rank in self.ranks.values():
                if rank.state[sample] == _PENDING:
                    rank.candidates.put(sample, _CANDIDATES)

    def left(self, sample: int) -> None:
        """The cache holds a sample no longer: it was evicted, or its file is gone."""
        if self._held[sample]:
            self._held[sample] = 0
            for rank in self.ranks.values():
                rank.candidates.discard(sample)
            self._want(sample)

    # -- what to fetch ahead -----------------------------------------------------------------------------------------

    def due(self, ready: Callable[[Hashable], int]) -> tuple[Hashable, int] | None:
        """The sample to fetch next, and for whom: one pending for the most ranks, and neither cached nor coming.

        It is one that is pending for the rank with the fewest candidates, if that has less than `ready(rank)`; None if
        each rank has so many, or nothing is left to fetch. The caller fetches it (`fetching`) only if the cache has
        room that is not reserved, and not taken by samples that are pending for more ranks.
        """
        if not self.active:
            return None
        short = [(rank_id, rank) for rank_id, rank in self.ranks.items() if rank.choice < ready(rank_id)]
        for rank_id, rank in sorted(short, key=lambda one: one[1].choice):
            for pending_ranks in reversed(self._wanting.numbers()):
                for _ in range(_DRAWS):
                    sample = self._wanting.drawn(pending_ranks, self.chance())
                    if sample is not None and rank.state[sample] == _PENDING and not rank.is_ready(sample):
                        return rank_id, sample
        return None

    def fetching(self, sample: int) -> None:
        """A sample is being fetched ahead; `entered` or `not_kept` must follow."""
        self._ahead.add(sample)
        self._comes(sample)

    def leave_to_readers(self, sample: int) -> None:
        """Have a sample that is due, and cannot be fetched ahead, not be due until it is pending for others than
        now."""
        self._wanting.discard(sample)

    def not_kept(self, sample: int) -> None:
        """What was being fetched ahead has come and was not kept, or has not come."""
        self._ahead.discard(sample)
        self._coming.pop(sample, None)
        self._want(sample)

    def _comes(self, sample: int) -> None:
        self._coming[sample] = None
        self._wanting.discard(sample)

    def _want(self, sample: int) -> None:
        """Note how many ranks want a sample fetched."""
        pending_ranks = self._pending_ranks[sample]
        if pending_ranks and not self._held[sample] and sample not in self._coming:
            self._wanting.put(sample, pending_ranks)
        else:
            self._wanting.discard(sample)
