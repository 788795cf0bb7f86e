"""How much processor time reader, kernel and daemon spend on a warm open, read and close: a table and a plot.

    .venv-dev/bin/python -m benchmarks.serving.cpu_split --plot PNG --json FILE
    .venv-dev/bin/python -m benchmarks.serving.cpu_split --quick    under a minute, for a look

"Kernel" is the system time of reader and daemon together: the page cache, copying and, for mounts, passing requests on
and waking processes. "Daemon" and "reader" are the times that these spend in their own code. Time in which no one
computes does not count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

from benchmarks.common.command import add_names, command_line
from benchmarks.common.interruption import exit_status, scratch_directory
from benchmarks.common.results import machine, plain_table, save
from benchmarks.serving import process_cost
from benchmarks.serving.peers import PEERS, Mounted, install_missing, mounted
from benchmarks.serving.readers import read_all
from benchmarks.serving.serve import FileSet, made_files, paths_below

PARTS = ("reader", "kernel", "daemon")
COLOURS = {"reader": "#4c78a8", "kernel": "#bab0ac", "daemon": "#e45756"}
FILE_SETS = ((2_000, 112_000), (5_000, 2_000))
ROUNDS = 9
QUICK_FILE_SETS, QUICK_ROUNDS = ((500, 112_000), (1_000, 2_000)), 2
READERS = 4
Split = dict[str, float]
"""Microseconds per file, by part."""


def split(peer: Mounted, files: FileSet, seed: int) -> Split:
    processes = peer.processes()
    user_before, system_before = process_cost.user_and_system_seconds(processes)
    reading = read_all(paths_below(peer, files), READERS, seed)
    user, system = process_cost.user_and_system_seconds(processes)
    kernel_s = reading.cpu_s - reading.user_s + system - system_before
    parts = {"reader": reading.user_s, "kernel": kernel_s, "daemon": user - user_before}
    return {part: spent_s / reading.files * 1e6 for part, spent_s in parts.items()}


def measure(
    file_sets: Sequence[tuple[int, int]], rounds: int, peers: list[str], console: Console
) -> dict[str, dict[str, Split]]:
    """Medians over the rounds, by files and system."""
    found: dict[str, dict[str, Split]] = {}
    with scratch_directory("cpu_split") as scratch:
        for count, size in file_sets:
            files = made_files(scratch / str(size), count, size)
            os.sync()
            with ExitStack() as stack:
                shown = [stack.enter_context(mounted(peer, files.root, scratch / f"at-{size}")) for peer in peers]
                for peer in shown:
                    read_all(paths_below(peer, files), 1, seed=0)
                runs: dict[str, list[Split]] = {peer: [] for peer in peers}
                for number in range(1, rounds + 1):
                    for peer in shown:
                        runs[peer.name].append(split(peer, files, number))
            found[files.name] = {
                system: {part: statistics.median(run[part] for run in of_system) for part in PARTS}
                for system, of_system in runs.items()
            }
            console.print(split_table(files.name, found[files.name]))
    return found


def split_table(files: str, by_system: dict[str, Split]) -> Table:
    title = f"{files}, {READERS} readers: microseconds of processor time a file"
    table = plain_table(title, "", *PARTS, "together", "x native")
    native = by_system.get("native")
    for system, parts in by_system.items():
        together = sum(parts.values())
        ratio = f"{together / sum(native.values()):.2f}" if native is not None else ""
        table.add_row(system, *(f"{parts[part]:.1f}" for part in PARTS), f"{together:.1f}", ratio)
    return table


def plot(found: dict[str, dict[str, Split]], path: Path) -> None:
    figure, axes = plt.subplots(1, len(found), figsize=(10, 3.2), layout="constrained")
    for axis, (files, peers) in zip(axes, found.items(), strict=True):
        # rclone takes ten times as long as the others and would flatten them.
        names = [name for name in reversed(peers) if name != "rclone"]
        left = [0.0] * len(names)
        for part in PARTS:
            widths = [peers[name][part] for name in names]
            axis.barh(names, widths, left=left, label=part, color=COLOURS[part])
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for row, total in enumerate(left):
            axis.text(total, row, f" {total:.0f}", va="center")
        axis.set_xlim(0, max(left) * 1.15)
        axis.set_title(f"{files}, {READERS} readers", fontsize=10)
        axis.set_xlabel("microseconds of processor time per open, read, close")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=130)


def parse_arguments() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, metavar="N", help=f"default {ROUNDS}, quick {QUICK_ROUNDS}")
    add_names(parser, "--peers", PEERS, "systems to measure (default all)", default=PEERS)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture to FILE")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()

    def run() -> None:
        install_missing(arguments.peers)
        file_sets, rounds = (QUICK_FILE_SETS, QUICK_ROUNDS) if arguments.quick else (FILE_SETS, ROUNDS)
        rounds = arguments.rounds or rounds
        found = measure(file_sets, rounds, arguments.peers, Console())
        if arguments.plot is not None:
            plot(found, arguments.plot)
        save(arguments.json, {"machine": machine(), "rounds": rounds, "us_per_file": found})

    return exit_status("cpu_split", run, "interrupted; everything is unmounted and deleted")


if __name__ == "__main__":
    sys.exit(main())
