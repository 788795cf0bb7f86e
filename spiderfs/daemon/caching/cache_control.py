"""The cache control: it passes events to the engine, and carries out its decisions in the store.

The engine decides, and the store is the truth. If the store no longer finds in landing what the engine wants to keep,
the engine forgets that key. At the start, and whenever the two disagree, the engine learns its members from the store
again. All calls belong to one thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgpack
import trio

from spiderfs.core.engine import BLOCKS, NOTHING, Changes, Engine, merged
from spiderfs.core.events import FETCHED, HIT, OPENED, REFUSED, UNSTORED, Access, Budget, Hint, Lost
from spiderfs.core.homes import Homes
from spiderfs.core.partials import PARTIALS, Partials
from spiderfs.core.plans.fetch_limits import AHEAD_SHARE
from spiderfs.core.policy import HubLimits, Key, Policy
from spiderfs.core.rooms import LANDING_SHARE, NO_VIEWS, ViewsRoom, landing_of, landing_room
from spiderfs.errors import SpiderfsError, StoreError
from spiderfs.linux import steady_clock
from spiderfs.metrics import Counters
from spiderfs.options.model import Options
from spiderfs.policies import mountable_policies
from spiderfs.protocol.partials import FIRST_PARTIAL
from spiderfs.sources.source import MAX_SIZE
from spiderfs.store.store import LANDING, Content, ContentKey, Keep, Member
from spiderfs.vfs.catalogue import Catalogue
from spiderfs.vfs.lister import Lister

log = logging.getLogger(__name__)

# While plans are followed, nearly every file that lands was fetched ahead and leaves landing at once. The number of
# these fetches is known, so landing gets room for them alone, and members can use the rest. Where landing still loses
# records, because workers fetch too or the manager does not run at once, it gets room for one more with each that it
# lost, up to a tenth of the cache: a place for a member saves one fetch in an epoch, and each lost record costs one.
LANDING_MOST_SHARE = 0.1


OnAccess = Callable[[Access, bool], None]


class CacheControl:
    def __init__(
        self,
        content: Content,
        policy: str,
        large_share: float,
        counters: Counters,
        hub_limits: HubLimits | None = None,
        note: Callable[[Hint], None] = lambda hint: None,
        partials_share: float = 0.5,
        views: ViewsRoom = NO_VIEWS,
        homes: Homes | None = None,
    ) -> None:
        """`note` is called with what the engine is given beside accesses."""
        self._content, self._note, self._counters = content, note, counters
        self.partials = Partials(partials_share)
        self._capacity_bytes = 0
        # What the engine leaves free for landing.
        self._left_bytes = 0
        self._largest_bytes = 0
        self._expected_files: int | None = None
        self._lost_files = 0
        self._hub_limits = hub_limits or HubLimits()
        self.engine = Engine(self._made(policy), 0, 0, large_share, views, homes)

    def status(self) -> dict[str, Any]:
        """The content of the cache in figures; `sections` begin with landing, and `pins` may not be cached."""
        usage, engine = self._content.usage(), self.engine
        sections = {LANDING: (usage.landing_bytes, usage.landing_entries)}
        sections |= {name: (size, engine.section_entries[name]) for name, size in engine.section_bytes.items()}
        sections[PARTIALS] = self.partials.bytes, len(self.partials)
        pins = {"files": len(engine.pins), "bytes": engine.pins.bytes, "limit_bytes": engine.pins_limit_bytes}
        return {
            "capacity_bytes": usage.capacity_bytes,
            "used_bytes": usage.used_bytes,
            "entries": usage.landing_entries + usage.kept_entries,
            "sections": {name: {"bytes": size, "entries": count} for name, (size, count) in sections.items()},
            "pins": pins,
        }

    @property
    def samples(self) -> int:
        """How many files are cached as a whole, and partial samples that are landing."""
        usage = self._content.usage()
        others = self.engine.section_entries.get(BLOCKS, 0) + len(self.partials)
        return usage.landing_entries + usage.kept_entries - others

    def restore(self, capacity_bytes: int, state: bytes | None) -> None:
        """Learn the members from the store; `state` is what `saved_state` gave, or None."""
        members = list(self._content.members())
        self.apply(self._learn(capacity_bytes, members, state))
        self._content.set_capacity(capacity_bytes)
        # Records that were fetched just before the last manager died, or while there was none, are still candidates.
        waiting = [member for member in members if member.section == LANDING and not _is_partial(member.key)]
        self.apply(*(self._candidate(_engine_key(member.key), member.size) for member in waiting))

    def _learn(self, capacity_bytes: int, members: Iterable[Member], state: bytes | None) -> Changes:
        """Give the engine what the store has; returns the changes for records that do not fit."""
        self._capacity_bytes = capacity_bytes
        stored = [member for member in members if member.section != LANDING]
        self._largest_bytes = max((size for _, size, *_ in stored if 2 * size <= capacity_bytes), default=0)
        self.partials.restore((member.key.inode, member.size) for member in stored if _is_partial(member.key))
        gone = Changes(drop=tuple(self.partials.resize(capacity_bytes)))
        self._resize()
        kept = [(_engine_key(key), size, section) for key, size, section, _ in stored if not _is_partial(key)]
        return merged((gone, self.engine.restore(kept, _unpacked(state))))

    def saved_state(self) -> bytes:
        """The engine's knowledge of its members, packed for the next mount."""
        packed: bytes = msgpack.packb(self.engine.state())
        return packed

    def reconcile(self) -> None:
        """Learn the members from the store again if the store and the engine no longer agree."""
        usage = self._content.usage()
        known = len(self.engine.members) + len(self.partials), self.engine.used_bytes + self.partials.bytes
        if (usage.kept_entries, usage.kept_bytes) != known:
            log.warning("the cache holds other files than thought: taking stock")
            self.restore(self._capacity_bytes, self.saved_state())

    def fold(self, events: list[Access], on_access: OnAccess = lambda access, offered: None) -> None:
        """Give accesses to the engine, and do what it decides; `on_access` gets each first, and if it is offered."""
        changes: list[Changes] = []
        for access in events:
            if access.trainer:
                late = access.where not in (HIT, OPENED)
                if self.engine.schedule.planned(access.trainer, access.wanted):
                    self._counters.add("planned_opens")
                    self._counters.add("planned_late", int(late))
                self.engine.wanted(access.trainer, access.wanted, access.time_s, late, access)
            offered = access.size > 0 and access.where not in (UNSTORED, REFUSED)
            on_access(access, offered)
            if access.where == REFUSED and access.size:
                changes.append(self._room_for(access.size))
            if not offered:
                continue
            key = ContentKey(access.inode, access.block) if access.block else access.inode
            change = self._candidate(key, access.size)
            if change is not NOTHING:
                changes.append(change)
        self._counters.add("events_folded", len(events))
        self.apply(*changes)

    def _candidate(self, key: Key, size: int) -> Changes:
        return self.engine.block_read(key, size) if isinstance(key, tuple) else self.engine.opened(key, size)

    def _room_for(self, size: int) -> Changes:
        """A file did not fit into landing: enlarge landing, unless the file is too large for this cache."""
        if not self._largest_bytes < size <= self._capacity_bytes // 2:
            return NOTHING
        self._largest_bytes = size
        return self._resize()

    @property
    def landing_room_bytes(self) -> int:
        """How many bytes may land before those that landed first are pushed out."""
        return self._capacity_bytes - self.engine.used_bytes

    def expect(self, files: int | None) -> None:
        """How many files land at a time, because plans are followed; None if files land as readers ask for them."""
        self._expected_files = files
        if files is None:
            self._lost_files = 0
        if self._landing_bytes() != self._left_bytes:
            self.apply(self._resize())

    def _resize(self) -> Changes:
        self._left_bytes, gone = self._landing_bytes(), self.partials.resize(self._capacity_bytes)
        room_bytes = self._capacity_bytes - self.partials.set_aside_bytes
        self._note(Budget(room_bytes, self._left_bytes))
        return merged((Changes(drop=tuple(gone)), self.engine.resize(room_bytes, self._left_bytes)))

    def _landing_bytes(self) -> int:
        share = landing_room(self._capacity_bytes)
        if self._expected_files is not None and self.engine.members:
            mean_bytes = self.engine.used_bytes // len(self.engine.members)
            most = landing_room(self._capacity_bytes, LANDING_MOST_SHARE)
            if self.engine.homes is not None:
                # What is fetched ahead takes room, too, and a plan is not to cost more than it saves.
                share = most = landing_room(self._capacity_bytes, LANDING_SHARE - AHEAD_SHARE)
            share = min(min(share, self._expected_files * mean_bytes) + self._lost_files * mean_bytes, most)
        return landing_of(share, self._largest_bytes, self._capacity_bytes)

    def set_capacity(self, capacity_bytes: int) -> None:
        """Evict down to this capacity; raises StoreError, and then the old one holds again, with less in the cache."""
        if capacity_bytes == self._capacity_bytes == self._content.usage().capacity_bytes:
            return
        with self._undone_on_failure():
            self._capacity_bytes = capacity_bytes
            self.apply(self._resize())
            self._content.set_capacity(capacity_bytes)

    def set_policy(self, name: str) -> None:
        """Go on with another policy; if the store cannot, this raises StoreError and everything is as it was."""
        if name == self.engine.policy.name:
            return
        with self._undone_on_failure():
            self.apply(self.engine.change_policy(self._made(name)))

    def limit_hubs(self, limits: HubLimits) -> None:
        """Change the limits of each hub, now and for policies that are chosen later."""
        self._hub_limits = limits
        self.engine.policy.limit_hubs(limits)

    def _made(self, name: str) -> Policy:
        policy = mountable_policies()[name]()
        policy.limit_hubs(self._hub_limits)
        return policy

    @contextlib.contextmanager
    def _undone_on_failure(self) -> Iterator[None]:
        capacity_bytes, policy = self._capacity_bytes, self.engine.policy.name
        try:
            yield
        except StoreError:
            if self.engine.policy.name != policy:
                self.engine.change_policy(self._made(policy))
            # The engine has decided changes that the store has not made, and it would not decide them again.
            self._learn(capacity_bytes, self._content.members(), self.saved_state())
            raise

    def evict(self, keys: Iterable[ContentKey]) -> int:
        """Evict records that the user has named, from landing too; returns how many there were."""
        going = [key for key in keys if self._content.member(key) is not None]
        self._content.apply(going, ())
        self._evict(going)
        return len(going)

    def pin(self, inode: int, size: int) -> bool:
        """Keep a file of `size` bytes whatever it is worth, if pins have room for it; returns whether it is pinned."""
        if pinned := self.engine.pin(inode, size):
            # What lies in landing may have been refused, so that no one would offer it again.
            there = [member for key in self._content.keys(inode) if (member := self._content.member(key)) is not None]
            self.apply(*(self.engine.place(_engine_key(member.key), member.size) for member in there))
        return pinned

    def unpin(self, inodes: Sequence[int]) -> None:
        for inode in inodes:
            self.engine.pins.discard(inode)
        keys = [_engine_key(key) for inode in inodes for key in self._content.keys(inode)]
        members = self.engine.members
        self.apply(*(self.engine.place(key, members[key].size) for key in keys if key in members))

    def release(self, keys: Iterable[ContentKey]) -> None:
        """Make these records the next to be evicted, whatever their score is."""
        if going := [key for key in keys if _engine_key(key) in self.engine.members]:
            self._evict(going)
            self._content.release(going)

    def release_blocks(self, inode: int) -> None:
        """As `release`, of what the cache has of a large file, unless that is pinned."""
        if inode not in self.engine.pins:
            self.release(self._content.keys(inode))

    def _evict(self, keys: Iterable[ContentKey]) -> None:
        for key in self.engine.evict(_engine_key(key) for key in keys).drop:
            self._note(Lost(key))

    def make_room_for(self, size: int) -> None:
        """A partial sample of this size did not fit into landing."""
        self.apply(self._room_for(size))

    def keep_partial(self, inode: int, size: int, replaces: int | None) -> bool:
        """Keep a partial sample that has landed, in place of an earlier one; returns whether it is kept."""
        before = self.partials.set_aside_bytes
        if (gone := self.partials.made(inode, size, replaces)) is None:
            self.apply(Changes(drop=(inode,)))
            return False
        changed = self._resize() if self.partials.set_aside_bytes != before else NOTHING
        self.apply(changed, Changes(((inode, PARTIALS),), tuple(gone)))
        return inode in self.partials

    @property
    def restocked(self) -> Policy | None:
        """The policy, if it has room for samples that no one has read yet."""
        return self.engine.policy if self.engine.policy.restocks else None

    def size_of(self, key: Key) -> int | None:
        """The bytes of a sample in the store, landing included; None if it is not there."""
        member = self._content.member(_content_key(key))
        return None if member is None else member.size

    def place(self, *inodes: int) -> None:
        """Have the engine put samples into the sections where the policy wants them now, if they are in the store."""
        sizes = [(inode, self.size_of(inode)) for inode in inodes]
        self.apply(*(self.engine.place(inode, size) for inode, size in sizes if size is not None))

    def land(self, records: Sequence[tuple[int, int, bytes]]) -> list[int]:
        """Store samples, each with its size and its record, in the sections where the policy wants them.

        Returns where each lies now, as in `core.events`: FETCHED; HIT if the store had it already; or REFUSED. Raises
        StoreError, and then has stored none of them.
        """
        new = [(inode, size) for inode, size, _ in records if inode not in self.engine.members]
        change = merged([self.engine.place(inode, size) for inode, size in new])
        sections = {_content_key(key): section for key, section in change.keep}
        keys = [ContentKey(inode) for inode, _, _ in records]
        rows = [(key, size, record) for key, (_, size, record) in zip(keys, records, strict=True)]
        try:
            landed = self._content.land_kept(rows, sections, map(_content_key, change.drop))
        except StoreError:
            # The engine has decided changes that it would not decide again. What leaves makes room on a full disk.
            for inode, _ in new:
                self.engine.forget(inode)
            self.apply(Changes(drop=change.drop))
            raise
        self._counters.add("evicted", sum(not _is_partial(_content_key(key)) for key in change.drop))
        entered = {key for key, taken in zip(keys, landed, strict=True) if taken and key in sections}
        self._counters.add("admitted", len(entered))
        lost = {key for key, taken in zip(keys, landed, strict=True) if taken is False and key in sections}
        for key in lost:
            self.engine.forget(_engine_key(key))
            self._note(Lost(_engine_key(key)))
        # What changes places beside them, and what another process had put into landing.
        moved = tuple(pair for pair in change.keep if _content_key(pair[0]) not in entered | lost)
        try:
            self.apply(Changes(moved))
        except StoreError as exc:
            # The records themselves are stored; `reconcile` finds what has not moved.
            log.warning("%s", exc)
        return [HIT if taken is None else FETCHED if taken else REFUSED for taken in landed]

    def score(self, key: ContentKey) -> float:
        """The policy's score of a sample; 0 for what is no sample."""
        return 0.0 if _is_partial(key) else self.engine.score(_engine_key(key))

    def apply(self, *changes: Changes) -> None:
        """Do in the store what the engine decided, in one transaction; the last decision about a key counts."""
        change = merged(changes)
        if change == NOTHING:
            return
        drop = [_content_key(key) for key in change.drop]
        keep = [Keep(_content_key(key), section, self.score(_content_key(key))) for key, section in change.keep]
        missing = self._content.apply(drop, keep)
        self.partials.forget(key.inode for key in missing if _is_partial(key))
        lost = [key for key in missing if not _is_partial(key)]
        for key in lost:
            self.engine.forget(_engine_key(key))
            self._note(Lost(_engine_key(key)))
        self._lost_files += len(lost)
        self._counters.add("evicted", sum(not _is_partial(key) for key in drop))
        self._counters.add("admitted", sum(not _is_partial(kept.key) for kept in keep) - len(lost))
        self._counters.add("landing_lost", len(lost))


def _is_partial(key: ContentKey) -> bool:
    return key.inode >= FIRST_PARTIAL


def _engine_key(key: ContentKey) -> Key:
    return key if key.block else key.inode


def _content_key(key: Key) -> ContentKey:
    if isinstance(key, tuple):
        return ContentKey(*key)
    assert isinstance(key, int)
    return ContentKey(key)


def _unpacked(state: bytes | None) -> dict[str, Any]:
    if state is None:
        return {}
    try:
        unpacked = msgpack.unpackb(state, use_list=False, strict_map_key=False)
    except ValueError:
        unpacked = None
    if not isinstance(unpacked, dict):
        log.warning("the order of the cached files could not be read: starting a new one")
        return {}
    return unpacked


_SOURCE_BYTES_FACT, _SOURCE_BYTES = "source bytes", struct.Struct("<Q")


class CacheCapacity:
    """Gives the cache control the capacity, whenever the option changes or the survey knows the source better."""

    def __init__(self, options: Options, cache: CacheControl, catalogue: Catalogue, lister: Lister) -> None:
        self._capacity, self._dir_ttl_s, self._cache = options.capacity, options.dir_ttl, cache
        self._catalogue, self._lister = catalogue, lister
        known = catalogue.fact(_SOURCE_BYTES_FACT)
        # What was found of the source so far.
        self._source_bytes: int = _SOURCE_BYTES.unpack(known)[0] if known else 0
        self.measured_bytes: int | None = None
        """The bytes of the whole source, once it was measured."""
        self._survey_is_needed = trio.Event()
        self._ask_for_survey()

    @property
    def budget_bytes(self) -> int:
        return self._capacity.budget_bytes(self._source_bytes)

    def change(self, options: Options) -> None:
        """Take over the option; raises StoreError, and then the capacity is as it was."""
        self._cache.set_capacity(options.capacity.budget_bytes(self._source_bytes))
        self._capacity = options.capacity
        self._ask_for_survey()

    def _ask_for_survey(self) -> None:
        if self._capacity.unit == "percent":
            self._survey_is_needed.set()

    async def run(self) -> None:
        """Walk the whole source once, as soon as the capacity is a share of it, and follow each better estimate.

        The walk also fills the catalogue. The estimate of an earlier mount stands until this one finds more, or ends.
        """
        await self._survey_is_needed.wait()
        total = 0
        # A listing is not trusted only because it is young: each directory's mtime is compared once, if it has one.
        ttl_s = self._dir_ttl_s if self._lister.undated else -math.inf
        async for files in self._lister.walk(lambda directory: True, ttl_s):
            # Sparse files may have any size, and together more than 64 bits can hold.
            total = min(total + sum(file.version.size for file in files), MAX_SIZE)
            if total > self._source_bytes:
                self._follow(total)
        self.measured_bytes = total
        self._follow(total)

    def _follow(self, source_bytes: int) -> None:
        self._source_bytes = source_bytes
        try:
            self._cache.set_capacity(self.budget_bytes)
            if self.measured_bytes is not None:
                self._catalogue.record_fact(_SOURCE_BYTES_FACT, _SOURCE_BYTES.pack(source_bytes))
        except StoreError as exc:
            log.warning("%s: the capacity stays as it is", exc)


INTERVAL_S = 1.0
# Where the table was empty: no one waits for what is evicted a little later.
IDLE_INTERVAL_S = 5.0
# How many inodes are looked at in one turn: 5 ms, and a transaction of a few hundred rows.
_AT_A_TIME = 200
# How long an unsettled version is remembered for readers that may have it open: longer than one sample is read. No
# version takes longer than this to settle.
_READ_WITHIN_S = 60.0


class Superseded:
    """Removes superseded versions and deleted files from the cache, by the catalogue's table `gone`.

    It moves the records of an inode to the front of landing; until they are evicted, a reader that has the file open
    reads on. When no record is left, the catalogue forgets the inode, and a handle of it gets ESTALE. A version that
    was superseded before it had settled has no records: its bytes are in transit, so the catalogue forgets it after a
    while. An inode that a name means again stays.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        content: Content,
        cache: CacheControl,
        on_superseded: Callable[[int, bytes], None],
        clock: Callable[[], float] = steady_clock.now,
    ) -> None:
        """`on_superseded` gets each inode that is not current, and its path, before the catalogue forgets it."""
        self._catalogue, self._content, self._cache = catalogue, content, cache
        self._on_superseded, self._now = on_superseded, clock
        self._after = 0

    async def run(self) -> None:
        interval_s = INTERVAL_S
        while True:
            await trio.sleep(interval_s)
            try:
                interval_s = INTERVAL_S if await self.turn() else IDLE_INTERVAL_S
            except SpiderfsError as exc:
                log.debug("the table of gone inodes is looked at again later: %s", exc)

    async def turn(self) -> bool:
        """Look at the next inodes of the table; returns whether there were any."""
        inodes = self._catalogue.gone(self._after, _AT_A_TIME)
        self._after = inodes[-1] if len(inodes) == _AT_A_TIME else 0
        keys = {inode: self._content.keys(inode) for inode in inodes if not self._catalogue.is_current(inode)}
        for inode in keys:
            if (node := self._catalogue.known(inode)) is not None:
                self._on_superseded(inode, node.path)
        self._cache.release([key for of_one in keys.values() for key in of_one])
        finished = [inode for inode in inodes if inode not in keys or not (keys[inode] or self._is_in_transit(inode))]
        if finished:
            await trio.to_thread.run_sync(self._catalogue.forget, finished)
        return bool(inodes)

    def _is_in_transit(self, inode: int) -> bool:
        """Whether readers may have this version open while it has no records, because it had not settled."""
        node = self._catalogue.known(inode)
        return node is not None and abs(self._now() - node.settles_at) < _READ_WITHIN_S
