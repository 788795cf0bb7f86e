"""The engine decides what is cached, and nothing else does. It serves a mount and a replay of a trace alike.

It knows keys, sizes and sections, never bytes; each method that takes an event returns the changes that the store has
to make. The section `landing`, which every fetched file enters first, is the store's own: the engine only leaves room
for it. What the user has pinned, whole files and blocks, no one ranks; pins come first, and the others share what they
leave:

- **Samples** are ranked by the policy, and **blocks** of large files lie in an LRU. Either may fill what the other
  leaves free. When both want more, blocks get `large_share`.
- **Views**, where the root shows some samples as views, have been chosen so that all of them fit, and are not ranked
  (`rooms.py`). They may fill their share of what blocks leave, and the policy what they leave.

Trusted plans of readers (`plans/schedule.py`), exchanges between jobs (`plans/exchange.py`) and homes of samples on
several nodes (`homes.py`) overrule the policy's ranking (`plans/foresight.py`).

Invariants, after every call: used_bytes == sum of the members' sizes == sum of section_bytes <= budget_bytes; one
Changes never names a key twice; a candidate that cannot get all the room that it needs evicts nothing. The size of a
key, as the store counts its record, never changes while it is a member.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from spiderfs.core.events import Access
from spiderfs.core.homes import Homes
from spiderfs.core.plans.exchange import SharedList
from spiderfs.core.plans.foresight import Foresight, PendingDraws
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.plans.schedule import Schedule
from spiderfs.core.policy import Key, Policy, in_saved_order
from spiderfs.core.rooms import NO_VIEWS, PINS, PINS_SHARE, VIEWS, PinnedFiles, ViewsRoom, file_of

BLOCKS = "blocks"

# The times of next uses are computed again when a reader is this far from where its pace said it would be.
_DRIFT_S = 2.0


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes that the store has to make: first all of `drop`, then all of `keep`."""

    keep: tuple[tuple[Key, str], ...] = ()
    """Move the key to this section, from landing or from another section."""
    drop: tuple[Key, ...] = ()
    """Remove the key from the cache."""


NOTHING = Changes()


def merged(several: Iterable[Changes]) -> Changes:
    """The changes of several calls as one: what the engine said last about a key counts."""
    fate: dict[Key, str | None] = {}
    for changes in several:
        fate.update(dict.fromkeys(changes.drop))
        fate.update(changes.keep)
    return Changes(
        tuple((key, section) for key, section in fate.items() if section is not None),
        tuple(key for key, section in fate.items() if section is None),
    )


class CacheMember(NamedTuple):
    size: int
    section: str


class Engine:
    """The attributes without an underscore are for others to read; `section_bytes` is what the members take."""

    def __init__(
        self,
        policy: Policy,
        capacity_bytes: int,
        landing_bytes: int = 0,
        large_share: float = 0.5,
        views: ViewsRoom = NO_VIEWS,
        homes: Homes | None = None,
    ) -> None:
        self.schedule = Schedule()
        self.exchange_pending = PendingDraws()
        self.policy = policy
        self.homes = homes
        self._foresight = Foresight(policy, self.schedule, self.exchange_pending, homes)
        self._large_share = large_share
        self._views = views
        self.members: dict[Key, CacheMember] = {}
        self._blocks: OrderedDict[Key, None] = OrderedDict()
        self._shown: dict[Key, None] = {}
        self._pinned: dict[Key, None] = {}
        self.pins = PinnedFiles()
        # Members for which it is not known yet what they are shown as.
        self._unnamed: set[Key] = set()
        self.section_bytes = self._empty_sections()
        self.section_entries = self._empty_sections()
        self.used_bytes = 0
        self._set_budget(capacity_bytes, landing_bytes)

    def opened(self, key: Key, size: int) -> Changes:
        """Note an open: of a member it is a hit; any other sample, which is in landing, is a candidate."""
        if key in self.members:
            self.read_unseen(key, size)
            return self.place(key, size) if key in self._unnamed else NOTHING
        if not self._is_view(key) and key not in self.pins:
            self.policy.missed(key, size)
        return self._offer(key, size)

    def read_unseen(self, key: Key, size: int) -> None:
        """Note that a reader got a sample from the kernel's memory; without bytes at hand it is no candidate."""
        if key in self.members and key not in self._shown and key not in self._pinned:
            self.policy.hit(key, size)
            self._foresight.changed(key)

    def would_keep(self, key: Key, size: int) -> bool:
        """Whether a sample that is no member would become one if `place` were called now."""
        if self._pin_fits(key, size):
            return True
        section = self._section_for(key)
        return self._view_fits(size) if section == VIEWS else self._victims(key, size, size, section) is not None

    def could_keep(self, key: Key, size: int) -> bool:
        """Whether a sample of this size fits its section's limit, whatever would have to leave for it."""
        if key in self.pins and size <= self.pins_limit_bytes:
            return True
        if self._is_view(key):
            return size <= self._views_share()
        share = self._policy_share()
        return size <= min(share, self.policy.limit(self.policy.section_for(key), share, self.section_bytes))

    def place(self, key: Key, size: int) -> Changes:
        """Put a sample where it belongs now: a member, also a block, moves; any other is a candidate."""
        member = self.members.get(key)
        if member is None:
            return self.block_read(key, size) if isinstance(key, tuple) else self._offer(key, size)
        if key in self._pinned:
            return NOTHING if key in self.pins else self._move(key, member.size, self._section_for(key))
        if self._pin_fits(key, member.size):
            return self._move(key, member.size, PINS)
        if key in self._blocks:
            return NOTHING
        section = self._section_for(key)
        if self._views.is_view(key) is not None:
            self._unnamed.discard(key)
        if section == member.section or (section == VIEWS and not self._view_fits(member.size)):
            return NOTHING
        victims = [] if section == VIEWS else self._victims(key, 0, member.size, section)
        if victims is None:
            return NOTHING
        self._leave([*victims, key])
        self._admit(key, member.size, section)
        return Changes(((key, section),), tuple(victims))

    def block_read(self, key: Key, size: int) -> Changes:
        """Note that a block of a large file was read: a member is a hit; any other block is a candidate in landing."""
        if key in self.members:
            if key in self._blocks:
                self._blocks.move_to_end(key)
            return NOTHING
        if self._pin_fits(key, size):
            return self._move(key, size, PINS)
        if self.homes is not None and self.homes.passes(*key):  # type: ignore[misc]
            return NOTHING
        blocks_bytes, blocks_share = self.section_bytes[BLOCKS], self._blocks_share()
        over_budget = self.used_bytes + size - self.budget_bytes
        own = self._oldest_blocks(min(over_budget, blocks_bytes + size - blocks_share))
        freed = sum(self.members[block].size for block in own)
        samples: list[Key] = []
        if over_budget > freed:
            if blocks_bytes - freed + size > blocks_share:
                return NOTHING
            samples = self._surplus(self._unpinned_bytes - (blocks_bytes - freed + size))
        self._leave(own)
        self._leave(samples)
        self._admit(key, size, BLOCKS)
        return Changes(((key, BLOCKS),), (*own, *samples))

    def forget(self, key: Key) -> None:
        """Remove a member that the store has lost: its `keep` came too late, or its record is corrupt."""
        if key in self.members:
            self._leave([key])

    def evict(self, keys: Iterable[Key]) -> Changes:
        """Drop these keys, and unpin their files, as the user asked for it; keys that are no members are left out."""
        going = [key for key in dict.fromkeys(keys) if key in self.members]
        for key in going:
            self.pins.discard(file_of(key))
        self._leave(going)
        return Changes(drop=tuple(going))

    def resize(self, capacity_bytes: int, landing_bytes: int) -> Changes:
        """Change the budget; a smaller one evicts down to its bytes at once."""
        self._set_budget(capacity_bytes, landing_bytes)
        return self.settle()

    def settle(self) -> Changes:
        """Evict until no limit is exceeded. The caller must call this after a policy changed its sections' limits."""
        pinned, _ = self._first(reversed(self._pinned), self.section_bytes[PINS] - self.pins_limit_bytes)
        self._leave(pinned)
        over_budget = self.used_bytes - self.budget_bytes
        blocks = self._oldest_blocks(min(over_budget, self.section_bytes[BLOCKS] - self._blocks_share()))
        self._leave(blocks)
        samples = self._surplus(self._samples_share())
        self._leave(samples)
        return Changes(drop=(*pinned, *blocks, *samples))

    def change_policy(self, policy: Policy) -> Changes:
        """Go on with another policy; it takes over the members, in the order in which the old policy ranked them."""
        members = {key: self.members[key].size for key in self.policy.eviction_order()}
        policy.restore(members, {})
        self.policy = policy
        self._foresight = Foresight(policy, self.schedule, self.exchange_pending, self.homes)
        return self._adopt(self._shown)

    def restore(self, members: Iterable[tuple[Key, int, str]], state: Mapping[str, Any]) -> Changes:
        """Replace all members by what the store holds (key, bytes, section), for example after a remount.

        `state` is what `state()` returned before, or empty; the state of another policy is ignored. Members that no
        longer fit are dropped. The files of members in the section of pins are pinned, and no others.
        """
        self.members.clear()
        self.members.update((key, CacheMember(size, section)) for key, size, section in members)
        blocks = (key for key, member in self.members.items() if member.section == BLOCKS)
        self._blocks = OrderedDict.fromkeys(in_saved_order(blocks, state.get(BLOCKS, ())))
        self._unnamed.clear()
        self._pinned = {key: None for key, member in self.members.items() if member.section == PINS}
        self.pins = PinnedFiles()
        for key in self._pinned:
            self.pins.add(file_of(key), self.members[key].size)
        shown = self._found_views()
        samples = {key: size for key, (size, section) in self.members.items() if section not in (BLOCKS, PINS)}
        samples = {key: size for key, size in samples.items() if key not in shown}
        same_policy = state.get("policy") == self.policy.name
        self.policy.restore(samples, state.get("ranks", {}) if same_policy else {})
        return self._adopt(shown)

    def state(self) -> dict[str, Any]:
        """The order of the blocks and the policy's state, for msgpack; the store knows the members."""
        return {"policy": self.policy.name, "ranks": self.policy.state(), BLOCKS: list(self._blocks)}

    def score(self, key: Key) -> float:
        """The policy's score of a sample; a block has no score, and this returns 0 for it."""
        return 0.0 if isinstance(key, tuple) else self.policy.score(key)

    def pin(self, inode: Key, size: int) -> bool:
        """Pin a file if there is room; whether it is pinned, and will be kept. The caller places what is stored."""
        # After a mount only what the store had of a large file counts.
        missing = size - self.pins.size_of(inode)
        if missing > 0 or inode not in self.pins:
            if self.pins.bytes + missing > self.pins_limit_bytes:
                return False
            self.pins.add(inode, missing)
        # With a smaller capacity there may be no room for what was pinned before.
        is_within = self.pins.bytes <= self.pins_limit_bytes
        return is_within or inode in self._pinned or self._pin_fits(inode, size)

    # -- what is known of the future -------------------------------------------------------------------------------

    def plan(self, trainer: Hashable, name: str, epoch: PlannedEpoch, now_s: float, begun: bool = True) -> None:
        """A trainer begins this epoch of the list `name` at its start position, or will do so later (`begun` False)."""
        if begun:
            self.schedule.begin(trainer, name, epoch, now_s)
        else:
            self.schedule.follow_with(trainer, name, epoch, now_s)
        self.rerank()

    def progressed(self, trainer: Hashable, name: str, number: int, dispatched: int, taken: int, now_s: float) -> None:
        """A trainer has dispatched and taken this many positions of epoch `number`."""
        for key in self.schedule.progressed(trainer, name, number, dispatched, taken, now_s):
            self._foresight.changed(key)

    def served(self, epoch: PlannedEpoch, position: int) -> None:
        """The sample at this position of a planned epoch waits for its reader outside of the cache."""
        key = epoch.serve(position)
        if key is not None:
            self._foresight.changed(key)

    def unserved(self, epoch: PlannedEpoch, position: int) -> None:
        """What waited for its reader at this position of a planned epoch has been lost."""
        self._foresight.changed(epoch.unserve(position))

    def end_epoch(self, trainer: Hashable, number: int) -> None:
        """A trainer reads nothing more of epoch `number`."""
        self.schedule.end(trainer, number)
        self.rerank()

    def unplan(self, trainer: Hashable) -> None:
        """A trainer has disconnected: forget its plans."""
        self.schedule.drop(trainer)
        self.rerank()

    def rank_some(self, limit: int) -> bool:
        """Rank up to `limit` samples again whose use on other nodes has changed; whether there were any."""
        changed = self.schedule.remote.taken_changes(limit)
        for key in changed:
            self._foresight.changed(key)
        return bool(changed)

    def wanted(
        self, trainer: Hashable, key: Key, now_s: float, late: bool = False, access: Access | None = None
    ) -> None:
        """A trainer opened a sample, `late` if it waited; call it before `opened`. `access`: for `Schedule.drawn`."""
        trusted = self.schedule.trusted
        changed = self.schedule.opened(trainer, key, now_s, late, access)
        if self.schedule.trusted is not trusted:
            self.rerank()
        else:
            for other in changed:
                self._foresight.changed(other)

    def unseen(self, now_s: float, trainer: Hashable | None) -> list[tuple[Hashable, Key]]:
        """The samples that a trainer, or any (None), took and whose opens no worker reported, with their trainers."""
        trusted = self.schedule.trusted
        found = self.schedule.unseen(now_s, trainer)
        if self.schedule.trusted is not trusted:
            self.rerank()
        return found

    def share(self, name: Hashable, shared: SharedList) -> None:
        """Jobs may exchange samples of this list from now on."""
        self.exchange_pending.add(name, shared, self.members)

    def compare_paces(self, now_s: float) -> None:
        """Compute the times of next uses again, by how fast each reader is now; to be called every few seconds."""
        if self.schedule.anchor(now_s, _DRIFT_S):
            self.rerank()

    def scored(self, key: Key, score: float) -> None:
        """A sample, member or not, has a new score."""
        self.policy.scored(key, score)
        self._foresight.changed(key)

    def rerank(self) -> None:
        """Rank all members again: plans, homes, or samples that are pending for jobs have changed."""
        foreseen = self.policy.foreseen
        self._foresight.replanned(key for key, member in self.members.items() if member.section == foreseen)

    # -- shares ----------------------------------------------------------------------------------------------------

    def _set_budget(self, capacity_bytes: int, landing_bytes: int) -> None:
        self.budget_bytes = max(0, capacity_bytes - landing_bytes)
        """Bytes that members may take: the capacity less the room left for landing."""

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that no member takes."""
        return self.budget_bytes - self.used_bytes

    @property
    def pins_limit_bytes(self) -> int:
        """Bytes that pinned files may take."""
        return int(self.budget_bytes * PINS_SHARE)

    def _pin_fits(self, key: Key, size: int) -> bool:
        """Whether a key that is not in the section of pins belongs there, and fits."""
        return key in self.pins and self.section_bytes[PINS] + size <= self.pins_limit_bytes

    @property
    def _unpinned_bytes(self) -> int:
        """Bytes that all members but the pinned ones may take."""
        return self.budget_bytes - self.section_bytes[PINS]

    def _blocks_share(self) -> int:
        """Bytes of blocks that the policy cannot take back."""
        return int(self._unpinned_bytes * self._large_share)

    def _samples_share(self) -> int:
        """Bytes that samples may fill: blocks keep their share, and less if they hold less now."""
        room, blocks = self.budget_bytes - self.section_bytes[PINS], self.section_bytes[BLOCKS]
        return room - min(blocks, int(room * self._large_share)) if blocks else room

    def _views_share(self) -> int:
        return self._views.limit(self._samples_share())

    def _policy_share(self) -> int:
        """Bytes that the policy may fill: what views leave free of those for samples."""
        return self._samples_share() - self.section_bytes[VIEWS]

    def _policy_bytes(self) -> int:
        return self.used_bytes - self.section_bytes[BLOCKS] - self.section_bytes[PINS] - self.section_bytes[VIEWS]

    # -- samples that are shown as views

    def _is_view(self, key: Key) -> bool:
        return self._views.is_view(key) is True

    def _section_for(self, key: Key) -> str:
        """The section of a key that is not pinned."""
        if isinstance(key, tuple):
            return BLOCKS
        return VIEWS if self._is_view(key) else self.policy.section_for(key)

    def _view_fits(self, size: int) -> bool:
        return self.section_bytes[VIEWS] + size <= self._views_share()

    def _found_views(self) -> dict[Key, None]:
        """The members that are shown as views; members for which that is not known become unnamed."""
        found: dict[Key, None] = {}
        for key, member in self.members.items():
            is_view = False if member.section in (BLOCKS, PINS) else self._views.is_view(key)
            if is_view:
                found[key] = None
            elif is_view is None:
                self._unnamed.add(key)
        return found

    # -- choosing victims ------------------------------------------------------------------------------------------

    def _offer(self, key: Key, size: int) -> Changes:
        if self._pin_fits(key, size):
            return self._move(key, size, PINS)
        section = self._section_for(key)
        victims: list[Key] | None
        if section != VIEWS:
            victims = self._victims(key, size, size, section)
        else:
            victims = self._policy_surplus(self._policy_share() - size) if self._view_fits(size) else None
        if victims is None:
            return NOTHING
        self._leave(victims)
        # Samples may take back all room that blocks hold beyond their own share.
        borrowed = self._oldest_blocks(self.used_bytes + size - self.budget_bytes)
        self._leave(borrowed)
        self._admit(key, size, section)
        if self._views.is_view(key) is None:
            self._unnamed.add(key)
        return Changes(((key, section),), (*victims, *borrowed))

    def _victims(self, key: Key, more: int, size: int, section: str) -> list[Key] | None:
        """The members that have to leave for a candidate that adds `more` bytes to the policy and `size` to a section.

        None if no members that may leave for it free enough bytes.
        """
        share = self._policy_share()
        limit = self.policy.limit(section, share, self.section_bytes)
        if size > min(share, limit) or (more and not self._foresight.may_enter(key)):
            return None
        over_share = self._policy_bytes() + more - share
        over_limit = self.section_bytes[section] + size - limit
        victims: list[Key] = []
        if over_limit > 0:
            victims = self._enough(self._foresight.victims_for(key, size, section), over_limit)
            if not victims:
                return None
            over_share -= sum(self.members[victim].size for victim in victims)
        if over_share > 0:
            others = (other for other in self._foresight.victims_for(key, size, None) if other not in victims)
            rest = self._enough(others, over_share)
            if not rest:
                return None
            victims += rest
        return victims

    def _enough(self, order: Iterable[Key], over: int) -> list[Key]:
        """The first keys of `order` that together free `over` bytes; an empty list if all keys together do not."""
        chosen, over = self._first(order, over)
        return chosen if over <= 0 else []

    def _oldest_blocks(self, over: int) -> list[Key]:
        """The least recently read blocks that together free `over` bytes, or all of them."""
        return self._first(self._blocks, over)[0]

    def _first(self, order: Iterable[Key], over: int) -> tuple[list[Key], int]:
        """The first keys of `order` that together free `over` bytes, or all, and the bytes that are still to free."""
        chosen: list[Key] = []
        for key in order if over > 0 else ():
            chosen.append(key)
            over -= self.members[key].size
            if over <= 0:
                break
        return chosen, over

    def _surplus(self, share: int) -> list[Key]:
        """The members that must leave so that samples hold at most `share` bytes, and views and policy their shares."""
        views_bytes = self.section_bytes[VIEWS]
        # All of them are as good as each other, so the newest ones leave, as with MinIO.
        views = self._enough(reversed(self._shown), views_bytes - self._views.limit(share))
        left = views_bytes - sum(self.members[key].size for key in views)
        return views + self._policy_surplus(share - left)

    def _policy_surplus(self, share: int) -> list[Key]:
        """The members that must leave so that the policy holds at most `share` bytes, and each section its limit."""
        chosen: dict[Key, None] = {}
        over_share = self._policy_bytes() - share
        for section in self.policy.sections:
            over_limit = self.section_bytes[section] - self.policy.limit(section, share, self.section_bytes)
            if over_limit > 0:
                chosen.update(dict.fromkeys(self._enough(self._foresight.eviction_order(section), over_limit)))
        over_share -= sum(self.members[key].size for key in chosen)
        if over_share > 0:
            rest = (key for key in self._foresight.eviction_order() if key not in chosen)
            chosen.update(dict.fromkeys(self._enough(rest, over_share)))
        return list(chosen)

    # -- books -----------------------------------------------------------------------------------------------------

    def _move(self, key: Key, size: int, section: str) -> Changes:
        """Put a member or a candidate into this section, whatever has to leave for it, or for what it leaves free."""
        if key in self.members:
            self._leave([key])
        self._admit(key, size, section)
        drop = self.settle().drop
        return Changes(() if key in drop else ((key, section),), drop)

    def _unranked(self, section: str) -> dict[Key, None] | None:
        """The members of a section that the policy knows nothing of; None for a section of the policy's."""
        if section == BLOCKS:
            return self._blocks
        return self._shown if section == VIEWS else self._pinned if section == PINS else None

    def _admit(self, key: Key, size: int, section: str) -> None:
        self.members[key] = CacheMember(size, section)
        self.section_bytes[section] += size
        self.section_entries[section] += 1
        self.used_bytes += size
        room = self._unranked(section)
        if room is not None:
            room[key] = None
        else:
            self.policy.inserted(key, size)
        self.exchange_pending.entered(key)
        self._foresight.inserted(key, section)

    def _leave(self, keys: Iterable[Key]) -> None:
        for key in keys:
            size, section = self.members.pop(key)
            self.section_bytes[section] -= size
            self.section_entries[section] -= 1
            self.used_bytes -= size
            self._unnamed.discard(key)
            room = self._unranked(section)
            if room is not None:
                del room[key]
            else:
                self.policy.removed(key)
            self.exchange_pending.left(key)
            self._foresight.removed(key)

    def _adopt(self, shown: dict[Key, None]) -> Changes:
        """Put every member into the section that it belongs to, then evict what does not fit; `shown` are views."""
        self._shown = shown
        self.section_bytes = self._empty_sections()
        self.section_entries = self._empty_sections()
        moved: list[tuple[Key, str]] = []
        for key, member in self.members.items():
            section = member.section
            if section not in (BLOCKS, PINS):
                section = VIEWS if key in shown else self.policy.section_for(key)
            if section != member.section:
                moved.append((key, section))
            self.section_bytes[section] += member.size
            self.section_entries[section] += 1
        self.members.update((key, CacheMember(self.members[key].size, section)) for key, section in moved)
        self.used_bytes = sum(self.section_bytes.values())
        self.rerank()
        drop = self.settle().drop
        return Changes(tuple(move for move in moved if move[0] in self.members), drop)

    def _empty_sections(self) -> Counter[str]:
        views = (VIEWS,) if self._views.share else ()
        return Counter(dict.fromkeys((BLOCKS, *views, *self.policy.sections), 0))
