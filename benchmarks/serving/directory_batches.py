"""The gain if small files were fetched by directory: the cost of a path, and how many samples share a directory.

    .venv-dev/bin/python -m benchmarks.serving.directory_batches             some seconds
    .venv-dev/bin/python -m benchmarks.serving.directory_batches --quick     a moment

The source opens a file by its path, from the root on, directory by directory. A batch would open a directory once, and
its files relative to the directory. The benchmark times both in turns, on files in the page cache, and takes the
fastest of some rounds. Then it takes the samples of a shuffled epoch that lie in one window ahead of the reader, and
counts how many of them come after another sample of the same directory: only their opens would become cheaper.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console

from benchmarks.common.command import command_line
from benchmarks.common.interruption import exit_status, scratch_directory
from benchmarks.common.results import machine, plain_table, save
from spiderfs.sources.local import LocalSource

FILES, FILE_BYTES = 2_000, 20_000
DEPTH = 3
ROUNDS, QUICK_ROUNDS = 7, 3
CLASSES = (10, 100, 1_000)
WINDOWS = (64, 256, 1_600)
SAMPLES = 100_000


def run(rounds: int, console: Console) -> dict[str, object]:
    with scratch_directory("directory_batches") as root:
        by_path_us, in_directory_us = read_times(root, rounds)
    table = plain_table(f"Reading a file that lies {DEPTH} directories deep", "", "us a file", "x by path")
    table.add_row("by its path", f"{by_path_us:.1f}", "1.00")
    table.add_row("relative to its open directory", f"{in_directory_us:.1f}", f"{in_directory_us / by_path_us:.2f}")
    console.print(table)
    title = "Share of a window's samples that come after another sample of their directory"
    table = plain_table(title, "", *(f"window {window:,}" for window in WINDOWS))
    rng = np.random.default_rng(0)
    shares = {}
    for classes in CLASSES:
        order = rng.integers(0, classes, SAMPLES)
        shares[classes] = {window: shared(order, window) for window in WINDOWS}
        table.add_row(f"{classes:,} directories", *(f"{share:.1%}" for share in shares[classes].values()))
    console.print(table)
    return {"by_path_us": by_path_us, "in_directory_us": in_directory_us, "shares": shares}


def read_times(root: Path, rounds: int) -> tuple[float, float]:
    """Microseconds to read a file by its path, and to read it relative to its open directory."""
    folder = root.joinpath(*(f"level {level}" for level in range(DEPTH)))
    folder.mkdir(parents=True)
    names = [b"%05d.jpg" % number for number in range(FILES)]
    for name in names:
        (folder / os.fsdecode(name)).write_bytes(bytes(FILE_BYTES))
    source = LocalSource(str(root))
    below = os.fsencode(folder.relative_to(root))
    versions = {name: source.stat(below + b"/" + name).version for name in names}
    # A source whose root is the directory opens files as a batch would.
    here = LocalSource(str(folder))

    def by_path() -> None:
        for name in names:
            source.read(below + b"/" + name, 0, FILE_BYTES, versions[name])

    def in_directory() -> None:
        for name in names:
            here.read(name, 0, FILE_BYTES, versions[name])

    try:
        times_s = [(seconds(by_path), seconds(in_directory)) for _ in range(rounds)]
    finally:
        source.close()
        here.close()
    fastest = np.min(times_s, axis=0) / FILES * 1e6
    return float(fastest[0]), float(fastest[1])


def seconds(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def shared(directories: npt.NDArray[np.int64], window: int) -> float:
    """The share of samples that come after another sample of their directory in the same window.

    `directories` holds each sample's directory, in the order of reading; windows follow each other.
    """
    whole = directories[: len(directories) // window * window].reshape(-1, window)
    return 1 - float(np.mean([len(np.unique(row)) for row in whole])) / window


def main() -> int:
    arguments = command_line(__doc__).parse_args()

    def measure() -> None:
        result = run(QUICK_ROUNDS if arguments.quick else ROUNDS, Console())
        save(arguments.json, {"machine": machine()} | result)

    return exit_status("directory_batches", measure, "interrupted")


if __name__ == "__main__":
    sys.exit(main())
