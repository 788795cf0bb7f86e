"""Real mounts of data sets of a hub, and of files behind a manifest: what readers get, and what no one is told."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounting import Mounted, eventually, mounted, options_text, run_spiderfs
from reading import files_below
from web_servers import FakeHub, FileServer, Reply, fake_hub, file_server

from benchmarks.common.web_server import free_port, nginx, temporary_paths

URL, TOKEN = "hf://datasets/owner/photos", "hf_SECRETtoken"
MODES = pytest.mark.parametrize("mode", [{}, {"immutable": "off"}, {"workers": 2}], ids=["default", "opened", "two"])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with fake_hub() as made:
        rng = random.Random(1)
        made.token = TOKEN
        made.push({f"train/c{number % 3}/{number:03}.jpg": rng.randbytes(2000 + number) for number in range(45)})
        made.files["train/labels.csv"] = b"small, and so not in LFS"
        made.files["README.md"] = b"read me"
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        yield made


def files(mount: Mounted) -> dict[str, bytes]:
    return files_below(mount.point)


@MODES
def test_a_data_set_is_read_with_few_requests(hub: FakeHub, tmp_path: Path, mode: dict[str, object]) -> None:
    with mounted(URL, tmp_path, **mode) as mount:
        hub.asked()
        assert files(mount) == hub.files
        asked = Counter(request.partition(" ")[0] for request in hub.requests)
        assert asked["RESOLVE"] == len(hub.files), "each file once"
        trees = hub.asked("API tree")
        assert len(trees) == len(set(trees)) <= 5
        assert sorted(hub.contents.asked()) == sorted(f"CONTENT {path}" for path in hub.files if path.endswith("jpg"))
        assert files(mount) == hub.files
        assert hub.asked() == hub.contents.asked() == []
        assert mount.metric("source_errors") == 0
    with mounted(URL, tmp_path, **mode) as mount:
        assert files(mount) == hub.files
        assert hub.asked("RESOLVE") == []


def test_a_mount_shows_one_commit_and_the_next_one_the_next(hub: FakeHub, tmp_path: Path) -> None:
    first = hub.files
    with mounted(URL, tmp_path) as mount:
        assert "\nimmutable=on" in mount.control("config").read_text()
        assert (mount.point / "README.md").read_bytes() == b"read me"
        hub.push({**first, "README.md": b"READ ME", "new": b"new"})
        assert files(mount) == first
        eventually(lambda: mount.stats()["entries"] == len(first), what="all files to be in the store")
        worker = mount.workers()[0]
        mount.expect("ended", "the process ends")
        os.kill(worker, 9)
        assert files(mount) == first, "also for a worker that came later"
    with mounted(URL, tmp_path, allowed=("ended",)) as mount:
        hub.asked()
        assert files(mount) == hub.files
        fetched = {request.rpartition("/")[2] for request in hub.asked("RESOLVE")}
        # What was on its way to the store when the worker was killed is fetched again.
        assert {"README.md", "new"} <= fetched
        assert len(fetched) < 6


def test_no_secret_is_ever_written_or_shown(hub: FakeHub, tmp_path: Path) -> None:
    with mounted(URL, tmp_path, log_level="debug", source__attempts=1, source__timeout_s=2) as mount:
        mount.expect("refuses the token", "spiderfs")
        files(mount)
        hub.token = "hf_SECRETother"
        hub.push(hub.files)
        with pytest.raises(OSError, match=r"Input/output error|No such file"):
            (mount.point / "train/none").read_bytes()
        texts = [path.read_text(errors="replace") for path in (mount.point / ".spiderfs").iterdir() if path.is_file()]
        pids = [mount.supervisor.pid, mount.manager(), *mount.workers()]
        texts += [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]
        texts += [Path("/proc/mounts").read_text(), mount.log.read_text()]
        assert f"{URL}: revision main is commit" in texts[-1]
        assert not any(secret in text for text in texts for secret in ("SECRET", "Signature"))
    assert subprocess.run(["grep", "-rl", "SECRET", tmp_path], capture_output=True, text=True).stdout == ""


@pytest.mark.parametrize(
    ("url", "reply", "said"),
    [
        ("hf://datasets/owner/none", None, "there is no hf://datasets/owner/none, or it is private (404)"),
        (f"{URL}@none", None, "has no revision none"),
        (URL, Reply(401), "refuses the token (401): renew it"),
        (URL, Reply(403, b"", {"X-Error-Code": "GatedRepo"}), "is gated: ask for access on its page"),
        ("hf:/datasets/owner/photos", None, "write hf://datasets/owner/photos"),
        (f"hf://{TOKEN}@datasets/owner/photos", None, "write hf://datasets/OWNER/NAME"),
    ],
)
def test_a_mount_that_cannot_work_says_why_in_a_line(
    hub: FakeHub, tmp_path: Path, url: str, reply: Reply | None, said: str
) -> None:
    hub.fails = lambda request: reply
    (tmp_path / "mnt").mkdir()
    done = run_spiderfs("mount", url, tmp_path / "mnt", "-o", options_text({"cache_dir": tmp_path / "cache"}))
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "SECRET" not in done.stderr


# -- files behind a manifest


@pytest.fixture
def server() -> Iterator[FileServer]:
    with file_server() as made:
        rng = random.Random(4)
        for number in range(40):
            made.put(f"c{number % 4}/{number:03}.jpg", rng.randbytes(3000 + number))
        publish(made)
        yield made


def publish(server: FileServer, modified_s: float = 1_700_000_000) -> None:
    server.files.pop("manifest.tsv", None)
    server.put("manifest.tsv", server.manifest(), modified_s)


def contents(server: FileServer) -> dict[str, bytes]:
    return {path: content for path, (content, _) in server.files.items() if path != "manifest.tsv"}


@pytest.mark.parametrize("mode", [{}, {"immutable": "on"}], ids=["opened", "immutable"])
def test_files_of_a_manifest_are_fetched_once(server: FileServer, tmp_path: Path, mode: dict[str, object]) -> None:
    with mounted(f"{server.url}/manifest.tsv", tmp_path, **mode) as mount:
        server.asked()
        assert files(mount) == contents(server)
        asked = Counter(server.asked())
        assert {request: times for request, times in asked.items() if "jpg" in request} == {
            f"GET {path}": 1 for path in contents(server)
        }
        assert asked["GET manifest.tsv"] <= 6
        assert files(mount) == contents(server)
        assert server.asked() == []
    with mounted(f"{server.url}/manifest.tsv", tmp_path, **mode) as mount:
        assert files(mount) == contents(server)
        assert server.asked("GET c") == []


def test_a_file_that_changes_within_a_second_is_read_as_it_is_then(server: FileServer, tmp_path: Path) -> None:
    """Its ETag stays. So bytes of so young a version are not kept."""
    now = int(time.time())
    server.put("c0/000.jpg", b"before", now)
    publish(server, now)
    with mounted(f"{server.url}/manifest.tsv", tmp_path, dir_ttl="0s", ttl="0s") as mount:
        assert (mount.point / "c0/000.jpg").read_bytes() == b"before"
        server.put("c0/000.jpg", b"after.", now)
        eventually(lambda: (mount.point / "c0/000.jpg").read_bytes() == b"after.", what="the later bytes")


@contextlib.contextmanager
def nginx_over(root: Path, place: Path) -> Iterator[str]:
    """A real nginx that gives the files below a directory."""
    place.mkdir()
    port = free_port()
    user = f"user {os.environ.get('USER', 'root')};" if os.geteuid() == 0 else ""
    text = (
        f"daemon off; {user} pid {place}/pid; error_log {place}/log;"
        f"events {{}} http {{ access_log off; {temporary_paths(place)}"
        f"server {{ listen 127.0.0.1:{port}; location / {{ root {root}; }} }} }}"
    )
    with nginx(text, place, port):
        yield f"http://127.0.0.1:{port}"


def test_nginx_gives_what_find_has_listed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    rng = random.Random(5)
    for number in range(30):
        path = root / f"c{number % 3}" / f"{number:03} é+%.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(2000 + number))
    (root / "large").write_bytes(rng.randbytes(3_000_000))

    def publish() -> None:
        command = (
            r"find . -type f ! -name 'manifest*' -printf '%P\t%s\t%T@\n' > manifest.new && mv manifest.new manifest.tsv"
        )
        subprocess.run(["sh", "-c", command], cwd=root, check=True)

    def contents() -> dict[str, bytes]:
        paths = [path for path in root.rglob("*") if path.is_file() and path.name != "manifest.tsv"]
        return {str(path.relative_to(root)): path.read_bytes() for path in paths}

    publish()
    options = {"ttl": "0.2s", "dir_ttl": "0.2s", "sample_max_bytes": "1MiB"}
    with (
        nginx_over(root, tmp_path / "nginx") as url,
        mounted(f"{url}/manifest.tsv", tmp_path / "m", **options) as mount,
    ):
        assert files(mount) == contents()
        (root / "c0/new").write_bytes(b"new")
        publish()
        eventually(lambda: "new" in os.listdir(mount.point / "c0"), what="the new manifest")
        (root / "c0/new").write_bytes(b"NEW")
        publish()
        eventually(lambda: (mount.point / "c0/new").read_bytes() == b"NEW", what="the later bytes")
        assert files(mount) == contents()
        assert mount.metric("source_errors") == 0
