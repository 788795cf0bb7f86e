"""Samples that are ranges of large files: `trainer_hook.plan(mount, loader, ranges=...)`.

Each function makes the ranges of a data set from a file's own index, in the order of the data set's indices.
"""

from trainer_hook.ranges.files import (
    arrow_rows,
    hdf5_chunks,
    parquet_row_groups,
    safetensors_tensors,
    token_windows,
    zarr_shards,
)
from trainer_hook.ranges.sample_ranges import SampleRanges, joined

__all__ = [
    "SampleRanges",
    "arrow_rows",
    "hdf5_chunks",
    "joined",
    "parquet_row_groups",
    "safetensors_tensors",
    "token_windows",
    "zarr_shards",
]
