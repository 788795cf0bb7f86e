"""Which members the parsers find in archives of all sorts, and which archives they refuse as a whole."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import struct
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from archive_files import (
    Link,
    MadeMember,
    Tree,
    add_to_tar,
    index_of,
    made_zip,
    pax_header,
    run,
    shown,
    tar_of,
    with_directories,
    written,
    zip_of,
)

from spiderfs.archives import index as index_module
from spiderfs.archives.formats import PIECE_BYTES, PieceReadAhead, Pieces
from spiderfs.archives.index import FILE, ArchiveIndex, archive_of, index_parts, save
from spiderfs.errors import ArchiveFailed
from spiderfs.sources.source import Version

LONG = b"/".join([b"d" * 100] * 3) + b"/" + b"n" * 200
TREE: Tree = {
    b"n01/a.jpg": b"first",
    b"n01/b.jpg": b"",
    b"n02/deep/er/c.jpg": bytes(range(256)) * 5,
    LONG: b"long",
    b"empty": None,
    b"caf\xc3\xa9.bin": b"x" * 512,
    b"link": Link(b"n01/a.jpg"),
    b"long link": Link(b"t" * 150),
    b"label.cls": b"17",
    b"large.json": b"{}" * 600,
}


def test_a_ustar_splits_long_names(tmp_path: Path) -> None:
    tree = {b"d" * 120 + b"/" + b"n" * 90: b"x"}
    assert shown(tar_of(tree, tarfile.USTAR_FORMAT), "tar", tmp_path) == with_directories(tree)


@pytest.mark.parametrize("form", ["gnu", "pax", "oldgnu"])
def test_a_tar_of_gnu_tar(tmp_path: Path, form: str) -> None:
    written(tmp_path / "tree", TREE)
    made = run("tar", f"--format={form}", "-cf", "-", ".", cwd=tmp_path / "tree")
    assert shown(made, "tar", tmp_path) == with_directories(TREE)


@pytest.mark.parametrize("form", ["ustar", "v7"])
def test_old_formats_of_gnu_tar(tmp_path: Path, form: str) -> None:
    tree = {path: content for path, content in TREE.items() if len(path) < 90 and b"long" not in path}
    written(tmp_path / "tree", tree)
    made = run("tar", f"--format={form}", "-cf", "-", "--", *os.listdir(tmp_path / "tree"), cwd=tmp_path / "tree")
    assert shown(made, "tar", tmp_path) == with_directories(tree)


@pytest.mark.parametrize("level", ["-0", "-9"])
def test_a_zip_of_info_zip(tmp_path: Path, level: str) -> None:
    written(tmp_path / "tree", TREE)
    run("zip", level, "-r", "-y", tmp_path / "made.zip", ".", cwd=tmp_path / "tree")
    assert shown((tmp_path / "made.zip").read_bytes(), "zip", tmp_path) == with_directories(TREE)


def test_a_zip_that_was_streamed_says_sizes_behind_the_bytes(tmp_path: Path) -> None:
    written(tmp_path / "tree", {b"a": b"streamed" * 100})
    made = run("zip", "-", "a", cwd=tmp_path / "tree")
    assert shown(made, "zip", tmp_path) == {b"a": b"streamed" * 100}


def test_a_zip64_has_long_numbers(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed, packed.open("a", "w", force_zip64=True) as member:
        member.write(b"long")
    assert shown(buffer.getvalue(), "zip", tmp_path) == {b"a": b"long"}
    # As of 65,536 members on, the end itself is one of zip64; this one says so without the need.
    plain = bytearray(zip_of({b"a": b"x"}))
    end = len(plain) - 22
    count, size, offset = struct.unpack_from("<H2L", plain, end + 10)
    record = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, offset)
    plain[end + 8 : end + 20] = b"\xff" * 12
    plain[end:end] = record + struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1)
    assert shown(bytes(plain), "zip", tmp_path) == {b"a": b"x"}


def test_names_of_a_zip_from_windows_are_in_its_code_page(tmp_path: Path) -> None:
    made = zip_of({b"cafX": b"x"}).replace(b"cafX", "café".encode("cp437"))
    # Made on DOS, version 2.0.
    made = made.replace(b"PK\x01\x02\x14\x03", b"PK\x01\x02\x14\x00")
    assert shown(made, "zip", tmp_path) == {"café".encode(): b"x"}


NAMES = [
    MadeMember(b"\xc6\xdf.txt", "七.txt".encode()),
    MadeMember(b"caf#U00e9", "café".encode(), system=3),
    MadeMember(b"renamed", b"another", names_crc=7),
    MadeMember(b"later version", b"another", version=2),
    MadeMember(b"empty", b""),
    MadeMember("é".encode(), b"another", flags=0x800),
    MadeMember(b"train\\cat\\1.jpg"),
    MadeMember(b"train\\dog\\"),
    MadeMember(b"unix\\1.jpg", system=3),
    MadeMember(b"both/dog\\1.jpg"),
    MadeMember(b"coded", "q\\é".encode()),
]


def test_names_of_a_zip_are_those_of_unzip(tmp_path: Path) -> None:
    made = made_zip(NAMES)
    found = shown(made, "zip", tmp_path)
    (tmp_path / "made.zip").write_bytes(made)
    with contextlib.suppress(subprocess.CalledProcessError):  # it warns of backslashes and of fields that it ignores
        subprocess.run(
            ["unzip", "-q", "made.zip", "-d", "unpacked"],
            cwd=tmp_path, check=True, capture_output=True, timeout=60, env={**os.environ, "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
    unpacked = tmp_path / "unpacked"
    assert found == {
        os.fsencode(path.relative_to(unpacked)): None if path.is_dir() else path.read_bytes()
        for path in unpacked.rglob("*")
    }
    expected = {"七.txt", "café", "renamed", "later version", "empty", "é", "train/cat/1.jpg", "train/dog"}
    expected |= {"unix\\1.jpg", "both/dog\\1.jpg", "q/é", "train", "train/cat", "both", "q"}
    assert {os.fsdecode(path) for path in found} == expected


@pytest.mark.parametrize("field", [b"\xff\xfe", b"caf\xe9"])
def test_a_name_in_a_field_for_utf8_that_is_not_utf8_is_ignored(tmp_path: Path, field: bytes) -> None:
    assert shown(made_zip([MadeMember(b"a", field)]), "zip", tmp_path) == {b"a": b""}


@pytest.mark.parametrize("more", [1, *(pytest.param(more, marks=pytest.mark.thorough) for more in (0, 65_535))])
def test_a_zip_without_zip64_has_as_many_members_as_it_has(tmp_path: Path, more: int) -> None:
    """Its end has room for 65,535: writers without zip64 give the rest."""
    count = 65_536 + more
    made = made_zip([MadeMember(b"%d" % number, system=3) for number in range(count)])
    index = index_of(made, "zip", tmp_path)
    assert (index.rows, index.left_out) == (count + 1, 0)
    with pytest.raises(ArchiveFailed, match="other members than its end record names"):
        index_of(_at(made, len(made) - 14, struct.pack("<2H", more + 1 & 0xFFFF, more + 1 & 0xFFFF)), "zip", tmp_path)


def test_the_end_of_a_zip_may_have_a_comment(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        packed.writestr("a", "x")
        packed.comment = b"see PK\x05\x06 and so on" * 10
    assert shown(buffer.getvalue(), "zip", tmp_path) == {b"a": b"x"}


def _tar(*members: tuple[bytes, bytes | None, dict[str, object]], form: int = tarfile.GNU_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for path, content, fields in members:
            add_to_tar(tar, path, content, **fields)
    return buffer.getvalue()


HARD: dict[str, object] = {"type": tarfile.LNKTYPE, "size": 0}


@pytest.mark.parametrize(
    ("archive", "expected", "left_out"),
    [
        (_tar((b"a", b"1", {}), (b"b", b"", HARD | {"linkname": "a"})), {b"a": b"1", b"b": b"1"}, 0),
        (_tar((b"b", b"", HARD | {"linkname": "a"}), (b"a", b"1", {})), {b"a": b"1"}, 1),
        (
            _tar((b"l", Link(b"a"), {}), (b"h", b"", HARD | {"linkname": "l"}), (b"i", b"", HARD | {"linkname": "h"})),
            {b"l": Link(b"a"), b"h": Link(b"a"), b"i": Link(b"a")},
            0,
        ),
        (_tar((b"d", None, {}), (b"h", b"", HARD | {"linkname": "d"})), {b"d": None}, 1),
        (
            _tar((b"a", b"1", {}), (b"b", b"", HARD | {"linkname": "a"}), (b"a", b"new", {})),
            {b"a": b"new", b"b": b"1"},
            0,
        ),
        (_tar((b"a", b"1", {}), (b"a", b"22", {})), {b"a": b"22"}, 0),
        (_tar((b"a", b"1", {}), (b"a/b", b"2", {})), {b"a": None, b"a/b": b"2"}, 1),
        (_tar((b"../a", b"1", {}), (b"b/../../c", b"1", {}), (b"d", b"2", {})), {b"d": b"2"}, 2),
        (_tar((b"/etc/passwd", b"1", {}), (b"./d", b"2", {})), {b"d": b"2"}, 1),
        (_tar((b"null", b"", {"type": tarfile.CHRTYPE}), (b"p", b"", {"type": tarfile.FIFOTYPE})), {}, 2),
        (_tar((b"n" * 300, b"1", {}), (b"d", b"2", {})), {b"d": b"2"}, 1),
        (_tar((b".", None, {}), (b"./a//b/./c", b"1", {})), {b"a": None, b"a/b": None, b"a/b/c": b"1"}, 0),
        (_tar((b"a", b"1", {"type": b"7"})), {b"a": b"1"}, 0),
        (_tar((b"a", b"1", {"type": b"Z"}), (b"b", b"2", {})), {b"b": b"2"}, 1),
        (_tar(), {}, 0),
    ],
    ids=[
        "hard link", "hard link ahead", "hard link to a symbolic link", "hard link to a directory",
        "hard link to what is replaced", "twice", "file on the way", "leads out",
        "absolute", "devices", "long name", "dots", "contiguous", "unknown kind", "empty",
    ],
)  # fmt: skip
def test_odd_members(tmp_path: Path, archive: bytes, expected: Tree, left_out: int) -> None:
    assert shown(archive, "tar", tmp_path) == expected
    assert index_of(archive, "tar", tmp_path).left_out == left_out


def test_hard_links_to_symbolic_links_by_gnu_tar(tmp_path: Path) -> None:
    tree = {b"a.cls": b"7", b"link": Link(b"a.cls" * 30)}
    written(tmp_path / "tree", tree)
    for name in ("a.cls", "link"):
        os.link(tmp_path / "tree" / name, tmp_path / "tree" / f"z {name}", follow_symlinks=False)
    made = run("tar", "--sort=name", "-cf", "-", ".", cwd=tmp_path / "tree")
    assert shown(made, "tar", tmp_path) == tree | {b"z a.cls": tree[b"a.cls"], b"z link": tree[b"link"]}
    assert index_of(made, "tar", tmp_path).left_out == 0


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE])
@pytest.mark.parametrize("fork_bytes", [3 << 20, (1 << 20) - 40])
def test_a_pax_header_may_hold_a_resource_fork(tmp_path: Path, kind: bytes, fork_bytes: int) -> None:
    """The second one ends at the edge of a piece that is read."""
    records = [(b"SCHILY.xattr.com.apple.ResourceFork", b"\n9 " * (fork_bytes // 3)), (b"path", b"long/name")]
    before = pax_header(records, kind)
    made = before + tar_of({b"a": b"1"})
    assert shown(made, "tar", tmp_path) == with_directories({b"long/name": b"1"})
    with pytest.raises(ArchiveFailed, match="ends within a header"):
        index_of(made[: len(before) - 600], "tar", tmp_path)
    with pytest.raises(ArchiveFailed, match="a name is longer than 1 MiB"):
        index_of(pax_header([(b"path", bytes(1 << 21))], kind) + tar_of({b"a": b"1"}), "tar", tmp_path)


@pytest.mark.parametrize("form", ["gnu", "pax"])
def test_sparse_files_are_left_out(tmp_path: Path, form: str) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        for at in range(40):
            file.seek(at << 20)
            file.write(b"x" * 4096)
    (tmp_path / "plain").write_bytes(b"plain")
    made = run("tar", f"--format={form}", "-S", "-cf", "-", "sparse", "plain", cwd=tmp_path)
    assert shown(made, "tar", tmp_path) == {b"plain": b"plain"}
    assert index_of(made, "tar", tmp_path).left_out == 1


def test_a_zip_leaves_out_what_is_encrypted_or_packed_otherwise(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"secret")
    run("zip", "-P", "word", "made.zip", "a", cwd=tmp_path)
    with zipfile.ZipFile(tmp_path / "made.zip", "a", zipfile.ZIP_BZIP2) as packed:
        packed.writestr("b", "bzip2" * 100)
        packed.writestr(zipfile.ZipInfo("c"), "plain")
    made = (tmp_path / "made.zip").read_bytes()
    assert shown(made, "zip", tmp_path) == {b"c": b"plain"}
    assert index_of(made, "zip", tmp_path).left_out == 2


def _at(archive: bytes, at: int, changed: bytes) -> bytes:
    return archive[:at] + changed + archive[at + len(changed) :]


def _summed(header: bytes) -> bytes:
    blank = _at(header, 148, b" " * 8)
    return _at(blank, 148, b"%06o\0 " % sum(blank))


TAR = tar_of({b"a": b"1" * 600, b"b": b"2"})
PAX = tar_of({b"\xc3\xa9" * 90: b""}, tarfile.PAX_FORMAT)
ZIP = zip_of({b"a": b"1" * 600, b"b": b"2"}, zipfile.ZIP_DEFLATED)
DAMAGED: dict[str, tuple[str, bytes]] = {
    "nothing": ("tar", b""),
    "cut in a header": ("tar", TAR[:1700]),
    "cut in a member": ("tar", TAR[:1000]),
    "cut at a member's end": ("tar", TAR[:1536]),
    "no end": ("tar", TAR[:2560]),
    "wrong checksum": ("tar", _at(TAR, 1536 + 110, b"7")),
    "no checksum": ("tar", _at(TAR, 1536 + 148, b"\0" * 8)),
    "negative size": ("tar", _at(TAR, 0, _summed(_at(TAR[:512], 124, b"\xff" * 12)))),
    "impossible size": ("tar", _at(TAR, 0, _summed(_at(TAR[:512], 124, b"\x80" + b"\x7f" * 11)))),
    "size too large": ("tar", _at(TAR, 0, _summed(_at(TAR[:512], 124, b"77777777777\0")))),
    "size with a sign": ("tar", _at(TAR, 0, _summed(_at(TAR[:512], 124, b"-0000000001\0")))),
    "two archives": ("tar", TAR + TAR),
    "a block of zeros, then members": ("tar", TAR[:1536] + bytes(512) + TAR[1536:]),
    "pax record of nonsense": ("tar", PAX.replace(b" path=", b"9path=")),
    "name of nothing": ("tar", tar_of({b"n" * 150: b""})[:1024] + bytes(10240)),
    "no archive": ("tar", b"this is no archive, whatever its name says" * 100),
    "no zip": ("zip", b"this is no archive, whatever its name says" * 100),
    "cut zip": ("zip", ZIP[:-30]),
    "zip cut in its end": ("zip", ZIP[:-1]),
    "bytes behind a zip": ("zip", ZIP + b"x"),
    "bytes before a zip": ("zip", b"x" * 100 + ZIP),
    "two zips": ("zip", ZIP + ZIP),
    "zip says fewer members": ("zip", _at(ZIP, len(ZIP) - 14, b"\x01\0\x01\0")),
    "zip says more members": ("zip", _at(ZIP, len(ZIP) - 14, b"\x03\0\x03\0")),
    "zip says no members": ("zip", _at(ZIP, len(ZIP) - 14, b"\0\0\0\0")),
    "pax record without an end": ("tar", pax_header([(b"path", b"x")])[:-505] + bytes(505) + TAR),
    "zip in parts": ("zip", _at(ZIP, len(ZIP) - 18, b"\x01\0")),
    "directory of nonsense": ("zip", ZIP.replace(b"PK\x01\x02", b"PK\x01\x03")),
    "member outside": ("zip", _at(ZIP, ZIP.index(b"PK\x01\x02") + 42, struct.pack("<L", 1 << 20))),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "archive"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_archive_is_refused_as_a_whole(tmp_path: Path, kind: str, archive: bytes) -> None:
    with pytest.raises(ArchiveFailed):
        index_of(archive, kind, tmp_path)


@pytest.mark.parametrize(
    "lie",
    [
        lambda made: made.replace(struct.pack("<L", 100_000), struct.pack("<L", 10)),
        lambda made: made.replace(struct.pack("<L", 100_000), struct.pack("<L", 100_001)),
        lambda made: _at(made, 33, b"\xff" * 8),
        lambda made: _at(made, 0, b"PK\x03\x05"),
    ],
    ids=["says less", "says more", "is not packed so", "no header"],
)
def test_a_member_that_is_not_what_the_zip_says_is_not_shown(tmp_path: Path, lie: Callable[[bytes], bytes]) -> None:
    made = lie(zip_of({b"a": bytes(100_000)}, zipfile.ZIP_DEFLATED))
    with pytest.raises(ArchiveFailed):
        shown(made, "zip", tmp_path)


def test_too_many_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MOST_MEMBERS", 100)
    with pytest.raises(ArchiveFailed, match="more than 100 members"):
        index_of(tar_of({b"%d" % number: b"" for number in range(101)}), "tar", tmp_path)


def test_a_small_label_lies_in_the_index(tmp_path: Path) -> None:
    index = index_of(tar_of(TREE), "tar", tmp_path)
    texts = {path: index.text(row) for path in TREE if (row := index.find(path)) and row.kind == FILE}
    assert {path: text for path, text in texts.items() if text} == {b"label.cls": b"17"}, "the other is too long"


def test_an_index_that_is_damaged_is_none(tmp_path: Path) -> None:
    index_of(tar_of(TREE), "tar", tmp_path)
    good = (tmp_path / "index").read_bytes()
    for bad in (b"", good[:50], good[:-1], _at(good, 200, b"\xff\xfe"), _at(good, 0, b"another!")):
        (tmp_path / "bad").write_bytes(bad)
        with pytest.raises(ValueError, match=r"bad|empty"):
            ArchiveIndex(tmp_path / "bad")


def test_an_index_may_say_why_there_is_none(tmp_path: Path) -> None:
    save(index_parts(b"caf\xe9.tar", Version(1, 2, 3), b"because"), tmp_path / "failed")
    failed = ArchiveIndex(tmp_path / "failed")
    assert (failed.version, failed.failure, failed.find(b"")) == (Version(1, 2, 3), "because", None)
    assert archive_of(tmp_path / "failed") == b"caf\xe9.tar"


def test_an_index_names_its_archive(tmp_path: Path) -> None:
    index_of(tar_of(TREE), "tar", tmp_path)
    assert archive_of(tmp_path / "index") == b"set.tar"
    for none in (b"", b"spidera2" + bytes(200)):
        (tmp_path / "other").write_bytes(none)
        with pytest.raises(ValueError, match="is no index"):
            archive_of(tmp_path / "other")


def test_pieces_read_small_members_in_a_row_and_hop_over_large_ones() -> None:
    content = os.urandom(9 * PIECE_BYTES)
    asked: list[tuple[int, int]] = []

    def read(offset: int, length: int) -> bytes:
        asked.append((offset, length))
        return content[offset : offset + length]

    pieces = Pieces(read, len(content))
    for at in range(0, 2 * PIECE_BYTES, 300_000):
        assert pieces.at(at, 512) == content[at : at + 512]
    assert asked == [(0, PIECE_BYTES), (PIECE_BYTES, PIECE_BYTES)]
    far = 7 * PIECE_BYTES + 1024
    assert pieces.at(far, 512) == content[far : far + 512]
    assert asked[2:] == [(far, 4096)]
    straddling = 2 * PIECE_BYTES - 10
    assert pieces.at(straddling, 100) == content[straddling : straddling + 100]
    assert pieces.at(len(content) - 10, 100) == content[-10:]
    assert pieces.at(len(content), 100) == b""


def test_the_next_pieces_are_asked_for_ahead() -> None:
    content = os.urandom(5 * PIECE_BYTES + 17)
    asked: list[int] = []

    def read(offset: int, length: int) -> bytes:
        asked.append(offset)
        return content[offset : offset + length]

    ahead = PieceReadAhead(read, len(content), ahead=2)
    found = b"".join(ahead.read(at, min(PIECE_BYTES, len(content) - at)) for at in range(0, len(content), PIECE_BYTES))
    assert found == content
    assert sorted(asked) == list(range(0, len(content), PIECE_BYTES)), "each once"
    assert ahead.read(100, 17) == content[100:117]
    ahead.close()


# -- archives that were made to do harm, or that hold what Linux cannot have


def test_a_path_has_more_levels_than_python_has_nested_calls(tmp_path: Path) -> None:
    deepest = b"a/" * 2000 + b"f"
    index = index_of(tar_of({deepest: b"x"}), "tar", tmp_path)
    row = index.find(deepest)
    assert row is not None
    assert (row.size, index.left_out) == (1, 0)


def test_names_that_would_fill_the_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each level of a path is a directory with a path of its own: 24 MB of deep ones would take 16 GB."""
    monkeypatch.setattr(index_module, "MOST_NAME_BYTES", 1 << 20)
    with pytest.raises(ArchiveFailed, match="names take more than 1 MiB"):
        index_of(tar_of({b"a/" * 1000 + b"f": b"x", b"b/" * 1000 + b"f": b"x"}), "tar", tmp_path)


def test_links_to_a_long_link_do_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a link with a text of its own, of eight times as many bytes as its header."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        add_to_tar(tar, b"link", Link(b"x" * 4000))
        for number in range(100):
            add_to_tar(tar, b"%d" % number, b"", type=tarfile.LNKTYPE, linkname="link")
    assert index_of(buffer.getvalue(), "tar", tmp_path).rows == 102
    monkeypatch.setattr(index_module, "MOST_NAME_BYTES", 300_000)
    with pytest.raises(ArchiveFailed, match="names take more than"):
        index_of(buffer.getvalue(), "tar", tmp_path)


@pytest.mark.parametrize("text", [b"0 path=x\n", b"00 =\n", b"9 path=x\n0 path=x\n", b"3 =\n", b"1 path=x\n"])
def test_a_record_of_a_pax_header_that_has_no_length_is_refused(tmp_path: Path, text: bytes) -> None:
    """The first one kept a process busy for ever."""
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, len(text)
    about = header.tobuf(tarfile.USTAR_FORMAT) + text.ljust(512, b"\0")
    with pytest.raises(ArchiveFailed, match="pax header makes no sense"):
        index_of(about + tar_of({b"a": b"x"}), "tar", tmp_path)


def test_links_that_linux_cannot_have_are_left_out(tmp_path: Path) -> None:
    texts = {b"empty": b"", b"long": b"x" * 4096, b"longest": b"x" * 4095}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        for path, text in texts.items():
            link = zipfile.ZipInfo(path.decode())
            link.external_attr = (stat.S_IFLNK | 0o777) << 16
            packed.writestr(link, text)
    tar = tar_of({path: Link(text) for path, text in texts.items()})
    for kind, archive in (("tar", tar), ("zip", buffer.getvalue())):
        assert shown(archive, kind, tmp_path) == {b"longest": b"x" * 4095}
