"""Real mounts of a bucket: what readers get, what the store is asked, and what no one is told."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mounting import Mounted, children, eventually, mounted, options_text, run_spiderfs
from object_server import MODIFIED_S, ObjectServer, object_server
from reading import files_below

SECRET, TOKEN = "SECRET-of-a-test", "TOKEN-of-a-test"
MODES = pytest.mark.parametrize("mode", [{}, {"immutable": "on"}, {"workers": 2}], ids=["opened", "immutable", "two"])
OPENED_AND_IMMUTABLE = pytest.mark.parametrize("mode", [{}, {"immutable": "on"}], ids=["opened", "immutable"])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY-of-a-test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    with object_server() as made:
        rng = random.Random(1)
        for number in range(60):
            made.objects[f"train/c{number % 3}/{number:03}.jpg"] = rng.randbytes(2000 + number)
        yield made


def shown(server: ObjectServer, place: Path, url: str = "s3://bucket/train", **options: object) -> Mounted:
    return mounted(url, place, source__endpoint=server.url, **options)  # type: ignore[return-value, arg-type]


def files(mount: Mounted) -> dict[str, bytes]:
    """All that a walk finds, by its key."""
    return files_below(mount.point, "train/")


@MODES
def test_each_object_is_asked_for_once(server: ObjectServer, tmp_path: Path, mode: dict[str, object]) -> None:
    with shown(server, tmp_path, **mode) as mount:
        server.asked()
        assert files(mount) == server.objects
        asked = Counter(server.asked())
        assert {request: times for request, times in asked.items() if request.startswith("GET")} == {
            f"GET {key}": 1 for key in server.objects
        }
        assert asked["LIST train/"] <= 1
        assert {asked[f"LIST train/c{number}/"] for number in range(3)} == {1}
        assert sum(asked.values()) <= len(server.objects) + 4, "and nothing else"
        assert files(mount) == server.objects
        assert server.asked() == []
    with shown(server, tmp_path, **mode) as mount:
        assert files(mount) == server.objects
        again = server.asked()
        assert [request for request in again if request.startswith("GET")] == []
        assert mount.metric("source_errors") == 0


def test_an_object_of_a_known_path_needs_no_walk(server: ObjectServer, tmp_path: Path) -> None:
    server.objects["train/large"] = random.Random(2).randbytes(3_500_000)
    with shown(server, tmp_path, sample_max_bytes="1MiB") as mount:
        server.asked()
        assert (mount.point / "c1/001.jpg").read_bytes() == server.objects["train/c1/001.jpg"]
        assert server.asked() == ["LIST train/", "LIST train/c1/", "GET train/c1/001.jpg"]
        assert not (mount.point / "c1/none.jpg").exists()
        with open(mount.point / "large", "rb") as file:
            assert os.pread(file.fileno(), 100, 3_400_000) == server.objects["train/large"][3_400_000:3_400_100]
            assert file.read() == server.objects["train/large"]
        assert set(server.asked()) <= {"LIST train/c1/none.jpg", "GET train/large"}


def test_a_replaced_object_is_read_as_it_is_now(server: ObjectServer, tmp_path: Path) -> None:
    with shown(server, tmp_path) as mount:
        assert len(os.listdir(mount.point / "c0")) == 20
        server.objects["train/c0/000.jpg"] = b"another"
        del server.objects["train/c0/003.jpg"]
        assert (mount.point / "c0/000.jpg").read_bytes() == b"another"
        assert os.stat(mount.point / "c0/000.jpg").st_size == 7
        with pytest.raises(FileNotFoundError):
            (mount.point / "c0/003.jpg").read_bytes()
        server.objects["train/c0/000.jpg"] = b"a third"
        assert (mount.point / "c0/000.jpg").read_bytes() == b"another", "the name is trusted for its TTL"
    with shown(server, tmp_path, ttl="0s", dir_ttl="0s") as mount:
        assert (mount.point / "c0/000.jpg").read_bytes() == b"a third"
        assert "003.jpg" not in os.listdir(mount.point / "c0")


def test_what_is_cached_is_read_while_the_store_is_away(server: ObjectServer, tmp_path: Path) -> None:
    options = {"ttl": "0s", "source__attempts": 1, "source__timeout_s": 2}
    with shown(server, tmp_path, allowed=("NoSuchBucket",), **options) as mount:
        content = (mount.point / "c0/000.jpg").read_bytes()
        server.fails = lambda request: (404, "NoSuchBucket")
        assert (mount.point / "c0/000.jpg").read_bytes() == content
        # A bucket that is gone says nothing about its files.
        with pytest.raises(OSError, match="Input/output error"):
            (mount.point / "c0/003.jpg").read_bytes()
        server.fails = lambda request: (403, "AccessDenied")
        with pytest.raises(PermissionError):
            (mount.point / "c1/001.jpg").read_bytes()
        server.fails = lambda request: None
        eventually(lambda: mount.metric("source_reachable") == 1, what="the store's return")
        assert files(mount) == server.objects


@OPENED_AND_IMMUTABLE
def test_a_hanging_store_holds_no_one_for_long(server: ObjectServer, tmp_path: Path, mode: dict[str, object]) -> None:
    options = {"source__timeout_s": 1, "source__attempts": 1}
    with shown(server, tmp_path, allowed=("not answered", "unanswered"), **options, **mode) as mount:
        files = [mount.point / f"c{number % 3}/{number:03}.jpg" for number in range(17)]

        def are_read(some: Sequence[Path]) -> bool:
            with contextlib.suppress(OSError):
                return [path.read_bytes() for path in some] == [
                    server.objects[f"train/{path.relative_to(mount.point)}"] for path in some
                ]
            return False

        # To connect takes a process half a second, on a busy machine more than one.
        eventually(lambda: are_read(files[:1]), what="the first file")
        server.latency_s = 3.0
        began = time.monotonic()
        with ThreadPoolExecutor(16) as pool:
            reads = [pool.submit(path.read_bytes) for path in files[1:]]
        # The library of the store and the mount have the same limit.
        assert {type(read.exception()) for read in reads} == {TimeoutError}
        assert time.monotonic() - began < 12, "they have waited at the same time"
        assert files[0].read_bytes() == server.objects["train/c0/000.jpg"]
        server.latency_s = 0.0
        eventually(lambda: are_read(files), what="the store's return")


@MODES
def test_processes_that_are_killed_connect_again(server: ObjectServer, tmp_path: Path, mode: dict[str, object]) -> None:
    with shown(server, tmp_path, **mode) as mount:
        mount.expect("ended", "the process ends")
        paths = [mount.point / key.removeprefix("train/") for key in server.objects]
        for number, path in enumerate(paths):
            if number in (20, 40):
                worker = mount.workers()[0]
                for pid in [worker] if number == 20 else children(worker):
                    os.kill(pid, signal.SIGKILL)
            assert path.read_bytes() == server.objects[f"train/{path.relative_to(mount.point)}"]
        assert mount.metric("source_errors") == 0


def test_no_secret_is_ever_written_or_shown(server: ObjectServer, tmp_path: Path) -> None:
    # The daemon logs everything, also what goes wrong.
    with shown(server, tmp_path, log_level="debug", source__attempts=1, negative_ttl="0s") as mount:
        mount.expect("ExpiredToken", "spiderfs")
        files(mount)
        server.fails = lambda request: (403, "ExpiredToken")
        server.objects["train/new"] = b"new"
        with pytest.raises(OSError, match="Input/output error"):
            (mount.point / "new").read_bytes()
        texts = [path.read_text(errors="replace") for path in (mount.point / ".spiderfs").iterdir() if path.is_file()]
        pids = [mount.supervisor.pid, mount.manager(), *mount.workers()]
        texts += [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]
        texts += [Path("/proc/mounts").read_text(), mount.log.read_text()]
        for text in texts:
            assert not any(secret in text for secret in (SECRET, TOKEN, "SECRET MESSAGE", "Signature"))
    for secret in (SECRET, TOKEN, "SECRET MESSAGE", "KEY-of-a-test"):
        assert subprocess.run(["grep", "-rl", secret, tmp_path], capture_output=True, text=True).stdout == ""


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("s3://another/train", {}, "there is no such bucket: check its name"),
        ("s3://bucket/none", {}, "holds no objects: check the prefix"),
        ("s3:/bucket/train", {}, "write s3://bucket/train"),
        ("s3://key:word@bucket/train", {}, "leave out what signs or logs in"),
        ("S3://key:SECRET@bucket/train", {}, "write s3://...@bucket/train"),
        ("ftp://bucket.example.org/train?X-Amz-Signature=SECRET", {}, "only: mount it first"),
        ("az://bucket/train?sig=SECRET", {"source.endpoint": ""}, "leave out what signs or logs in"),
        ("gs://bucket/train", {"source.region": "x"}, "this is for s3://, and the source is gs://: leave it out"),
        ("s3://bucket/train", {"source.endpoint": "http://me:SECRET@host"}, "leave the password out"),
        ("s3://bucket/train", {"source.endpoint": "me:SECRET@host:9000"}, "leave the password out"),
    ],
)
def test_a_mount_that_cannot_work_says_why_in_a_line(
    server: ObjectServer, tmp_path: Path, url: str, options: dict[str, str], said: str
) -> None:
    (tmp_path / "mnt").mkdir()
    text = options_text({"cache_dir": tmp_path / "cache", "source.endpoint": server.url, **options})
    done = run_spiderfs("mount", url, tmp_path / "mnt", "-o", text)
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "word" not in done.stderr.replace("password", "")
    assert "SECRET" not in done.stderr


@pytest.mark.parametrize(
    ("off", "mode"),
    [
        ("gone", {}),
        *(pytest.param(off, {"immutable": "on"}, marks=pytest.mark.thorough) for off in ("503", "hangs")),
    ],
    ids=str,
)
def test_what_is_known_is_shown_though_the_store_is_off_before_the_mount(
    server: ObjectServer, tmp_path: Path, off: str, mode: dict[str, object]
) -> None:
    options = {"source__timeout_s": 1, "source__attempts": 2, **mode}
    (tmp_path / "empty").mkdir()
    # While the store answers, a busy machine may take longer than that.
    with shown(server, tmp_path, **mode) as mount:
        known = sorted(os.walk(mount.point))
        cached = (mount.point / "c0/000.jpg").read_bytes()
    if off == "gone":
        server.close()
    elif off == "503":
        server.fails = lambda request: (503, "SlowDown")
    else:
        server.latency_s = 30.0
    soon = "from spiderfs.options import paths; paths.check_source_answers.__defaults__ = (0.5,)"
    refused = run_spiderfs(
        "mount",
        "s3://bucket/train",
        tmp_path / "empty",
        "-o",
        options_text({"cache_dir": tmp_path / "new", "source__endpoint": server.url}),
        first=soon,
    )
    assert refused.returncode == 1, "nothing is known of it"
    assert any(said in refused.stderr for said in ("check source.endpoint", "too much", "has not answered for 0.5 s"))
    allowed = ("cannot be reached", "not answered", "too much")
    began = time.monotonic()
    with shown(server, tmp_path, allowed=allowed, first=soon, **options) as mount:
        assert sorted(os.walk(mount.point)) == known
        assert (mount.point / "c0/000.jpg").read_bytes() == cached
        assert time.monotonic() - began < 25
        with pytest.raises(OSError, match=r"Input/output error|timed out"):
            (mount.point / "c0/003.jpg").read_bytes()

        def took_s() -> float:
            began = time.monotonic()
            assert (mount.point / "c0/000.jpg").read_bytes() == cached
            return time.monotonic() - began

        eventually(lambda: took_s() < 1, what="that it is known that the store is off")


def test_a_store_of_a_variable_has_its_cache(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    with mounted("s3://bucket/train", tmp_path) as mount:
        assert files(mount) == server.objects
    with object_server() as other:
        other.objects["train/c0/000.jpg"] = b"another store's"
        monkeypatch.setenv("AWS_ENDPOINT_URL", other.url)
        text = options_text({"cache_dir": mount.cache})
        done = run_spiderfs("mount", "s3://bucket/train", mount.point, "-o", text)
    assert done.returncode == 1
    assert f"holds the files of s3://bucket/train at {server.url}" in done.stderr


@OPENED_AND_IMMUTABLE
@pytest.mark.parametrize("has_tags", [False, True], ids=["times", "tags"])
def test_listed_names_spare_listings(
    server: ObjectServer, tmp_path: Path, mode: dict[str, object], has_tags: bool
) -> None:
    names = tmp_path / "names"
    names.write_text(
        "".join(
            f"{key.removeprefix('train/')}\t{len(content)}\t{server.e_tag(content) if has_tags else MODIFIED_S}\n"
            for key, content in server.objects.items()
        )
    )
    server.objects["train/c0/unlisted.jpg"] = b"absent"
    with shown(server, tmp_path, names=names, **mode) as mount:
        assert files(mount) == {key: content for key, content in server.objects.items() if "unlisted" not in key}
        assert not (mount.point / "c0/unlisted.jpg").exists()
        asked = Counter(server.asked())
        # Whether there is anything is asked of the store; no directory is.
        assert {request for request in asked if not request.startswith("GET")} <= {"LIST train/"}
        assert sum(request.startswith("GET") for request in asked.elements()) == 60
