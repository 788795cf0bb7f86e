"""Lists of names as other programs write them, and a source that is shown by one."""

from __future__ import annotations

import gzip
import json
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spiderfs.errors import ConfigError, SourceError, SourceNotFound
from spiderfs.sources.listed_files import ListedSource, read_list
from spiderfs.sources.local import LocalSource
from spiderfs.sources.object_source import tag_of
from spiderfs.sources.source import Version

E_TAG = "d41d8cd98f00b204e9800998ecf8427e"
TIME_S = 1_672_671_845  # 2023-01-02 15:04:05 UTC

RCLONE = [
    {"Path": "a", "Name": "a", "Size": -1, "ModTime": "2023-01-02T15:04:05Z", "IsDir": True},
    {"Path": "a/é 1.jpg", "Name": "é 1.jpg", "Size": 10, "ModTime": "2023-01-02T16:04:05.5+01:00", "IsDir": False},
    {"Path": "b.jpg", "Name": "b.jpg", "Size": 7, "ModTime": "2023-01-02T15:04:05Z", "IsDir": False},
]
BY_TIME = {"a/é 1.jpg": Version(10, TIME_S * 10**9), "b.jpg": Version(7, TIME_S * 10**9)}
BY_TAG = {"a/é 1.jpg": Version(10, 0, tag_of(E_TAG)), "b.jpg": Version(7, 0, tag_of(f"{E_TAG}-3"))}
LISTS = {
    "a manifest": (f'a/é 1.jpg\t10\t"{E_TAG}"\n./b.jpg\t7\t{E_TAG}-3\n', BY_TAG),
    "aws s3 ls": (
        "2023-01-02 15:04:05         10 data/a/é 1.jpg\n2023-01-02 15:04:05          0 data/c/\r\n"
        "2023-01-02 15:04:05          7 data/b.jpg\n2023-01-02 15:04:05          7 other/b.jpg\n",
        BY_TIME,
    ),
    "rclone": (
        "[\n" + ",\n".join(map(json.dumps, RCLONE)) + "\n]\n",
        {**BY_TIME, "a/é 1.jpg": Version(10, TIME_S * 10**9 + 500_000_000)},
    ),
    "rclone in one line": (
        json.dumps(RCLONE),
        {**BY_TIME, "a/é 1.jpg": Version(10, TIME_S * 10**9 + 500_000_000)},
    ),
    "an inventory": (
        f'"bucket","data/a/%C3%A9+1.jpg","10","2023-01-02T15:04:05.000Z","{E_TAG}","STANDARD"\n'
        f'"bucket","data/b.jpg","7","2023-01-02T15:04:05.000Z","{E_TAG}-3","STANDARD"\n',
        BY_TAG,
    ),
    "an inventory of versions": (
        f'"bucket","data/a/%C3%A9+1.jpg","v1","true","false","10","{E_TAG}"\n'
        f'"bucket","data/b.jpg","v1","false","false","9","{E_TAG}"\n'
        f'"bucket","data/b.jpg","v2","true","false","7","{E_TAG}-3"\n'
        '"bucket","data/gone.jpg","v2","true","true",""\n'.replace('""\n', f'"","{E_TAG}"\n'),
        BY_TAG,
    ),
    "an inventory without ETags": (
        '"bucket","data/a/%C3%A9+1.jpg","10","2023-01-02T15:04:05.000Z"\n'
        '"bucket","data/b.jpg","7","2023-01-02T15:04:05.000Z"\n',
        BY_TIME,
    ),
}


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("packed", [False, True])
def test_each_kind_of_list_is_read(kind: str, packed: bool, tmp_path: Path) -> None:
    text, wanted = LISTS[kind]
    path = tmp_path / ("list.gz" if packed else "list")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    files = read_list(path, "data/" if "data/" in text else "")
    found = {
        (directory + name).decode(): its.version
        for directory in (b"", b"a/")
        for name, its in files.files(directory.rstrip(b"/")).items()
    }
    assert found == wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\t1\t5\nb\tmany\t5\n", "line 2 is not PATH, SIZE and TAG"),
        ("2023-01-02 15:04:05 1 a\n\nTotal Objects: 2\n", "line 3 is none of aws s3 ls --recursive"),
        ('[\n{"Path":"a","Size":1,"IsDir":false}\n]\n', "line 2 is none of rclone lsjson"),
        ('[\n{"Path":"a",\n]\n', "line 2 is none of rclone lsjson"),
        ('"bucket","a","1","2023-01-02T15:04:05Z"\n"bucket","a"\n', "line 2 is none of an S3 Inventory"),
        ("2023-01-02 15:04:05 1 outside\n", "it lists no files"),
        ("", "it lists no files"),
    ],
)
def test_a_wrong_line_is_named(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_list(path, "data/" if "outside" in text else "")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_list_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_list(tmp_path / "none", "")
    (tmp_path / "list.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_list(tmp_path / "list.gz", "")


def test_a_directory_is_shown_by_the_list_alone(tmp_path: Path) -> None:
    root, path = tmp_path / "root", tmp_path / "list"
    (root / "a").mkdir(parents=True)
    for name in ("a/one", "a/two", "gone"):
        (root / name).write_text(name)
    times = {name: (root / name).stat().st_mtime_ns for name in ("a/one", "gone")}
    path.write_text("".join(f"{name}\t{len(name)}\t{at // 10**9}.{at % 10**9:09}0\n" for name, at in times.items()))
    (root / "gone").unlink()
    source = ListedSource(LocalSource(str(root)), read_list(path, ""))
    assert {name for name, _ in source.scan(b"")} == {b".", b"a", b"gone"}
    found = source.stat(b"a/one")
    # What may be private at the source is only the owner's.
    assert (stat.filemode(found.mode), stat.filemode(source.stat(b"a").mode)) == ("-r--------", "dr-x------")
    assert source.read(b"a/one", 0, 5, found.version) == b"a/one"
    with pytest.raises(SourceNotFound):
        source.stat(b"a/two")
    with pytest.raises(SourceError, match="in the list of names and not at the source") as caught:
        source.read(b"gone", 0, 4, source.stat(b"gone").version)
    assert not isinstance(caught.value, SourceNotFound)
    shutil.rmtree(root)
    with pytest.raises(SourceError):
        source.stat(b"")
    source.close()
