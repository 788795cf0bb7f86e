"""The program of one maker: `python -m spiderfs.views.maker_process` makes views for the process that has started it.

Original and view lie in a memory file that both have mapped. A request on standard input is the original's length and
the recipe; an answer on standard output is a reason of `Unmade`, or 0, and the view's length. The maker ends with its
parent, takes no more memory than it is given, and gives way to all other processes.
"""

from __future__ import annotations

import mmap
import os
import resource
import sys

from spiderfs.linux.process_table import end_with_parent
from spiderfs.views.making import make
from spiderfs.views.recipe import ANSWER, MADE, REQUEST_BYTES, Unmade, parse_request

# Readers and the mount go first: nice(2) says that this is the lowest of 20 steps.
_NICE = 19


def main(arguments: list[str]) -> None:
    """`arguments`: the memory file's descriptor and length, address space in bytes, most pixels, parent."""
    memory_fd, slot_bytes, memory_bytes, most_pixels, parent = map(int, arguments)
    if not end_with_parent(parent):
        return
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    memory = mmap.mmap(memory_fd, slot_bytes)
    while message := os.read(0, REQUEST_BYTES):
        length, recipe = parse_request(message)
        made = make(memory[:length], recipe, most_pixels)
        if isinstance(made, bytes) and len(made) > slot_bytes:
            made = Unmade.MEMORY
        if isinstance(made, bytes):
            memory[: len(made)] = made
            os.write(1, ANSWER.pack(MADE, len(made)))
        else:
            os.write(1, ANSWER.pack(made, 0))


if __name__ == "__main__":
    main(sys.argv[1:])
