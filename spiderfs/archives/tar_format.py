"""The members of a tar file, from its headers (POSIX ustar and pax, GNU, and the tar of Unix V7).

A member's bytes are one range of the archive. Sparse files, of which that is not so, and devices are left out. An
archive that ends within a member, or without its end, or has anything behind its end, is refused as a whole: who trains
must not train on less than there is without a warning. tar(1) and Python's tarfile read on behind a wrong header, or
stop there, and show what they have found.
"""

from __future__ import annotations

import zlib

from spiderfs.archives.index import FILE, LINK, IndexBuilder
from spiderfs.archives.pieces import Pieces
from spiderfs.errors import ArchiveFailed

HEADER_BYTES = _BLOCK = 512
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


def add_members(archive: Pieces, index: IndexBuilder) -> None:
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
            return _check_end(archive, at + _BLOCK)
        _check_sum(header)
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
        name = pax.get(b"path") or long_name or _name(header)
        if kind in _WITHOUT_BYTES:
            size = 0
        elif b"size" in pax:
            size = _decimal(pax[b"size"])
        if kind == _SPARSE:
            begin = _behind_map(archive, header, begin)
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
            index.leave_out()
        at, said, long_name, long_link = begin + _whole_blocks(size), {}, b"", b""


def check_header(header: bytes | memoryview, crc: int) -> None:
    """Raises ArchiveFailed if the header before a member has not this CRC-32, which its row has."""
    if zlib.crc32(header) != crc:
        raise ArchiveFailed("the archive has other bytes than when its members were looked for: give it a new time")


def _check_end(archive: Pieces, at: int) -> None:
    """Two blocks of zeros end an archive, and zeros may follow. A second archive behind the first is seen by no one."""
    while behind := archive.at(at, _BEHIND_BYTES):
        if behind.count(0) < len(behind):
            raise ArchiveFailed("something lies behind its end, such as another archive")
        at += len(behind)


def _check_sum(header: bytes) -> None:
    """The sum is of all bytes, with blanks in its own place; some old writers sum signed bytes."""
    stated = _number(header[148:156])
    if stated != sum(header) - sum(header[148:156]) + 256:
        signed = sum(byte - 256 if byte > 127 else byte for byte in header[:148] + header[156:]) + 256
        if stated != signed:
            raise ArchiveFailed("the checksum of a header is wrong")


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # GNU's form of large numbers; negative ones begin with another byte
        if field[0] != 0x80:
            raise ArchiveFailed("a number in a header is negative")
        return int.from_bytes(field[1:], "big")
    text = field.split(b"\0", 1)[0].strip()
    # int() takes signs, underscores and blanks too.
    if text and not text.isdigit():
        raise ArchiveFailed("a number in a header is none")
    try:
        return int(text, 8) if text else 0
    except ValueError:
        raise ArchiveFailed("a number in a header is none") from None


def _decimal(text: bytes) -> int:
    if not text.isdigit() or len(text) > 20:
        raise ArchiveFailed("a pax size is no number")
    return int(text)


def _name(header: bytes) -> bytes:
    name = header[:100].split(b"\0", 1)[0]
    if header[345] and header[_MAGIC] == _USTAR:
        name = header[_PREFIX].split(b"\0", 1)[0] + b"/" + name
    return name


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


def _behind_map(archive: Pieces, header: bytes, at: int) -> int:
    """Where the bytes of a sparse file begin: its map may go on in blocks of its own."""
    more = header[482]
    while more:
        block = archive.at(at, _BLOCK)
        if len(block) < _BLOCK:
            raise ArchiveFailed("it ends within a member")
        more, at = block[504], at + _BLOCK
    return at


def _whole_blocks(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
