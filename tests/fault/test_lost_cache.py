"""A mount whose cache directory disappears: readers do not notice it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mounting import eventually, mounted
from reading import read_through, readers, together, write_files

from spiderfs.shared.layout import CacheLayout

SIZES = {f"{number:03d}": 20_000 for number in range(40)} | {"large": (9 << 20) + 5}
GONE = "has gone: the cache is made again"
# The supervisor may look while the directory is being deleted, a worker may fetch a block just while the directory of
# blocks is gone, and the manager may need room for names.
ALLOWED = [
    GONE,
    "cannot be made again",
    "set them again",
    "reading from the source instead",
    "no room to keep for names",
]
# How soon the supervisor notices: by default 2 s.
LOOKING_OFTEN = "from spiderfs.daemon import supervisor; supervisor.LOOK_S = 0.2"


def delete(directory: Path) -> None:
    """Delete a directory, even while processes of the mount write into it; one made in its place stays."""
    number = directory.stat().st_ino

    def is_there() -> bool:
        return directory.exists() and directory.stat().st_ino == number

    def deleted() -> bool:
        if is_there():
            shutil.rmtree(directory, ignore_errors=True)
        return not is_there()

    eventually(deleted, what=f"the end of {directory}")


LOSSES: dict[str, Callable[[Path], object]] = {
    "deleted": delete,
    "moved": lambda cache: cache.rename(cache.with_name("remote")),
    "run deleted": lambda cache: delete(CacheLayout(cache).run.directory),
    "store deleted": lambda cache: delete(CacheLayout(cache).store),
}


# The supervisor alone notices a loss, and knows its workers only by their number. So each loss comes once, and each
# number of workers with the loss of everything and with that of a part. The kernel of an immutable mount goes on to
# read files whose names are lost.
CASES = [
    ("deleted", {"workers": 1}),
    ("deleted", {"workers": 2, "immutable": "on"}),
    ("moved", {"workers": 1}),
    ("run deleted", {"workers": 2}),
    ("store deleted", {"workers": 1}),
]


@pytest.mark.parametrize(("loss", "options"), CASES)
def test_a_mount_outlives_its_cache_directory(source: Path, tmp_path: Path, loss: str, options: dict[str, Any]) -> None:
    wanted = write_files(source, SIZES)
    with mounted(source, tmp_path / "m", ttl=0.2, allowed=ALLOWED, first=LOOKING_OFTEN, **options) as mount:
        with readers(2, mount.point, wanted) as some:
            eventually(lambda: mount.metric("opens") > len(wanted), what="reads before")
            LOSSES[loss](mount.cache)
            eventually(lambda: mount.logged(GONE), what="a message in the log")
            before = mount.metric("opens")
            eventually(lambda: mount.metric("opens") > before + 2 * len(wanted), what="reads after")
            seen = together(some)
        assert seen.wrong == []
        # The mount has forgotten what a handle means that was open while the names were lost.
        assert {kind for _, kind, _ in seen.errors} <= {"ESTALE"}
        assert mount.metric("worker_restarts") == options["workers"]
        assert mount.metric("manager_restarts") == 1
        assert mount.metric("store_rebuilds") == (loss != "run deleted")
        assert mount.stats()["entries"] > 0
        read_through(mount.point, wanted, 2, 1)


@pytest.mark.parametrize("step", ["supervisor.publish_options", "environment.claim"])
def test_a_cache_directory_that_is_deleted_again_is_made_once_more(source: Path, tmp_path: Path, step: str) -> None:
    wanted = write_files(source, {"one": 5_000, "two": 5_000})
    cache, deleting = tmp_path / "cache", tmp_path / "deleting"
    first = f"""{LOOKING_OFTEN}
import os, shutil
from spiderfs.store import environment

def begun_again(*arguments, real={step}):
    if is_claim := {step == "environment.claim"}:
        found = real(*arguments)
    if os.path.exists({str(deleting)!r}):
        os.unlink({str(deleting)!r})
        shutil.rmtree({str(cache)!r})
    return found if is_claim else real(*arguments)

{step} = begun_again
"""
    # Processes that begin without a store end with a traceback.
    allowed = ALLOWED if step == "supervisor.publish_options" else [".*"]
    with mounted(source, tmp_path / "m", cache=cache, ttl=0.2, allowed=allowed, first=first) as mount:
        assert (mount.point / "one").read_bytes() == (source / "one").read_bytes()
        deleting.touch()
        delete(cache)
        eventually(lambda: mount.logged(GONE), what="a message in the log")
        with readers(1, mount.point, wanted, rounds=2) as one:
            seen = together(one)
        assert seen.wrong == []
        assert {kind for _, kind, _ in seen.errors} <= {"ESTALE"}
        assert not deleting.exists()
