"""Who may have what in a cache directory: made, checked, tightened or refused."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spiderfs.daemon.cache_directory import (
    bind_to_source,
    lock_other_directories,
    open_cache_directory,
    real_path,
    tighten,
)
from spiderfs.errors import ConfigError, MountError
from spiderfs.shared.layout import CacheLayout


@pytest.fixture(autouse=True, params=[0, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache directory as an earlier version may have left it."""
    cache = tmp_path / "cache"
    for directory in ("store/content/blocks", "store/names", "store/scores/00ff", "run"):
        (cache / directory).mkdir(parents=True)
    for file in ("lock", "source", "spiderfs.log", "store/in-use", "store/content/data.mdb", "store/names/lock.mdb"):
        (cache / file).touch()
    (cache / "store/content/blocks/70001").touch()
    for place in (cache, *cache.rglob("*")):
        place.chmod(0o755 if place.is_dir() else 0o644)
    # Of a plain file that was handed out to the kernel (`store/blocks.py`).
    (cache / "store/content/blocks/70001").chmod(0o1644)
    return cache


def use(cache: Path) -> None:
    cache = real_path(cache)
    os.close(open_cache_directory(cache))
    tighten(cache)


def modes(cache: Path) -> set[tuple[str, int]]:
    places = (cache, *cache.rglob("*"))
    return {("directory" if place.is_dir() else "file", stat.S_IMODE(place.stat().st_mode)) for place in places}


def test_what_is_made_is_its_users_alone(tmp_path: Path) -> None:
    cache = tmp_path / "above/cache"
    use(cache)
    (cache / "store").mkdir()
    (cache / "store/file").touch()
    assert modes(tmp_path / "above") == {("directory", 0o700), ("file", 0o600)}


def test_what_an_earlier_version_left_open_is_closed(cache: Path) -> None:
    use(cache)
    assert modes(cache) == {("directory", 0o700), ("file", 0o600), ("file", 0o1600)}


def test_an_empty_directory_that_was_made_for_it_is_closed(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir(mode=0o755)
    use(tmp_path / "made")
    assert modes(tmp_path / "made") == {("directory", 0o700), ("file", 0o600)}


def refused(cache: Path, *words: str) -> None:
    before = modes(cache) if cache.exists() else set()
    with pytest.raises(ConfigError) as caught:
        use(cache)
    message = str(caught.value)
    assert "\n" not in message
    assert "-o cache_dir=" in message
    for word in words:
        assert word in message
    assert before == (modes(cache) if cache.exists() else set()), "what is not ours was changed"


def test_another_users_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    # An ordinary user owns directories above it too, by which it could be exchanged.
    words = (f"belongs to user {owner}", "delete it") if owner == 0 else (f"could be exchanged by user {owner}",)
    refused(cache, *words)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another user")
def test_a_user_whom_this_user_namespace_does_not_map_has_no_number(cache: Path) -> None:
    """Such users all look like user 65534, whom a message had better not blame."""
    os.chown(cache, 1000, 1000)
    program = "import pathlib, sys; from spiderfs.daemon.cache_directory import open_cache_directory as use;"
    program += "use(pathlib.Path(sys.argv[1]))"
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", program, cache]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert f"{cache} belongs to a user from outside of this user namespace, and this mount to user 0" in done.stderr


def test_a_symbolic_link_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(cache)
    refused(tmp_path / "link", "symbolic link", f"-o cache_dir={cache}")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    refused(tmp_path / "dangling", "symbolic link")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_one_that_everybody_may_write_to_is_refused(cache: Path, mode: int) -> None:
    cache.chmod(mode)
    refused(cache, "everybody may write")


def test_one_that_everybody_could_exchange_is_refused(tmp_path: Path) -> None:
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(0o777)
    refused(above / "inner/cache", str(above), "chmod o-w")
    above.chmod(0o1777)
    use(above / "inner/cache")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives directories away")
def test_a_directory_above_that_anybody_may_have_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SUDO_UID", raising=False)
    sticky = tmp_path / "tmp"
    (sticky / "made").mkdir(parents=True)
    sticky.chmod(0o1777)
    (sticky / "made").chmod(0o755)
    os.chown(sticky / "made", 65534, 65534)
    refused(sticky / "made/cache", "user 65534", str(sticky / "made"))
    with monkeypatch.context() as sudo:
        sudo.setenv("SUDO_UID", "65534")
        use(sticky / "made/of the user who called sudo")
    sticky.chmod(0o755)
    use(sticky / "made/cache")


def test_a_directory_with_other_uses_is_not_closed(cache: Path) -> None:
    (cache / "thesis.tex").touch()
    refused(cache, "holds more than a cache", "chmod 700")
    cache.chmod(0o700)
    use(cache)


@pytest.mark.parametrize("name", ["store", "store/names", "store/content/blocks", "store/content/data.mdb", "source"])
def test_a_link_inside_is_refused(cache: Path, tmp_path: Path, name: str) -> None:
    (cache / name).rename(tmp_path / "remote")
    (cache / name).symlink_to(tmp_path / "remote")
    with pytest.raises(ConfigError, match="symbolic link"):
        use(cache)
    outside = (tmp_path / "remote").stat().st_mode
    assert outside & 0o044, "what a link leads to was changed"


def test_a_link_in_place_of_the_lock_is_not_followed(cache: Path, tmp_path: Path) -> None:
    (cache / "lock").unlink()
    (cache / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError):
        use(cache)
    assert not (tmp_path / "victim").exists()


def test_a_file_that_anybody_may_have_written_is_refused(cache: Path) -> None:
    (cache / "store/content/data.mdb").chmod(0o666)
    with pytest.raises(ConfigError, match="everybody may write to it"):
        use(cache)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_users_file_inside_is_refused(cache: Path) -> None:
    os.chown(cache / "store/content/data.mdb", 65534, 65534)
    with pytest.raises(ConfigError, match="of user 65534"):
        use(cache)


def test_it_belongs_to_its_first_source(cache: Path, tmp_path: Path) -> None:
    layout = CacheLayout(cache)
    layout.source.unlink()
    bind_to_source(layout, str(tmp_path / "one"))
    bind_to_source(layout, str(tmp_path / "one"))
    with pytest.raises(MountError, match=f"holds the files of {tmp_path / 'one'}"):
        bind_to_source(layout, str(tmp_path / "another"))


def test_a_note_that_a_crash_has_emptied_binds_it_to_no_source(cache: Path, tmp_path: Path) -> None:
    """What is cached may be another source's, and goes."""
    layout = CacheLayout(cache)
    layout.source.write_bytes(b"")
    bind_to_source(layout, str(tmp_path / "one"))
    assert layout.source.read_bytes() == os.fsencode(tmp_path / "one") + b"\n"
    assert not (layout.content / "data.mdb").exists()


def test_other_directories_that_cannot_be_used_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there, missing, open_to_all = (tmp_path / name for name in ("there", "missing", "open"))
    there.mkdir(mode=0o755)
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    locks = lock_other_directories([there, missing, open_to_all], tmp_path / "mnt", "/nfs/a")
    assert list(locks) == [there]
    assert not missing.exists()
    assert [record.message.partition(" until ")[0] for record in caplog.records] == [
        f"the cache goes without {missing}",
        f"the cache goes without {open_to_all}",
    ]
    with pytest.raises(MountError, match="in use by another mount"):
        lock_other_directories([there], tmp_path / "other", "/nfs/a")
    os.close(locks[there])
    with pytest.raises(MountError, match="holds the files of /nfs/a"):
        lock_other_directories([there], tmp_path / "other", "/nfs/b")
