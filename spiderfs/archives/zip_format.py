"""The members of a zip file, from its central directory (APPNOTE.TXT 6.3.10): two reads, whatever its size.

Members are stored or deflated; others, and encrypted ones, are left out. The directory has to lie where its end says,
and to be as long: so bytes before the archive, or a second archive, are noticed. Names are those that unzip(1) gives.
"""

from __future__ import annotations

import stat
import struct
import zlib

from spiderfs.archives.index import DEFLATED, FILE, LINK, STORED, IndexBuilder
from spiderfs.archives.pieces import Pieces
from spiderfs.errors import ArchiveFailed

# The record at the end: disk, disk of the directory, members here and in all, size and offset of the directory, bytes
# of the comment. With zip64 a record and its locator lie before it.
_END, _END_MAGIC = struct.Struct("<4s4H2LH"), b"PK\x05\x06"
_END64, _END64_MAGIC = struct.Struct("<4sQ2H2L4Q"), b"PK\x06\x06"
_LOCATOR, _LOCATOR_MAGIC = struct.Struct("<4sLQL"), b"PK\x06\x07"
_CENTRAL, _CENTRAL_MAGIC = struct.Struct("<4s2B5H3L5H2L"), b"PK\x01\x02"
_LOCAL, _LOCAL_MAGIC = struct.Struct("<4s5H3L2H"), b"PK\x03\x04"
LOCAL_BYTES = _LOCAL.size
# So many bytes more than the name has are taken along for a member's own header: what zip(1) and zip64 put there.
EXTRA_BYTES = 64
_LONGEST_COMMENT = (1 << 16) - 1
# So much of the end is read at first: the directory of some 10,000 members.
_TAIL_BYTES = 1 << 20
# A longer directory than one of 8 million members, with 128 bytes each, would take all memory.
_LONGEST_DIRECTORY = 1 << 30
_FULL = 0xFFFFFFFF
# Writers without zip64 give the count of more members modulo 65,536.
_COUNTS, _COUNTS64 = 1 << 16, 1 << 64
_ENCRYPTED, _CRC_FOLLOWS, _UTF8 = 0x1, 0x8, 0x800
_ENCRYPTION_BYTES = 12
_DOS, _UNIX = 0, 3
_ZIP64_EXTRA, _UNICODE_PATH = 1, 0x7075


def add_members(archive: Pieces, index: IndexBuilder) -> None:
    """Add every member in the order of the directory; raises ArchiveFailed."""
    begin = max(0, archive.size - _TAIL_BYTES)
    tail = archive.at(begin, _TAIL_BYTES)
    count, counts, size, offset = _directory_of(tail, begin)
    if size > _LONGEST_DIRECTORY:
        raise ArchiveFailed("its directory is longer than 1 GiB")
    central = tail[offset - begin :][:size] if offset >= begin else archive.at(offset, size)
    at = members = 0
    while at < len(central):
        members += 1
        if len(central) - at < _CENTRAL.size:
            raise ArchiveFailed("its directory ends before its last member")
        magic, _, system, _, flags, method, _, _, *sizes, _, _, attributes, place = _CENTRAL.unpack_from(central, at)
        crc, packed, unpacked, name_n, extra_n, comment_n = sizes
        at += _CENTRAL.size
        name, extra = central[at : at + name_n], central[at + name_n : at + name_n + extra_n]
        at += name_n + extra_n + comment_n
        if magic != _CENTRAL_MAGIC or at > len(central):
            raise ArchiveFailed("its directory makes no sense")
        if _FULL in (packed, unpacked, place):
            unpacked, packed, place = _long_numbers(extra, unpacked, packed, place)
        # Encrypted bytes come behind 12 others.
        encrypted = _ENCRYPTION_BYTES if flags & _ENCRYPTED else 0
        if place + LOCAL_BYTES + name_n + packed > offset or (method == STORED and packed != unpacked + encrypted):
            raise ArchiveFailed("a member lies outside of it, or has another length than its header")
        name = _path(name, extra, flags, system)
        mode = attributes >> 16 if system == _UNIX else 0
        if name[-1:] == b"/":
            index.add_directory(name, mode & 0o777 or 0o755)
        elif encrypted or method not in (STORED, DEFLATED) or (mode and stat.S_IFMT(mode) not in _SHOWN):
            index.leave_out()
        else:
            kind = LINK if stat.S_ISLNK(mode) else FILE
            index.add(name, kind, place, unpacked, mode & 0o777 or 0o644, packed, method, crc)
    if (members - count) % counts:
        raise ArchiveFailed("its directory has other members than its end record names")


# Some writers give no type.
_SHOWN = (0, stat.S_IFREG, stat.S_IFLNK)


def _directory_of(tail: bytes, tail_at: int) -> tuple[int, int, int, int]:
    """How many members the directory has and modulo what, its size, and where it lies; raises ArchiveFailed."""
    at = len(tail)
    while (at := tail.rfind(_END_MAGIC, max(0, len(tail) - _END.size - _LONGEST_COMMENT), at)) >= 0:
        if len(tail) - at >= _END.size and _END.unpack_from(tail, at)[-1] == len(tail) - at - _END.size:
            break
    else:
        raise ArchiveFailed("it has no end: it may have been cut short")
    counts = _COUNTS
    _, disk, first, here, count, size, offset, _ = _END.unpack_from(tail, at)
    locator = at - _LOCATOR.size
    if locator >= 0 and tail[locator : locator + 4] == _LOCATOR_MAGIC:
        _, disk, place, _ = _LOCATOR.unpack_from(tail, locator)
        at = place - tail_at
        if at < 0 or at + _END64.size > locator or tail[at : at + 4] != _END64_MAGIC:
            raise ArchiveFailed("its end makes no sense")
        _, _, _, _, _, first, here, count, size, offset = _END64.unpack_from(tail, at)
        counts = _COUNTS64
    if disk or first or here != count:
        raise ArchiveFailed("it is one of several parts")
    if offset + size != tail_at + at:
        raise ArchiveFailed("its directory is at another place than its end record names: data precede or follow it")
    return count, counts, size, offset


def _path(name: bytes, extra: bytes, flags: int, system: int) -> bytes:
    """The path of a member: in UTF-8, unless it is from Unix and says no encoding, and with slashes."""
    if not flags & _UTF8:
        field = _field(extra, _UNICODE_PATH)
        text = field[5:].decode(errors="ignore").encode()
        # Version 1, and the checksum of the name that it replaces: who renames a member may leave its field alone.
        if text and field == struct.pack("<BL", 1, zlib.crc32(name)) + text:
            name = text
        elif system != _UNIX:
            name = name.decode("cp437").encode()
    return name.replace(b"\\", b"/") if system == _DOS and b"/" not in name else name


def _long_numbers(extra: bytes, *numbers: int) -> list[int]:
    """The numbers, with those that did not fit taken from the field that has them."""
    field = _field(extra, _ZIP64_EXTRA)
    long = iter(int.from_bytes(field[begin : begin + 8], "little") for begin in range(0, len(field) - 7, 8))
    try:
        return [next(long) if number == _FULL else number for number in numbers]
    except StopIteration:
        raise ArchiveFailed("the size of a member is missing") from None


def _field(extra: bytes, wanted: int) -> bytes:
    """The first field of this kind; empty if there is none."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == wanted:
            return extra[at + 4 : at + 4 + length]
        at += 4 + length
    return b""


def bytes_begin(local: bytes, crc: int | None = None) -> int:
    """How far behind its own header the bytes of a member begin; raises ArchiveFailed, also if `crc` is another's."""
    magic, _, flags, _, _, _, own_crc, _, _, name_n, extra_n = _LOCAL.unpack(local[:LOCAL_BYTES].ljust(LOCAL_BYTES))
    if magic != _LOCAL_MAGIC:
        raise ArchiveFailed("it has no header")
    if crc not in (None, own_crc) and not flags & _CRC_FOLLOWS:
        raise ArchiveFailed("its header is that of another member: give the archive a new time")
    return LOCAL_BYTES + int(name_n) + int(extra_n)


def unpacked(packed: bytes, method: int, size: int, crc: int) -> bytes:
    """The bytes of a member, never more than `size`, whatever the archive holds; raises ArchiveFailed."""
    found = packed
    if method == DEFLATED:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            # The end of the last block may come behind the last byte.
            found = inflater.decompress(packed, size + 1)
        except zlib.error:
            raise ArchiveFailed("it cannot be unpacked") from None
    if len(found) != size or zlib.crc32(found) != crc:
        raise ArchiveFailed("it differs from its archive's directory")
    return found
