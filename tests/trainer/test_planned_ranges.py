"""Samples that are ranges of large files: grids, the indices of formats, and loaders on a real mount."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mounting import Mounted, eventually, mounted, run_spiderfs
from torch.utils.data import DataLoader, Subset
from windows import SIZE, Mapped, Windows, read_epochs, windows
from xxhash import xxh3_64_intdigest

import trainer_hook
from benchmarks.common.sources import make_older, patterned
from spiderfs.linux.mounts import set_read_ahead
from spiderfs.protocol.extents import extent_of
from spiderfs.shared.layout import CacheLayout
from trainer_hook.connection.sample_list import range_declaration
from trainer_hook.ranges import (
    SampleRanges,
    arrow_rows,
    hdf5_chunks,
    joined,
    parquet_row_groups,
    safetensors_tensors,
    token_windows,
    zarr_shards,
)
from trainer_hook.ranges.files import rows_of_dataset
from trainer_hook.ranges.sample_ranges import SampleGrid

PAGE = 4096


def bytes_of(ranges: SampleRanges, index: int) -> list[bytes]:
    rows = range(ranges.first[index], ranges.first[index + 1])
    contents = {number: Path(path).read_bytes() for number, path in enumerate(map(str, ranges.paths))}
    return [
        contents[ranges.files[row]][ranges.offsets[row] : ranges.offsets[row] + ranges.lengths[row]] for row in rows
    ]


# -- grids


def places(grid: SampleGrid, order: Sequence[int]) -> list[tuple[int, int]]:
    drawn = [extent_of(grid.paths[number]) for number in grid.draws(np.array(order, np.uint32))]
    return [(extent.begin, extent.end) for extent in drawn if extent is not None]


@pytest.mark.parametrize("longest", [3_000, 50_000, 3_000_000])
def test_each_page_lies_in_one_extent_and_a_sample_has_all_of_its_pages(tmp_path: Path, longest: int) -> None:
    rng, size = random.Random(longest), 5_000_000
    (path := tmp_path / "one").write_bytes(bytes(size))
    lengths = [rng.randrange(longest) for _ in range(80)]
    offsets = [rng.randrange(size - length) for length in lengths]
    grid = SampleGrid(SampleRanges.in_file(path, offsets, lengths), [b"one"])
    extents = sorted((extent.begin, extent.end) for extent in map(extent_of, grid.paths) if extent is not None)
    assert len(extents) == len(set(grid.paths))
    assert all(before[1] <= after[0] for before, after in pairwise(extents))
    assert all(begin % PAGE == 0 and (end % PAGE == 0 or end == size) for begin, end in extents)
    assert max(end - begin for begin, end in extents) <= 1 << 20
    for index, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        own = places(grid, [index])
        assert all(before[1] == after[0] for before, after in pairwise(own))
        assert not length or (own[0][0] <= offset and offset + length <= own[-1][1])


def test_plans_and_progress_are_counted_in_extents(tmp_path: Path) -> None:
    (path := tmp_path / "one").write_bytes(bytes(10 * PAGE))
    ranges = SampleRanges.of([(path, 0, PAGE), [(path, PAGE, 10), (path, 5 * PAGE, PAGE)], [], (path, 100, 2 * PAGE)])
    grid = SampleGrid(ranges, [b"one"])
    assert places(grid, [1, 2, 0]) == [(PAGE, 2 * PAGE), (5 * PAGE, 6 * PAGE), (0, PAGE)]
    assert places(grid, [3]) == [(0, PAGE), (PAGE, 2 * PAGE), (2 * PAGE, 3 * PAGE)]
    assert grid.positions(np.array([1, 2, 0, 3], np.uint32)).tolist() == [0, 2, 2, 3, 6]


def test_a_file_of_several_paths_has_one_grid(tmp_path: Path) -> None:
    (path := tmp_path / "one").write_bytes(bytes(100 * PAGE))
    (link := tmp_path / "link").symlink_to(path)
    spellings = [path, str(path), os.fsencode(path), link, tmp_path / "../" / tmp_path.name / "one"]
    parts = [SampleRanges.in_file(each, [number * PAGE], 30 * PAGE) for number, each in enumerate(spellings)]
    declared = range_declaration(joined(parts), len(parts), tmp_path, "train")
    found = [extent_of(name) for name in declared.paths]
    extents = sorted((extent.begin, extent.end) for extent in found if extent is not None)
    assert {extent.file for extent in found if extent is not None} == {b"one"}
    assert all(before[1] <= after[0] for before, after in pairwise(extents))
    assert declared.grid is not None
    for number in range(len(parts)):
        own = places(declared.grid, [number])
        assert (own[0][0], own[-1][1]) == (number * PAGE, (number + 30) * PAGE)


# -- the indices of formats


def test_token_windows(tmp_path: Path) -> None:
    tokens = np.arange(10_000, dtype=np.uint16)
    tokens.tofile(path := tmp_path / "tokens.bin")
    ranges = token_windows(path, np.uint16, [5, 700], [100, 3])
    assert bytes_of(ranges, 0) == [tokens[5:105].tobytes()]
    assert bytes_of(ranges, 1) == [tokens[700:703].tobytes()]


@pytest.mark.parametrize("kind", [np.uint16, np.uint32, np.int32])
def test_starts_of_a_narrow_type_do_not_wrap(kind: Any) -> None:
    start = np.iinfo(kind).max
    ranges = token_windows("t", np.uint32, np.array([start], kind), np.array([start], kind), header_bytes=8)
    assert (ranges.offsets[0], ranges.lengths[0]) == (4 * int(start) + 8, 4 * int(start))


@pytest.mark.parametrize(
    ("starts", "tokens", "message"),
    [
        ([0.5, 1], 10, "give whole numbers, such as starts.astype"),
        ([1, 2], 10.0, "give whole numbers, such as tokens.astype"),
        (5, 10, "give a list of starts"),
        ([[1, 2], [3, 4]], 10, "give a list of starts"),
        ([1, 2, 3], [1, 2], "one for each start"),
        ([2**62], 1, "within the file"),
        ([-1], 1, "within the file"),
    ],
)
def test_other_windows_are_refused(starts: Any, tokens: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_windows("t", np.uint16, starts, tokens)


def test_parquet_row_groups_hold_the_columns_that_are_read(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rng = random.Random(1)
    table = pyarrow.table({name: [rng.randbytes(100) for _ in range(600)] for name in "ab"})
    parquet.write_table(table, path := tmp_path / "t.parquet", row_group_size=100)
    content = path.read_bytes()
    ranges, part = parquet_row_groups([path, path]), parquet_row_groups([path], columns=["b"])
    assert (len(ranges), len(part)) == (12, 6)
    # Whatever else of the file is destroyed, the row group can be read.
    for given, columns in ((ranges, ["a", "b"]), (part, ["b"])):
        row = slice(given.first[4], given.first[5])
        kept = bytearray(len(content))
        footer = int.from_bytes(content[-8:-4], "little") + 8
        kept[:4], kept[-footer:] = content[:4], content[-footer:]
        for offset, length in zip(given.offsets[row], given.lengths[row], strict=True):
            kept[offset : offset + length] = content[offset : offset + length]
        (copy := tmp_path / "copy.parquet").write_bytes(kept)
        read = parquet.ParquetFile(copy).read_row_group(4, columns=columns)
        assert read == table.select(columns).slice(400, 100)


def test_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {f"layer{number}": torch.rand(number + 1, 7) for number in range(5)}
    save_file(tensors, path := tmp_path / "m.safetensors")
    for names in (sorted(tensors), ["layer3", "layer1"]):
        ranges = safetensors_tensors(path, names)
        assert [bytes_of(ranges, i) for i in range(len(names))] == [[tensors[n].numpy().tobytes()] for n in names]


@pytest.mark.parametrize("chunks", [None, (4, 5)])
def test_hdf5_chunks(tmp_path: Path, chunks: tuple[int, int] | None) -> None:
    import h5py

    rows = np.arange(10 * 10, dtype=np.int32).reshape(10, 10)
    with h5py.File(path := tmp_path / "d.h5", "w") as file:
        file.create_dataset("x", data=rows, chunks=chunks)
    ranges = hdf5_chunks(path, "x")
    assert len(ranges) == len(rows)
    for index in range(len(rows)):
        parts = b"".join(bytes_of(ranges, index))
        if chunks is None:
            assert parts == rows[index].tobytes()
        else:
            assert all(rows[index, part : part + 5].tobytes() in parts for part in (0, 5))
            assert len(parts) == 2 * 4 * 5 * 4


def test_hdf5_rows_that_were_never_written_have_no_ranges(tmp_path: Path) -> None:
    import h5py

    with h5py.File(path := tmp_path / "d.h5", "w") as file:
        file.create_dataset("x", (10, 3), "f4")
    ranges = hdf5_chunks(path, "x")
    assert (len(ranges), len(ranges.files)) == (10, 0)


def test_zarr_shards(tmp_path: Path) -> None:
    import zarr

    array = zarr.create_array(
        tmp_path / "z", shape=(8, 6), chunks=(2, 3), shards=(4, 6), dtype="int32", compressors=None, fill_value=0
    )
    array[:6] = np.arange(1, 37).reshape(6, 6)
    ranges = zarr_shards(tmp_path / "z")
    chunks = [array[row : row + 2, column : column + 3] for row in range(0, 8, 2) for column in (0, 3)]
    assert [bytes_of(ranges, index) for index in range(6)] == [[chunk.tobytes()] for chunk in chunks[:6]]
    assert [bytes_of(ranges, index) for index in (6, 7)] == [[], []]


@pytest.mark.parametrize("form", [2, 3])
def test_other_zarr_arrays_are_refused(tmp_path: Path, form: Any) -> None:
    import zarr

    zarr.create_array(tmp_path / "z", shape=(8, 6), chunks=(2, 3), dtype="int32", zarr_format=form)
    with pytest.raises(ValueError, match="is no sharded array of zarr format 3: give samples="):
        zarr_shards(tmp_path / "z")


def write_arrow(path: Path, column: Any, **options: Any) -> Path:
    import pyarrow

    table = pyarrow.table({"x": column})
    with pyarrow.OSFile(str(path), "wb") as out, pyarrow.ipc.new_stream(out, table.schema, **options) as stream:
        stream.write_table(table)
    return path


def test_arrow_columns_that_have_no_ranges_are_refused(tmp_path: Path) -> None:
    import pyarrow

    views, maps = pyarrow.string_view(), pyarrow.map_(pyarrow.string(), pyarrow.int64())
    union = pyarrow.UnionArray.from_sparse(pyarrow.array([0, 0], pyarrow.int8()), [pyarrow.array([1, 2])])
    for column in (pyarrow.array(["a", "b"], views), pyarrow.array([[("k", 1)]] * 2, maps), union):
        with pytest.raises(ValueError, match=r"a column of the Arrow type .*; give ranges="):
            arrow_rows(write_arrow(tmp_path / "rows.arrow", column))
    compressed = pyarrow.ipc.IpcWriteOptions(compression="lz4")
    with pytest.raises(ValueError, match="write it uncompressed"):
        arrow_rows(write_arrow(tmp_path / "rows.arrow", [b"x" * 1000] * 20, options=compressed))


def test_arrow_rows_without_bytes_have_no_ranges(tmp_path: Path) -> None:
    import pyarrow

    lists = pyarrow.list_(pyarrow.string())
    for column in (pyarrow.array([[]] * 20, lists), pyarrow.array([None] * 20, lists), pyarrow.nulls(20)):
        ranges = arrow_rows(write_arrow(tmp_path / "rows.arrow", column))
        assert len(ranges) == 20
        assert (ranges.lengths > 0).all()
    assert len(arrow_rows(write_arrow(tmp_path / "rows.arrow", pyarrow.array([], lists)))) == 0


def arrow_dataset(directory: Path, rows: int = 300) -> Any:
    import datasets

    rng = random.Random(2)
    columns = {
        "image": [{"bytes": rng.randbytes(rng.randrange(20_000, 40_000)), "path": f"{n}.jpg"} for n in range(rows)],
        "label": list(range(rows)),
        "tags": [[f"t{n}", "x" * (n % 50)] for n in range(rows)],
        "flag": [n % 3 == 0 for n in range(rows)],
        "box": [[float(n), 0.5] if n % 7 else None for n in range(rows)],
    }
    datasets.Dataset.from_dict(columns).save_to_disk(directory)
    return datasets.load_from_disk(directory)


def test_arrow_rows_hold_the_bytes_of_every_column(tmp_path: Path) -> None:
    dataset = arrow_dataset(tmp_path / "rows", 200)
    (file,) = dataset.cache_files
    ranges = arrow_rows(file["filename"])
    assert len(ranges) == len(dataset)
    for row in (0, 123, 199):
        assert dataset[row]["image"]["bytes"] in bytes_of(ranges, row)
        assert b"t%d" % row + b"x" * (row % 50) in bytes_of(ranges, row)


def test_the_ranges_of_a_shuffled_data_set_and_of_a_part_of_it(tmp_path: Path) -> None:
    dataset = arrow_dataset(tmp_path / "rows", 200).shuffle(seed=3)
    part = Subset(dataset, [7, 3])
    ranges = rows_of_dataset(part)
    assert ranges is not None
    for index, row in enumerate(part.indices):
        assert dataset[row]["image"]["bytes"] in bytes_of(ranges, index)
    assert rows_of_dataset(Subset(range(3), [1])) is None  # type: ignore[arg-type]


def test_ranges_without_bytes_are_ignored(tmp_path: Path) -> None:
    (path := tmp_path / "one").write_bytes(bytes(PAGE))
    given = [(path, 0, 10), (path, 10**9, 0), (tmp_path / "no", 0, 0), [("/elsewhere", 0, 0), (path, 0, PAGE)]]
    declared = range_declaration(SampleRanges.of(given), 4, tmp_path, "train")
    assert declared.paths == [b"one.@ranges/0-4096"]
    assert declared.grid is not None
    assert np.diff(declared.grid.first).tolist() == [1, 0, 0, 1]


# -- loaders on a mount

SAMPLES = 300
SLOW = {"source__latency_ms": 5, "capacity": "6MB", "policy": "minio"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    (source / "big").mkdir()
    (source / "big/one.bin").write_bytes(patterned(0, SIZE))
    (source / "small.bin").write_bytes(patterned(0, 100_000))
    for path in source.rglob("*"):
        make_older(path)
    return source


@pytest.fixture(scope="module")
def quiet(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    """A mount of which no file is read."""
    with mounted(source, tmp_path_factory.mktemp("quiet")) as mount:
        yield mount


@pytest.mark.parametrize(
    ("immutable", "mapped", "overlapping"),
    [("off", False, False), ("off", True, True), ("on", False, True), ("on", True, False)],
    ids=["opened-read-dense", "opened-mapped-random", "immutable-read-random", "immutable-mapped-dense"],
)
def test_planned_ranges_come_ahead_with_the_right_bytes(
    source: Path, tmp_path: Path, immutable: str, mapped: bool, overlapping: bool
) -> None:
    with mounted(source, tmp_path, immutable=immutable, workers=2, **SLOW) as mount:
        path, places = mount.point / "big/one.bin", windows(SAMPLES, overlapping)
        loader = DataLoader((Mapped if mapped else Windows)(path, places), batch_size=8, shuffle=True, num_workers=2)
        ranges = [(path, *place) for place in places]
        with trainer_hook.plan(mount.point, loader, ranges=ranges):
            read_epochs(loader, 2)
        assert mount.metric("prefetched") > SAMPLES / 2
        wanted = 2 * sum(length for _, length in places)
        assert mount.metric("origin_bytes") < 1.3 * wanted


def test_an_open_after_one_that_failed_has_the_new_bytes_whatever_the_ttl(tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    file, size, places = source / "one.bin", 12 << 20, [(number * 40_000, 30_000) for number in range(300)]
    file.write_bytes(patterned(0, size))
    make_older(file)
    changed = ["one.bin.* has changed at the source"]
    with mounted(source, tmp_path, allowed=changed, **SLOW) as mount:
        loader = DataLoader(Windows(mount.point / "one.bin", places), batch_size=8)
        with trainer_hook.plan(mount.point, loader, ranges=[(mount.point / "one.bin", *place) for place in places]):
            read_epochs(loader, 1)
            (new := source / "new").write_bytes(patterned(1, size + 1))
            make_older(new, 1800)
            new.rename(file)

            def result(offset: int) -> str:
                try:
                    with open(mount.point / "one.bin", "rb", buffering=0) as opened:
                        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                        opened.seek(offset)
                        found = opened.read(4096)
                except OSError as exc:
                    return errno.errorcode[exc.errno or 0]
                return "new" if found == patterned(offset + 1, offset + 4097) else "old"

            results = [result(offset) for offset, _ in places]
            # What is cached may be read until one finds out.
            began = results.index("ESTALE")
            assert set(results[:began]) <= {"old"}
            assert set(results[began + 3 :]) == {"new"}
            assert (mount.point / "one.bin").read_bytes() == file.read_bytes()


def test_evict_drops_the_ranges_of_a_file(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path, **SLOW) as mount:
        path, places = mount.point / "big/one.bin", windows(SAMPLES, overlapping=False)
        loader = DataLoader(Windows(path, places), batch_size=8)
        with trainer_hook.plan(mount.point, loader, ranges=[(path, *place) for place in places]):
            read_epochs(loader, 1)
        assert mount.stats()["used_bytes"] > 0
        assert run_spiderfs("evict", mount.point, path).returncode == 0
        eventually(lambda: mount.stats()["used_bytes"] == 0, what="an empty cache")


def test_where_grids_cannot_be_written_the_ranges_are_read_unplanned(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path, allowed=["no range of big/one.bin is fetched ahead .*: free the cache's"]) as mount:
        path, places = mount.point / "big/one.bin", windows(SAMPLES, overlapping=False)
        CacheLayout(mount.cache).run.grids(f"{xxh3_64_intdigest(b'big/one.bin'):016x}").mkdir()
        loader = DataLoader(Windows(path, places), batch_size=8, shuffle=True)
        with trainer_hook.plan(mount.point, loader, ranges=[(path, *place) for place in places]):
            read_epochs(loader, 1)
        assert mount.metric("prefetched") == 0


def test_a_data_set_of_hugging_face_needs_no_ranges(tmp_path: Path) -> None:
    import datasets

    right = arrow_dataset(tmp_path / "source/rows", 600)
    for path in (tmp_path / "source").rglob("*"):
        make_older(path)
    with mounted(tmp_path / "source", tmp_path, **SLOW) as mount:
        dataset = datasets.load_from_disk(mount.point / "rows")
        loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2, collate_fn=list)
        with trainer_hook.plan(mount.point, loader):
            rows = [row for batch in loader for row in batch]
        assert sorted(row["label"] for row in rows) == list(range(600))
        assert all(row == right[row["label"]] for row in rows)
        assert mount.metric("prefetched") > 600
        del dataset, loader, rows
        gc.collect()


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        (lambda big, outside: [(big, SIZE - 5, 6)] * SAMPLES, "give ranges within the file"),
        (lambda big, outside: [(big, -1, 6)] * SAMPLES, "give ranges within the file"),
        (lambda big, outside: [(outside, 0, 1)] * SAMPLES, "give ranges of files in the mount"),
        (lambda big, outside: [(big.with_name("no"), 0, 1)] * SAMPLES, "give paths of files below the mount"),
        (lambda big, outside: [(big, 0, 1)] * 3, "one or a list of them for each index"),
        (lambda big, outside: [big] * SAMPLES, "give ranges="),
        (lambda big, outside: [(big, "a", 1)] * SAMPLES, "give ranges="),
        (lambda big, outside: [(big, 0.5, 1)] * SAMPLES, "whole numbers: give ranges="),
        (lambda big, outside: [(3, 0, 1)] * SAMPLES, "a path and whole numbers: give ranges="),
        (lambda big, outside: [("a\0b", 0, 1)] * SAMPLES, "give paths of files below the mount"),
        (lambda big, outside: [(big.parent, 0, 1)] * SAMPLES, "give paths of files below the mount"),
        (lambda big, outside: [(big, 2**62, 2**62)] * SAMPLES, "give ranges within the file"),
        (lambda big, outside: [(big, SIZE - 1, 2**63 - 1)] * SAMPLES, "give ranges within the file"),
        (lambda big, outside: [(big, 2**70, 0)] * SAMPLES, "give ranges="),
        (lambda big, outside: [(big, 5, 0)] * SAMPLES, "all ranges are empty: give ranges="),
        (lambda big, outside: [[]] * SAMPLES, "all ranges are empty: give ranges="),
        (lambda big, outside: [], "ranges 0: give ranges="),
    ],
)
def test_ranges_that_cannot_be_are_refused_with_what_to_do(
    quiet: Mounted, tmp_path: Path, ranges: Callable[[Path, Path], Any], message: str
) -> None:
    (outside := tmp_path / "outside").write_bytes(b"x")
    path = quiet.point / "big/one.bin"
    loader = DataLoader(Windows(path, windows(SAMPLES)), batch_size=8)
    with pytest.raises(ValueError, match=message) as refused:
        trainer_hook.plan(quiet.point, loader, ranges=ranges(path, outside))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("immutable", ["off", "on"])
def test_one_page_fault_brings_all_pages_of_an_extent(source: Path, tmp_path: Path, immutable: str) -> None:
    places = [(number << 16, 1 << 16) for number in range(SAMPLES)]
    with mounted(source, tmp_path, immutable=immutable) as mount:
        path = mount.point / "big/one.bin"
        loader = DataLoader(Mapped(path, places), batch_size=8, shuffle=True)
        with trainer_hook.plan(mount.point, loader, ranges=[(path, *place) for place in places]):
            read_epochs(loader, 1)
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                mapped.madvise(mmap.MADV_RANDOM)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                before = mount.metric("reads")
                for begin, length in places[:100]:
                    # From the middle on: the pages before come too.
                    middle = begin + length // 2
                    assert mapped[middle : begin + length] == patterned(middle, begin + length)
                    assert mapped[begin:middle] == patterned(begin, middle)
                # Without the push there would be 16 for each.
                assert mount.metric("reads") - before < 3 * 100


def test_ranges_are_not_shared(quiet: Mounted) -> None:
    loader = DataLoader(Windows(quiet.point / "big/one.bin", windows(SAMPLES)), batch_size=8)
    with pytest.raises(ValueError, match="leave share out"):
        trainer_hook.plan(quiet.point, loader, ranges=[(quiet.point / "big/one.bin", 0, 1)] * SAMPLES, share=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change the read-ahead of a mount")
def test_read_ahead_is_small_while_ranges_are_used_or_learned(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path) as mount:
        device = mount.point.stat().st_dev
        setting = Path(f"/sys/class/bdi/{device >> 8}:{device & 255}/read_ahead_kb")
        path, places = mount.point / "big/one.bin", windows(SAMPLES)
        loader = DataLoader(Windows(path, places), batch_size=8)
        for ranges in ([(path, *place) for place in places], "learn"):
            assert setting.read_text().strip() == "256"
            with trainer_hook.plan(mount.point, loader, ranges=ranges):  # type: ignore[arg-type]
                if ranges != "learn":
                    eventually(lambda: setting.read_text().strip() == "4", what="a small read-ahead")
                assert setting.read_text().strip() == "4"
            # As if the manager were another one by now: it changes nothing that someone else has set.
            set_read_ahead(mount.point, 256, instead_of=8)
            assert setting.read_text().strip() == "4"
            set_read_ahead(mount.point, 256, instead_of=4)
            assert setting.read_text().strip() == "256"
