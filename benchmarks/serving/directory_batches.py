"""What fetching small files directory by directory could save: what a path costs, and how many of a window share one.

    .venv/bin/python -m benchmarks.serving.directory_batches     some seconds

A file is read by its path, as the source does it: from the root on, directory by directory. A batch would open the
directory once and its files relative to that. Both are timed in turns, on files in memory or wherever temporary files
lie, the fastest of some rounds. And of the samples of a shuffled epoch that lie in one window ahead of the reader, it
counts how many come after another one of the same directory there: the only opens that a batch makes cheaper.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spiderfs.sources.local import LocalSource

FILES, FILE_BYTES = 2_000, 20_000
DEPTH = 3
ROUNDS = 7
CLASSES = (10, 100, 1_000)
WINDOWS = (64, 256, 1_600)
SAMPLES = 100_000


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as root:
        by_path_us, in_directory_us = read_times(Path(root))
    print(f"read by path, {DEPTH} directories deep   {by_path_us:6.1f} us a file")
    print(f"read relative to its directory     {in_directory_us:6.1f} us a file")
    print("share of a window's samples that follow another one of their directory in it:")
    print(f"{'':>18}", *(f"{f'window {window:,}':>14}" for window in WINDOWS))
    rng = np.random.default_rng(0)
    for classes in CLASSES:
        order = rng.integers(0, classes, SAMPLES)
        shares = (shared(order, window) for window in WINDOWS)
        print(f"{f'{classes:,} directories':>18}", *(f"{share:>14.1%}" for share in shares))


def read_times(root: Path) -> tuple[float, float]:
    """Microseconds a file: by its path, and relative to its open directory."""
    folder = root.joinpath(*(f"level {level}" for level in range(DEPTH)))
    folder.mkdir(parents=True)
    names = [b"%05d.jpg" % number for number in range(FILES)]
    for name in names:
        (folder / os.fsdecode(name)).write_bytes(bytes(FILE_BYTES))
    source = LocalSource(str(root))
    below = os.fsencode(folder.relative_to(root))
    versions = {name: source.stat(below + b"/" + name).version for name in names}
    # What a batch would make of the source: one whose root is the directory.
    here = LocalSource(str(folder))

    def by_path() -> None:
        for name in names:
            source.read(below + b"/" + name, 0, FILE_BYTES, versions[name])

    def in_directory() -> None:
        for name in names:
            here.read(name, 0, FILE_BYTES, versions[name])

    try:
        rounds = [(seconds(by_path), seconds(in_directory)) for _ in range(ROUNDS)]
    finally:
        source.close()
        here.close()
    fastest = np.min(rounds, axis=0) / FILES * 1e6
    return float(fastest[0]), float(fastest[1])


def seconds(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def shared(directories: npt.NDArray[np.int64], window: int) -> float:
    """Of samples in windows that follow each other, by their directories in the order of reading."""
    whole = directories[: len(directories) // window * window].reshape(-1, window)
    return 1 - float(np.mean([len(np.unique(row)) for row in whole])) / window


if __name__ == "__main__":
    main()
