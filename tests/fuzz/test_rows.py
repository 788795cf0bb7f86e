"""Rows of the store that are not what was written: bytes are right or missing, or the store is said to be corrupt."""

from __future__ import annotations

import contextlib
import random
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest
from fuzzing import damaged, examples
from hypothesis import given
from hypothesis import strategies as st

from spiderfs.errors import Stale, StoreCorrupt
from spiderfs.sources.source import SourceStat
from spiderfs.store.content import LmdbContent
from spiderfs.store.environment import MAP_BYTES
from spiderfs.store.records import LmdbRecords
from spiderfs.store.store import BLOCK_BYTES, ContentKey, Keep
from spiderfs.vfs.catalogue import ROOT_INODE, TABLES, Catalogue

PAYLOADS = {ContentKey(inode): random.Random(inode).randbytes(100 * inode) for inode in range(1, 12)}
PAYLOADS |= {ContentKey(77, block): random.Random(block).randbytes(3000) for block in (1, 2, 3)}
NAMES = {f"name-{number}".encode(): SourceStat(stat.S_IFREG | 0o644, 0, 0, number, number) for number in range(20)}
# No call on a store takes longer, whatever its rows say.
PATIENCE_S = 10


def rows_of(path: Path) -> list[tuple[str, bytes, bytes]]:
    with lmdb.open(str(path), max_dbs=len(TABLES), map_size=MAP_BYTES) as env, env.begin() as txn:
        tables = [name for name, _ in txn.cursor()]
        return [
            (name.decode(), bytes(key), bytes(value))
            for name in tables
            for key, value in txn.cursor(env.open_db(name, txn=txn))
        ]


def change(path: Path, changes: list[tuple[str, bytes, bytes | None]]) -> None:
    """Rows written behind the store's back; None removes."""
    with lmdb.open(str(path), max_dbs=len(TABLES), map_size=MAP_BYTES) as env, env.begin(write=True) as txn:
        tables = {name: env.open_db(name.encode(), txn=txn) for name, _, _ in changes}
        for name, key, value in changes:
            if value is None:
                txn.delete(key, db=tables[name])
            else:
                txn.put(key, value, db=tables[name])


@st.composite
def changes(draw: st.DrawFn, rows: list[tuple[str, bytes, bytes]]) -> list[tuple[str, bytes, bytes | None]]:
    made: list[tuple[str, bytes, bytes | None]] = []
    for _ in range(draw(st.integers(1, 3))):
        table = draw(st.sampled_from(sorted({name for name, _, _ in rows})))
        name, key, value = draw(st.sampled_from([row for row in rows if row[0] == table]))
        how = draw(st.sampled_from(["value", "value", "value", "remove", "key"]))
        if how == "value":
            made.append((name, key, draw(damaged(value))))
        elif how == "remove":
            made.append((name, key, None))
        else:
            other = draw(damaged(key).filter(lambda key: 0 < len(key) < 500))
            made += [(name, key, None), (name, other, value)]
    return made


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """A call that never ends fails the test, rather than the suite."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not within {PATIENCE_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# -- contents


def filled(path: Path) -> None:
    content = LmdbContent(path)
    content.set_capacity(60_000)
    for key, payload in PAYLOADS.items():
        assert content.land(key, payload)
    content.apply([ContentKey(3)], [Keep(ContentKey(1), "importance", 0.5), Keep(ContentKey(77, 1), "blocks", 1.0)])
    content.close()


@pytest.fixture(scope="module")
def content_rows(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, bytes, bytes]]:
    path = tmp_path_factory.mktemp("content")
    filled(path)
    return rows_of(path)


ACTIONS = st.sampled_from(["read", "land", "again", "keep", "drop", "shrink", "grow", "members", "free", "sweep"])


@examples(60)
@given(data=st.data())
def test_damaged_contents_give_no_wrong_byte(content_rows: list[tuple[str, bytes, bytes]], data: st.DataObject) -> None:
    made = data.draw(changes(content_rows))
    actions = data.draw(st.lists(st.tuples(ACTIONS, st.sampled_from(sorted(PAYLOADS))), max_size=20))
    with tempfile.TemporaryDirectory(prefix="rows") as directory:
        path = Path(directory)
        filled(path)
        change(path, made)
        with limited(), contextlib.closing(LmdbContent(path)) as content:
            for action, key in actions:
                # The supervisor then builds the store again.
                with contextlib.suppress(StoreCorrupt):
                    _act(content, action, key)
                content.end_read()


def _act(content: LmdbContent, action: str, key: ContentKey) -> None:
    if action == "read":
        found = content.read(key)
        assert found is None or bytes(found) == PAYLOADS[key]
        content.member(key)
    elif action == "land":
        content.land(ContentKey(1000 + key.inode), bytes(9000))
    elif action == "again":
        content.land(key, PAYLOADS[key])
        found = content.read(key)
        assert found is None or bytes(found) == PAYLOADS[key]
    elif action == "keep":
        content.apply([], [Keep(key, "importance", 2.0)])
    elif action == "drop":
        content.apply([key], [])
    elif action == "shrink":
        content.set_capacity(1000)
    elif action == "grow":
        content.set_capacity(BLOCK_BYTES)
    elif action == "members":
        for member in content.members():
            assert member.size >= 0
        assert content.usage().used_bytes >= 0
    elif action == "free":
        content.free()
    else:
        content.sweep()


# -- names


def named(path: Path) -> None:
    records = LmdbRecords(path, TABLES)
    catalogue = Catalogue(records)
    catalogue.record_root(SourceStat(stat.S_IFDIR | 0o755, 0, 0, 0, 1))
    catalogue.record(ROOT_INODE, b"directory", SourceStat(stat.S_IFDIR | 0o755, 0, 0, 0, 1), 5.0)
    catalogue.record_listing(ROOT_INODE, NAMES.items(), 7, 5.0)
    catalogue.record_fact("state", b"something")
    records.put([("redirect", bytes(16), bytes(8))])
    records.close()


@pytest.fixture(scope="module")
def name_rows(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, bytes, bytes]]:
    path = tmp_path_factory.mktemp("names")
    named(path)
    return rows_of(path)


@examples(60)
@given(data=st.data())
def test_damaged_names_give_no_wrong_answer(name_rows: list[tuple[str, bytes, bytes]], data: st.DataObject) -> None:
    """A name that is answered has the attributes and the inode that were recorded, and the inode the name's path."""
    made = data.draw(changes(name_rows))
    wanted = data.draw(st.permutations(sorted(NAMES)))[:8]
    with tempfile.TemporaryDirectory(prefix="rows") as directory:
        path = Path(directory)
        named(path)
        change(path, made)
        records = LmdbRecords(path, TABLES)
        with limited(), contextlib.closing(records):
            catalogue = Catalogue(records)
            for name in wanted:
                with contextlib.suppress(StoreCorrupt):
                    found = catalogue.find(ROOT_INODE, name)
                    if found is not None:
                        assert found.stat == NAMES[name]
                        with contextlib.suppress(Stale):
                            node = catalogue.node(found.inode)
                            assert (node.path, node.stat) == (name, NAMES[name])
            with contextlib.suppress(StoreCorrupt):
                for entry in catalogue.entries(ROOT_INODE, 0, 100):
                    assert entry.name == b"directory" or NAMES[entry.name] == entry.stat
            with contextlib.suppress(StoreCorrupt):
                listing = catalogue.listing(ROOT_INODE)
                assert listing is None or (listing.scanned_at, listing.mtime_ns) == (5.0, 7)
            with contextlib.suppress(StoreCorrupt):
                assert catalogue.fact("state") in (None, b"something")
            with contextlib.suppress(StoreCorrupt, Stale):
                catalogue.record_listing(ROOT_INODE, NAMES.items(), 9, 6.0)
                assert {entry.name for entry in catalogue.entries(ROOT_INODE, 0, 100)} >= set(NAMES)
