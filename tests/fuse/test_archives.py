"""Real mounts of archives: what readers see of tars and zips, over a directory and over a bucket."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import fsspec
import pytest
from archive_files import Link, tar_of, zip_of
from mounting import eventually, mounted, run_spiderfs
from object_server import object_server

pytestmark = pytest.mark.opened_and_immutable

RNG = random.Random(7)
FILES = {b"n%02d/%03d.jpg" % (number % 3, number): RNG.randbytes(2000 + number) for number in range(60)}
LARGE = RNG.randbytes(2_500_000)


def contents(root: Path) -> dict[bytes, bytes]:
    found = {}
    for directory, _, names in os.walk(root):
        for name in names:
            path = Path(directory, name)
            found[os.fsencode(path.relative_to(root))] = path.read_bytes()
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    (root / "set").mkdir(parents=True)
    (root / "set" / "train.tar").write_bytes(tar_of({**FILES, b"large": LARGE}))
    (root / "set" / "test.zip").write_bytes(zip_of(FILES))
    (root / "set" / "plain").write_bytes(b"a file beside them")
    (root / "all.tar").write_bytes(tar_of({b"n01.tar": tar_of({b"a": b"first"}), b"link": Link(b"n01.tar/a")}))
    return root


def test_archives_are_directories(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path, archives="tar+zip+nested", sample_max_bytes="1MiB") as mount:
        for name, members in (("train.tar", {**FILES, b"large": LARGE}), ("test.zip", FILES)):
            root = mount.point / "set" / name
            assert root.is_dir()
            assert contents(root) == members
        assert (mount.point / "set" / "plain").read_bytes() == b"a file beside them"
        assert (mount.point / "all.tar" / "link").read_bytes() == b"first"
        opened = mount.metric("origin_reads")
        assert contents(mount.point / "set" / "test.zip") == FILES
        assert mount.metric("origin_reads") == opened, "members are cached as files are"
        with pytest.raises(FileNotFoundError):
            (mount.point / "set" / "train.tar" / "none").stat()
        with pytest.raises(NotADirectoryError):
            (mount.point / "set" / "train.tar" / "large" / "below").stat()
        assert mount.metric("source_errors") == 0
    # The next mount has the indices, and without the option the archives are files again.
    with mounted(source, tmp_path) as mount:
        assert (mount.point / "set" / "train.tar").is_file()
        assert (mount.point / "set" / "train.tar").read_bytes() == (source / "set" / "train.tar").read_bytes()


def test_a_damaged_archive_is_an_error_and_the_others_are_not(source: Path, tmp_path: Path) -> None:
    archive = source / "set" / "train.tar"
    archive.write_bytes(archive.read_bytes()[:70_000])
    with mounted(source, tmp_path, archives="tar", allowed=["set/train.tar cannot be shown"]) as mount:
        for _ in range(3):
            with pytest.raises(OSError, match="Input/output") as caught:
                os.listdir(mount.point / "set" / "train.tar")
            assert caught.value.errno == errno.EIO
        with pytest.raises(OSError, match="Input/output"):
            (mount.point / "set" / "train.tar" / "n00" / "000.jpg").read_bytes()
        assert sorted(os.listdir(mount.point / "set")) == ["plain", "test.zip", "train.tar"]
        files = fsspec.filesystem("spiderfs", mountpoint=mount.point)
        for search in (files.find, lambda path: files.glob(f"{path}/**")):
            with pytest.raises(OSError, match="Input/output"):
                search("/")
        assert files.find("/all.tar") == ["/all.tar/link", "/all.tar/n01.tar"]
        assert files.find("/none") == files.glob("/none/*") == []
        assert [above for above, _, _ in files.walk("/", maxdepth=9, on_error="omit") if ".spider" not in above] == [
            "/", "/all.tar", "/set"
        ]  # fmt: skip
        assert (mount.point / "all.tar" / "n01.tar").is_file(), "without +nested it is one"
        assert len(mount.logged("cannot be shown as a directory")) == 1
        done = run_spiderfs("warm", "--names", mount.point)
        assert done.stderr == (
            f"spiderfs: 1 path could not be looked up, for example {mount.point}/set/train.tar"
            " (it ends within a member)\n"
        )
        for path in ("set/train.tar/n00", "all.tar", "set/plain"):
            with pytest.raises(OSError, match="Input/output" if "train" in path else "No data available"):
                os.getxattr(mount.point / path, "user.spiderfs.failure")
        assert mount.metric("source_reachable") == 1


@pytest.mark.not_immutable
def test_warm_makes_indices_ahead(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path, archives="tar+zip") as mount:
        done = run_spiderfs("warm", "--names", mount.point)
        assert done.returncode == 0, done.stderr
        assert len(list((mount.cache / "archives").rglob("*.index"))) == 3
        done = run_spiderfs("warm", mount.point, "set/test.zip", "set/train.tar/n01")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("80 files fetched")
    (source / "set" / "test.zip").unlink()
    with mounted(source, tmp_path, archives="tar+zip") as mount:
        assert eventually(lambda: len(list((mount.cache / "archives").rglob("*.index"))) == 2)


@pytest.mark.not_immutable
def test_members_of_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with object_server() as server:
        server.objects["set/train.tar"] = tar_of(FILES)
        url = {"source__endpoint": server.url}
        with mounted("s3://bucket/set", tmp_path, archives="tar", **url) as mount:
            assert contents(mount.point / "train.tar") == FILES
            asked = server.asked("GET")
            assert len(asked) == 1 + len(FILES), "one for the index, and one for each member"
