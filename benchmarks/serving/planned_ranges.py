"""Epochs over samples that are ranges of a large file, planned by range, beside the same loader without a cache.

    .venv-dev/bin/python -m benchmarks.serving.planned_ranges --json FILE     a few minutes
    .venv-dev/bin/python -m benchmarks.serving.planned_ranges --quick         a minute

A DataLoader with two workers reads a file whose source is `--latency-ms` away, in a new order each epoch:

    tokens     a memory-mapped file of tokens, windows of 32 KiB from random places on, which overlap
    parquet    row groups of 100 KB
    arrow      a data set of Hugging Face `datasets` with rows of 32 KB, loaded from the mount

`direct` waits that long for each sample and reads it from the local file: one request a sample, whose bytes take no
time. `planned` is a mount that has the plan and room for a fifth of the wanted bytes; `immutable` the same with
-o immutable. `learned` gives no ranges: the first epoch finds them out. After each batch the kernel forgets the file's
pages. Each sample is compared with the source's. "Fetched" is for each byte that the samples of an epoch have together.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import random
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from torch.utils.data import DataLoader, Dataset, Sampler

import trainer_hook
from benchmarks import tables
from benchmarks.common.command import add_names, command_line, main
from benchmarks.common.interruption import scratch_directory
from benchmarks.common.mounts import counts, mounted
from trainer_hook.ranges import SampleRanges, parquet_row_groups, token_windows
from trainer_hook.ranges.files import rows_of_dataset

TOKENS, TOKEN = 8192, np.dtype(np.uint32)
ROWS, ROW_BYTES, ARROW_BYTES = 100, 1000, 32_000
CACHED_SHARE, BATCH, WORKERS = 0.2, 16, 2
OLD_S = 1_700_000_000


@dataclass(frozen=True)
class Extent:
    samples: int
    epochs: int
    latency_ms: int


FULL = Extent(samples=2000, epochs=4, latency_ms=20)
QUICK = Extent(samples=600, epochs=3, latency_ms=20)


class Epoch(NamedTuple):
    seconds: float
    fetched_bytes: int


# -- the data, and how a loader's worker reads a sample of it


def make_tokens(place: Path, samples: int) -> None:
    np.random.default_rng(1).integers(0, 1 << 32, samples * TOKENS, TOKEN).tofile(place / "tokens.bin")


def token_starts(samples: int) -> list[int]:
    rng = random.Random(3)
    return [rng.randrange((samples - 1) * TOKENS) for _ in range(samples)]


def open_tokens(place: Path, samples: int) -> Callable[[int], bytes]:
    mapped, starts = np.memmap(place / "tokens.bin", TOKEN, "r"), token_starts(samples)
    return lambda index: mapped[starts[index] : starts[index] + TOKENS].tobytes()


def make_parquet(place: Path, samples: int) -> None:
    import pyarrow
    from pyarrow import parquet

    schema = pyarrow.schema([("text", pyarrow.binary()), ("label", pyarrow.int32())])
    with parquet.ParquetWriter(place / "rows.parquet", schema, compression="none", use_dictionary=False) as writer:
        for number in range(samples):
            rng = random.Random(number)
            rows = {"text": [rng.randbytes(ROW_BYTES) for _ in range(ROWS)], "label": [number] * ROWS}
            writer.write_table(pyarrow.table(rows, schema))


def open_parquet(place: Path, samples: int) -> Callable[[int], bytes]:
    from pyarrow import parquet

    file = parquet.ParquetFile(place / "rows.parquet")
    return lambda index: b"".join(file.read_row_group(index).column("text").to_pylist())


def make_arrow(place: Path, samples: int) -> None:
    import datasets

    rng = random.Random(5)
    rows = {"bytes": [rng.randbytes(ARROW_BYTES) for _ in range(samples)], "label": list(range(samples))}
    features = datasets.Features({"bytes": datasets.Value("binary"), "label": datasets.Value("int64")})
    datasets.Dataset.from_dict(rows, features).save_to_disk(place / "rows")


def load_arrow(place: Path) -> Any:
    import datasets

    return datasets.load_from_disk(place / "rows")


class Kind(NamedTuple):
    make: Callable[[Path, int], None]
    open: Callable[[Path, int], Callable[[int], bytes]]
    ranges: Callable[[Path, int], SampleRanges]


def arrow_ranges(place: Path, samples: int) -> SampleRanges:
    found = rows_of_dataset(load_arrow(place))
    assert found is not None
    return found


def open_arrow(place: Path, samples: int) -> Callable[[int], bytes]:
    rows = load_arrow(place)
    return lambda index: bytes(rows[index]["bytes"])


KINDS = {
    "tokens": Kind(
        make_tokens,
        open_tokens,
        lambda place, samples: token_windows(place / "tokens.bin", TOKEN, token_starts(samples), TOKENS),
    ),
    "parquet": Kind(make_parquet, open_parquet, lambda place, _: parquet_row_groups([place / "rows.parquet"])),
    "arrow": Kind(make_arrow, open_arrow, arrow_ranges),
}
WAYS = {"direct": "", "planned": "", "immutable": "immutable=on", "learned": ""}


class Samples(Dataset[int]):
    """Gives the checksum of each sample, and has the kernel forget the file after as many as a batch has."""

    def __init__(self, kind: str, place: Path, samples: int, wait_s: float) -> None:
        self._kind, self._place, self._samples, self._wait_s = kind, place, samples, wait_s
        self._read: Callable[[int], bytes] | None = None
        self._files: list[Path] = []
        self._kept = 0

    def __len__(self) -> int:
        return self._samples

    def __getitems__(self, indices: list[int]) -> list[tuple[int, int]]:
        if self._read is None:
            self._read = KINDS[self._kind].open(self._place, self._samples)
            # Listed once: a listing takes the source's time.
            files = (file for file in self._place.rglob("*") if ".spiderfs" not in file.parts)
            self._files = [file for file in files if file.is_file()]
        found = []
        for index in indices:
            time.sleep(self._wait_s)
            found.append((index, zlib.crc32(self._read(index))))
        # While ranges are learned, samples are read one by one.
        self._kept += len(found)
        if self._kept >= BATCH:
            self._kept = 0
            forget(self._place, self._files)
        return found


def forget(place: Path, files: list[Path]) -> None:
    """Have the kernel drop the pages of these files below a directory, those that this process has mapped too."""
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if f" {place}/" in line:
            begin, _, end = line.partition(" ")[0].partition("-")
            length = ctypes.c_size_t(int(end, 16) - int(begin, 16))
            libc.madvise(ctypes.c_void_p(int(begin, 16)), length, mmap.MADV_DONTNEED)
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class Shuffled(Sampler[int]):
    """A new order each epoch, which a copy of the sampler draws too."""

    def __init__(self, samples: int) -> None:
        self._samples, self._epoch = samples, 0

    def __len__(self) -> int:
        return self._samples

    def __iter__(self) -> Any:
        order = random.Random(self._epoch).sample(range(self._samples), self._samples)
        self._epoch += 1
        return iter(order)


def epochs(kind: str, place: Path, extent: Extent, wait_s: float, way: str, right: list[int]) -> list[Epoch]:
    dataset = Samples(kind, place, extent.samples, wait_s)
    loader = DataLoader(
        dataset, BATCH, sampler=Shuffled(extent.samples), num_workers=WORKERS, collate_fn=list, persistent_workers=True
    )
    found = []
    planned, plan = way != "direct", None
    if planned:
        ranges = "learn" if way == "learned" else KINDS[kind].ranges(place, extent.samples)
        plan = trainer_hook.plan(place, loader, ranges=ranges)
        time.sleep(1.0)
    for _ in range(extent.epochs):
        before, began = counts(place)["origin_bytes"] if planned else 0, time.perf_counter()
        for batch in loader:
            for index, checksum in batch:
                if checksum != right[index]:
                    raise RuntimeError(f"sample {index} has other bytes than the source's")
        took = time.perf_counter() - began
        found.append(Epoch(took, (counts(place)["origin_bytes"] if planned else 0) - before))
    if plan is not None:
        plan.close()
    return found


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    extent: Extent = arguments.extent
    result: dict[str, Any] = {"extent": asdict(extent), "kinds": {}}
    with scratch_directory("planned_ranges") as scratch:
        for kind in arguments.kinds:
            source = scratch / kind
            source.mkdir()
            KINDS[kind].make(source, extent.samples)
            for file in source.rglob("*"):
                os.utime(file, (OLD_S, OLD_S))
            wanted = int(KINDS[kind].ranges(source, extent.samples).lengths.sum())
            read = KINDS[kind].open(source, extent.samples)
            right = [zlib.crc32(read(index)) for index in range(extent.samples)]
            figures = {}
            for way in arguments.ways:
                wait_s = extent.latency_ms / 1000
                if way == "direct":
                    figures[way] = epochs(kind, source, extent, wait_s, way, right)
                    continue
                capacity = int(CACHED_SHARE * wanted)
                place = scratch / f"{kind}-{way}"
                with mounted(source, place, capacity, extent.latency_ms, WAYS[way] or "immutable=off") as mount:
                    figures[way] = epochs(kind, mount, extent, 0.0, way, right)
            result["kinds"][kind] = {way: [of._asdict() for of in found] for way, found in figures.items()}
            result["kinds"][kind]["wanted_bytes"] = wanted
    print(tables.planned_ranges(result))
    return result


if __name__ == "__main__":
    program = command_line(__doc__, FULL, QUICK)
    add_names(program, "--kinds", KINDS, "kinds of files (default all)", KINDS)
    add_names(program, "--ways", WAYS, "ways to read (default all)", WAYS)
    main(run, program)
