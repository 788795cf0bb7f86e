"""Files that this process has mapped already, such as those of a loaded data set."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Mapping(NamedTuple):
    """The addresses from `begin` up to `end` are the bytes of a file from `offset` on."""

    begin: int
    end: int
    offset: int
    path: bytes


def mappings() -> list[Mapping]:
    """The mappings of files in this process, in the order of their addresses."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            mapped = [line.rstrip(b"\n").split(None, 5) for line in maps]
    except OSError:
        return []
    found = []
    for addresses, _, offset, _, _, path in (fields for fields in mapped if fields[-1].startswith(b"/")):
        begin, _, end = addresses.partition(b"-")
        # The kernel also appends this to a file that exists, if it has looked up the name again since.
        path = path.removesuffix(b" (deleted)")
        found.append(Mapping(int(begin, 16), int(end, 16), int(offset, 16), path))
    return found


def read_no_pages_around(files: Collection[bytes]) -> None:
    """Advise the kernel so for all mappings of these files, which workers inherit that are forked later.

    Around a page that faults the kernel reads others, as far as the read-ahead that was in force when the file was
    opened. With planned ranges those would be fetched in vain.
    """
    libc = ctypes.CDLL(None)
    for begin, end, _, path in mappings():
        if path in files:
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_RANDOM)


def places_of(
    addresses: npt.NDArray[np.int64], mapped: Sequence[Mapping]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The mapping that each address lies in, or -1, and the offset in its file."""
    if not mapped:
        return np.full(len(addresses), -1), addresses
    begins, ends, offsets = (np.array(numbers, np.int64) for numbers in list(zip(*mapped, strict=True))[:3])
    found = np.searchsorted(begins, addresses, "right") - 1
    found[addresses >= ends[found]] = -1
    return found, addresses - begins[found] + offsets[found]
