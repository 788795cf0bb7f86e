"""Made-up archives, by the standard library, GNU tar and Info-ZIP, and damaged ones: shown whole, or not at all."""

from __future__ import annotations

import contextlib
import tarfile
import tempfile
import zipfile
from pathlib import Path

from archive_files import (
    Link,
    MadeMember,
    Tree,
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
from fuzzing import damaged, examples
from hypothesis import given
from hypothesis import strategies as st

from spiderfs.archives.index import FILE
from spiderfs.errors import ArchiveFailed

LETTERS = st.sampled_from(["a", "b", "é", " ", ".x", "n" * 60, "n" * 101])
NAMES = st.lists(LETTERS, min_size=1, max_size=3).map(lambda letters: "".join(letters).encode())
PATHS = st.lists(NAMES.filter(lambda name: len(name) < 256), min_size=1, max_size=3).map(b"/".join)
CONTENTS = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([511, 512, 513, 1 << 15]).map(lambda size: b"\x01" * size),
    st.none(),
    st.binary(min_size=1, max_size=20).filter(lambda text: b"\0" not in text and text.isascii()).map(Link),
)


def possible(tree: Tree) -> dict[bytes, bytes | None]:
    """The tree without what lies below a file, which no file system could have."""
    files = {path for path, content in tree.items() if content is not None}
    ways = {path: [path[:at] for at in range(len(path)) if path[at : at + 1] == b"/"] for path in tree}
    return {path: content for path, content in tree.items() if not files.intersection(ways[path])}


TREES = st.dictionaries(PATHS, CONTENTS, max_size=6).map(possible)
TAR_FORMS = st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
METHODS = st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
# What a pax header may hold besides names: attributes of any bytes.
ATTRIBUTES = st.lists(
    st.tuples(st.sampled_from([b"SCHILY.xattr.user.a", b"comment"]), st.binary(max_size=2000)), min_size=1, max_size=3
)
# Names as any writer may put them, with fields for UTF-8 that may be for other names, or no text.
MEMBERS = st.lists(
    st.builds(
        MadeMember,
        st.text("ab\\/.é", min_size=1, max_size=6).map(str.encode),
        st.none() | st.text("cd\\/é七", max_size=6).map(str.encode) | st.binary(max_size=4),
        st.none() | st.just(7),
        st.sampled_from([1, 1, 2]),
        st.sampled_from([0, 0x800]),
        st.sampled_from([0, 3, 10]),
        st.binary(max_size=20),
    ),
    max_size=5,
)


@given(TREES, TAR_FORMS, METHODS)
@examples(60)
def test_archives_of_the_standard_library_are_shown_as_they_are(tree: Tree, form: int, method: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        assert shown(tar_of(tree, form), "tar", Path(directory)) == with_directories(tree)
        assert shown(zip_of(tree, method), "zip", Path(directory)) == with_directories(tree)


@given(TREES)
@examples(10)
def test_archives_of_the_usual_programs_are_shown_as_they_are(tree: Tree) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "tree").mkdir()
        written(root / "tree", tree)
        for form in ("gnu", "pax"):
            made = run("tar", f"--format={form}", "-cf", "-", ".", cwd=root / "tree")
            assert shown(made, "tar", root) == with_directories(tree)
        if tree:
            run("zip", "-q", "-r", "-y", root / "made.zip", ".", cwd=root / "tree")
            assert shown((root / "made.zip").read_bytes(), "zip", root) == with_directories(tree)


@given(ATTRIBUTES, st.sampled_from([tarfile.XHDTYPE, tarfile.XGLTYPE]), PATHS)
@examples(60)
def test_attributes_in_pax_headers_change_nothing(records: list[tuple[bytes, bytes]], kind: bytes, path: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        made = pax_header(records, kind) + tar_of({path: b"1"})
        assert shown(made, "tar", Path(directory)) == with_directories({path: b"1"})


def _name_of(member: MadeMember) -> bytes:
    """As unzip(1) names a member, with a slash at the end for a directory."""
    name, is_utf8 = member.name, member.flags & 0x800
    with contextlib.suppress(UnicodeDecodeError):
        text = (member.unicode_name or b"").decode()
        if text and not is_utf8 and member.version == 1 and member.names_crc is None:
            name, is_utf8 = text.encode(), 1
    if not is_utf8 and member.system != 3:
        name = name.decode("cp437").encode()
    return name.replace(b"\\", b"/") if member.system == 0 and b"/" not in name else name


@given(MEMBERS)
@examples(150)
def test_members_of_a_zip_have_the_names_that_unzip_gives(members: list[MadeMember]) -> None:
    files: dict[bytes, bytes] = {}
    for member in members:
        name = _name_of(member)
        parts = [part for part in name.split(b"/") if part not in (b"", b".")]
        if parts and b".." not in parts and name[:1] != b"/" and name[-1:] != b"/":
            files.pop(b"/".join(parts), None)
            files[b"/".join(parts)] = member.content
    with tempfile.TemporaryDirectory() as directory:
        found = shown(made_zip(members), "zip", Path(directory))
    shown_files = {path: content for path, content in found.items() if content is not None}
    assert shown_files == {path: content for path, content in files.items() if found.get(path, b"") is not None}


@given(TREES, TAR_FORMS, ATTRIBUTES, st.data())
@examples(150)
def test_a_damaged_tar_is_shown_whole_or_not_at_all(
    tree: Tree, form: int, records: list[tuple[bytes, bytes]], data: st.DataObject
) -> None:
    whole = (pax_header(records) if tree else b"") + tar_of(tree, form)
    broken = data.draw(damaged(whole))
    with tempfile.TemporaryDirectory() as directory, contextlib.suppress(ArchiveFailed):
        index = index_of(broken, "tar", Path(directory))
        if whole.startswith(broken):
            # Only what lies behind the end may be missing.
            assert shown(broken, "tar", Path(directory)) == with_directories(tree)
        for number in range(index.rows):
            row = index.row(number)
            assert row.kind != FILE or row.offset + row.size <= len(broken)


@given(st.builds(zip_of, TREES, METHODS) | MEMBERS.map(made_zip), st.data())
@examples(150)
def test_a_damaged_zip_is_shown_whole_or_not_at_all(whole: bytes, data: st.DataObject) -> None:
    broken = data.draw(damaged(whole))
    with tempfile.TemporaryDirectory() as directory, contextlib.suppress(ArchiveFailed):
        index = index_of(broken, "zip", Path(directory))
        assert not whole.startswith(broken) or broken == whole
        for number in range(index.rows):
            row = index.row(number)
            assert row.kind != FILE or row.offset + row.packed <= len(broken)
