"""Parts that tests and benchmarks use in place of the real ones, and the file system without a daemon around it.

`MemoryContent` and `MemorySource` pass the same contract tests as the store and the sources of a mount
(`tests/contract`).
"""

from spiderfs.testing.bare import Bare, NoEvents, NoManager, bare_filesystem, make_older, notes_of_sole_worker
from spiderfs.testing.fake_kernel import FakeKernel
from spiderfs.testing.hook_sink import RecordingSink
from spiderfs.testing.memory_content import MemoryContent
from spiderfs.testing.memory_source import MemorySource

__all__ = [
    "Bare",
    "FakeKernel",
    "MemoryContent",
    "MemorySource",
    "NoEvents",
    "NoManager",
    "RecordingSink",
    "bare_filesystem",
    "make_older",
    "notes_of_sole_worker",
]
