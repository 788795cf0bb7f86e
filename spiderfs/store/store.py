"""The contract of the store for the rest of spiderfs: verified content, membership, and small ordered records.

Content is keyed by (inode, block): block 0 is the whole of a small file, block n >= 1 the n-th MiB of a large one, so a
file that another limit makes large or small never finds the wrong kind of record. A record enters through the
**landing** section, a first-in-first-out queue that lives inside the byte budget: any worker may `land` at any time,
and makes room by dropping the records that landed first. The manager alone moves records out of landing into the
sections of the engine, and drops them. `used <= capacity` therefore holds after every call, whichever process made it
and whether or not the manager is alive.

`read` and `plain_file` are for one thread per process (the event loop's); a view returned by `read` is valid until
`end_read`, which the event loop calls before it sleeps, so that no read transaction outlives a request. Writing calls
may block on the writer lock: call them in threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

LANDING = "landing"
BLOCK_BYTES = 1 << 20


class ContentKey(NamedTuple):
    """`block` 0 is a whole file; n >= 1 its n-th block of BLOCK_BYTES."""

    inode: int
    block: int = 0


class Member(NamedTuple):
    """One record of the store: `size` is its payload in bytes, the unit of every budget."""

    key: ContentKey
    size: int
    section: str
    score: float


class Usage(NamedTuple):
    """Payload bytes and records in landing and in all other sections, and the bytes both may fill together."""

    landing_bytes: int
    landing_entries: int
    kept_bytes: int
    kept_entries: int
    capacity_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.landing_bytes + self.kept_bytes


class Keep(NamedTuple):
    key: ContentKey
    section: str
    score: float = 0.0


class Content(Protocol):
    def has(self, key: ContentKey) -> bool:
        """Whether the record is there; does not touch its bytes."""

    def read(self, key: ContentKey, offset: int = 0, size: int | None = None) -> memoryview | bytes | None:
        """At most `size` bytes of the payload from `offset` on; their checksums were verified just now.

        The bytes are valid until `end_read`, or until another record is read. None if the record is absent, or damaged
        in the part that was asked for.
        """

    def end_read(self) -> None:
        """Invalidate the views that `read` has given; this costs little if there are none."""

    def member(self, key: ContentKey) -> Member | None:
        """Section, size and score of one record."""

    def blocks(self, inode: int) -> int:
        """The number of blocks of a large file in the store; they are not looked at one by one."""

    def whole(self, inode: int, size: int) -> bool:
        """Whether the store has all blocks of a large file, and this process wrote or verified every piece."""

    def plain_file(self, inode: int, size: int) -> int | None:
        """A descriptor of a plain file that has the bytes of the large file `inode`, for the caller to close.

        None unless the file is whole, or if dropped blocks of files that were handed out take too much disk. Nothing is
        taken out of the plain file as long as it is open anywhere, whatever becomes of its records.
        """

    def land(self, key: ContentKey, payload: bytes) -> bool:
        """Put a record into landing, and drop the records that landed first to make room for it.

        Returns False if there is not enough room beside the records that are kept. A key that is stored again gets new
        bytes in the section in which it lies. Raises StoreFull.
        """

    def land_all(self, records: Sequence[tuple[ContentKey, bytes]]) -> list[bool]:
        """Land these records in this order, in one transaction; returns what `land` would return for each."""

    def land_kept(
        self,
        records: Sequence[tuple[ContentKey, int, bytes]],
        sections: Mapping[ContentKey, str],
        drop: Iterable[ContentKey],
    ) -> list[bool | None]:
        """Drop records, then take in whole files, each with its size and its record, in one transaction.

        `content.RecordWriter` and `content.chunked_record` make records. The files that `sections` names enter their
        section at once, the others land. Returns for each file what `land` returns, or None if the store had it
        already; then it stays in the section in which it lies. Raises StoreFull.
        """

    def apply(self, drop: Iterable[ContentKey], keep: Iterable[Keep]) -> list[ContentKey]:
        """Drop records, then move others to sections, in one transaction; returns the moves that found no record."""

    def keys(self, inode: int) -> list[ContentKey]:
        """The records of one file."""

    def release(self, keys: Iterable[ContentKey]) -> None:
        """Move records back into landing, before all that landed later; other keys are ignored."""

    def set_capacity(self, capacity_bytes: int) -> None:
        """Change the capacity, and empty landing as far as needed; the engine drops kept records beforehand."""

    def members(self) -> Iterator[Member]:
        """All records as of one moment, in the order in which they entered their section. All are held in memory."""

    def each_member(self) -> Iterator[Member]:
        """All records in the order of their keys, for stores of any size.

        The records are read in pieces, and each piece shows the store as it is then. A record that stays in the store
        meanwhile comes exactly once. Each step may run in another thread.
        """

    def usage(self) -> Usage: ...

    def close(self) -> None: ...


Row = tuple[str, bytes, bytes | None]
"""Table, key, value; the value None deletes the row."""
Left = tuple[str, Callable[[bytes], bool]]
"""A table, and a test of a value in it: an existing value that passes the test is not replaced."""


class Records(Protocol):
    """Ordered byte strings under byte keys in named tables: where the catalogue keeps names."""

    def get(self, table: str, key: bytes) -> bytes | None: ...

    def put(self, rows: Iterable[Row], leave: Left | None = None, unless: Callable[[], bool] | None = None) -> None:
        """Write rows in one transaction, except where `leave` says to keep the value that is there.

        `unless` is called when no one else can write any more; if it returns True, nothing is written.
        """

    def get_many(self, table: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value that `get` returns for each of these keys, all as of one moment."""

    def scan(self, table: str, start: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """Up to `limit` rows with key >= start, in order."""

    def count(self, table: str) -> int: ...

    def close(self) -> None: ...
