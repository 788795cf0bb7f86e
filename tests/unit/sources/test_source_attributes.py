"""Whatever attributes a source shows come through catalogue, wire and survey, and never as an error."""

from __future__ import annotations

import stat
import struct
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import trio
from hypothesis import given, settings

from benchmarks.fakes import MemoryContent, MemorySource
from spiderfs.daemon.caching.cache_control import CacheCapacity
from spiderfs.fuse import wire
from spiderfs.options.units import Capacity
from spiderfs.sources.client import SourceClient, SourceLimits
from spiderfs.sources.source import MAX_SIZE, SourceStat
from spiderfs.store.spare_records import MemoryRecords
from spiderfs.vfs.answer_types import Attributes, Entry
from spiderfs.vfs.catalogue import ROOT_INODE, TABLES, Catalogue
from spiderfs.vfs.lister import Lister
from spiderfs.vfs.rules import settles_at

ROOT = SourceStat(stat.S_IFDIR | 0o755, 0, 0, 0, 1)
# Seconds have 64 bits in struct statx, and nanoseconds come on top.
MTIME_NS = st.integers(-(1 << 63) * 10**9, (1 << 63) * 10**9 - 1)
FOUND = st.builds(
    SourceStat,
    st.builds(
        lambda kind, bits: kind | bits,
        st.sampled_from([stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR]),
        st.integers(0, 0o7777),
    ),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, (1 << 32) - 1),
    st.one_of(st.integers(0, MAX_SIZE), st.just(MAX_SIZE)),
    st.one_of(MTIME_NS, st.sampled_from([13_569_465_600 * 10**9, -1, 1 << 63, -(1 << 63) - 1])),
    st.none(),
    tag=st.one_of(st.just(0), st.integers(0, (1 << 64) - 1)),
)
NOW = 1_800_000_000.0


def catalogue_of() -> Catalogue:
    catalogue = Catalogue(MemoryRecords(TABLES), lambda: NOW)
    catalogue.record_root(ROOT)
    return catalogue


@given(FOUND)
def test_the_catalogue_gives_back_what_was_found(found: SourceStat) -> None:
    catalogue = catalogue_of()
    dentry = catalogue.record(ROOT_INODE, b"name", found, NOW)
    assert dentry.stat == catalogue.node(dentry.inode).stat == found
    assert [entry.stat for entry in catalogue.entries(ROOT_INODE, 0, 10)] == [found]
    assert catalogue.record(ROOT_INODE, b"name", found, NOW + 1).inode == dentry.inode
    catalogue.record_listing(ROOT_INODE, [(b"name", found)], found.mtime_ns, NOW)
    assert catalogue.listing(ROOT_INODE).mtime_ns == found.mtime_ns
    assert settles_at(found.mtime_ns, found.size, NOW, NOW, 0.0, None) <= NOW + 60


@given(FOUND, st.floats(0, 1e9))
def test_the_kernel_knows_of_it(found: SourceStat, timeout_s: float) -> None:
    shown = Attributes(1 << 63 | 5, *found[:5], timeout_s)
    for packed in (
        wire.attr_out(shown),
        wire.entry_out(Entry(shown, timeout_s)),
        wire.direntry_out(b"name", Entry(shown, timeout_s), 7),
    ):
        assert struct.pack("<Q", found.size) in packed
        assert struct.pack("<q", found.mtime_ns // 10**9) in packed


class Odd(MemorySource):
    """One whose regular files all show these attributes."""

    found = ROOT

    def scan(self, path: bytes, known: object = ()):  # type: ignore[no-untyped-def]
        return ((name, self.found) for name, _ in super().scan(path))


@settings(max_examples=25)
@given(st.integers(0, 0o7777), MTIME_NS, st.one_of(st.integers(0, MAX_SIZE), st.just(MAX_SIZE)))
def test_any_source_can_be_measured(bits: int, mtime_ns: int, size: int) -> None:
    source = Odd()
    for number in range(3):
        source.add(b"%d" % number)
    source.found = SourceStat(stat.S_IFREG | bits, (1 << 32) - 1, (1 << 32) - 1, size, mtime_ns)

    content = MemoryContent()

    async def measure() -> CacheCapacity:
        client = SourceClient(source, SourceLimits(), rng=None, on_event=lambda event: None)  # type: ignore[arg-type]
        options: Any = SimpleNamespace(capacity=Capacity.parse("100%"), dir_ttl=1.0)
        cache: Any = content
        catalogue = catalogue_of()
        capacity = CacheCapacity(options, cache, catalogue, Lister(catalogue, client, lambda: NOW))
        await capacity.run()
        return capacity

    measured_bytes = trio.run(measure).measured_bytes
    assert measured_bytes == min(3 * size, MAX_SIZE)
    struct.pack("<Q", measured_bytes)
    struct.pack("<Q", content.usage().capacity_bytes)
