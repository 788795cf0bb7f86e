"""Archives that were made to do harm, or that hold what Linux cannot have."""

from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest
from archive_files import Link, add_to_tar, index_of, shown, tar_of

from spiderfs.archives import index as index_module
from spiderfs.errors import ArchiveFailed


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


def test_hard_links_to_a_long_symbolic_link_do_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
