"""Serves a bare `Filesystem` over each binding to the kernel: the daemons of fuse_library.py.

    .venv-dev/bin/python -m benchmarks.serving.fuse_servers SYSTEM SOURCE MOUNTPOINT PLACE LATENCY_MS

SYSTEM is one of SERVERS. One process, one event loop, in the foreground until it is unmounted; PLACE is a directory for
its store. The docstring of fuse_library.py describes the comparison.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import trio

from benchmarks.fakes import notes_of_sole_worker
from benchmarks.serving.bare import bare_on_disk
from spiderfs.core.memory import MemoryBounds
from spiderfs.fuse import bindings, pyfuse3_binding
from spiderfs.fuse.handles import Handles
from spiderfs.fuse.kernel import Serving
from spiderfs.linux.memory import keep_freed_memory
from spiderfs.sources.local import LocalSource
from spiderfs.sources.slow import SlowSettings, SlowSource
from spiderfs.sources.source import Source


def _as_it_comes() -> None:
    """Leave pyfuse3 its own wait for a request."""

    @contextlib.contextmanager
    def unchanged(descriptor: int, alarm: pyfuse3_binding.Alarm) -> Iterator[None]:
        yield

    pyfuse3_binding.looking_before_waiting = unchanged


# Of each system the binding, and what is done to it first.
SERVERS: dict[str, tuple[str, Callable[[], None]]] = {
    "kernel": ("kernel", lambda: None),
    "pyfuse3": ("pyfuse3", lambda: None),
    "pyfuse3-plain": ("pyfuse3", _as_it_comes),
}


async def run(system: str, root: str, mountpoint: Path, place: Path, latency_ms: float) -> None:
    place.mkdir()
    source: Source = LocalSource(root)
    if latency_ms:
        source = SlowSource(source, SlowSettings.create(place / "faults", latency_ms=latency_ms))
    binding, prepare = SERVERS[system]
    prepare()
    async with bare_on_disk(source, place) as bare:
        kernel = bindings.mount(binding, mountpoint, root, allow_other=False, programs_run=True)
        # Not as the sole process: over neither binding is the content of a file pushed to the kernel.
        held = notes_of_sole_worker(bare.counters)
        await kernel.serve(Serving(bare.filesystem, bare.counters, bare.content.end_read, Handles(sole=False), held))


if __name__ == "__main__":
    keep_freed_memory(MemoryBounds().freed)
    trio.run(run, sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), float(sys.argv[5]))
