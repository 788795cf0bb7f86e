"""`spiderfs serve`: the daemon without a mount, read with `spiderfs.client` and fsspec.

What it answers to names, reads and errors one by one, tests/contract/test_filesystem_cases.py says.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import multiprocessing
import os
import pickle
import signal
import socket
import stat
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import fsspec
import pytest
import torch
import yaml
from mounting import eventually, run_spiderfs, settle
from ordinary_user import UID, let_everybody_in
from reading import write_files
from serving import NAME, URL, ServedDaemon, served
from torch.utils.data import DataLoader, Dataset

import trainer_hook
from spiderfs import client
from spiderfs.protocol.requests import (
    ENVIRONMENT,
    LENGTH,
    REQUEST_BYTES,
    Connection,
    address_of,
    socket_address,
    socket_of,
)

LARGE = 18 << 20
SMALL = [f"train/{number % 4}/{number:03}" for number in range(80)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    write_files(source, {**dict.fromkeys(SMALL, 5_000), "large": LARGE, "text": 0, "view me": 3})
    (source / "text").write_text("one\ntwo\n")
    (source / "link").symlink_to("train/0/000")
    (source / "absolute").symlink_to("/etc/hostname")
    (source / "loop").symlink_to("loop")
    settle(source)
    # A time that a quotient of nanoseconds would round otherwise than `os.stat` does.
    os.utime(source / "large", ns=(1_695_938_553_048_221_300,) * 2)
    return source


@pytest.fixture(scope="module")
def daemon(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedDaemon]:
    with served(source, tmp_path_factory.mktemp("d"), workers=2) as found:
        yield found


def error_of(path: str, mode: str = "rb") -> int:
    with pytest.raises(OSError) as caught:  # noqa: PT011
        client.open(path, mode).close()
    assert caught.value.filename == path
    return caught.value.errno or 0


# -- addresses


def test_addresses() -> None:
    assert address_of("spiderfs://data") == ("data", b"")
    assert address_of(b"spiderfs://data/a/b c") == ("data", b"a/b c")
    for other in ("/mnt/data", "spiderfs:///mnt/data", "data", 3, Path("/mnt")):
        assert address_of(other) is None
    for impossible in ("spiderfs://", "spiderfs://-x/a", "spiderfs://..", f"spiderfs://{'x' * 65}"):
        with pytest.raises(ValueError, match="is no name: take up to 64"):
            address_of(impossible)


# -- reading


def test_what_is_read_is_what_the_source_has(daemon: ServedDaemon, source: Path) -> None:
    before = daemon.metric("client_opens")
    for _ in range(2):
        for name in SMALL:
            assert client.read_bytes(f"{URL}/{name}") == (source / name).read_bytes()
    # The second time from the store, in this process.
    eventually(lambda: daemon.metric("client_opens") >= before + len(SMALL), what="reads without the daemon")
    with client.open(f"{URL}/text") as file:
        assert list(file) == ["one\n", "two\n"]
    with client.open(f"{URL}/text", encoding="ascii", newline="") as file:
        assert file.readline() == "one\n"
    assert client.read_bytes(f"{URL}/link") == (source / "train/0/000").read_bytes()
    assert sorted(client.listdir(URL)) == sorted(os.listdir(source))
    assert sorted(client.listdir(f"{URL}/train/1")) == sorted(os.listdir(source / "train/1"))
    found, real = client.stat(f"{URL}/large"), os.stat(source / "large")
    assert (found.st_size, found.st_mode, found.st_mtime_ns) == (real.st_size, real.st_mode, real.st_mtime_ns)
    assert found.st_mtime == real.st_mtime
    assert client.stat(f"{URL}/train/../train/./0/").st_mode == os.stat(source / "train").st_mode


def test_ranges_of_a_large_file(daemon: ServedDaemon, source: Path) -> None:
    content = (source / "large").read_bytes()
    with client.open(f"{URL}/large", "rb") as file:
        assert not isinstance(file, io.BytesIO)
        assert file.read() == content
        rng = Random(1)
        for _ in range(20):
            offset, size = rng.randrange(LARGE), rng.choice((1, 100, 3 << 20))
            assert file.seek(offset) == offset
            assert file.read(size) == content[offset : offset + size]
        assert file.seek(-5, os.SEEK_END) == LARGE - 5
        assert file.read(10) == content[-5:]
        with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
            file.seek(-1)
        with pytest.raises(io.UnsupportedOperation):
            file.fileno()
    with client.open(f"{URL}/large", "rb", buffering=0) as raw:
        assert raw.read(3) == content[:3]
    assert daemon.files.read_bytes("large") == content
    files = fsspec.filesystem("spiderfs")
    assert files.cat_file(f"{NAME}/large", 10, 20) == content[10:20]
    assert files.cat_file(f"{NAME}/large", -20, -3) == content[-20:-3]


def test_errors_of_odd_paths_and_modes(daemon: ServedDaemon) -> None:
    assert error_of(f"{URL}/text/below") == errno.ENOTDIR
    assert error_of(f"{URL}/loop") == errno.ELOOP
    assert error_of(f"{URL}/{'n' * 256}") == errno.ENAMETOOLONG
    assert error_of(f"{URL}/{'n/' * 4096}") == errno.ENAMETOOLONG
    # It leads out of what is served.
    assert error_of(f"{URL}/absolute") == errno.ENOENT
    assert error_of(f"{URL}/text", "x") == errno.EROFS
    assert not daemon.files.exists("absent")
    assert not daemon.files.exists("text/below")
    with pytest.raises(ValueError, match="invalid mode"):
        daemon.files.open("text", "q")


def test_a_name_that_nothing_is_served_as(daemon: ServedDaemon) -> None:
    with pytest.raises(OSError, match="nothing is served as spiderfs://other: run 'spiderfs serve SOURCE") as caught:
        client.read_bytes("spiderfs://other/file")
    assert caught.value.errno == errno.ENOTCONN


def test_a_file_that_changes_while_it_is_open_goes_stale_with_its_worker(source: Path, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    path = tmp_path / "source/large"
    path.write_bytes(b"1" * (17 << 20))
    with (
        served(
            tmp_path / "source", tmp_path / "d", ttl=0, allowed=["ended", "has changed"], sample_max_bytes="1MiB"
        ) as daemon,
        client.open(f"{URL}/large", "rb") as file,
    ):
        assert file.read(3) == b"111"
        path.write_bytes(b"2" * (17 << 20))
        settle(tmp_path / "source")
        os.kill(daemon.workers()[0], signal.SIGKILL)
        file.seek(16 << 20)
        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            file.read(3)
        assert client.read_bytes(f"{URL}/large")[:3] == b"222"


# -- several readers, and deaths


def test_many_readers_while_workers_are_killed(source: Path, tmp_path: Path) -> None:
    wanted = {name: hashlib.blake2b((source / name).read_bytes()).digest() for name in [*SMALL, "large"]}

    def read(seed: int) -> int:
        names = Random(seed).sample([*SMALL * 3, "large"], 100)
        for name in names:
            assert hashlib.blake2b(client.read_bytes(f"{URL}/{name}")).digest() == wanted[name]
        return len(names)

    with served(source, tmp_path / "d", workers=2, allowed=["ended"], capacity="100kB") as daemon:
        with ThreadPoolExecutor(16) as pool:
            reads = [pool.submit(read, seed) for seed in range(16)]
            for death in range(1, 4):
                os.kill(daemon.workers()[0], signal.SIGKILL)
                eventually(lambda death=death: daemon.metric("worker_restarts") == death)  # type: ignore[misc]
            assert [one.result(60) for one in reads] == [100] * 16
        os.kill(daemon.manager(), signal.SIGKILL)
        assert client.read_bytes(f"{URL}/text") == b"one\ntwo\n"


def test_a_killed_daemon_is_an_error_and_another_one_takes_its_place(source: Path, tmp_path: Path) -> None:
    with served(source, tmp_path / "d") as daemon, client.open(f"{URL}/large", "rb", buffering=0) as file:
        file.read(10)
        daemon.supervisor.signal(signal.SIGKILL)
        assert daemon.supervisor.ended(30)
        for read in (lambda: file.read(10), lambda: client.read_bytes(f"{URL}/text")):
            with pytest.raises(OSError, match="nothing is served as spiderfs://data"):
                eventually(read)
        done = run_spiderfs("serve", source, "--name", NAME, "-o", f"cache_dir={daemon.cache},log_file={daemon.log}")
        assert done.returncode == 0, done.stderr
        # The file that is open is still that version.
        assert file.read(10) == (source / "large").read_bytes()[10:20]
        done = run_spiderfs("umount", URL)
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(source: Path, tmp_path: Path) -> None:
    with served(source, tmp_path / "d") as daemon:
        # As if someone had opened what the daemon has made for its user alone.
        let_everybody_in(daemon.point.parent)
        daemon.point.chmod(0o666)
        context = multiprocessing.get_context("fork")
        with context.Pool(1) as pool:
            assert pool.apply(_asked_by_another_user, (daemon.point,)) == errno.EACCES
        assert daemon.files.exists("text")


def _asked_by_another_user(socket: Path) -> int | None:
    os.setgroups([])
    os.setgid(UID)
    os.setuid(UID)
    with pytest.raises(PermissionError) as caught:
        Connection(socket).ask("stat", threading.get_native_id(), b"text", 1)
    return caught.value.errno


def test_what_is_no_request_ends_its_connection_alone(daemon: ServedDaemon) -> None:
    for bad in (b"\xff\xff\xff\xff", LENGTH.pack(REQUEST_BYTES + 1) + b"x", LENGTH.pack(3) + b"\xc1\xc1\xc1"):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(os.fspath(socket_of(NAME)))
            raw.sendall(bad)
            raw.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert raw.recv(10) == b""
    connection = Connection(socket_of(NAME))
    requests: list[tuple[object, ...]] = [("open",), ("nonsense", 1, b"", 0), ("read", 1 << 63, 1, 0, 10)]
    requests += [("write", 5, b"x"), ("stat", "x", b"", 0), ("read", 1, 1, -1, 0)]
    requests += [("list", 1, b"", -1), ("list", 1, b"", 1 << 63), ("stat", 1, b"a\0b", 1), ({}, [], b"")]
    for request in requests:
        with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
            connection.ask(*request)  # type: ignore[arg-type]
    assert stat.S_ISDIR(connection.ask("stat", threading.get_native_id(), b"", 1)[0])
    connection.close()


# -- control files and commands


def test_commands_take_the_name(daemon: ServedDaemon, source: Path) -> None:
    listed = run_spiderfs("status")
    assert f"{source} on {URL}: " in listed.stdout
    status = run_spiderfs("status", URL)
    assert status.stdout.startswith(f"{source} on {URL}\n")
    changed = run_spiderfs("config", URL, "capacity=900MB")
    assert changed.returncode == 0, changed.stderr
    assert daemon.stats()["capacity_bytes"] == 900_000_000
    assert "nonsense" in run_spiderfs("config", URL, "nonsense=1").stderr
    for command in (("warm", URL, "train/2"), ("pin", URL, f"{URL}/train/3"), ("unpin", URL, "train/3")):
        done = run_spiderfs(*command)
        assert done.returncode == 0, done.stderr
    assert "has no file or directory absent" in run_spiderfs("warm", URL, "absent").stderr
    assert "leave it out" in run_spiderfs("warm", URL, "--names").stderr
    evicted = run_spiderfs("evict", URL, "train/2")
    assert evicted.returncode == 0, evicted.stderr
    again = run_spiderfs("serve", source, "--name", NAME, "-o", f"cache_dir={daemon.cache.parent}/other")
    assert "spiderfs://data is served already" in again.stderr
    again = run_spiderfs("serve", source, "--name", "other", "-o", f"cache_dir={daemon.cache}")
    assert f"in use by another mount, served as {URL} (process {daemon.supervisor.pid}): end that, or" in again.stderr
    assert (
        "no source is named: write 'spiderfs serve SOURCE --name NAME'" in run_spiderfs("serve", "--name", "b").stderr
    )
    assert "nothing is served as spiderfs://other" in run_spiderfs("status", "spiderfs://other").stderr
    assert "no name" in run_spiderfs("serve", source, "--name", "a/b").stderr
    for option in ("immutable", "allow_other", "binding=pyfuse3"):
        refused = run_spiderfs("serve", source, "--name", "b", "-o", f"cache_dir={daemon.cache.parent}/other,{option}")
        assert f"{option.partition('=')[0]} needs a mount, and there is none: leave it out" in refused.stderr


def test_it_ends_at_once(source: Path, tmp_path: Path) -> None:
    # A worker that does not see the end is killed after that time.
    late = "from spiderfs.daemon import supervisor; supervisor.DRAIN_S = 3600.0"
    with served(source, tmp_path, workers=2, first=late) as daemon:
        client.read_bytes(f"{URL}/text")
        assert run_spiderfs("umount", URL).returncode == 0
        eventually(daemon.supervisor.ended, what="the end of the daemon")


def test_umount_all_ends_what_is_served(source: Path, tmp_path: Path) -> None:
    with served(source, tmp_path / "d") as daemon, socket.socket(socket.AF_UNIX) as killed:
        # As a daemon leaves it that was killed.
        with socket_address(daemon.point.with_name("killed")) as address:
            killed.bind(address)
        # Root unmounts all, and so what other tests have mounted.
        no_mounts = "from spiderfs.cli import mount\nassert mount._own_mounts\nmount._own_mounts = lambda: []\n"
        done = run_spiderfs("umount", "--all", first=no_mounts)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"unmounted {URL}\n", "")
        assert daemon.supervisor.ended(30)


def test_a_directory_of_others_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv(ENVIRONMENT, os.fspath(tmp_path / "open"))
    done = run_spiderfs("serve", source, "--name", "x", "-o", f"cache_dir={tmp_path}/cache")
    assert "is not a directory of this user alone" in done.stderr


# -- training


class Files(Dataset[tuple[int, int]]):
    def __init__(self) -> None:
        self.samples = [(f"{URL}/{name}", number % 4) for number, name in enumerate(SMALL)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[int, int]:
        return len(client.read_bytes(self.samples[index][0])), index


@pytest.mark.parametrize("directory", [URL, f"{URL}/train"])
def test_a_plan_has_every_sample_fetched_before_a_loader_reads_it(source: Path, tmp_path: Path, directory: str) -> None:
    with served(source, tmp_path / "d", source__latency_ms=5, policy="minio") as daemon:
        loader = DataLoader(Files(), 4, shuffle=True, num_workers=2)
        with trainer_hook.plan(directory, loader) as planning:
            assert repr(planning).startswith(f"Planning({URL}, {len(SMALL)} samples")
            for _ in range(3):
                seen = [int(index) for sizes, indices in loader for index in indices if (sizes == 5_000).all()]
                assert sorted(seen) == list(range(len(SMALL)))
            # Of the first epoch some may be read before the daemon has the plan.
            planned = eventually(lambda: count if (count := daemon.metric("planned_opens")) >= 2 * len(SMALL) else 0)
            assert daemon.metric("planned_late") < 0.3 * planned
            assert daemon.stats()["trainers"][0]["lists"] == {"train": len(SMALL)}


def test_a_hook_attaches(daemon: ServedDaemon) -> None:
    loader = DataLoader(Files(), 8, shuffle=True)
    model = torch.nn.Linear(1, 4)
    hook = trainer_hook.attach(URL, model, loader)
    try:
        # Batches before the connection are not sent, nor is the last one before the next.
        for _ in range(3):
            for sizes, indices in loader:
                loss = torch.nn.functional.cross_entropy(model(sizes[:, None] / 5_000), indices % 4)
                loss.backward()

        def sent() -> bool:
            return any(trainer["batches"] >= 10 for trainer in daemon.stats()["trainers"])

        eventually(sent, what=lambda: str(daemon.stats()["trainers"]))
    finally:
        hook.close()


# -- fsspec


def test_fsspec(daemon: ServedDaemon, source: Path) -> None:
    with fsspec.open(f"{URL}/text", "rt") as file:
        assert file.read() == "one\ntwo\n"
    files, path = fsspec.core.url_to_fs(f"{URL}/train")
    assert path == "data/train"
    assert files.unstrip_protocol(path) == f"{URL}/train"
    assert sorted(files.find(path)) == sorted(f"data/{name}" for name in SMALL)
    assert files.glob(f"{URL}/train/1/*1") == [f"data/{name}" for name in SMALL if name[6] == "1" and name[-1] == "1"]
    found = {each["name"]: each for each in files.ls("data")}
    assert (found["data/large"]["size"], found["data/large"]["type"]) == (LARGE, "file")
    assert (found["data/train"]["type"], found["data/link"]["type"]) == ("directory", "file")
    assert found["data/absolute"]["type"] == "link"
    assert files.info(f"{URL}/link")["size"] == 5_000
    below = pickle.loads(pickle.dumps(fsspec.filesystem("spiderfs", mountpoint=f"{URL}/train")))
    assert below.ls("0", detail=False)[0] == "/0/000"
    assert below.cat("/0/000") == (source / "train/0/000").read_bytes()
    with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
        files.pipe_file(f"{URL}/new", b"")
    with pytest.raises(FileNotFoundError):
        files.info(f"{URL}/absent")


# -- the example for Kubernetes


def test_the_sidecar_of_the_examples_serves_its_pod(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = Path(__file__).resolve().parents[2] / "docs/examples/containers/sidecar.yaml"
    pod = yaml.safe_load(example.read_text())["spec"]
    (cache, sidecar), (training,) = pod["initContainers"], pod["containers"]
    # A volume that all users may write to.
    (volume := tmp_path / "cache").mkdir()
    volume.chmod(0o777)

    def here(argument: str) -> str:
        replaced = argument.replace("/cache", str(volume)).replace("/source", str(source)).replace("200GiB", "200MiB")
        return f"{replaced},log_file={tmp_path}/log" if "cache_dir" in replaced else replaced

    (variable,) = sidecar["env"]
    assert training["env"] == [variable]
    monkeypatch.setenv(variable["name"], here(variable["value"]))
    subprocess.run([here(word) for word in cache["command"]], check=True)
    arguments = [here(argument) for argument in sidecar["args"] if argument != "--foreground"]
    url = training["command"][-1]
    done = run_spiderfs(*arguments)
    try:
        assert done.returncode == 0, done.stderr
        _, *probe = sidecar["startupProbe"]["exec"]["command"]
        assert run_spiderfs(*probe).returncode == 0
        assert client.read_bytes(f"{url}/text") == b"one\ntwo\n"
    finally:
        run_spiderfs("umount", url)
