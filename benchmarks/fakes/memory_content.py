"""The store's contract for content, kept in memory: for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from spiderfs.store.store import BLOCK_BYTES, LANDING, ContentKey, Keep, Member, Usage


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

    def plain_file(self, inode: int, size: int) -> int | None:
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

    def land_kept(
        self,
        records: Sequence[tuple[ContentKey, int, bytes]],
        sections: Mapping[ContentKey, str],
        drop: Iterable[ContentKey],
    ) -> list[bool | None]:
        self.apply(drop, ())
        landed: list[bool | None] = []
        for key, size, record in records:
            landed.append(None if key in self._members else self.land(key, bytes(record[len(record) - size :])))
            if landed[-1] and key in sections:
                self.apply((), [Keep(key, sections[key])])
        return landed

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
