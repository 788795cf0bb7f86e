"""Lists whose samples are extents of large files (`sources/ranges.py`): their inodes, and their grids for workers."""

from __future__ import annotations

import logging
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import trio

from spiderfs.protocol.extents import Extent, extent_of
from spiderfs.vfs.catalogue import Node
from spiderfs.vfs.on_demand import Supply

log = logging.getLogger(__name__)

# How many extents are recorded at a time: 10 ms of LMDB's writer lock.
_AT_A_TIME = 2000


async def inodes_of_extents(
    paths: Sequence[bytes], supply: Supply, sample_max_bytes: int, release_blocks: Callable[[int], None]
) -> npt.NDArray[np.uint64]:
    """The inode of each extent, 0 for one without a file; workers find those extents in READs from now on.

    A file of up to `sample_max_bytes` is read as a whole, so it stands for each of its extents. Of a larger one, blocks
    are released: no one reads them any more, and what learns ranges has read many.
    """
    inodes = np.zeros(len(paths), np.uint64)
    of_files: defaultdict[bytes, list[tuple[int, Extent]]] = defaultdict(list)
    for number, path in enumerate(paths):
        extent = extent_of(path)
        if extent is not None:
            of_files[extent.file].append((number, extent))
        if number % _AT_A_TIME == 0:
            await trio.lowlevel.checkpoint()
    directories = {file.rpartition(b"/")[0] for file in of_files}
    listed = await supply.lister.directories(directories, ttl_s=60.0)
    for file, members in of_files.items():
        directory, _, name = file.rpartition(b"/")
        parent = listed.get(directory)
        dentry = None if parent is None else supply.catalogue.find(parent.inode, name)
        if parent is None or dentry is None or not stat.S_ISREG(dentry.stat.mode):
            continue
        numbers = [number for number, _ in members]
        if dentry.stat.size <= sample_max_bytes:
            inodes[numbers] = dentry.inode
            continue
        release_blocks(dentry.inode)
        extents = [extent for _, extent in members]
        inodes[numbers] = await trio.to_thread.run_sync(_record, supply, dentry.below(parent), extents)
    return inodes


def _record(supply: Supply, file: Node, extents: list[Extent]) -> list[int]:
    inodes = supply.catalogue.record_extents(file, extents)
    places = sorted({(extent.begin, extent.end) for extent in extents})
    try:
        supply.grids.publish(file.path, np.array(places, np.int64))
    except OSError as exc:
        log.warning("no range of %s is fetched ahead (%s): free the cache's disk", os.fsdecode(file.path), exc.strerror)
        return [0] * len(inodes)
    return inodes
