"""A declared list means the files that its paths lead to, by links at any place, as the kernel follows them."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path

import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from spiderfs.daemon.training.trainer import inodes_of
from spiderfs.sources.client import SourceClient, SourceLimits
from spiderfs.sources.local import LocalSource
from spiderfs.store.spare_records import MemoryRecords
from spiderfs.vfs.catalogue import TABLES, Catalogue
from spiderfs.vfs.lister import Lister

DIRECTORIES = ("a", "a/b", "c")
NAMES = ("f", "g", "x", "y", "z")


def found(root: Path, paths: list[str]) -> list[bytes | None]:
    """The path of the file that each path of a list means, where readers see `root` at its own path."""

    async def main() -> list[bytes | None]:
        source = LocalSource(str(root))
        client = SourceClient(source, SourceLimits(), rng=random.Random(1), on_event=lambda event: None)
        catalogue = Catalogue(MemoryRecords(TABLES))
        lister = Lister(catalogue, client, mountpoint=os.fsencode(root))
        inodes = await inodes_of([os.fsencode(path) for path in paths], catalogue, lister)
        source.close()
        return [catalogue.path_of(inode) if inode else None for inode in inodes.tolist()]

    return trio.run(main)


def meant(root: Path, path: str) -> bytes | None:
    """The same as the kernel has it."""
    try:
        # Without an open of the file: the path may lead to any device.
        opened = os.open(root / path, os.O_PATH)
    except OSError:
        return None
    real = Path(os.readlink(f"/proc/self/fd/{opened}"))
    os.close(opened)
    return os.fsencode(real.relative_to(root)) if real.is_file() and real.is_relative_to(root) else None


def target(root: Path) -> st.SearchStrategy[str]:
    part = st.sampled_from((*NAMES, "a", "b", "c", "..", "."))
    relative = st.lists(part, min_size=1, max_size=5).map("/".join)
    absolute = st.lists(part, max_size=3).map(lambda names: "/".join((str(root), *names)))
    return st.one_of(relative, absolute, st.sampled_from(("/", "/etc/hostname", f"../../..{root}/a/f", "")))


@settings(deadline=None)
@given(st.data())
def test_links_are_followed_as_the_kernel_follows_them(data: st.DataObject) -> None:
    root = Path(os.path.realpath(tempfile.mkdtemp()))
    try:
        for directory in DIRECTORIES:
            (root / directory).mkdir()
        places = [f"{directory}{name}" for directory in ("", *(f"{one}/" for one in DIRECTORIES)) for name in NAMES]
        for place in places:
            kind = data.draw(st.sampled_from(("file", "link", "link", "nothing")))
            if kind == "file":
                (root / place).write_bytes(place.encode())
            elif kind == "link" and (text := data.draw(target(root))):
                (root / place).symlink_to(text)
        deeper = data.draw(st.lists(st.lists(st.sampled_from((*NAMES, "a", "b", "c")), max_size=4), max_size=10))
        paths = [*places, *("/".join(names) for names in deeper if names)]
        assert found(root, paths) == [meant(root, path) for path in paths]
    finally:
        shutil.rmtree(root)


def test_a_chain_may_be_as_long_as_linux_allows(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("bytes")
    for number in range(1, 43):
        (tmp_path / str(number)).symlink_to(str(number - 1))
    assert found(tmp_path, ["40", "41", "42"]) == [b"0", None, None]
    assert meant(tmp_path, "40") is not None
