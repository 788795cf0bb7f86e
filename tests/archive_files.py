"""Archives for tests: made by stdlib, GNU tar and Info-ZIP, and read by the code under test without a source."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import struct
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from spiderfs.archives.formats import Pieces, bytes_begin, unpacked
from spiderfs.archives.index import FILE, LINK, ArchiveIndex, IndexBuilder, save
from spiderfs.archives.indexer_process import FORMATS, Indexers
from spiderfs.sources.client import SourceLimits
from spiderfs.sources.source import Version

OLD_S = 1_700_000_000


class Link(bytes):
    """The text of a symbolic link."""


Tree = Mapping[bytes, bytes | None]
"""What lies at each path: bytes, a link's text, or None for a directory."""


def tar_of(tree: Tree, form: int = tarfile.GNU_FORMAT) -> bytes:
    """A tar by the standard library."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form, encoding="utf-8", errors="surrogateescape") as tar:
        for path, content in tree.items():
            add_to_tar(tar, path, content)
    return buffer.getvalue()


def add_to_tar(tar: tarfile.TarFile, path: bytes, content: bytes | None, **fields: object) -> None:
    member = tarfile.TarInfo(os.fsdecode(path))
    member.mtime = OLD_S
    if content is None:
        member.type, member.mode = tarfile.DIRTYPE, 0o755
    elif isinstance(content, Link):
        member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(content)
    else:
        member.size = len(content)
    for name, value in fields.items():
        setattr(member, name, value)
    tar.addfile(member, io.BytesIO(content) if member.size and content else None)


def zip_of(tree: Tree, method: int = zipfile.ZIP_STORED) -> bytes:
    """A zip by the standard library; its names must be UTF-8."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as packed:
        for path, content in tree.items():
            name = path.decode() + ("/" if content is None else "")
            member = zipfile.ZipInfo(name)
            member.compress_type = method
            kind = stat.S_IFLNK if isinstance(content, Link) else stat.S_IFDIR if content is None else stat.S_IFREG
            member.external_attr = (kind | 0o755) << 16
            packed.writestr(member, content or b"")
    return buffer.getvalue()


class MadeMember(NamedTuple):
    """A stored member of a zip as some writer might make it, which the standard library does not."""

    name: bytes
    unicode_name: bytes | None = None
    names_crc: int | None = None
    version: int = 1
    flags: int = 0
    system: int = 0
    content: bytes = b""


def made_zip(members: Sequence[MadeMember]) -> bytes:
    """A zip without zip64, with a Unicode path field (0x7075) for each member that has such a name."""
    bodies, directory, at = [], [], 0
    for name, unicode_name, names_crc, version, flags, system, content in members:
        field = struct.pack("<BL", version, zlib.crc32(name) if names_crc is None else names_crc)
        # The usual time field comes first.
        extra = b"UT\5\0\1" + bytes(4)
        if unicode_name is not None:
            extra += struct.pack("<HH", 0x7075, len(field + unicode_name)) + field + unicode_name
        sizes = zlib.crc32(content), len(content), len(content), len(name), len(extra)
        bodies.append(struct.pack("<4s5H3L2H", b"PK\3\4", 20, flags, 0, 0, 0x5821, *sizes) + name + extra + content)
        central = b"PK\1\2", 20, system, 20, flags, 0, 0, 0x5821, *sizes, 0, 0, 0, 0, at
        directory.append(struct.pack("<4s2B5H3L5H2L", *central) + name + extra)
        at += len(bodies[-1])
    count, size = len(members) & 0xFFFF, sum(map(len, directory))
    return b"".join([*bodies, *directory, struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, size, at, 0)])


def pax_header(records: Sequence[tuple[bytes, bytes]], kind: bytes = tarfile.XHDTYPE) -> bytes:
    """A pax header of these records, whatever they are: to be put before a member."""
    text = b""
    for key, value in records:
        rest = b" " + key + b"=" + value + b"\n"
        length = len(rest) + len(str(len(rest) + len(str(len(rest)))))
        text += str(length).encode() + rest
    header = tarfile.TarInfo("pax")
    header.type, header.size = kind, len(text)
    return header.tobuf(tarfile.USTAR_FORMAT) + text + bytes(-len(text) % 512)


def written(root: Path, tree: Tree) -> None:
    """The tree as files, for tar(1) and zip(1)."""
    for path, content in tree.items():
        target = root / os.fsdecode(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            target.mkdir(exist_ok=True)
        elif isinstance(content, Link):
            target.symlink_to(os.fsdecode(content))
        else:
            target.write_bytes(content)


def run(*command: str | Path, cwd: Path) -> bytes:
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, timeout=60).stdout


@contextlib.contextmanager
def patient_indexers() -> Iterator[Indexers]:
    """Those of a test, in which no one is told to ask again because the machine is busy."""
    with contextlib.closing(Indexers(SourceLimits())) as indexers:
        indexers.moment_s = 30.0
        yield indexers


def index_of(archive: bytes, kind: str, directory: Path) -> ArchiveIndex:
    """The index of an archive; raises ArchiveFailed."""
    builder = IndexBuilder()
    pieces = Pieces(lambda offset, length: archive[offset : offset + length], len(archive))
    FORMATS[kind](pieces, builder)
    parts = builder.parts(b"set." + kind.encode(), Version(len(archive), OLD_S * 10**9))
    save(parts, directory / "index")
    assert ArchiveIndex(directory, b"".join(parts)).rows == ArchiveIndex(directory / "index").rows
    return ArchiveIndex(directory / "index")


def shown(archive: bytes, kind: str, directory: Path) -> dict[bytes, bytes | None]:
    """All that an archive is shown to hold, found from its root down; raises ArchiveFailed."""
    index = index_of(archive, kind, directory)
    found: dict[bytes, bytes | None] = {}
    waiting = [b""]
    while waiting:
        path = waiting.pop()
        row = index.find(path)
        assert row is not None
        for name, below in index.below(row):
            at = path + b"/" + name if path else name
            assert index.find(at) == below
            if below.kind not in (FILE, LINK):
                found[at] = None
                waiting.append(at)
                continue
            content = index.text(below)
            if not content and kind == "tar":
                content = archive[below.offset : below.offset + below.size]
            elif not content:
                begin = below.offset + bytes_begin(archive[below.offset :][:30])
                content = unpacked(archive[begin : begin + below.packed], below.method, below.size, below.crc)
            assert len(content) == below.size
            found[at] = Link(content) if below.kind == LINK else content
    return found


def with_directories(tree: Tree) -> dict[bytes, bytes | None]:
    """The tree, with the directories that its paths imply."""
    whole: dict[bytes, bytes | None] = {}
    for path, content in tree.items():
        for parent in Path(os.fsdecode(path)).parents:
            if str(parent) != ".":
                whole[os.fsencode(parent)] = None
        whole[path] = content
    return whole
