"""The members of tar and zip files.

**Pieces.** An archive is read from its beginning to its end, in large pieces, a few of them ahead: that finds the
headers of small members sooner than a request for each. Only what lies far behind is requested by itself.

**Tar** (POSIX ustar and pax, GNU, and Unix V7). A member's bytes are one range of the archive. Sparse files, of which
that is not so, and devices are left out. An archive that ends within a member, or without its end, or has anything
behind its end, is refused as a whole: no training should go on with less than there is. tar(1) and Python's tarfile
read on behind a wrong header, or stop there, and show what they have found.

**Zip** (APPNOTE.TXT 6.3.10), from its central directory: two reads, whatever its size. Members are stored or deflated;
others, and encrypted ones, are left out. The directory has to lie where its end says, and to be as long: so bytes
before the archive, or a second archive, are noticed. Names are those that unzip(1) gives.
"""

from __future__ import annotations

import stat
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from spiderfs.archives.index import DEFLATED, FILE, LINK, STORED, IndexBuilder
from spiderfs.errors import ArchiveFailed

Read = Callable[[int, int], bytes]
"""Bytes of an archive, at an offset and of a length that lie within it."""

PIECE_BYTES = 1 << 20
# Pieces that are asked for ahead of the one that is wanted.
AHEAD = 8
# Where the next header lies further behind than this, it is asked for alone: the source sends so many bytes in about
# the time of an answer. Some more bytes come along for a header that follows another (long names).
_HOP_BYTES, _HOPPED_BYTES = 2 << 20, 4096


class Pieces:
    """The bytes of an archive of `size` bytes, for a reader that goes forward; `read` is asked for what is not here."""

    def __init__(self, read: Read, size: int) -> None:
        self._read, self.size = read, size
        self._begin, self._held = 0, b""

    def at(self, offset: int, length: int) -> bytes:
        """Up to `length` bytes at `offset`; fewer only at the end of the archive."""
        end = min(offset + length, self.size)
        begin = offset - self._begin
        if begin < 0 or end - self._begin > len(self._held):
            if end <= offset:
                return b""
            if begin - len(self._held) > _HOP_BYTES:
                self._begin, past = offset, max(end, offset + _HOPPED_BYTES)
            else:
                self._begin, past = offset // PIECE_BYTES * PIECE_BYTES, -(-end // PIECE_BYTES) * PIECE_BYTES
            self._held = self._read(self._begin, min(past, self.size) - self._begin)
            begin = offset - self._begin
        return self._held[begin : end - self._begin]


class PieceReadAhead:
    """`read` for a reader of whole pieces in a row: the next ones are asked for in threads. Close it at the end."""

    def __init__(self, read: Read, size: int, ahead: int = AHEAD) -> None:
        self._read, self._size, self._ahead = read, size, ahead
        self._threads = ThreadPoolExecutor(ahead)
        self._coming: dict[int, Future[bytes]] = {}

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of the archive; raises what the source raises."""
        first, past = divmod(offset, PIECE_BYTES)
        last = -(-(offset + length) // PIECE_BYTES)
        if past or (length % PIECE_BYTES and offset + length < self._size):
            return self._read(offset, length)
        for number in [known for known in self._coming if known < first]:
            self._coming.pop(number).cancel()
        for number in range(first, min(last + self._ahead, -(-self._size // PIECE_BYTES))):
            if number not in self._coming:
                begin = number * PIECE_BYTES
                size = min(PIECE_BYTES, self._size - begin)
                self._coming[number] = self._threads.submit(self._read, begin, size)
        return b"".join(self._coming.pop(number).result() for number in range(first, last))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


TAR_HEADER_BYTES = _BLOCK = 512
_ZEROS = bytes(_BLOCK)
# Kinds of members: with bytes behind the header, and those that say something of the member that follows them.
_FILES = frozenset((*b"07", 0))
_HARD, _SYMBOLIC, _DIRECTORY, _SPARSE = b"125S"
_LONG_NAME, _LONG_LINK, _NEXT, _OLD_NEXT, _ALL = b"LKxXg"
_ABOUT_OTHERS = frozenset((_LONG_NAME, _LONG_LINK, _NEXT, _OLD_NEXT, _ALL))
# Links, devices, directories and FIFOs have no bytes, whatever their header says.
_WITHOUT_BYTES = frozenset(b"123456")
# A longer text is no name.
_LONGEST_NAME = 1 << 20
# A pax header may be of any size: macOS puts whole resource forks there. Of its records only these are read, which say
# something of a member's name or place; the beginning of each has its length and its key.
_READ_RECORDS, _SPARSE_RECORDS = frozenset((b"path", b"linkpath", b"size")), b"GNU.sparse"
_BEGIN_BYTES = 1024
# Of what lies behind the end, so many bytes are looked at in one go.
_BEHIND_BYTES = 1 << 20
_USTAR, _MAGIC, _PREFIX = b"ustar\0", slice(257, 263), slice(345, 500)
# Members of a few bytes that are labels lie in the index, so that to read them asks the source for nothing.
_LABELS, LABEL_BYTES = (b".cls", b".json"), 1024


def add_tar_members(archive: Pieces, index: IndexBuilder) -> None:
    """Add every member in the order of the archive; raises ArchiveFailed."""
    at = 0
    common: dict[bytes, bytes] = {}
    said: dict[bytes, bytes] = {}
    long_name = long_link = b""
    while True:
        header = archive.at(at, _BLOCK)
        if len(header) < _BLOCK:
            raise ArchiveFailed("it has no end: it may have been cut short")
        if header == _ZEROS:
            if said or long_name or long_link:
                raise ArchiveFailed("it ends with the name of a member that does not come")
            # Two blocks of zeros end an archive, and zeros may follow. No one sees a second archive behind the first.
            at += _BLOCK
            while behind := archive.at(at, _BEHIND_BYTES):
                if behind.count(0) < len(behind):
                    raise ArchiveFailed("something lies behind its end, such as another archive")
                at += len(behind)
            return
        # The sum is of all bytes, with blanks in its own place; some old writers sum signed bytes.
        summed, stated = header[:148] + b" " * 8 + header[156:], _number(header[148:156])
        if stated != sum(summed) and stated != sum(summed) - 256 * sum(byte > 127 for byte in summed):
            raise ArchiveFailed("the checksum of a header is wrong")
        kind, size, begin = header[156], _number(header[124:136]), at + _BLOCK
        if kind in _ABOUT_OTHERS:
            if begin + size > archive.size:
                raise ArchiveFailed("it ends within a header")
            if kind == _LONG_NAME:
                long_name = _text(archive, begin, size).split(b"\0", 1)[0]
            elif kind == _LONG_LINK:
                long_link = _text(archive, begin, size).split(b"\0", 1)[0]
            elif kind == _ALL:
                common |= _pax(archive, begin, begin + size)
            else:
                said = _pax(archive, begin, begin + size)
            at = begin + _whole_blocks(size)
            continue
        pax = {**common, **said} if said or common else said
        if not (name := pax.get(b"path") or long_name):
            name = header[:100].split(b"\0", 1)[0]
            if header[345] and header[_MAGIC] == _USTAR:
                name = header[_PREFIX].split(b"\0", 1)[0] + b"/" + name
        if kind in _WITHOUT_BYTES:
            size = 0
        elif b"size" in pax:
            if not pax[b"size"].isdigit() or len(pax[b"size"]) > 20:
                raise ArchiveFailed("a pax size is no number")
            size = int(pax[b"size"])
        if kind == _SPARSE:
            # The bytes of a sparse file begin behind its map, which may go on in blocks of its own.
            more = header[482]
            while more:
                block = archive.at(begin, _BLOCK)
                if len(block) < _BLOCK:
                    raise ArchiveFailed("it ends within a member")
                more, begin = block[504], begin + _BLOCK
        if begin + size > archive.size:
            raise ArchiveFailed("it ends within a member")
        if kind in _FILES and name[-1:] == b"/":
            kind = _DIRECTORY  # as before 1988
        mode = _number(header[100:108]) & 0o777
        target = pax.get(b"linkpath") or long_link or header[157:257].split(b"\0", 1)[0]
        if kind in _FILES and _SPARSE_RECORDS not in pax:
            label = archive.at(begin, size) if size <= LABEL_BYTES and name.endswith(_LABELS) else b""
            index.add(name, FILE, begin, size, mode, crc=zlib.crc32(header), text=label)
        elif kind == _DIRECTORY:
            index.add_directory(name, mode)
        elif kind == _SYMBOLIC:
            index.add(name, LINK, size=len(target), mode=0o777, text=target)
        elif kind == _HARD:
            index.add_alias(name, target)
        else:
            index.left_out += 1
        at, said, long_name, long_link = begin + _whole_blocks(size), {}, b"", b""


def check_tar_header(header: bytes | memoryview, crc: int) -> None:
    """Raises ArchiveFailed if the header before a member has not this CRC-32, which its row has."""
    if zlib.crc32(header) != crc:
        raise ArchiveFailed("the archive has other bytes than when its members were looked for: give it a new time")


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # GNU's form of large numbers; negative ones begin with another byte
        if field[0] != 0x80:
            raise ArchiveFailed("a number in a header is negative")
        return int.from_bytes(field[1:], "big")
    text = field.split(b"\0", 1)[0].strip()
    # int() takes signs, underscores and blanks too.
    if text.strip(b"01234567"):
        raise ArchiveFailed("a number in a header is none")
    return int(text or b"0", 8)


def _text(archive: Pieces, at: int, size: int) -> bytes:
    if size > _LONGEST_NAME:
        raise ArchiveFailed("a name is longer than 1 MiB")
    return archive.at(at, size)


def _pax(archive: Pieces, at: int, past: int) -> dict[bytes, bytes]:
    """Those of the records `LENGTH KEY=VALUE\\n` that are read; raises ArchiveFailed."""
    found: dict[bytes, bytes] = {}
    while at < past and (begin := archive.at(at, min(past - at, _BEGIN_BYTES)))[0]:
        digits, blank, _ = begin[:20].partition(b" ")
        end = at + int(digits) if blank and digits.isdigit() else 0
        key, equals, _ = begin[len(digits) + 1 : end - at].partition(b"=")
        value = at + len(digits) + 1 + len(key) + 1
        # A record of no length would be read for ever.
        if not equals or not value < end <= past or archive.at(end - 1, 1) != b"\n":
            raise ArchiveFailed("a pax header makes no sense")
        if key in _READ_RECORDS:
            found[key] = _text(archive, value, end - 1 - value)
        elif key.startswith(_SPARSE_RECORDS):
            found[_SPARSE_RECORDS] = b""
        at = end
    return found


def _whole_blocks(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


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
# Some writers give no type.
_SHOWN = (0, stat.S_IFREG, stat.S_IFLNK)
_ZIP64_EXTRA, _UNICODE_PATH = 1, 0x7075


def add_zip_members(archive: Pieces, index: IndexBuilder) -> None:
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
            index.left_out += 1
        else:
            kind = LINK if stat.S_ISLNK(mode) else FILE
            index.add(name, kind, place, unpacked, mode & 0o777 or 0o644, packed, method, crc)
    if (members - count) % counts:
        raise ArchiveFailed("its directory has other members than its end record names")


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
