"""One suite for three ways to read a mount: the built-in open, `spiderfs.client`, and fsspec. All answer the same.

Where the cache can answer, the two ways around FUSE must have taken it (`client_opens`): a client that silently read
everything through the mount would pass for a correct one.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from mounting import Mounted, as_root, eventually, mounted, refused_by_modes
from PIL import Image
from reading import digest, readers, together, write_files

from benchmarks.common.sources import make_older
from spiderfs import client

SIZES = {
    "empty": 0,
    "one": 1,
    "page": 4096,
    "train/112000": 112_000,
    "train/piece": 131_072,
    "train/piece and one": 131_073,
    "train/pieces": 700_003,
    "deep/" * 12 + "file": 500,
    "n" * 255: 10,
    "ünï cödé": 20,
    os.fsdecode(b"not utf-8 \xff"): 30,
    "large": (8 << 20) + 5,
}
OPENERS: dict[str, Callable[..., Any]] = {
    "open": builtins.open,
    "client": client.open,
    "fsspec": lambda path, mode="r", **more: fsspec.filesystem("spiderfs").open(os.fspath(path), mode, **more),
}


def _settled(mount: Mounted) -> int | float:
    """How many opens were answered around FUSE, once the manager has heard of all: it listens every 5 ms."""
    seen = [mount.metric("client_opens")]
    while len(seen) < 4 or len(set(seen[-4:])) > 1:
        time.sleep(0.005)
        seen.append(mount.metric("client_opens"))
    return seen[-1]


def cache(mount: Mounted, *names: str) -> None:
    for name in names:
        (mount.point / name).read_bytes()


class Subject:
    """A way to read; `around` says whether it goes around FUSE."""

    def __init__(self, name: str, mount: Mounted) -> None:
        self.open = OPENERS[name]
        self.around = name != "open"
        self.mount = mount

    def read(self, path: Path) -> bytes:
        with self.open(path, "rb") as file:
            content: bytes = file.read()
            return content

    @contextlib.contextmanager
    def counted(self, opens: int) -> Iterator[None]:
        """So many opens of the context are answered by the cache without the mount, if this way goes around it."""
        before = _settled(self.mount)
        yield
        wanted = before + (opens if self.around else 0)
        eventually(
            lambda: self.mount.metric("client_opens") >= wanted, what=f"{opens} opens around FUSE, after {before}"
        )
        assert _settled(self.mount) == wanted


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    write_files(source, SIZES)
    (source / "link").symlink_to("train/112000")
    (source / "directory link").symlink_to("train")
    (source / "broken").symlink_to("nowhere")
    (source / "text").write_text("first\r\nsecond ü\nthird", encoding="utf-8", newline="")
    return source


@pytest.fixture(scope="module")
def mount(source: Path, tmp_path_factory: pytest.TempPathFactory, binding: str) -> Iterator[Mounted]:
    with mounted(source, tmp_path_factory.mktemp("m"), capacity="100MiB") as found:
        yield found


@pytest.fixture(params=OPENERS)
def subject(request: pytest.FixtureRequest, mount: Mounted) -> Subject:
    return Subject(request.param, mount)


# -- contents


def test_the_bytes_are_those_of_the_source(subject: Subject, source: Path) -> None:
    for name in SIZES:
        assert subject.read(subject.mount.point / name) == (source / name).read_bytes(), name
    with subject.counted(2 * len(SIZES) - 2):
        for name in [*SIZES, *SIZES]:
            assert subject.read(subject.mount.point / name) == (source / name).read_bytes(), name


def _every_way(file: Any) -> Iterator[object]:
    """What a binary file object answers, call by call; an error by its type and errno."""

    def tried(call: Callable[..., object], *arguments: object) -> object:
        try:
            return call(*arguments)
        except (OSError, ValueError) as exc:
            return isinstance(exc, OSError), getattr(exc, "errno", None)

    yield file.readable(), file.seekable(), file.writable(), file.closed, file.isatty(), file.mode
    yield file.read(10), file.tell(), file.read(0), file.read1(7), file.tell()
    yield file.peek(1)[:1], file.tell()
    yield tried(file.seek, -5, os.SEEK_CUR), file.read(5), tried(file.seek, -3, os.SEEK_END), file.read(), file.read(1)
    yield file.seek(10_000_000), file.tell(), file.read(5)
    yield tried(file.seek, -1), file.tell(), tried(file.seek, -20_000_000, os.SEEK_CUR), tried(file.seek, 0, 99)
    buffer = bytearray(100)
    yield file.seek(1), file.readinto(buffer), bytes(buffer), file.readinto1(memoryview(buffer)[:10]), bytes(buffer)
    yield file.seek(0), file.readline(50), sum(1 for _ in file), file.seek(0), len(file.readlines())
    yield tried(file.write, b"x"), tried(file.truncate), tried(file.writelines, [b"x"]), file.flush()
    with file:
        yield file.seek(0), file.read(3)
    yield file.closed, tried(file.read), tried(file.seek, 0), tried(file.fileno), tried(file.__enter__)


def test_a_file_object_does_what_the_built_in_one_does(subject: Subject, source: Path) -> None:
    for name in ("train/112000", "one", "empty", "large"):
        subject.read(subject.mount.point / name)
        with subject.counted(name != "large"):
            found = list(_every_way(subject.open(subject.mount.point / name, "rb")))
        with builtins.open(source / name, "rb") as real:
            assert found == list(_every_way(real)), name


def test_text(subject: Subject, source: Path) -> None:
    subject.read(subject.mount.point / "text")
    for more in ({}, {"newline": ""}, {"encoding": "latin-1"}, {"errors": "replace", "newline": "\n"}):
        more = {"encoding": "utf-8", **more}
        with (
            subject.counted(1),
            subject.open(subject.mount.point / "text", "r", **more) as file,
            builtins.open(source / "text", **more) as real,  # type: ignore[call-overload]
        ):
            assert (file.readline(), file.read(), file.encoding) == (real.readline(), real.read(), real.encoding)


def test_unbuffered_and_updating_files_are_opened_through_the_mount(mount: Mounted) -> None:
    with client.open(mount.point / "one", "rb", buffering=0) as file:
        assert isinstance(file, io.FileIO)
    with pytest.raises(ValueError, match="binary mode"):
        client.open(mount.point / "one", "rb", encoding="utf-8")
    with pytest.raises(ValueError, match="invalid mode"):
        client.open(mount.point / "one", "q")
    fd = os.open(mount.point / "one", os.O_RDONLY)
    with client.open(fd, "rb") as file:
        assert len(file.read()) == 1


# -- names


def test_errors_are_those_of_the_mount(subject: Subject) -> None:
    paths = ["none", "train", "", "one/below", "none/none", "broken", "x" * 256, "nul\0", ".spiderfs", ".spiderfs/none"]
    for path in paths:
        # With os.path.join, for Path refuses some of them itself.
        whole = os.path.join(subject.mount.point, path)
        errors = []
        for opener in (subject.open, builtins.open):
            with pytest.raises((OSError, ValueError)) as caught:
                opener(whole, "rb")
            errors.append((caught.type, getattr(caught.value, "errno", None)))
        assert errors[0] == errors[1], path


_NOT_IMMUTABLE = pytest.mark.not_immutable("root can open a file there, but not write to it")


@pytest.mark.parametrize("mode", ["wb", "xb", *(pytest.param(mode, marks=_NOT_IMMUTABLE) for mode in ("ab", "r+b"))])
@pytest.mark.opened_and_immutable
def test_nothing_can_be_written(mount: Mounted, mode: str, binding: str) -> None:
    wanted = errno.EEXIST if mode == "xb" else errno.EROFS
    if mode == "wb" and refused_by_modes(binding):
        wanted = errno.EACCES
    for opener in OPENERS.values():
        with pytest.raises(OSError, match=f"Errno {wanted}"):
            opener(mount.point / "one", mode)


def test_roundabout_paths(subject: Subject, source: Path) -> None:
    wanted = (source / "train/112000").read_bytes()
    for path in ("link", "directory link/112000", "train/../train/112000", "train//112000", "../mnt/train/112000"):
        assert subject.read(Path(os.path.join(subject.mount.point, path))) == wanted, path


def test_a_control_file_is_read_through_the_mount(subject: Subject) -> None:
    with subject.counted(0):
        assert subject.read(subject.mount.control("hook")).strip()


def test_paths_outside_of_any_mount(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"outside")
    assert client.read_bytes(tmp_path / "file") == b"outside"
    with client.open(tmp_path / "new", "w") as file:
        file.write("written")
    assert (tmp_path / "new").read_text() == "written"
    with client.Client(tmp_path).open("file") as file:
        assert file.read() == b"outside"


def test_a_client_of_one_mount(mount: Mounted, source: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(mount.point)
    cache(mount, "train/112000", "one", "text")
    for point in (mount.point, tmp_path / "alias", os.fsencode(mount.point)):
        one = client.Client(point)
        assert one.mountpoint == str(mount.point)
        with Subject("client", mount).counted(3):
            assert one.read_bytes("train/112000") == (source / "train/112000").read_bytes()
            assert one.read_bytes(mount.point / "one") == (source / "one").read_bytes()
            with one.open("text", "r", encoding="utf-8") as text:
                assert text.readline() == "first\n"
        assert sorted(one.listdir()) == sorted(os.listdir(source))
        assert one.listdir("train") == os.listdir(mount.point / "train")
        assert one.stat("one") == os.stat(mount.point / "one")
        assert (one.exists("one"), one.exists("none")) == (True, False)
    assert client.Client(tmp_path / "alias").read_bytes(tmp_path / "alias" / "one") == (source / "one").read_bytes()


@pytest.mark.skipif(os.getuid() != 0, reason="root may not enter another user's mount, and only root can bind")
def test_another_mount_inside_is_not_ours(mount: Mounted, tmp_path: Path) -> None:
    (tmp_path / "inside").write_bytes(b"of another file system")
    assert client.read_bytes(mount.point / "one") != b"of another file system"
    as_root("mount", "--bind", tmp_path / "inside", mount.point / "one")
    try:
        assert client.read_bytes(mount.point / "one") == b"of another file system"
    finally:
        as_root("umount", mount.point / "one")
    with Subject("client", mount).counted(1):
        assert len(client.read_bytes(mount.point / "one")) == 1


# -- fsspec


def test_fsspec_names_and_attributes(mount: Mounted, source: Path) -> None:
    files = fsspec.filesystem("spiderfs", mountpoint=mount.point)
    walked = os.walk(source, followlinks=True)
    wanted = sorted(f"{top.removeprefix(str(source))}/{name}" for top, _, names in walked for name in names)
    assert sorted(files.find("/")) == wanted
    assert files.ls("/train", detail=False) == sorted(f"/train/{path.name}" for path in (source / "train").iterdir())
    assert files.ls("train/112000", detail=False) == ["/train/112000"]
    found = files.info("/train/112000")
    assert (found["name"], found["size"], found["type"]) == ("/train/112000", 112_000, "file")
    assert found["ino"] == os.stat(mount.point / "train/112000").st_ino
    assert files.info("/broken")["type"] == "link"
    assert (files.isdir("/train"), files.isfile("/train"), files.exists("/none")) == (True, False, False)
    assert files.modified("/one").timestamp() == pytest.approx((source / "one").stat().st_mtime)
    assert files.glob("/train/p*") == ["/train/piece", "/train/piece and one", "/train/pieces"]
    with pytest.raises(FileNotFoundError):
        files.info("/none")
    for change in (files.mkdir, files.rm, files.touch):
        with pytest.raises(OSError, match=r"Read-only|Errno 30"):
            change("/one")


# -- changes


@pytest.fixture
def own_source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


def test_a_changed_file_is_seen_after_its_ttl(own_source: Path, tmp_path: Path) -> None:
    for way in OPENERS:
        (own_source / way).write_bytes(b"old")
    with mounted(own_source, tmp_path / "m", ttl="300ms") as mount:
        for way in OPENERS:
            sees_changes(Subject(way, mount), own_source / way)


def sees_changes(subject: Subject, path: Path) -> None:
    shown = subject.mount.point / path.name
    for content in (b"newer", b"newest"):
        subject.read(shown)
        path.write_bytes(content)
        seen: list[bytes] = []

        def changed(seen: list[bytes] = seen, content: bytes = content) -> bool:
            seen.append(subject.read(shown))
            return seen[-1] == content

        eventually(changed, what="the change")
        assert set(seen) <= {b"old", b"newer", b"newest"}
        assert seen == sorted(seen, key=[b"old", b"newer", b"newest"].index), "never back to an older version"
    path.unlink()

    def gone() -> bool:
        try:
            return subject.read(shown) == b""
        except FileNotFoundError:
            return True

    eventually(gone, what="the end of the file")


def test_known_names_and_cached_bytes_outlive_the_source(own_source: Path, tmp_path: Path) -> None:
    wanted = write_files(own_source, dict.fromkeys((*(f"cached {way}" for way in OPENERS), "uncached"), 5000))
    with mounted(own_source, tmp_path / "m", ttl="0s", allowed=["WARNING"]) as mount:
        subjects = {f"cached {way}": Subject(way, mount) for way in OPENERS}
        for name, subject in subjects.items():
            subject.read(mount.point / name)
        os.listdir(mount.point)
        mount.change("source.gone", "on")
        for name, subject in subjects.items():
            assert digest(subject.read(mount.point / name)) == wanted[name]
            with pytest.raises(OSError, match="Errno 5"):
                subject.read(mount.point / "uncached")


def test_an_immutable_mount_asks_for_each_name_once(own_source: Path, tmp_path: Path) -> None:
    """Whatever an earlier mount trusts, and whatever `ttl` says."""
    for content in (b"old", b"newer"):
        for way in OPENERS:
            (own_source / way).write_bytes(content)
        with mounted(own_source, tmp_path / "m", binding="kernel", immutable="on") as mount:
            for way in OPENERS:
                path, subject = mount.point / way, Subject(way, mount)
                assert subject.read(path) == content
                eventually(lambda path=path: os.getxattr(path, "user.spiderfs.state") == b"cached")  # type: ignore[misc]
                mount.change("ttl", "0s")
                with subject.counted(1):
                    assert subject.read(path) == content


def landed(mount: Mounted, size: int) -> None:
    """Wait until the cache holds so many bytes; no reader waits for that."""
    eventually(lambda: mount.stats()["used_bytes"] == size, what=f"{size} bytes in the cache")


def test_a_mount_that_goes_and_comes_back(own_source: Path, tmp_path: Path) -> None:
    wanted = write_files(own_source, {"file": 50_000})
    place = tmp_path / "m"
    for _ in range(2):
        with mounted(own_source, place) as mount:
            client.read_bytes(mount.point / "file")
            landed(mount, 50_000)
            with Subject("client", mount).counted(1):
                assert digest(client.read_bytes(mount.point / "file")) == wanted["file"]
        with pytest.raises(FileNotFoundError):
            client.read_bytes(mount.point / "file")
        assert str(mount.cache) not in Path("/proc/self/maps").read_text(), "the cache is let go"
    (mount.point / "file").write_bytes(b"what the mount had hidden")
    assert client.read_bytes(mount.point / "file") == b"what the mount had hidden"
    (mount.point / "file").unlink()
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_bytes(b"of another source")
    with mounted(other, place, cache=tmp_path / "another cache") as mount:
        assert client.read_bytes(mount.point / "file") == b"of another source"
        landed(mount, len("of another source"))
        with Subject("client", mount).counted(1):
            assert client.read_bytes(mount.point / "file") == b"of another source"


def test_a_mount_that_comes_back_with_another_view(own_source: Path, tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.effect_noise((300, 200), 50).save(out, "JPEG")
    (own_source / "a.jpg").write_bytes(out.getvalue())
    make_older(own_source / "a.jpg")
    others = client.Client(tmp_path / "m/mnt")
    for recipe in ("none", "bmp:64", "bmp:32"):
        views = {} if recipe == "none" else {"view": "small", "views": f"small:{recipe}"}
        with mounted(own_source, tmp_path / "m", **views) as mount:
            assert mount.point == Path(others.mountpoint)
            wanted = (mount.point / "a.jpg").read_bytes()

            def around(mount: Mounted = mount, wanted: bytes = wanted) -> bool:
                before = _settled(mount)
                for read in (client.read_bytes, others.read_bytes):
                    assert read(mount.point / "a.jpg") == wanted
                return _settled(mount) == before + 2

            # Bytes land a moment later, and an idle client may hold up the other one for as long.
            eventually(around)


def test_a_process_that_gives_up_its_rights(mount: Mounted) -> None:
    if os.geteuid() != 0:
        pytest.skip("takes another user's part")
    client.read_bytes(mount.point / "one")
    os.seteuid(65534)
    try:
        for opener in (builtins.open, client.open):
            with pytest.raises(PermissionError):
                opener(mount.point / "one", "rb")
    finally:
        os.seteuid(0)
    path = os.fsencode(mount.point / "one")
    one, _ = client._client_of(path)
    assert one is not None
    eventually(lambda: one.cached(path), what="reads around FUSE")


# -- processes and threads


def test_a_fork_behind_pythons_back(mount: Mounted, source: Path) -> None:
    path = mount.point / "train/112000"
    wanted = (source / "train/112000").read_bytes()
    for _ in range(2):
        assert client.read_bytes(path) == wanted
    # A thread of the test's that waits for the interpreter's lock asks for it. The child has no such thread, but would
    # hand the lock over, and wait for ever.
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        child = ctypes.PyDLL(None).fork()
        if child == 0:
            status = 1
            try:
                status = int(any(client.read_bytes(path) != wanted for _ in range(3)))
            finally:
                os._exit(status)
    finally:
        sys.setswitchinterval(usual_s)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with Subject("client", mount).counted(1):
        assert client.read_bytes(path) == wanted


def more_client_opens(mount: Mounted) -> None:
    """Wait until the cache is read around FUSE (again)."""
    wanted = mount.metric("client_opens") + 100
    eventually(lambda: mount.metric("client_opens") > wanted, what="reads around FUSE")


def test_a_store_that_is_rebuilt_while_it_is_read(own_source: Path, tmp_path: Path) -> None:
    wanted = write_files(own_source, {f"{number:02d}": 20_000 for number in range(20)})
    with mounted(own_source, tmp_path / "m", allowed=["ended", "damaged"]) as mount:
        with readers(1, mount.point, wanted, around=True) as reading:
            more_client_opens(mount)
            for deaths in range(1, 5):
                # Four crashes within a minute are taken for damage; see CRASHES in the supervisor.
                os.kill(mount.workers()[0], signal.SIGABRT)
                if deaths < 4:
                    eventually(lambda deaths=deaths: mount.metric("worker_restarts") == deaths, what="a worker")
            eventually(lambda: mount.metric("store_rebuilds") == 1, what="an empty store")
            more_client_opens(mount)
            seen = together(reading)
        assert (seen.wrong, seen.errors) == ([], [])
