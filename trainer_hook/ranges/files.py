"""Ranges from the indices of files, read with the library of each format; a library is imported when it is needed."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer_hook.ranges.mappings import Mapping, mappings, places_of
from trainer_hook.ranges.sample_ranges import Numbers, Path, SampleRanges, first_of, joined

Span = tuple[Numbers, Numbers]
"""Where bytes of each row begin, and where they end."""


def token_windows(
    path: Path, dtype: npt.DTypeLike, starts: npt.ArrayLike, tokens: npt.ArrayLike, header_bytes: int = 0
) -> SampleRanges:
    """Windows of a memory-mapped file of tokens: sample i reads `tokens` (one number, or one each) from `starts[i]` on.

    For documents give where each begins, and its number of tokens, as the index beside the file has them.
    """
    size = np.dtype(dtype).itemsize
    begins, many = _whole("starts", starts, size), _whole("tokens", tokens, size)
    if begins.ndim != 1 or many.shape not in ((), begins.shape):
        raise ValueError(
            f"starts of shape {begins.shape}, tokens of {many.shape}: give a list of starts, and tokens as one number "
            "or one for each start"
        )
    return SampleRanges.in_file(path, begins * size + header_bytes, many * size)


def _whole(name: str, given: npt.ArrayLike, size: int) -> Numbers:
    """Numbers of tokens whose bytes 64 bits can count; the caller's own type may have fewer."""
    numbers = np.asarray(given)
    if numbers.size and numbers.dtype.kind not in "iu":
        raise ValueError(f"{name} of type {numbers.dtype}: give whole numbers, such as {name}.astype(numpy.int64)")
    if numbers.size and (numbers.min() < 0 or numbers.max() > 2**62 // size):
        raise ValueError(f"{name} from {numbers.min()} to {numbers.max()}: give numbers of tokens within the file")
    return numbers.astype(np.int64)


def parquet_row_groups(paths: Iterable[Path], columns: Sequence[str] | None = None) -> SampleRanges:
    """Sample i is row group i of these files, all files counted through; of these columns alone, if any are given."""
    from pyarrow import parquet

    rows = []
    for path in paths:
        with parquet.ParquetFile(os.fsdecode(path)) as file:
            for group in (file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)):
                chunks = [group.column(number) for number in range(group.num_columns)]
                wanted = [c for c in chunks if columns is None or c.path_in_schema.partition(".")[0] in columns]
                begins = [min(c.data_page_offset, c.dictionary_page_offset or c.data_page_offset) for c in wanted]
                rows.append([(path, begin, c.total_compressed_size) for begin, c in zip(begins, wanted, strict=True)])
    return SampleRanges.of(rows)


def safetensors_tensors(path: Path, names: Sequence[str] | None = None) -> SampleRanges:
    """Sample i is the tensor `names[i]` of a safetensors file; without names each tensor, sorted by name."""
    from safetensors import safe_open

    with safe_open(os.fsdecode(path), "np") as file:
        chosen = sorted(file.keys()) if names is None else names
    with open(path, "rb") as head:
        (length,) = struct.unpack("<Q", head.read(8))
        index = json.loads(head.read(length))
    offsets = np.array([index[name]["data_offsets"] for name in chosen], np.int64).reshape(-1, 2)
    return SampleRanges.in_file(path, offsets[:, 0] + 8 + length, offsets[:, 1] - offsets[:, 0])


def hdf5_chunks(path: Path, dataset: str) -> SampleRanges:
    """Sample i is row i of an HDF5 dataset: the chunks that hold it, or its bytes if the dataset is contiguous."""
    import h5py

    with h5py.File(path, "r") as file:
        data = file[dataset]
        if data.chunks is None:
            row_bytes = data.dtype.itemsize * int(np.prod(data.shape[1:]))
            begin = data.id.get_offset()
            if begin is None:
                # Compact, or never written.
                return SampleRanges.none(len(data))
            return SampleRanges.in_file(path, begin + np.arange(len(data)) * row_bytes, row_bytes)
        chunks = [data.id.get_chunk_info(number) for number in range(data.id.get_num_chunks())]
        of_row: dict[int, list[tuple[Path, int, int]]] = {}
        for chunk in chunks:
            of_row.setdefault(chunk.chunk_offset[0] // data.chunks[0], []).append((path, chunk.byte_offset, chunk.size))
        return SampleRanges.of([of_row.get(row // data.chunks[0], []) for row in range(len(data))])


def zarr_shards(directory: Path) -> SampleRanges:
    """Sample i is the inner chunk i, in the order of the array's grid, of a sharded zarr array (format 3) on disk.

    The index of each shard is read; a chunk that is empty has no range.
    """
    import zarr
    from zarr.codecs import ShardingCodec

    array: Any = zarr.open_array(os.fsdecode(directory), mode="r")
    # Format 2 has no such codecs.
    codecs: tuple[Any, ...] = getattr(array.metadata, "codecs", ())
    if len(codecs) != 1 or not isinstance(codec := codecs[0], ShardingCodec):
        raise ValueError(
            f"{os.fsdecode(directory)} is no sharded array of zarr format 3: give samples=, one file for each chunk"
        )
    in_shard = [shard // chunk for shard, chunk in zip(array.shards, array.chunks, strict=True)]
    each, at_end = int(np.prod(in_shard)), codec.index_location.value == "end"
    # The offset and length of each chunk, and a checksum of four bytes.
    index_bytes = each * 16 + 4
    rows: list[list[tuple[Path, int, int]]] = []
    known: dict[str, npt.NDArray[np.uint64] | None] = {}
    counts = [-(-length // chunk) for length, chunk in zip(array.shape, array.chunks, strict=True)]
    for place in np.ndindex(*counts):
        shard, inner = zip(*(divmod(number, many) for number, many in zip(place, in_shard, strict=True)), strict=True)
        path = os.path.join(os.fsdecode(directory), array.metadata.encode_chunk_key(shard))
        if path not in known:
            known[path] = None
            if os.path.exists(path):
                with open(path, "rb") as file:
                    file.seek(-index_bytes if at_end else 0, os.SEEK_END if at_end else os.SEEK_SET)
                    known[path] = np.frombuffer(file.read(index_bytes - 4), "<u8").reshape(*in_shard, 2)
        index = known[path]
        offset, length = (2**64 - 1, 0) if index is None else index[inner].tolist()
        rows.append([] if offset == 2**64 - 1 else [(path, offset, length)])
    return SampleRanges.of(rows)


# -- Arrow


def arrow_rows(path: Path) -> SampleRanges:
    """Sample i is row i of an Arrow file (stream format, as Hugging Face `datasets` writes it), all columns."""
    import pyarrow

    file = pyarrow.memory_map(os.fsdecode(path))
    base = file.read_buffer(1).address
    file.seek(0)
    whole = Mapping(base, base + file.size(), 0, os.fsencode(path))
    found, compressed = _rows_of(pyarrow.ipc.open_stream(file), [whole])
    if compressed:
        raise ValueError(f"{os.fsdecode(path)} is compressed, so its rows have no ranges: write it uncompressed")
    return found


def _rows_of(batches: Iterable[Any], mapped: Sequence[Mapping]) -> tuple[SampleRanges, bool]:
    """The ranges of mapped files that hold the rows of some batches, and whether other memory holds some bytes."""
    rows, counts = [np.empty((0, 2), np.int64)], [np.empty(0, np.int64)]
    for batch in batches:
        columns = [span for column in batch.columns for span in _spans(column, np.arange(len(batch)), 1)]
        counts.append(np.full(len(batch), len(columns)))
        if columns:
            rows.append(np.stack([np.stack(span, axis=1) for span in columns], axis=1).reshape(-1, 2))
    begins, ends = np.concatenate(rows).T
    files, offsets = places_of(begins, mapped)
    paths = [os.fsdecode(mapping.path) for mapping in mapped]
    every = SampleRanges(paths, files, offsets, ends - begins, first_of(np.concatenate(counts)))
    return every.keep((ends > begins) & (files >= 0)), bool(((ends > begins) & (files < 0)).any())


def _spans(array: Any, begin: Numbers, many: Numbers | int) -> Iterator[Span]:
    """The addresses of the bytes of some elements of an Arrow array for each row: `many` from `begin` on."""
    import pyarrow
    from pyarrow import types

    if not len(array):
        return
    if isinstance(array, pyarrow.ExtensionArray):
        array = array.storage
    kind, buffers, begin = array.type, array.buffers(), begin + array.offset
    end = begin + many
    if buffers[0] is not None:
        yield buffers[0].address + begin // 8, buffers[0].address + -(-end // 8)
    if types.is_struct(kind):
        for number in range(kind.num_fields):
            # `field` applies the offset of the struct.
            yield from _spans(array.field(number), begin - array.offset, many)
    elif types.is_fixed_size_list(kind):
        yield from _spans(array.values, begin * kind.list_size, many * kind.list_size)
    elif types.is_null(kind):
        return
    elif (variable := _offset_type(kind)) is not None:
        offsets = np.frombuffer(buffers[1], variable)
        width = offsets.itemsize
        yield buffers[1].address + begin * width, buffers[1].address + (end + 1) * width
        low, high = offsets[begin].astype(np.int64), offsets[end].astype(np.int64)
        if types.is_list(kind) or types.is_large_list(kind):
            yield from _spans(array.values, low, high - low)
        elif buffers[2] is not None:
            yield buffers[2].address + low, buffers[2].address + high
    elif types.is_dictionary(kind):
        yield from _spans(array.indices, begin - array.offset, many)
    elif (bits := _bits_of(kind)) >= 8:
        width = bits // 8
        yield buffers[1].address + begin * width, buffers[1].address + end * width
    else:
        yield buffers[1].address + begin // 8, buffers[1].address + -(-end // 8)


def _bits_of(kind: Any) -> int:
    try:
        return int(kind.bit_width)
    except ValueError:
        raise ValueError(
            f"a column of the Arrow type {kind}: the ranges of its rows are not known; give ranges=[(path, offset, "
            "length), ...] yourself, or store another type"
        ) from None


def _offset_type(kind: Any) -> Any:
    from pyarrow import types

    if types.is_string(kind) or types.is_binary(kind) or types.is_list(kind):
        return np.int32
    if types.is_large_string(kind) or types.is_large_binary(kind) or types.is_large_list(kind):
        return np.int64
    return None


def rows_of_dataset(dataset: Any) -> SampleRanges | None:
    """The ranges of a map-style data set of Hugging Face `datasets`, or of a Subset or ConcatDataset of such.

    None for any other. A row that is in memory has no ranges. Raises ValueError for a column's type that is not known.
    """
    if hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        inner = rows_of_dataset(dataset.dataset)
        return None if inner is None else inner.take(dataset.indices)
    if hasattr(dataset, "datasets") and hasattr(dataset, "cumulative_sizes"):
        parts = [found for part in dataset.datasets if (found := rows_of_dataset(part)) is not None]
        return joined(parts) if len(parts) == len(dataset.datasets) else None
    if all(kind.__module__ != "datasets.arrow_dataset" for kind in type(dataset).__mro__):
        return None
    # Slices, selected columns and tables beside each other are views of the files' mappings, so the addresses of a
    # row's bytes say where they are.
    table = dataset.data.table
    if dataset._format_columns is not None and not dataset._output_all_columns:
        table = table.select(dataset._format_columns)
    rows, _ = _rows_of(table.to_batches(), mappings())
    return rows if dataset._indices is None else rows.take(dataset._indices.column(0).to_numpy())
