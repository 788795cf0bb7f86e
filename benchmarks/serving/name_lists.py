"""How long a mount takes to read a list of names (`names=FILE`), of each kind, until it could answer for a name.

    .venv-dev/bin/python -m benchmarks.serving.name_lists [--quick] [--json FILE]

The list has a million files in 1,000 directories. The lists that other programs write are made up in their formats. To
list one directory of such a tree is timed too, as the first reader of that directory waits for it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console

from benchmarks.common.command import command_line, main
from benchmarks.common.interruption import scratch_directory
from benchmarks.common.results import plain_table
from spiderfs.sources.listed_files import read_list

DIRECTORIES = 1000


def _manifest(path: str, number: int) -> str:
    return f"{path}\t{100_000 + number}\t1700000000.1234567890\n"


def _aws(path: str, number: int) -> str:
    return f"2023-01-02 15:{number % 60:02}:05 {100_000 + number:10} {path}\n"


def _rclone(path: str, number: int) -> str:
    name = path.rpartition("/")[2]
    return (
        f'{{"Path":"{path}","Name":"{name}","Size":{100_000 + number},"MimeType":"image/jpeg",'
        f'"ModTime":"2023-01-02T15:{number % 60:02}:05.123456789Z","IsDir":false,"Tier":"STANDARD"}},\n'
    )


def _inventory(path: str, number: int) -> str:
    return f'"bucket","{path}","{100_000 + number}","2023-01-02T15:04:05.000Z","{number:032x}"\n'


KINDS: dict[str, Callable[[str, int], str]] = {
    "manifest": _manifest,
    "aws s3 ls": _aws,
    "rclone lsjson": _rclone,
    "S3 Inventory": _inventory,
}


def _lines(line: Callable[[str, int], str], files: int) -> Iterator[str]:
    return (line(f"train/n{number % DIRECTORIES:04}/{number:08}.jpg", number) for number in range(files))


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    files = 20_000 if arguments.quick else 1_000_000
    table = plain_table(f"Seconds for {files:,} names", "list", "read", "one directory", words=("list",))
    rows = []
    with scratch_directory("name_lists") as scratch:
        path = scratch / "names"
        for kind, line in KINDS.items():
            with path.open("w") as file:
                file.writelines(_lines(line, files))
            began = time.perf_counter()
            listed = read_list(path, "")
            read_s = time.perf_counter() - began
            assert len(listed.files(b"train/n0007")) == files // DIRECTORIES
            rows.append((kind, read_s, time.perf_counter() - began - read_s))
            table.add_row(kind, f"{read_s:.1f}", f"{rows[-1][2]:.3f}")
    console.print(table)
    return {"files": files, "rows": rows}


if __name__ == "__main__":
    main(measure, command_line(__doc__))
