"""Lists of names as other programs write them, and a source that is shown by one."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forking import exit_status, forked

from spiderfs.errors import ConfigError, SourceChanged, SourceError, SourceNotFound, SourceUnavailable
from spiderfs.sources import listed_files
from spiderfs.sources.listed_files import ListedSource, read_list
from spiderfs.sources.local import LocalSource
from spiderfs.sources.object_source import tag_of
from spiderfs.sources.source import UNKNOWN, SourceStat, Version

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
    "rclone in one line": (json.dumps(RCLONE), {**BY_TIME, "a/é 1.jpg": Version(10, TIME_S * 10**9 + 500_000_000)}),
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
        ('[\n{"Path":null,"Size":1,"ModTime":"2023-01-02T15:04:05Z","IsDir":false}\n]\n', "line 2 is none of rclone"),
        ('[\n{"Path":5,"Size":1,"ModTime":"2023-01-02T15:04:05Z","IsDir":false}\n]\n', "line 2 is none of rclone"),
        ('[\n{"Path":"a","Size":Infinity,"ModTime":"2023-01-02T15:04:05Z","IsDir":false}\n]\n', "line 2 is none of"),
        (
            '[\n{"Path":"a","Size":-1,"ModTime":"2023-01-02T15:04:05Z","IsDir":false}\n]\n',
            "line 2 is none of rclone lsjson, as a file has the size -1: correct it, or make the list again",
        ),
        (
            '[\n{"Path":"\\ud800","Size":1,"ModTime":"2023-01-02T15:04:05Z","IsDir":false}\n]\n',
            "line 2 is none of rclone lsjson",
        ),
        (json.dumps([*RCLONE, {**RCLONE[2], "Size": 1.5}]), "file 3 in line 1 is none of rclone lsjson"),
        ("[" * 100_000, "line 1 is none of rclone lsjson"),
        (
            f'"b","a","{10**19}","2023-01-02T15:04:05Z"\n',
            f"line 1 is none of an S3 Inventory, as a file has the size {10**19}",
        ),
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
    packed = gzip.compress(b"a\t5\t1\n" * 1000)
    for damaged in (packed[:30], packed[:-8] + bytes(8), packed[:12] + b"\xff\xff\xff" + packed[15:]):
        (tmp_path / "list.gz").write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"list\.gz cannot be read as gzip .*: make or copy the list again"):
            read_list(tmp_path / "list.gz", "")


def test_keys_that_no_line_can_hold_are_reported(tmp_path: Path) -> None:
    path, reported = tmp_path / "list", list[str]()
    path.write_text("".join(f'"b","{key}","1","2023-01-02T15:04:05Z"\n' for key in ("a", "t%09b", "n%0Ab", "../up")))
    files = read_list(path, "")
    assert {name for name, _ in files.scan(b"", lambda _, names: reported.extend(names))} == {b".", b"a"}
    assert sorted(reported) == ["..", "n\nb", "t\tb"]


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


@pytest.fixture
def listed(tmp_path: Path) -> Callable[..., ListedSource]:
    """Makes a source of files with one byte, of which a list has these lines."""
    (tmp_path / "root").mkdir()

    def make(*lines: str) -> ListedSource:
        for line in lines:
            (tmp_path / "root" / line.partition("\t")[0]).write_bytes(b"x")
        (tmp_path / "list").write_text("".join(f"{line}\n" for line in lines))
        return ListedSource(LocalSource(tmp_path / "root"), read_list(tmp_path / "list", ""))

    return make


def test_a_file_that_differs_from_its_line_is_looked_up_at_the_source(
    listed: Callable[..., ListedSource], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = listed("read\t1\t5", "streamed\t2\t5", "present\t1\t5", "large\t1\t5", "other\t1\t5")
    (tmp_path / "root/large").write_bytes(b"xx")
    versions = {name: source.stat(name).version for name in (b"read", b"streamed", b"other")}
    with pytest.raises(SourceChanged):
        source.read(b"read", 0, 1, versions[b"read"])
    with pytest.raises(SourceChanged):
        list(source.stream(b"streamed", 0, 2, versions[b"streamed"]))
    with pytest.raises(SourceChanged):
        source.read_present(b"large", 1)
    found, content = source.read_present(b"present", 1)
    names = dict(source.scan(b""))
    for name in (b"read", b"streamed", b"present", b"large"):
        there = os.stat(tmp_path / "root" / name.decode())
        assert source.stat(name).version == names[name].version == (there.st_size, there.st_mtime_ns, 0)
    # What is read is shown as what is listed.
    assert (content, found) == (b"x", source.stat(b"present"))
    assert stat.filemode(found.mode) == "-r--------"
    assert source.stat(b"other").version == names[b"other"].version == versions[b"other"]
    (warning,) = caplog.messages
    assert "the list of names is out of date, for example about 'read'" in warning
    source.read(b"read", 0, 1, source.stat(b"read").version)
    # A name that is no file any more is neither a directory nor a link of the tree.
    (tmp_path / "root/read").unlink()
    for make in (lambda: None, (tmp_path / "root/read").mkdir):
        make()
        with pytest.raises(SourceError, match=r"in the list of names and (not|no file) at the source") as caught:
            source.stat(b"read")
        assert not isinstance(caught.value, SourceNotFound)
        assert dict(source.scan(b""))[b"read"] == UNKNOWN


def test_processes_of_a_mount_share_what_they_learn_of_a_list(listed: Callable[..., ListedSource]) -> None:
    source = listed("a\t2\t5")

    def learn() -> None:
        with pytest.raises(SourceChanged):
            source.read(b"a", 0, 2, source.stat(b"a").version)

    assert exit_status(forked(learn)) == 0
    assert source.stat(b"a").size == 1


def test_an_empty_file_is_looked_up_before_it_is_shown(
    listed: Callable[..., ListedSource], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = listed("empty\t0\t5", "grown\t0\t5")
    (tmp_path / "root/empty").write_bytes(b"")
    assert source.stat(b"empty").size == 0
    assert not caplog.messages
    names = dict(source.scan(b""))
    assert names[b"empty"].size == 0
    assert (names[b"grown"].size, source.stat(b"grown").size) == (1, 1)
    assert len(caplog.messages) == 1


def test_a_scan_looks_some_empty_files_up(listed: Callable[..., ListedSource], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listed_files, "_ASKED_PER_SCAN", 2)
    source = listed("a\t0\t5", "b\t0\t5", "c\t0\t5", "d\t1\t5")
    found = dict(source.scan(b""))
    assert [name for name, its in found.items() if its == UNKNOWN] == [b"c"]


def test_a_scan_waits_once_for_the_source(listed: Callable[..., ListedSource], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def away(source: LocalSource, path: bytes) -> SourceStat:
        asked.append(path)
        raise SourceUnavailable("away")

    source = listed("a\t0\t5", "b\t0\t5", "c\t1\t5")
    monkeypatch.setattr(LocalSource, "stat", away)
    found = dict(source.scan(b""))
    assert [name for name, its in found.items() if its == UNKNOWN] == [b"a", b"b"]
    assert asked == [b"a"]
    assert found[b"c"].size == 1
