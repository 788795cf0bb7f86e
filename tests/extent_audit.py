"""Compares the map of chunks with the rows of a store."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import lmdb

from spiderfs.shared.layout import EXTENTS_MAP_FILE
from spiderfs.store.content import _is_inline, _lease_of
from spiderfs.store.rows import is_block


class Audit(NamedTuple):
    shared: int
    """Chunks that two rows name."""
    free: int
    """Chunks that a row names and the map has as free."""
    lost: int
    """Chunks that are taken, and that no row names."""


def audit(content: Path) -> Audit:
    env = lmdb.open(str(content), max_dbs=8, readonly=True, lock=False, map_size=4 << 40)
    table = env.open_db(b"content", create=False)
    named: Counter[int] = Counter()
    with env.begin(table) as txn:
        for key, value in txn.cursor():
            if not is_block(key) and not _is_inline(value):
                for first, count in _lease_of(key, value).runs:
                    named.update(range(first, first + count))
    env.close()
    whole = (content / EXTENTS_MAP_FILE).read_bytes()
    chunks = whole[4096 : 4096 + int.from_bytes(whole[:8], "little")]
    return Audit(
        sum(times > 1 for times in named.values()),
        sum(chunk >= len(chunks) or not chunks[chunk] for chunk in named),
        sum(bool(owner) and chunk not in named for chunk, owner in enumerate(chunks)),
    )
