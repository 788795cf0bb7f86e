"""Files that this process has mapped already, such as those of a loaded data set: pages come one by one from now on.

Around a page that faults the kernel reads others, as far as the read-ahead that was in force when the file was opened.
With planned ranges those would be fetched in vain.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Collection


def read_no_pages_around(files: Collection[bytes]) -> None:
    """Advise the kernel so for all mappings of these files, which workers inherit that are forked later."""
    libc = ctypes.CDLL(None)
    try:
        with open("/proc/self/maps", "rb") as maps:
            mapped = [line.rstrip(b"\n").split(None, 5) for line in maps]
    except OSError:
        return
    for begin, _, end in (fields[0].partition(b"-") for fields in mapped if fields[-1] in files):
        at, length = int(begin, 16), int(end, 16) - int(begin, 16)
        libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(length), mmap.MADV_RANDOM)
