"""Keep samples of high loss, and let other samples stand in for those of low loss (ImPACT, sections III-C and III-D).

The half of a course's scored samples with the higher losses are its **H-samples** (`impact_course.py`); they are
chosen anew at the start of each of its epochs, and some times in between. A sample that is on the H-list of any course
is an H-sample of the cache, with the worth that it had when the last list was made; all others are L-samples. H-samples
that are cached are the H-part of the members, and L-samples that are cached are the L-part.

- An H-sample enters if there is room, or evicts a member of lower worth.
- An L-sample enters if it can evict an L-member that is used up: all courses that read it have read it in this epoch.
- A reader that asks for an L-sample of its course that is not cached gets a stand-in: a member of the same label that
  is an L-sample of this course too, and that no reader of this course got in this epoch. Each member stands in once for
  each course. If no such member is left, the reader gets the sample itself.
- Whoever can bring many L-samples at a time restocks the L-part with samples that were not yet read
  (`core/guided.py`). For that the policy remembers the L-samples that were missed (`missed_ids`).
- A sample that no batch has named, such as a sample of a validation set, gets no stand-in and is not remembered so.

The two parts share the room by how often H-samples and L-samples are read, at first 9 to 1. A part that holds less than
its share takes room from the other one. A read counts for the course of its reader (`read_by`, `stood_in`), and a read
of anybody else for all courses.

Before there are H-samples nothing is evicted. So on a mount without a trainer this policy acts as MinIO does, and while
the only course warms up as well: it has no H-list, as in the paper. If others have one, samples that are read for a
course that warms up evict nothing.

When there are new H-samples, members pass from the old parts to the new ones, a few at each event, so that no event
takes long. A member is a victim in the order of the part that it is in (the paper's shadow heap).

Samples that a trainer pins (the paper's S, which it evaluates before each epoch) are in a section of their own and in
no part. They are no victims of other samples, stand in for no sample, and no sample stands in for them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from spiderfs.core.guided import UNKNOWN, Divided, Guided, HasPins, HasStandIns, Restocked, WarmsUp
from spiderfs.core.policy import SAMPLES, Key, in_saved_order, saved_keys
from spiderfs.policies.impact_course import FIRST_HIGH_READS, FIRST_LOW_READS, HighAndLow, ImpactCourse
from spiderfs.policies.pins import PINNED, Pins, pinned_limit

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


class Impact(Guided, HasStandIns, HasPins, Divided, WarmsUp, Restocked):
    name = "impact"
    sections = (SAMPLES, PINNED)
    scoring = "loss"

    def __init__(self) -> None:
        self._courses: dict[str, ImpactCourse] = {}
        self._worths: dict[Key, float] = {}
        self._sizes: dict[Key, int] = {}
        self._parts = HighAndLow({})
        # While members pass to new parts: the old parts, and the members that have not passed yet.
        self._old = HighAndLow({})
        self._to_pass: deque[Key] = deque()
        # L-members that are used up, in the order in which they became so.
        self._used: OrderedDict[Key, None] = OrderedDict()
        self._pins = Pins()
        # Members of the section of pinned samples, in the order in which they entered.
        self._pinned: dict[Key, None] = {}
        # The course and the sample of the next read, if that is known, and the courses of the last one.
        self._next_read: tuple[str, Key] | None = None
        self._last_read: tuple[Key, Sequence[ImpactCourse]] | None = None
        # Redirects of courses that are over, which have to be taken back.
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
        for course in self._read(key):
            course.stand_ins.take_back(key)
        if self._parts.worths and key in self._worths and self.ranks_low(key):
            self._miss(key)

    def inserted(self, key: Key, size: int) -> None:
        self._sizes[key] = size
        for course in self._courses.values():
            course.stand_ins.take_back(key)
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
        for course in self._courses.values():
            course.stand_ins.discard(key)
            course.used.discard(key)
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
        """The sample's worth to all courses: with one course, its latest loss."""
        return self._worths.get(key, UNKNOWN)

    def state(self) -> dict[str, Any]:
        """The losses of L-samples are not in it, for the scoring saves all losses."""
        savable = len(self._parts.worths) + sum(len(course.high) for course in self._courses.values()) <= 2 * MAX_SAVED
        high = self._parts.worths if savable else {}
        return {
            "order": list(self.eviction_order()),
            "listed": list(high),
            "losses": list(high.values()),
            "courses": {name: course.state() for name, course in self._courses.items()} if savable else {},
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
        self._pins = Pins({name: saved_keys(keys) for name, keys in state.get("pins", {}).items()})
        self._pinned.clear()
        for course in self._courses.values():
            course.forget_reads()
        for name, saved in state.get("courses", {}).items():
            if name not in self._courses:
                self._courses[name] = ImpactCourse(self._is_away)
                self._courses[name].is_back = False
            self._courses[name].restore(saved, members)
        self._sizes = dict(members)
        for key in in_saved_order(members, state.get("order", ())):
            self.inserted(key, members[key])

    # -- as every guided policy

    def scored(self, key: Key, score: float) -> None:
        if not score > UNKNOWN:
            raise ValueError(f"a score must be positive, not {score}")
        self._worths[key] = score

    def scored_by(self, course_id: str, key: Key, score: float) -> None:
        self._course(course_id).losses[key] = score

    def listed(self, course_id: str, labels: Mapping[Key, int]) -> None:
        course = self._course(course_id)
        # A trainer that goes on with its warm-up says so again.
        course.warms_up = False
        course.labels = labels
        course.stand_ins.listed(labels)

    def forget_course(self, course_id: str, keys: Iterable[Key]) -> None:
        """The H-samples stay until another course has a new list: the cache is filled with them."""
        course = self._courses.pop(course_id, None)
        if course is not None:
            course.stand_ins.clear()
            self._left += [(course_id, key, given) for key, given in course.stand_ins.drain_changes()]
        for key in keys:
            if key not in self._sizes and key not in self._parts.worths:
                self._worths.pop(key, None)

    def stand_in(self, course_id: str, key: Key) -> Key | None:
        course = self._courses.get(course_id)
        return None if course is None or key in self._sizes else course.stand_ins.stand_in(key)

    def stood_in(self, course_id: str, stand_in: Key, wanted: Key) -> None:
        course = self._course(course_id)
        course.asked_for.add(wanted)
        course.stand_ins.take_back(wanted)
        self._miss(wanted)
        self._next_read = course_id, stand_in

    def read_by(self, course_id: str, key: Key) -> None:
        self._next_read = course_id, key

    def pin(self, course_id: str, keys: Collection[Key]) -> Collection[Key]:
        changed = self._pins.replace(course_id, keys)
        for key in keys:
            for course in self._courses.values():
                course.stand_ins.take_back(key)
        return changed

    @property
    def pinned(self) -> Mapping[str, Collection[Key]]:
        return self._pins.by_course

    def redirects_changed(self) -> list[tuple[str, Key, Key | None]]:
        changes, self._left = self._left, []
        for course_id, course in self._courses.items():
            changes += [(course_id, key, given) for key, given in course.stand_ins.drain_changes()]
        return changes

    def forget_told(self) -> None:
        for course in self._courses.values():
            course.stand_ins.change_all()

    def new_epoch(self, course_id: str) -> None:
        """Choose the H-samples of this course anew; every L-member may stand in for it again."""
        course = self._course(course_id)
        for gone in [name for name, other in self._courses.items() if not other.is_back]:
            del self._courses[gone]
        course.new_epoch()
        self._list_anew(course)

    def warm_up(self, course_id: str, active: bool) -> None:
        """While a course warms up it has no H-list; when the warm-up is over it has one at once."""
        course = self._course(course_id)
        if active != course.warms_up:
            course.warms_up = active
            self._list_anew(course)

    @property
    def ratio(self) -> float:
        """The share of H-samples among recent reads; their part has the same share of the room."""
        high = sum(course.high_reads for course in self._courses.values()) or FIRST_HIGH_READS
        return high / (high + (sum(course.low_reads for course in self._courses.values()) or FIRST_LOW_READS))

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
        return self.ranks_low(key) and any(course.needs_stand_in(key) for course in self._courses.values())

    # -- inside

    def _course(self, course_id: str) -> ImpactCourse:
        course = self._courses.get(course_id)
        if course is None:
            course = self._courses[course_id] = ImpactCourse(self._is_away)
        course.is_back = True
        return course

    def _is_away(self, key: Key) -> bool:
        return key not in self._sizes and key not in self._pins

    def _read(self, key: Key) -> Sequence[ImpactCourse]:
        """Note a read that got the sample's own bytes, cached or not; returns the courses that it counts for."""
        self._pass_members(PASSED_AT_ONCE)
        told, self._next_read = self._next_read, None
        known = told is not None and told[1] == key
        courses = [self._course(told[0])] if told is not None and known else list(self._courses.values())
        self._last_read = key, courses
        for course in courses:
            course.read(key, counts=key not in self._pins)
            if key in self._parts:
                course.use(key)
            if course.list_is_old:
                self._list_anew(course)
        self._note_used(key)
        return courses

    def _is_of_a_warm_up(self, key: Key) -> bool:
        """Whether this candidate was just read, and for no other courses than such that warm up."""
        if self._last_read is None or self._last_read[0] != key or not self._last_read[1]:
            return False
        return all(course.warms_up for course in self._last_read[1])

    def _miss(self, key: Key) -> None:
        self.missed_ids[key] = None
        self.missed_ids.move_to_end(key)
        if len(self.missed_ids) > MAX_MISSED:
            self.missed_ids.popitem(last=False)

    def _offer_member(self, key: Key) -> None:
        """Offer a member of the new parts as a stand-in to the courses for which it may be one."""
        for course in self._courses.values():
            course.offer(key)
        self._note_used(key)

    def _note_used(self, key: Key) -> None:
        """Note an L-member if it is used up: if all courses that read it have read it in this epoch."""
        if key in self._parts.low and all(key in course.used for course in self._courses.values() if course.wants(key)):
            self._used.setdefault(key)

    def _list_anew(self, course: ImpactCourse) -> None:
        """Choose the H-samples of one course anew, and with them those of the cache, and let members pass."""
        self._pass_members(len(self._to_pass))
        course.list_anew()
        high = {key: self._worths[key] for other in self._courses.values() for key in other.high if key in self._worths}
        self._used.clear()
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
        """All L-members; those that are used up come first, for the others may still stand in."""
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
