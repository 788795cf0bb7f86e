"""What lies beside a member in its archive, and members in a range of the archive's bytes that was read in one go."""

from __future__ import annotations

from collections.abc import Iterator

from spiderfs.archives import tar_format, zip_format
from spiderfs.archives.index import FILE, STORED, Index, Row
from spiderfs.core.chunks import Member
from spiderfs.sources.source import Version


class Neighbourhood:
    """A member and those beside it, by the index that this process has; nothing here asks the source."""

    def __init__(self, archive: bytes, index: Index, row: Row) -> None:
        self.archive, self._index, self._row = archive, index, row
        self.as_file = archive + b"/"
        """The path by which the source that gave this reads the archive as the file that it is."""
        self._is_zip = archive.endswith(b".zip")

    @property
    def version(self) -> Version:
        """That of the archive."""
        return self._index.version

    @property
    def member(self) -> Member | None:
        """The member itself; None if its bytes do not lie in the archive as they are."""
        return self._member(self._row)

    def beside(self, step: int) -> Iterator[Member]:
        """The members after this one (`step` is 1) or before it (-1), up to one that cannot be read along."""
        at, number = self._member(self._row), self._row.number
        while at is not None and 0 <= (number := number + step) < self._index.rows:
            found = self._member(self._index.row(number))
            # Aliases, and members of an archive whose directory has another order, do not lie beside each other.
            if found is None or (found.begin - at.begin) * step <= 0:
                return
            yield found
            at = found

    def path_of(self, member: Member) -> bytes:
        return self.archive + b"/" + self._index.path(member.number)

    def is_version(self, member: Member, version: Version) -> bool:
        return version.tag == self._index.tag(self._index.row(member.number))

    def bytes_in(self, whole: bytes, begin: int, member: Member) -> bytes:
        """The bytes of a member in the archive's bytes from `begin` on; raises ArchiveFailed if they are not its."""
        row = self._index.row(member.number)
        if text := self._index.text(row):
            return text
        part = memoryview(whole)[member.begin - begin : member.end - begin]
        if not self._is_zip:
            tar_format.check_header(part[: tar_format.HEADER_BYTES], row.crc)
            return bytes(part[tar_format.HEADER_BYTES :])
        at = zip_format.bytes_begin(bytes(part[: zip_format.LOCAL_BYTES]))
        return zip_format.unpacked(bytes(part[at : at + row.packed]), row.method, row.size, row.crc)

    def _member(self, row: Row) -> Member | None:
        if row.kind != FILE or row.method != STORED:
            return None
        if not self._is_zip:
            return Member(row.number, row.offset - tar_format.HEADER_BYTES, row.offset + row.size)
        length = zip_format.LOCAL_BYTES + len(self._index.path(row.number)) + zip_format.EXTRA_BYTES + row.packed
        return Member(row.number, row.offset, row.offset + length)
