"""Makes packages of small samples that rank low, and restocks the cache from them with one read each.

The policy knows nothing of packages. It says (`core/policy.py`) which samples rank low, which of these readers had to
do without, and for how many bytes of unread ones it has room. Two tasks do the rest, each one thing at a time:

- **Packing**: with the policy's first list of samples that rank low, random cached ones of them are packed. From then
  on, a sample that was missed and fetched for its reader is copied while it is cached; so packing reads no samples from
  the source. When the copies fill a package, it is written to the source.
- **Repacking**: with each new list, packages whose samples have come to rank high are read and removed, in a random
  order. What still ranks low in them is packed again.
- **Loading**: while the policy has room, the package with the most bytes that it wants is read, if these are half of
  the package or more. The wanted samples go into the store and to the engine like all fetched samples.

A package that another user may have written, or that is sealed with another key, is left alone and counted. No failure
here costs a reader anything. All state belongs to the manager's event loop.
"""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeVar

import trio

from spiderfs import packages
from spiderfs.core.policy import Policy
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.errors import SourceError, SourceUnavailable, SpiderfsError, StoreDamaged
from spiderfs.sources.source import Source, Version
from spiderfs.store.store import ContentKey
from spiderfs.vfs.catalogue import Node
from spiderfs.vfs.on_demand import Supply

log = logging.getLogger(__name__)

T = TypeVar("T")

# The pause between two looks for a package to load.
PAUSE_S = 0.25
# The pause between two collections. Fetched samples soon leave landing; a reader misses 40 of them at most meanwhile.
COLLECT_PAUSE_S = 0.02
# A package is loaded if the policy wants this share of its bytes.
USEFUL_SHARE = 0.5
# A package is made again when less than this share of its bytes is of samples that rank low.
REPACKED_SHARE = 0.75
# A sample may take this share of a package at most: a package of four samples would hardly save a round trip.
_LARGEST_SHARE = 0.25
# How long a package is left alone that could not be read, or if the engine took less than half of it.
_REST_S = 30.0
# Packages that are compared at a time, and missed samples that are looked at: some tenths of a millisecond.
_COMPARED, _LOOKED_AT = 8, 128
MAX_PACKAGES = 4096
# The most samples in packages; each takes 8 bytes of memory.
MAX_PACKED = 1 << 20


@dataclass(eq=False)
class _Package:
    """A package at the source: the inodes of its samples (0 for an unknown name) and their sizes."""

    name: bytes
    version: Version
    inodes: list[int]
    sizes: list[int]
    rests_until_s: float = -math.inf

    @property
    def path(self) -> bytes:
        return packages.DIRECTORY + b"/" + self.name

    def low_bytes(self, policy: Policy) -> int:
        """The bytes of its samples that rank low; a sample whose name is unknown counts."""
        rows = zip(self.inodes, self.sizes, strict=True)
        return sum(size for inode, size in rows if not inode or policy.ranks_low(inode))


class Packer:
    """`source` must show packages, the client of `supply` need not; a package has `package_bytes` or more."""

    def __init__(
        self,
        cache: CacheControl,
        supply: Supply,
        source: Source,
        directory: packages.PackageDirectory,
        package_bytes: int = packages.PACKAGE_BYTES,
        rng: random.Random | None = None,
    ) -> None:
        self._cache, self._catalogue, self._fetcher = cache, supply.catalogue, supply.fetcher
        self._client, self._source, self._content = supply.client, source, supply.content
        self._counters, self._directory = supply.counters, directory
        self._package_bytes = package_bytes
        self._packages: dict[bytes, _Package] = {}
        self._packed: set[int] = set()
        # Copies for the next package; they never reach the bytes of two packages.
        self._collected: dict[int, tuple[Node, bytes]] = {}
        self._collected_bytes = 0
        # The list of the policy that packages follow, by its number; what is left of cached samples to pack for the
        # first list, and of packages to look through for later ones, both in a random order.
        self._list = 0
        self._to_pack: list[int] = []
        self._to_repack: list[bytes] = []
        self._may_write = True
        self._ignored = False
        self._next = 0
        self._rng = rng or random.Random()

    async def run(self) -> None:
        # Once there is something to do, a trainer has declared its list, so the catalogue knows the samples' names.
        while not self._has_work():
            await trio.sleep(PAUSE_S)
        try:
            await trio.to_thread.run_sync(lambda: self._directory.key)
        except OSError as exc:
            log.warning(
                "cannot keep a key for packages in the cache directory (%s): no packages are made or read", exc.strerror
            )
            return
        await self._find()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_packing)
            nursery.start_soon(self._keep_loading)

    def _has_work(self) -> bool:
        policy = self._cache.restocked
        return policy is not None and (policy.room_for_unread_bytes() > 0 or any(True for _ in policy.missed_low()))

    async def _find(self) -> None:
        """Learn of the packages at the source; damaged ones of this mount, and temporary files, are removed."""
        try:
            if not packages.is_ours(await self._client.call(self._source.stat, packages.DIRECTORY)):
                self._ignore(packages.DIRECTORY)
                return
            await self._client.call(self._directory.clean)
            _, *found = await self._client.call(lambda: list(self._source.scan(packages.DIRECTORY)))
        except (OSError, SourceError) as exc:
            log.debug("no packages are found: %s", exc)
            return
        prefix, ours = packages.own_prefix(self._directory.key), []
        for name, stat in found:
            if not name.endswith(packages.SUFFIX):
                continue
            if name.startswith(prefix) and packages.is_ours(stat):
                ours.append((name, stat))
            else:
                self._ignore(name)
        for name, stat in ours[:MAX_PACKAGES]:
            try:
                self._learn(name, stat.version, await self._index_of(name, stat.version))
            except StoreDamaged as exc:
                await self._remove_damaged(name, exc)
            except SourceError as exc:
                log.debug("%s could not be looked into: %s", os.fsdecode(name), exc)

    def _ignore(self, name: bytes) -> None:
        """Count a package, or the directory of packages, that this mount has not made, and leave it alone."""
        if not self._ignored:
            log.warning(
                "%s at the source was not made by this mount: ignored; delete it if no other mount uses it",
                os.fsdecode(name),
            )
        self._ignored = True
        self._counters.add("packages_ignored")

    async def _index_of(self, name: bytes, version: Version) -> packages.Index:
        path = packages.DIRECTORY + b"/" + name
        # Most indices are shorter than this, so one read is enough.
        head = await self._client.call(self._source.read, path, 0, 1 << 16, version)
        needed = packages.HEADER_BYTES + packages.index_bytes(head)
        if needed > len(head):
            head = await self._client.call(self._source.read, path, 0, needed, version)
        return packages.read_index(head, version.size, self._directory.key)

    def _learn(self, name: bytes, version: Version, index: packages.Index) -> None:
        inodes = [self._inode_of(file.path, file.version) for file in index.files]
        self._packages[name] = _Package(name, version, inodes, [file.version.size for file in index.files])
        self._packed.update(inode for inode in inodes if inode)

    def _inode_of(self, path: bytes, version: Version) -> int:
        """The inode of a file, if the catalogue knows the file in this version; else 0."""
        dentry = self._catalogue.find(*self._catalogue.parent_of(path))
        return dentry.inode if dentry is not None and dentry.stat.version == version else 0

    def _forget(self, name: bytes) -> None:
        if (package := self._packages.pop(name, None)) is not None:
            self._packed.difference_update(package.inodes)

    async def _remove_damaged(self, name: bytes, exc: StoreDamaged) -> None:
        log.warning("the package %s is removed: %s", os.fsdecode(name), exc)
        await self._remove(name)

    async def _remove(self, name: bytes) -> None:
        self._forget(name)
        self._counters.add("packages_removed")
        try:
            await self._client.call(self._directory.remove, name)
        except (OSError, SourceError) as exc:
            log.debug("%s could not be removed: %s", os.fsdecode(name), exc)

    async def _keep_packing(self) -> None:
        while self._may_write:
            await trio.sleep(COLLECT_PAUSE_S)
            if (policy := self._cache.restocked) is None:
                continue
            self._follow_list(policy)
            if self._to_repack and self._collected_bytes < self._package_bytes and self._client.reachable:
                await self._repack(policy, self._to_repack.pop())
            if len(self._packages) < MAX_PACKAGES and len(self._packed) < MAX_PACKED:
                self._collect(policy)
                if self._collected_bytes >= self._package_bytes and self._client.reachable:
                    await self._write()

    def _follow_list(self, policy: Policy) -> None:
        """Choose what is packed, or packed again, if the policy has a new list."""
        if policy.lists == self._list:
            return
        self._list = policy.lists
        if self._packages:
            self._to_repack = self._shuffled(self._packages)
        elif not self._packed:
            self._to_pack = self._shuffled(inode for inode in self._cache.engine.members if isinstance(inode, int))

    def _shuffled(self, some: Iterable[T]) -> list[T]:
        found = list(some)
        self._rng.shuffle(found)
        return found

    async def _repack(self, policy: Policy, name: bytes) -> None:
        """Collect what still ranks low in a package, and remove it, if too little of it does."""
        if (package := self._packages.get(name)) is None:
            return
        low = package.low_bytes(policy)
        if low >= REPACKED_SHARE * sum(package.sizes):
            return
        if low:
            if (read := await self._read(package)) is None:
                return
            index, whole = read
            for file, inode in zip(index.files, package.inodes, strict=True):
                payload = index.payload(file, whole) if inode and policy.ranks_low(inode) else None
                node = self._catalogue.known(inode) if inode else None
                if payload is not None and node is not None and inode not in self._collected:
                    self._collected[inode] = node, payload
                    self._collected_bytes += len(payload)
        await self._remove(name)

    def _collect(self, policy: Policy) -> None:
        """Copy samples that were missed lately and have been fetched for their readers, or that are chosen."""
        chosen = [self._to_pack.pop() for _ in range(min(_LOOKED_AT, len(self._to_pack)))]
        lately = islice(policy.missed_low(), _LOOKED_AT)
        for inode in chain(filter(policy.ranks_low, chosen), lately):
            if self._collected_bytes >= self._package_bytes:
                break
            if not isinstance(inode, int) or inode in self._packed or inode in self._collected:
                continue
            here = self._fetcher.local(ContentKey(inode))
            if here is None or not 0 < len(here) <= _LARGEST_SHARE * self._package_bytes:
                continue
            node = self._catalogue.known(inode)
            # A time has 64 bits in the index of a package.
            # Packages hold originals.
            is_whole = node is not None and not node.stat.viewed and node.stat.size == len(here)
            if node is not None and is_whole and abs(node.stat.mtime_ns) < 1 << 63:
                self._collected[inode] = node, bytes(here)
                self._collected_bytes += len(here)
        self._content.end_read()

    async def _write(self) -> None:
        """Make a package of the copies, and write it to the source."""
        files = [(node.path, node.version, payload) for node, payload in self._collected.values()]
        self._collected.clear()
        self._collected_bytes = 0
        name, package = packages.pack(files, self._directory.key)
        try:
            await self._client.call(self._directory.write, name, package)
            written = await self._client.call(self._source.stat, packages.DIRECTORY + b"/" + name)
        except OSError as exc:
            log.warning("packages cannot be written to the source (%s): there will be no new ones", exc.strerror)
            self._may_write = False
            return
        except SourceError as exc:
            log.debug("a package was written in vain: %s", exc)
            return
        self._counters.add("packages_written")
        self._counters.add("package_bytes_written", len(package))
        self._learn(name, written.version, packages.read_index(package, written.size, self._directory.key))

    async def _keep_loading(self) -> None:
        while True:
            await trio.sleep(PAUSE_S)
            policy = self._cache.restocked
            while policy is self._cache.restocked and policy is not None and self._client.reachable:
                if (package := self._best(policy)) is None:
                    break
                await self._load(policy, package)

    def _best(self, policy: Policy) -> _Package | None:
        """The package with the most wanted bytes among the next few; None if no package is worth reading."""
        best, best_bytes = None, 0
        if not (spare := policy.room_for_unread_bytes()):
            return None
        there = list(self._packages.values())
        for step in range(min(_COMPARED, len(there))):
            package = there[(self._next + step) % len(there)]
            useful = min(spare, sum(package.sizes[position] for position in self._wanted(policy, package)))
            if (
                useful >= USEFUL_SHARE * sum(package.sizes)
                and useful > best_bytes
                and trio.current_time() >= package.rests_until_s
            ):
                best, best_bytes = package, useful
        self._next = (self._next + _COMPARED) % max(1, len(there))
        return best

    def _wanted(self, policy: Policy, package: _Package) -> Iterator[int]:
        """The positions, in a package, of the samples that the policy wants unread."""
        engine = self._cache.engine
        for position, inode in enumerate(package.inodes):
            if inode and inode not in engine.members and policy.wants_unread(inode):
                yield position

    async def _load(self, policy: Policy, package: _Package) -> None:
        # The package does not rest if it turns out that half of it was of use.
        package.rests_until_s = trio.current_time() + _REST_S
        if (read := await self._read(package)) is None:
            return
        index, whole = read
        self._counters.add("packages_loaded")
        records = []
        for position in self._wanted(policy, package):
            if (payload := index.payload(index.files[position], whole)) is None:
                await self._remove_damaged(package.name, StoreDamaged("a file in it is damaged"))
                return
            records.append((ContentKey(package.inodes[position]), payload))
        try:
            taken = sum([await self._take(some) for some in self._by_room(records)])
        except SpiderfsError as exc:
            log.debug("a package could not be stored: %s", exc)
            return
        self._counters.add("packaged_samples", taken)
        if taken >= USEFUL_SHARE * len(index.files):
            package.rests_until_s = -math.inf

    async def _read(self, package: _Package) -> tuple[packages.Index, bytes] | None:
        """The index of a package and all of its bytes, and its inodes as they are now; None if it cannot be read."""
        try:
            whole = await self._client.call(self._source.read, package.path, 0, package.version.size, package.version)
            self._counters.add("origin_reads")
            self._counters.add("origin_bytes", len(whole))
            index = packages.read_index(whole, package.version.size, self._directory.key)
        except SourceUnavailable as exc:
            log.debug("a package could not be read: %s", exc)
            return None
        except SourceError:
            # Another mount has removed it.
            self._forget(package.name)
            return None
        except StoreDamaged as exc:
            await self._remove_damaged(package.name, exc)
            return None
        # Since the package was found, names may have come to mean other versions.
        package.inodes = [self._inode_of(file.path, file.version) for file in index.files]
        return index, whole

    def _by_room(self, records: list[tuple[ContentKey, bytes]]) -> Iterable[list[tuple[ContentKey, bytes]]]:
        """Groups of records so small that they push neither each other nor other fetched samples out of landing."""
        usage = self._content.usage()
        room = (usage.capacity_bytes - usage.kept_bytes) // 4
        some: list[tuple[ContentKey, bytes]] = []
        size = 0
        for record in records:
            if some and size + len(record[1]) > room:
                yield some
                some, size = [], 0
            some.append(record)
            size += len(record[1])
        if some:
            yield some

    async def _take(self, records: list[tuple[ContentKey, bytes]]) -> int:
        """Land these records and offer them to the engine; returns how many of them are cached now."""
        landed = await trio.to_thread.run_sync(self._content.land_all, records)
        inodes = [key.inode for (key, _), there in zip(records, landed, strict=True) if there]
        self._cache.place(*inodes)
        members = self._cache.engine.members
        return sum(inode in members for inode in inodes)
