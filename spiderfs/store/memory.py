"""The store's contracts in memory: for tests and for replaying traces; passes the same suite as LMDB's."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence

from spiderfs.store.store import BLOCK_BYTES, LANDING, ContentKey, Keep, Left, Member, Row, Usage


class MemoryContent:
    def __init__(self) -> None:
        self._payloads: dict[ContentKey, bytes] = {}
        self._members: dict[ContentKey, Member] = {}
        self._capacity_bytes = 0

    def has(self, key: ContentKey) -> bool:
        return key in self._payloads

    def read(self, key: ContentKey, offset: int = 0, size: int | None = None) -> memoryview | bytes | None:
        payload = self._payloads.get(key)
        return None if payload is None else payload[offset : None if size is None else offset + size]

    def end_read(self) -> None:
        pass

    def blocks(self, inode: int) -> int:
        return sum(key.inode == inode and key.block > 0 for key in self._payloads)

    def whole(self, inode: int, size: int) -> bool:
        blocks = range(1, -(-size // BLOCK_BYTES) + 1)
        return all(ContentKey(inode, block) in self._payloads for block in blocks)

    def lend(self, inode: int, size: int) -> int | None:
        return None  # nothing in memory is a plain file

    def member(self, key: ContentKey) -> Member | None:
        return self._members.get(key)

    def land_all(self, records: Sequence[tuple[ContentKey, bytes]]) -> list[bool]:
        return [self.land(*record) for record in records]

    def land(self, key: ContentKey, payload: bytes) -> bool:
        if key not in self._members:
            if self.usage().kept_bytes + len(payload) > self._capacity_bytes:
                return False
            self._shrink_landing(self._capacity_bytes - len(payload))
            self._members[key] = Member(key, len(payload), LANDING, 0.0)
        self._payloads[key] = payload
        return True

    def apply(self, drop: Iterable[ContentKey], keep: Iterable[Keep]) -> list[ContentKey]:
        missing = []
        for key in drop:
            self._remove(key)
        for key, section, score in keep:
            member = self._members.pop(key, None)
            if member is None:
                missing.append(key)
            else:
                self._members[key] = Member(key, member.size, section, score)
        return missing

    def keys(self, inode: int) -> list[ContentKey]:
        return sorted(key for key in self._members if key.inode == inode)

    def release(self, keys: Iterable[ContentKey]) -> None:
        going = [key for key in keys if key in self._members and self._members[key].section != LANDING]
        first = {key: self._members.pop(key)._replace(section=LANDING, score=0.0) for key in going}
        self._members = first | self._members

    def set_capacity(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._shrink_landing(capacity_bytes)

    def _shrink_landing(self, room: int) -> None:
        for member in list(self._members.values()):
            if self.usage().used_bytes <= room:
                return
            if member.section == LANDING:
                self._remove(member.key)

    def _remove(self, key: ContentKey) -> None:
        self._payloads.pop(key, None)
        self._members.pop(key, None)

    def members(self) -> Iterator[Member]:
        yield from list(self._members.values())

    def each_member(self) -> Iterator[Member]:
        yield from sorted(self._members.values())

    def usage(self) -> Usage:
        landing = [member.size for member in self._members.values() if member.section == LANDING]
        kept = [member.size for member in self._members.values() if member.section != LANDING]
        return Usage(sum(landing), len(landing), sum(kept), len(kept), self._capacity_bytes)

    def close(self) -> None:
        pass


class MemoryRecords:
    def __init__(self, tables: Iterable[str]) -> None:
        self._rows: dict[str, dict[bytes, bytes]] = {name: {} for name in tables}
        self._order: dict[str, list[bytes]] = {name: [] for name in self._rows}

    def get(self, table: str, key: bytes) -> bytes | None:
        return self._rows[table].get(key)

    def get_many(self, table: str, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self._rows[table].get(key) for key in keys]

    def put(self, rows: Iterable[Row], leave: Left | None = None, unless: Callable[[], bool] | None = None) -> None:
        if unless is not None and unless():
            return
        for table, key, value in rows:
            known, order = self._rows[table], self._order[table]
            if leave is not None and table == leave[0] and key in known and leave[1](known[key]):
                continue
            if value is None:
                if known.pop(key, None) is not None:
                    del order[bisect_left(order, key)]
            else:
                if key not in known:
                    insort(order, key)
                known[key] = value

    def scan(self, table: str, start: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        first = bisect_left(self._order[table], start)
        return [(key, self._rows[table][key]) for key in self._order[table][first : first + limit]]

    def count(self, table: str) -> int:
        return len(self._rows[table])

    def close(self) -> None:
        pass
